"""Red zones: each way of touching what one must not, by functions that do just that."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from layoutcheck import E8M0, FP32, Index, Layout, Writes, contract, layout
from layoutcheck.testing import calls, redzones
from layoutcheck.testing._check import for_each
from layoutcheck.testing._child import in_child
from layoutcheck.testing._redzones import observe

ROWS = Layout("t.rows", "row col -> row col", dtype=FP32, dense="col")
SCALE = layout("mxfp8.interleaved")


def made(body: Any) -> Any:
    """A function that stores rows of x at index in out, and does what ``body`` does besides."""

    @contract
    def store(
        x: Annotated[Tensor, ROWS(row="token")],
        index: Annotated[Int64[Tensor, "token"], Index("row", skip="< 0", unique=True)],
        out: Annotated[Tensor, ROWS, Writes(at="index")],
    ) -> Float32[Tensor, "token"]:
        live = index >= 0
        out[index[live]] = x[live]
        result = torch.empty(len(x))
        result.copy_(x.sum(1))
        return body(x, index, out, result)

    return store


def one(fn: Any, **bounds: Any) -> Any:
    found: list[Any] = []

    def look(call: Any) -> None:
        a = call.arguments
        if a["out"].stride(0) > a["out"].shape[1] and 0 < (a["index"] >= 0).sum() < len(a["out"]):
            found.append(call)

    for_each(calls(fn, token=(2, 4), row=(4, 6), col=(2, 4), **bounds), look, 150)
    return found[-1]


def beyond(t: Tensor, at: int) -> Tensor:
    """One element of t's storage, counted from its first element."""
    return t.as_strided((1,), (1,), t.storage_offset() + at)


def behind(t: Tensor) -> Tensor:
    """The element behind t's last one."""
    return beyond(t, (len(t) - 1) * t.stride(0) + t.shape[1])


def test_a_function_that_keeps_to_its_contract_is_let_through():
    call = one(made(lambda x, index, out, result: result))
    done = redzones(call)
    assert torch.equal(done.result, call.arguments["x"].sum(1))
    assert not done.findings


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x, index, out, result: (beyond(out, -1).fill_(1), result)[1], "before out"),
        (lambda x, index, out, result: (behind(out).fill_(1), result)[1], "behind out"),
        (lambda x, index, out, result: (beyond(out, out.shape[1]).fill_(1), result)[1], "the gap at byte"),
        (lambda x, index, out, result: (x.mul_(2), result)[1], ": no rule says that it is written"),
        (lambda x, index, out, result: (beyond(result, len(result)).fill_(1), result)[1], "behind memory allocated"),
        (lambda x, index, out, result: torch.empty(len(x)), "result[0] was left unwritten"),
        (lambda x, index, out, result: torch.empty_like(result), "result[0] was left unwritten"),
        (lambda x, index, out, result: (_rest(out, index), result)[1], "no rule says that it is written"),
    ],
    ids=["before", "behind", "gap", "an_input", "behind_an_allocation", "result", "result_like", "another_row"],
)  # fmt: skip
def test_what_must_not_be_touched(body, words):
    call = one(made(body))
    with pytest.raises(AssertionError) as caught:
        redzones(call)
    assert words in str(caught.value), str(caught.value)
    assert "store(" in str(caught.value), "the call as code"


def _rest(out: Tensor, index: Tensor) -> None:
    free = next(r for r in range(len(out)) if r not in index.tolist())
    out[free] += 1


def test_what_is_promised_must_be_written():
    @contract
    def lazy(
        x: Annotated[Tensor, ROWS(row="token")],
        index: Annotated[Int64[Tensor, "token"], Index("row", unique=True)],
        out: Annotated[Tensor, ROWS, Writes(at="index")],
    ) -> None:
        out.reshape(-1).view(out.shape)[index] = x  # a copy, unless out is contiguous

    call = one(lazy)
    assert any("out[" in f and "left unwritten" in f for f in observe(call).findings)

    @contract
    def part(x: Float32[Tensor, "n"], out: Annotated[Float32[Tensor, "n"], Writes()]) -> None:
        out[1:] = x[1:]

    found: list[Any] = []
    for_each(calls(part, n=3), found.append, 1)
    assert observe(found[0]).findings == ("out[0] was left unwritten, and 0 more of 3",)
    assert observe(found[0], partial=["out"]).findings == ()


def test_a_byte_that_happens_to_be_right_is_not_written():
    """A function that writes nothing into rows that already hold what they should."""

    @contract
    def nothing(x: Float32[Tensor, "n"], out: Annotated[Float32[Tensor, "n"], Writes()]) -> None: ...

    found: list[Any] = []
    for_each(calls(nothing, n=3), found.append, 1)
    call = found[0].with_arguments(out=found[0].arguments["x"].clone())
    assert observe(call).findings


def test_the_rows_of_a_laid_out_buffer_are_those_of_its_layout():
    @contract
    def store(
        bytes_: Annotated[
            Tensor, Layout("b", "token head group -> token head group", dtype=E8M0, head_dim="group * 32")
        ],
        loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0", unique=True)],
        cache: Annotated[Tensor, SCALE, Writes(at="loc")],
        page_size: int,
    ) -> None:
        live = loc > 0
        s = loc[live]
        cache.view(torch.uint8)[s // page_size, :, s % page_size % 32, s % page_size // 32] = bytes_.view(torch.uint8)[
            live
        ]

    def look(call: Any) -> None:
        assert observe(call).findings == (), repr(call)

    for_each(calls(store, page=(1, 3)), look, 25)


def test_a_child_that_crashes_hangs_or_raises_is_told_apart():
    import os
    import signal
    import time

    assert in_child(lambda: 3).value == 3
    assert in_child(lambda: 1 // 0).error == "ZeroDivisionError: integer division or modulo by zero"
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGSEGV)).crash == "killed by SIGSEGV"
    assert in_child(lambda: os._exit(134)).crash == "exit 134"
    assert in_child(lambda: time.sleep(9), seconds=0.3).crash == "did not end within 0.3 s"
    big = in_child(lambda: torch.ones(300_000))
    assert torch.equal(big.value, torch.ones(300_000))
