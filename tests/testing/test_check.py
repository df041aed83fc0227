"""``check`` as a user calls it: its report, each way in which it fails, the mutation score, and the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from layoutcheck import BF16, FP32, Index, Layout, LayoutError, Writes, contract, guard
from layoutcheck.testing import check

ROWS = Layout("t.rows", "row col -> row col", dtype=FP32, dense="col")
TALL = Layout("t.tall", "row col -> col row", dtype=FP32)


def store(x: Tensor, index: Tensor, out: Tensor) -> Tensor:
    live = index >= 0
    out.T[index[live]] = x[live]
    return x.sum(1)


ANNOTATIONS: dict[str, Any] = dict(
    x=Annotated[Tensor, ROWS(row="token")],
    index=Annotated[Int64[Tensor, "token"], Index("row", skip="< 0", unique=True)],
    out=Annotated[Tensor, TALL, Writes(at="index")],
    return_=Float32[Tensor, "token"],
)
good = guard(store, same_device=True, **ANNOTATIONS)


def wrong(body: Any) -> Any:
    """The same contract on another body."""

    def store(x: Tensor, index: Tensor, out: Tensor) -> Tensor:
        return body(x, index, out)

    return guard(store, same_device=True, **ANNOTATIONS)


def test_the_report_of_a_good_kernel():
    report = check(good, store, examples=60)
    assert (report.valid, report.faulty, report.runs) == (60, 60, 5)
    assert len(report.kinds) > 10
    assert report.probed == ("out is written as t.tall, as declared",)
    assert report.mutants >= 10
    text = str(report)
    assert "60 valid calls accepted, 60 faulty calls" in text
    assert f"{report.score:.0%}" in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x, i, out: (store(x, i, out), out[..., -1:].add_(1))[0], "no rule says that it is written"),
        (lambda x, i, out: store(x, i[torch.arange(len(i)).clamp(max=0)] if len(i) else i, out), "out"),
        (lambda x, i, out: store(x, i, out) + 1, "result is not the reference's"),
        (lambda x, i, out: (store(2 * x, i, out), x.sum(1))[1], "out is not the reference's"),
        (lambda x, i, out: (_ for _ in ()).throw(LayoutError("inner", [])), "refused a call that its contract allows"),
    ],
    ids=["another_row", "rows_forgotten", "result", "contents", "refuses"],
)  # fmt: skip
def test_a_bad_kernel_fails_with_the_smallest_call_as_code(body, words):
    with pytest.raises(AssertionError) as caught:
        check(wrong(body), store, examples=5, runs=30, mutants=0)
    assert words in str(caught.value), str(caught.value)
    assert "x=tensor((" in str(caught.value)


def test_a_kernel_that_writes_another_layout_fails_at_the_probe():
    def linear(x: Tensor, index: Tensor, out: Tensor) -> Tensor:
        live = index >= 0
        if out.shape[0] == out.shape[1]:  # right where no test with equal sizes can tell
            return store(x, index, out)
        flat = out.as_strided((out.shape[1], out.shape[0]), (out.shape[0], 1), out.storage_offset())
        flat[index[live]] = x[live]
        return x.sum(1)

    with pytest.raises(AssertionError):
        check(wrong(linear), None, examples=1, runs=5, mutants=0)


def test_a_crash_is_caught_where_runs_are_isolated():
    import os

    def crash(x: Tensor, index: Tensor, out: Tensor) -> Tensor:
        if len(x) > 1:
            os._exit(134)
        return store(x, index, out)

    with pytest.raises(AssertionError, match="did not survive: exit 134"):
        check(wrong(crash), store, examples=1, runs=20, mutants=0, isolated=True)


def test_a_rejected_valid_call_fails(monkeypatch):
    from layoutcheck.testing import _check

    monkeypatch.setattr(_check, "refused", lambda fn, arguments: ("because",))
    with pytest.raises(AssertionError, match="a valid call was rejected"):
        check(good, store, examples=3)


def test_adjust_partial_and_refuses():
    @contract
    def pair(
        a: Annotated[Int64[Tensor, "n"], Index(9)], b: Annotated[Int64[Tensor, "n"], Index(9)],
        out: Annotated[Float32[Tensor, "n"], Writes()],
    ) -> None:  # fmt: skip
        if not torch.equal(a, b):
            raise LayoutError("pair", [])
        out[1:] = 1.0

    with pytest.raises(AssertionError, match="refused a call"):
        check(pair, examples=2, mutants=0, runs=20, partial=["out"])
    with pytest.raises(AssertionError, match="left unwritten"):
        check(pair, examples=2, mutants=0, runs=20, adjust=lambda a: dict(b=a["a"].clone()))
    report = check(pair, examples=2, mutants=0, adjust=lambda a: dict(b=a["a"].clone()), partial=["out"])
    assert (report.runs, report.refused) == (5, 0)
    assert check(pair, examples=2, mutants=0, runs=20, refuses=True, partial=["out"]).refused > 0


def test_what_no_number_notices_is_listed():
    """A kernel that never looks at an argument, and one that reads any integer, cannot notice a fault of it."""

    @contract(same_device=True)
    def blind(
        x: Float32[Tensor, "n"],
        unused: Annotated[Tensor, Layout("t.unused", "n m -> n m", dtype=BF16)],
        out: Annotated[Float32[Tensor, "n"], Writes()],
    ) -> None:
        out.copy_(x)

    def reference(x: Tensor, unused: Tensor, out: Tensor) -> None:
        out[:] = x

    report = check(blind, reference, examples=5)
    unnoticed = [line for line in report.unnoticed if "of unused" in line]
    assert unnoticed
    assert "Only the guard tells them apart" in unnoticed[0]
    assert not any(" of out:" in line and "one_too" in line for line in report.unnoticed)
    assert 0.0 < report.score < 1.0
    assert unnoticed[0] in str(report)


def test_the_plugin_and_the_example_as_a_user_runs_them():
    example = Path(__file__).parents[2] / "examples" / "test_your_kernel.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--layoutcheck-examples", "7", str(example)],
        capture_output=True, text=True, cwd=example.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "7 passed" in done.stdout


def test_the_fixtures(layout_mode, layout_cases, redzones):
    from layoutcheck import mode

    assert mode.get() == "values"
    cases = layout_cases(good, token=(1, 3))
    assert len(cases) == 20
    assert all(redzones(case).findings == () for case in cases[:3])
