"""Modes: whose they are, when they change, and how often a warning comes."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import warnings
from typing import Annotated, Any

import pytest
import torch
import torch._dynamo.testing
from jaxtyping import Float32, Int64
from torch import Tensor

from layoutcheck import Index, LayoutError, contract, mode
from layoutcheck._mode import state


@contract
def gather(rows: Float32[Tensor, "row dim"], at: Annotated[Int64[Tensor, "n"], Index("row")]) -> str:
    """A rule about shapes, and one about values."""
    return "ran"


ROWS, INSIDE, OUTSIDE = torch.zeros(4, 3), torch.tensor([0, 3]), torch.tensor([0, 4])


def checks_values() -> bool:
    try:
        gather(ROWS, OUTSIDE)
    except LayoutError as error:
        return [v.rule for v in error.violations] == ["value"]
    return False


def test_values_are_read_only_where_asked():
    assert not checks_values()
    with mode("values"):
        assert checks_values()
        with mode("raise"):
            assert not checks_values()
        assert checks_values()
    assert not checks_values()


def test_guards_stop_looking_once_no_values_mode_is_left():
    assert not state.watch
    with mode("values"), mode("values"):
        assert state.watch
    assert not state.watch
    mode.set("values")
    try:
        assert state.watch
        with mode("values"):
            pass
        assert state.watch
        assert checks_values()
    finally:
        mode.set("raise")
    assert not state.watch


def test_one_mode_object_may_be_entered_again_and_at_once():
    values = mode("values")
    with values, values:
        assert mode.get() == "values"
    assert mode.get() == "raise"
    assert not state.watch
    with values:
        assert checks_values()


def test_a_contracts_own_mode_comes_first_and_can_change():
    @contract(mode="values")
    def own(rows: Float32[Tensor, "row dim"], at: Annotated[Int64[Tensor, "n"], Index("row")]) -> None: ...

    with pytest.raises(LayoutError):
        own(ROWS, OUTSIDE)
    own.contract.mode = "raise"
    with mode("values"):
        own(ROWS, OUTSIDE)
    own.contract.mode = None
    own(ROWS, OUTSIDE)
    with mode("values"), pytest.raises(LayoutError):
        own(ROWS, OUTSIDE)


def test_threads_and_tasks_have_their_own():
    entered, done = threading.Barrier(2), threading.Barrier(2)
    seen: list[bool] = []

    def other() -> None:
        with mode("values"):
            entered.wait(10)
            seen.append(checks_values())
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    assert state.watch
    assert not checks_values()
    assert mode.get() == "raise"
    done.wait(10)
    thread.join()
    assert seen == [True]

    async def task(value: Any) -> tuple[str, bool]:
        with mode(value):
            await asyncio.sleep(0)
            return mode.get(), checks_values()

    async def both() -> list[tuple[str, bool]]:
        return await asyncio.gather(task("values"), task("raise"))

    assert asyncio.run(both()) == [("values", True), ("raise", False)]


def test_the_end_of_a_block_counts_in_contexts_that_outlive_it():
    with mode("values"):
        taken = contextvars.copy_context()
        assert taken.run(checks_values)
    assert not taken.run(checks_values)
    assert taken.run(mode.get) == "raise"
    mode.set("values")
    try:
        assert taken.run(checks_values)
    finally:
        mode.set("raise")


def test_a_service_changes_its_mode_while_it_runs():
    stop, results = threading.Event(), []

    def serve() -> None:
        while not stop.is_set():
            results.append(checks_values())

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for wanted in (True, False, True, False):
            mode.set("values" if wanted else "raise")
            start = len(results) + len(threads)  # calls under way may still see the mode before
            while len(results) < start + 5:
                pass
            assert all(r is wanted for r in results[start : start + 5])
    finally:
        mode.set("raise")
        stop.set()
        for thread in threads:
            thread.join()


def caught(times: int, *calls: tuple[Tensor, Tensor]) -> list[str]:
    """The first lines of the warnings that calls from one site give, repeated some times."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            for arguments in calls:
                assert gather(*arguments) == "ran"
    assert all(w.filename == __file__ for w in found)
    return [str(w.message).splitlines()[0] for w in found]


def test_a_warning_comes_once_per_call_site_and_cause():
    with mode("warn"):
        wide = [(torch.zeros(n, 3, dtype=torch.float64), INSIDE) for n in (4, 5)]
        (message,) = caught(3, *wide)
        assert message.startswith("gather: rows has the wrong dtype")
        assert caught(1, *wide) == []
        assert len(caught(2, (ROWS, INSIDE[None]))) == 1, "another cause at the same site"
        with pytest.warns(UserWarning, match="rows has the wrong dtype"):
            gather(*wide[0])  # another site


def test_of_two_causes_only_the_new_one_is_told():
    @contract(mode="warn")
    def two(a: Float32[Tensor, "n"], b: Float32[Tensor, "n"]) -> None: ...

    good, bad = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    messages = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for a in (good, bad):
            two(a, bad)
    messages = [str(w.message) for w in found]
    assert len(messages) == 2
    assert "two: b has the wrong dtype" in messages[0]
    assert "two: b" not in messages[1]


def test_a_warning_made_an_error_comes_every_time():
    with mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="rows has the wrong dtype"):
                gather(ROWS.double(), INSIDE)


@pytest.mark.parametrize("setting", ["warn", "raise", "values"])
def test_the_environment_sets_the_mode_to_start_with(setting):
    code = f"from layoutcheck import mode; assert mode.get() == {setting!r}"
    subprocess.run([sys.executable, "-c", code], env={"LAYOUTCHECK": setting, "PATH": ""}, check=True)


def test_changing_the_mode_does_not_compile_again():
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()

    @contract
    def doubled(x: Float32[Tensor, "row"], at: Annotated[Int64[Tensor, "n"], Index("row")]) -> Tensor:
        return x * 2

    traced = torch.compile(doubled, backend=counter, fullgraph=True)
    for value in ("raise", "values", "warn"):
        with mode(value):
            traced(torch.zeros(4), INSIDE)
    assert counter.frame_count == 1
