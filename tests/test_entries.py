"""Index rules that other arguments have a say in: the segment in which an entry lies, and which entries are read."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from layoutcheck import Index, Indptr, LayoutError, Violation, contract, mode


def found(fn: Any, *args: Any) -> list[Violation]:
    """What the guard says in values mode."""
    with mode("values"):
        try:
            fn(*args)
        except LayoutError as error:
            return list(error.violations)
    return []


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- segments ---------------------------------------------------------------------------------------------------------


@contract
def ragged(
    seq_index: Annotated[Int32[Tensor, "token"], Index("seq", segment_of="cu_seqlens")],
    cu_seqlens: Annotated[Int64[Tensor, "seq+1"], Indptr("token", capacity=True)],
) -> str:
    return "ran"


@pytest.mark.parametrize(
    ("cu_seqlens", "right"),
    [
        ([0, 1, 3], [0, 1, 1]),
        ([0, 0, 2, 2, 3], [1, 1, 3]),
        ([0], []),
        ([0, 0], []),
        ([0, 2, 3], [0, 0, 1, -1, 2**30]),  # behind the last segment
    ],
)
def test_each_entry_is_the_segment_in_which_it_lies(cu_seqlens, right):
    cu = torch.tensor(cu_seqlens)
    assert found(ragged, ints(*right), cu) == []
    for at in range(cu_seqlens[-1]):
        for other in range(-1, len(cu_seqlens)):
            changed = [*right[:at], other, *right[at + 1 :]]
            assert bool(found(ragged, ints(*changed), cu)) == (other != right[at]), changed


def test_the_error_says_which_segment_it_should_be_and_why():
    (violation,) = found(ragged, ints(1, 0, 0), torch.tensor([0, 1, 3]))
    assert (violation.argument, violation.rule) == ("seq_index", "value")
    assert violation.expected == "seq_index[0] = 0, as cu_seqlens[0] = 0 <= 0 < cu_seqlens[1] = 1"
    assert violation.got == "seq_index[0] = 1"
    assert violation.cause is None
    assert violation.fix == "pass torch.repeat_interleave(torch.arange(2), cu_seqlens.diff())"


def test_a_cause_is_given_where_every_entry_shows_it():
    cu = torch.tensor([0, 1, 1, 3, 3])
    (one_based,) = found(ragged, ints(1, 3, 3), cu)
    assert one_based.cause == "seq_index counts segments from 1"
    late = torch.searchsorted(cu[1:], torch.arange(3)).int()
    (searched,) = found(ragged, late, cu)
    assert "searchsorted without right=True" in str(searched.cause)
    (neither,) = found(ragged, ints(1, 3, 2), cu)
    assert neither.cause is None


def test_a_wrong_prefix_sum_is_the_only_thing_blamed():
    (violation,) = found(ragged, ints(0, 0, 0), torch.tensor([0, 2, 1]))
    assert violation.argument == "cu_seqlens"


def test_rows_of_an_index_lie_in_a_segment_together():
    @contract
    def f(
        of_row: Annotated[Int32[Tensor, "token two"], Index("seq", segment_of="indptr")],
        indptr: Annotated[Int64[Tensor, "seq+1"], Indptr("token")],
    ) -> None: ...

    indptr = torch.tensor([0, 1, 2])
    assert found(f, ints([0, 0], [1, 1]), indptr) == []
    (violation,) = found(f, ints([0, 0], [1, 0]), indptr)
    assert violation.got == "of_row[1, 1] = 0"


# --- what is read -----------------------------------------------------------------------------------------------------


@contract
def attend(
    table: Annotated[Int32[Tensor, "seq width"], Index("page", live="cdiv(lens, page_size)")],
    lens: Annotated[Int32[Tensor, "seq"], Index("width * page_size + 1")] | None = None,
    *,
    page: int = 4,
    page_size: int = 16,
) -> None: ...


def test_the_first_entries_of_each_row_are_read():
    table = ints([0, -1, 99], [3, 2, 1], [7, 7, 7])
    assert found(attend, table, ints(16, 33, 0)) == []
    (violation,) = found(attend, table, ints(17, 48, 0))
    assert violation.got == "table[0, 1] = -1"
    assert violation.expected == "0 <= table < page = 4; live are the first cdiv(lens, page_size) of a row"
    assert violation.headline == "table has 1 of 5 live values out of range"


def test_all_are_read_where_nothing_says_which():
    assert [v.got for v in found(attend, ints([0, -1]))] == ["table[0, 1] = -1"]


def test_lengths_that_are_wrong_are_the_only_thing_blamed():
    (violation,) = found(attend, ints([0, -1]), ints(33))
    assert violation.argument == "lens"


def test_entries_before_the_end_of_a_prefix_sum_are_read():
    @contract
    def f(
        indices: Annotated[Int32[Tensor, "entry"], Index("slot", live="indptr", unique=True)],
        indptr: Annotated[Int32[Tensor, "bound"], Indptr("entry", capacity=True)],
        slot: int = 9,
    ) -> None: ...

    indices = ints(8, 0, 9, 0)
    assert found(f, indices, ints(0, 1, 2)) == []
    (violation,) = found(f, indices, ints(0, 1, 3))
    assert violation.expected == "0 <= indices < slot = 9; live are the first indptr[-1] = 3"
    assert [v.headline for v in found(f, ints(1, 0, 2, 0), ints(0, 4))] == ["indices has 1 value more than once"]


def test_rows_that_a_mask_selects_are_read():
    @contract
    def f(
        rows: Annotated[Int64[Tensor, "seq tap"], Index("token", live="mask and slot >= 0")],
        slot: Annotated[Int64[Tensor, "seq"], Index("pool", skip="< 0", live="mask", unique=True)],
        mask: Bool[Tensor, "seq"],
        pool: int = 3,
        token: int = 5,
    ) -> None: ...

    rows, slot = torch.tensor([[0, 4], [5, 5], [-1, 0]]), torch.tensor([2, 2, -7])
    assert found(f, rows, slot, torch.tensor([True, False, True])) == []
    wrong = found(f, rows, slot, torch.tensor([True, True, False]))
    assert [v.argument for v in wrong] == ["slot"]  # and rows wait for it
    (violation,) = found(f, rows, torch.tensor([2, 1, 9]), torch.tensor([True, True, False]))
    assert violation.got == "rows[1, 0] = 5"
    assert violation.expected.endswith("live are those where mask and slot >= 0")


def test_a_number_of_entries_is_read():
    @contract("entry >= token")
    def f(
        x: Float32[Tensor, "token"], loc: Annotated[Int64[Tensor, "entry"], Index("slot", live="token")], slot: int = 2
    ) -> None: ...

    assert found(f, torch.zeros(2), torch.tensor([0, 1, 2])) == []
    (violation,) = found(f, torch.zeros(3), torch.tensor([0, 1, 2]))
    assert violation.expected == "0 <= loc < slot = 2; live are the first token = 3"


def test_all_are_read_where_the_number_is_not_given():
    @contract
    def f(loc: Annotated[Int64[Tensor, "entry"], Index(2, live="token")], token: int | None = None) -> None: ...

    assert found(f, torch.tensor([0, 1, 2]), 2) == []
    (violation,) = found(f, torch.tensor([0, 1, 2]))
    assert violation.expected == "0 <= loc < 2"


def test_tellers_without_data_leave_an_index_unchecked():
    assert found(attend, ints([9, 9]), ints(20).to("meta")) == []


# --- other arguments' values ------------------------------------------------------------------------------------------


def test_two_indices_that_are_apart_share_no_value_that_is_read():
    @contract
    def f(
        track: Annotated[Int64[Tensor, "n"], Index("pool", skip="< 0", apart_from="own")],
        own: Annotated[Int64[Tensor, "m"], Index("pool", live="mask")],
        mask: Bool[Tensor, "m"],
        pool: int = 9,
    ) -> None: ...

    own, mask = torch.tensor([5, 4, 5]), torch.tensor([False, True, True])
    assert found(f, torch.tensor([-1, 3, 3]), own, mask) == []
    assert found(f, torch.tensor([5]), own, torch.tensor([False, True, False])) == []
    (violation,) = found(f, torch.tensor([-1, 5, 4]), own, mask)
    assert violation.headline == "track has 2 values of own"
    assert violation.got == "track[1] = 5 = own[2]"


def test_steps_of_a_prefix_sum_are_at_most_as_long_as_another_argument_says():
    @contract
    def f(
        query_start: Annotated[Int32[Tensor, "seq+1"], Indptr("token", capacity=True, longest="seq_lens")],
        seq_lens: Annotated[Int32[Tensor, "seq"], Index(100)],
        token: int = 50,
    ) -> None: ...

    assert found(f, ints(0, 3, 3, 50), ints(3, 0, 47)) == []
    (violation,) = found(f, ints(0, 3, 4, 4), ints(3, 0, 47))
    assert violation.expected == "query_start[2] - query_start[1] <= 0 (seq_lens)"
    assert violation.fix == "compute query_start from lengths that are at most seq_lens"
    assert [v.argument for v in found(f, ints(0, 3, 4, 4), ints(3, -1, 47))] == ["seq_lens"]


# --- decoration -------------------------------------------------------------------------------------------------------

ROW = Int64[Tensor, "row"]


@pytest.mark.parametrize(
    ("rule", "other", "message"),
    [
        (Index(3, segment_of="cu"), Int32[Tensor, "b"], "'cu' is neither a dim nor an argument"),
        (Index(3, segment_of="y"), Int32[Tensor, "b"], "y is no tensor with an Indptr rule"),
        (Index(3, segment_of="n"), Int32[Tensor, "b"], "n is no tensor with an Indptr rule"),
        (Index(3, apart_from="z"), ROW, "'z' is neither a dim nor an argument"),
        (Index(3, apart_from="y"), Annotated[ROW, Indptr(3)], "y is no tensor with an Index rule"),
        (Index(3, live="yy"), Bool[Tensor, "row"], "did you mean 'y'"),
        (Index(3, live="len(yy) == 2"), Bool[Tensor, "row"], "did you mean 'y'"),
        (Index(3, live="y"), Bool[Tensor, "b"], "y has no value for each row of x"),
        (Index(3, live="y"), Int32[Tensor, "row"], "y has no value for each row of x"),
        (Index(3, live="y > 0"), Int32[Tensor, "b"], "y has no value for each row of x"),
        (Index(3, live="x > 0"), Int32[Tensor, "b"], "the rules of x speak of itself"),
        (
            Index(3, live="y > 0"),
            Annotated[ROW, Index(3, live="x > 0")],
            "the rules of x and y speak of each other",
        ),
    ],
)
def test_what_no_call_can_have_is_refused_at_decoration(rule, other, message):
    def f(x, y, n: int = 3): ...

    with pytest.raises(TypeError) as caught:
        contract(x=Annotated[ROW, rule], y=other)(f)
    assert "Index: " in str(caught.value)
    assert message in str(caught.value)


def test_a_text_that_is_no_expression_is_refused():
    with pytest.raises(ValueError, match="'first five' is not an expression"):
        Index("slot", live="first five")
