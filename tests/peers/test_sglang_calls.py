"""Our contracts against the real sglang: what it refuses, what it runs right, and what it runs wrong without a word.

sglang runs unguarded in processes of its own, since what corrupts memory may end one: an end counts as a wrong run.
``PEER_CALLS`` sets the number of calls (500; 5,000 have been run once). The table of what happened is printed.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import peer_calls
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CALLS = int(os.environ.get("PEER_CALLS", "500"))
WORKER = Path(__file__).with_name("sglang_worker.py")


class Sglang:
    """A process that runs sglang's functions."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, cwd=WORKER.parent,
        )  # fmt: skip
        assert self._line() == "ready"

    def run(self, **case: object) -> tuple[list[str], str]:
        """What our contract says of a call, and what sglang does with it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        ours, theirs = json.loads(self._line())
        assert isinstance(ours, list), ours  # our contract has failed, or never answered
        return ours, theirs

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def sglang() -> Iterator[Sglang]:
    process = Sglang()
    yield process
    process.close()


def agree(ours: list[str], theirs: str) -> bool:
    """Refused or run wrong: we must refuse it. Run right: we must not."""
    return bool(ours) != theirs.startswith(peer_calls.RIGHT)


@pytest.fixture(scope="module")
def counts() -> Iterator[collections.Counter[tuple[str, str, bool]]]:
    found: collections.Counter[tuple[str, str, bool]] = collections.Counter()
    yield found
    print(f"\n{sum(found.values())} calls of sglang {'':<30}{'right':>8}{'refused':>9}{'wrong':>7}   refused by us")
    for path in dict.fromkeys(p for p, _, _ in sorted(found)):
        cells = [sum(n for (p, t, _), n in found.items() if (p, t) == (path, k)) for k in ("right", "refused", "wrong")]
        by_us = sum(n for (p, _, ours), n in found.items() if p == path and ours)
        print(f"   {path:<48}{cells[0]:>8}{cells[1]:>9}{cells[2]:>7}{by_us:>10}")


CASES = [(path, kind) for path, kinds in peer_calls.KINDS.items() for kind in kinds]
VALID = [(path, "valid") for path in peer_calls.KINDS]
calls = st.tuples(st.sampled_from(VALID) | st.sampled_from(CASES), st.integers(0, 2**32 - 1))


@settings(
    max_examples=CALLS, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(call=calls)
def test_what_sglang_refuses_or_runs_wrong_we_refuse_and_nothing_else(sglang, counts, call):
    (path, kind), seed = call
    ours, theirs = sglang.run(path=path, kind=kind, seed=seed)
    counts[path, theirs.partition(":")[0], bool(ours)] += 1
    assert agree(ours, theirs), f"{path}, {kind}: we say {ours or 'right'}, sglang is {theirs}"


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_each_kind_once(sglang, counts, path, kind):
    ours, theirs = sglang.run(path=path, kind=kind, seed=7)
    counts[path, theirs.partition(":")[0], bool(ours)] += 1
    assert agree(ours, theirs), f"we say {ours or 'right'}, sglang is {theirs}"
