"""Every contract of the repo: valid calls are accepted, faults rejected for the right reason."""

from __future__ import annotations

from collections import Counter

import contracts
import pytest

KERNELS = list(contracts.kernels())
CASES = list(contracts.cases())


@pytest.mark.parametrize(("name", "fn", "bounds"), KERNELS, ids=[k[0] for k in KERNELS])
def test_the_guard_of_a_kernel_judges_calls_rightly(name, fn, bounds):
    drawn, kinds, wrong = contracts.count(fn, bounds, 120)
    assert not wrong, wrong[0]
    assert drawn["valid"] == 120
    assert drawn["faulty"] == 120
    assert len(kinds) > 5


def test_the_guards_of_the_reported_cases_judge_calls_rightly():
    kinds: Counter[str] = Counter()
    for name, fn, bounds in CASES:
        drawn, found, wrong = contracts.count(fn, bounds, 12)
        assert not wrong, f"{name}: {wrong[0]}"
        assert drawn["valid"] > 0, name
        kinds += found
    assert len(CASES) > 50
    assert len(kinds) > 20
