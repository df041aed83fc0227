"""Rules beyond shape and dtype: every value, finite elements, descriptors that agree, and what conditions may say."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from layoutcheck import BF16, E4M3, Finite, Index, Indptr, Layout, LayoutError, contract, each, layout, mode, when

SCALE = layout("mxfp8.interleaved")


def broken(fn: Any, *args: Any, **kwargs: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        fn(*args, **kwargs)
    return caught.value


def rules(error: LayoutError) -> list[tuple[str, str]]:
    return [(v.argument, v.rule) for v in error.violations]


def test_every_value_of_a_sequence_is_checked_on_every_call():
    @contract("sum(splits) == n", "len(splits) <= 3", when("strict", each("splits", "% unit == 0")))
    def f(x: Float32[Tensor, "n"], splits: list[int], unit: int = 4, strict: bool = True) -> str:
        return "ran"

    assert f(torch.zeros(12), [4, 8]) == f(torch.zeros(0), []) == f(torch.zeros(5), [5], strict=False) == "ran"
    error = broken(f, torch.zeros(12), [4, 5, 3])
    assert rules(error) == [("splits", "value")]
    assert "splits[1] = 5 (5 % 4), and 1 more" in str(error)
    assert rules(broken(f, torch.zeros(12), [4, 4])) == [("splits", "relation")]
    assert rules(broken(f, torch.zeros(4), [0, 0, 0, 4])) == [("splits", "shape")]

    def caller(x: Tensor) -> Tensor:
        f(x, [4, 8])
        return x + 1

    assert torch.compile(caller, fullgraph=True, backend="eager")(torch.zeros(12)).shape == (12,)


def test_every_value_of_a_tensor_is_checked_in_values_mode():
    @contract(each("x", ">= 0 and value < most"))
    def f(x: Float32[Tensor, "n m"], most: int = 9) -> str:
        return "ran"

    wrong = torch.tensor([[1.0, 2.0], [8.0, float("nan")]])
    assert f(wrong) == "ran"
    with mode("values"):
        assert f(torch.zeros(2, 2)) == f(torch.zeros(0, 2)) == "ran"
        error = broken(f, wrong)
        assert f(wrong.to("meta")) == "ran", "nothing to read"
    assert rules(error) == [("x", "value")]
    assert "x[1, 1] = nan" in str(error)


@pytest.mark.parametrize("code", [0xFF])
@pytest.mark.parametrize("slot", [0, 5, 127, 128])
def test_elements_of_a_reserved_slot_are_finite(code, slot):
    @contract
    def f(scale: Annotated[Tensor, SCALE, Finite(slot="reserved")], page_size: int = 128, reserved: int = 0) -> str:
        return "ran"

    concrete = SCALE(page=2, page_size=128, head=2, head_dim=64)
    buffer = concrete.empty()
    flat = buffer.view(torch.uint8).view(-1)
    flat[concrete.offset(slot=slot, head=1, group=1)] = code
    with mode("values"):
        for reserved in (0, 5, 127, 128):
            if reserved != slot:
                assert f(buffer, reserved=reserved) == "ran"
                continue
            error = broken(f, buffer, reserved=reserved)
            assert rules(error) == [("scale", "value")]
            assert f"at slot {slot}, head 1, group 1" in str(error)
            assert "0xff, which is nan in e8m0" in str(error)
        assert f(concrete.empty().view(torch.uint8)) == "ran", "bytes are read as the elements they carry"


def test_elements_of_plain_and_wide_tensors_are_finite():
    @contract
    def f(x: Annotated[Float32[Tensor, "row col"], Finite(row=1)], y: Annotated[Tensor, ROWS, Finite()]) -> str:
        return "ran"

    x, y = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bfloat16)
    x[2, 0] = float("nan")
    with mode("values"):
        assert f(x, y) == "ran"
        x[1, 2] = float("inf")
        assert "at row 1, col 2" in str(broken(f, x, y))
        x[1, 2] = 0
        y[1, 1] = float("-inf")
        assert rules(broken(f, x, y)) == [("y", "value")]


ROWS = Layout("rows", "row col -> row col", dtype=(BF16, E4M3))


def test_finite_names_an_axis_that_exists():
    with pytest.raises(TypeError, match="'page' is no axis of x"):

        @contract
        def f(x: Annotated[Tensor, ROWS, Finite(page=0)]) -> None: ...


def test_steps_of_a_prefix_sum_are_not_too_long():
    @contract
    def f(
        indptr: Annotated[Int32[Tensor, "m"], Indptr("n", longest="most")], x: Float32[Tensor, "n"], most: int
    ) -> str:
        return "ran"

    indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    with mode("values"):
        assert f(indptr, torch.zeros(8), 5) == "ran"
        error = broken(f, indptr, torch.zeros(8), 4)
    assert rules(error) == [("indptr", "value")]
    assert "indptr[3] - indptr[2] = 5" in str(error)


def test_what_is_skipped_may_depend_on_the_call():
    @contract
    def f(loc: Annotated[Int32[Tensor, "n"], Index(8, skip="== -1 and padded", unique=True)], padded: bool) -> str:
        return "ran"

    loc = torch.tensor([[1, -1, 2, -1]], dtype=torch.int32)[0]
    with mode("values"):
        assert f(loc, True) == "ran"
        error = broken(f, loc, False)
        assert rules(error) == [("loc", "value"), ("loc", "value")]
        assert "2 of 4 values out of range" in str(error)
        assert "-1 counts from the end and is 7" in str(error)

    @contract
    def g(loc: Annotated[Int32[Tensor, "n"], Index(8, skip="in (-1, 100) or index > 1000")]) -> str:
        return "ran"

    with mode("values"):
        assert g(torch.tensor([-1, 100, 7, 2000], dtype=torch.int32)) == "ran"
        assert rules(broken(g, torch.tensor([-1, 99, 7], dtype=torch.int32))) == [("loc", "value")]


def test_counts_of_positional_arguments():
    @contract("len(extra) == 0")
    def f(x: Float32[Tensor, "n"], *extra: Any, scale: float | None = None) -> str:
        return "ran"

    assert f(torch.zeros(2), scale=3.0) == "ran"
    error = broken(f, torch.zeros(2), 3.0)
    assert rules(error) == [("extra", "presence")]
    assert "pass 0 values in extra; the others by keyword" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tag(x, 3) == 1", "not the name of a fact"),
        ("tag(x) == 1", "1 arguments for tag"),
        ("len(3) == 1", "not an argument's name"),
        ("n in tag(x, 'a')", "without a list of values"),
        ("tag(z, 'a') == 1", "'z' is neither a dim nor an argument"),
    ],
)
def test_conditions_that_cannot_be_read(text, message):
    with pytest.raises((TypeError, ValueError), match=message):

        @contract(text)
        def f(x: Float32[Tensor, "n"]) -> None: ...


def test_words_of_the_grammar_may_be_names_of_sizes():
    @contract("len == 3", "tag == sum")
    def f(x: Float32[Tensor, "len tag sum"]) -> str:
        return "ran"

    assert f(torch.zeros(3, 2, 2)) == "ran"
    assert rules(broken(f, torch.zeros(3, 2, 1))) == [("x", "shape")]
