"""A kernel of your own, tested from its contract: run it with ``pytest examples/test_your_kernel.py``.

The kernel is in torch here, so that this runs on a laptop; a Triton kernel is tested in the same way. Everything that
the tests know of it is its contract, and, for the numbers, a reference that is three lines long.
"""

from __future__ import annotations

from typing import Annotated

import pytest
import torch
from jaxtyping import Int64
from torch import Tensor

from layoutcheck import BF16, FP32, Index, Layout, Writes, contract, needs, when
from layoutcheck.testing import Call, calls, check, faults, probe, redzones

# A ring buffer for each head: HND in memory, [head, slot, dim], and a scale for each of its rows.
RING = Layout("ring", "slot head dim -> head slot dim", dtype=BF16)
RING_SCALE = Layout("ring scale", "slot head -> head slot", dtype=FP32)
ROWS = Layout("rows", "token head dim -> token head dim", dtype=(BF16, FP32), dense="dim")


@contract("dim % 8 == 0", when("dtype(rows) == fp32", needs("scale")), same_device=True)
def push(
    rows: Annotated[Tensor, ROWS],
    at: Annotated[Int64[Tensor, "token"], Index("slot", skip="== -1", unique=True)],
    ring: Annotated[Tensor, RING, Writes(at="at")],
    scale: Annotated[Tensor, RING_SCALE, Writes(at="at")] | None = None,
) -> None:
    """Your kernel: store rows (token, head, dim) at slots ``at`` of a ring; with ``scale`` the rows are normalised."""
    live = at >= 0
    new, slots = rows[live].float(), at[live]
    if scale is not None:
        largest = new.abs().amax(-1).clamp(min=1.0)
        scale[:, slots] = largest.T
        new = new / largest[..., None]
    ring[:, slots] = new.to(torch.bfloat16).transpose(0, 1)


def reference(rows: Tensor, at: Tensor, ring: Tensor, scale: Tensor | None) -> None:
    """The same, row by row."""
    for row, slot in zip(rows.float(), at.tolist(), strict=True):
        if slot >= 0:
            largest = torch.ones(len(row)) if scale is None else row.abs().amax(-1).clamp(min=1.0)
            ring[:, slot] = (row / largest[:, None]).to(torch.bfloat16)
            if scale is not None:
                scale[:, slot] = largest


def test_everything_in_one_line():
    report = check(push, reference)
    assert report.score > 0.5, report
    print(report)


def test_the_guard_accepts_every_valid_call(layout_cases):
    for call in layout_cases(push):
        call()


def test_the_guard_names_each_fault():
    from hypothesis import given, settings

    @settings(max_examples=50, deadline=None)
    @given(faults(push))
    def each(fault):
        assert fault.missed() is None, fault.missed()

    each()


def test_nothing_else_is_touched(layout_cases, redzones):
    for call in layout_cases(push, token=(1, 4)):
        redzones(call)


def test_the_ring_is_written_as_it_was_declared():
    assert probe(push, "ring").declared


def test_a_kernel_that_forgets_a_row_is_caught():
    def forgetful(rows: Tensor, at: Tensor, ring: Tensor, scale: Tensor | None = None) -> None:
        push.__wrapped__(rows[1:], at[1:], ring, scale)

    forgetful.contract = push.contract  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="left unwritten"):
        check(forgetful, reference, examples=1, runs=20, mutants=0)


def test_calls_are_code():
    from hypothesis import find

    call: Call = find(calls(push), lambda c: len(c.arguments["at"]) == 2)
    assert repr(call).startswith("push(\n    rows=tensor((2, 1, 8), ")
    redzones(call)
