"""Of every contract of the repo: once a valid call is known, each of its faults is still refused, in the same words."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import contracts
import pytest

from layoutcheck import LayoutError, _compile, _memo, _recall, mode
from layoutcheck._contract import Contract
from layoutcheck.testing import calls
from layoutcheck.testing._check import for_each
from layoutcheck.testing._faults import every_fault
from layoutcheck.testing._guard import apply

ALL = [*contracts.kernels(), *contracts.cases()]


def alone(made: Contract, *, remembers: bool) -> Callable[..., Any]:
    """The guard of a contract, in front of nothing, with and without a memo."""
    with mock.patch.object(_memo, "AVAILABLE", remembers), mock.patch.object(_recall, "FEWEST", 1):
        return _compile.compile_guard(lambda *_, **__: None, dataclasses.replace(made, results=(), mode=None))


def said(fn: Callable[..., Any], made: Contract, arguments: dict[str, Any]) -> list[str]:
    """What a guard says of a call."""
    try:
        with mode("values"):
            apply(fn, made, arguments)
    except LayoutError as error:
        return [str(v) for v in error.violations]
    return []


def compare(fn: Callable[..., Any], bounds: dict[str, Any], examples: int) -> Counter[str]:
    """Draw calls and make every fault of each; returns how often what happened."""
    made: Contract = fn.contract
    plain, knowing = (alone(made, remembers=r) for r in (False, True))
    memo = knowing.__globals__.get("_memo")
    seen: Counter[str] = Counter()

    def known(arguments: dict[str, Any]) -> bool:
        with mock.patch.object(_memo.Memo, "remember", side_effect=AssertionError) as compared:
            try:
                return said(knowing, made, arguments) == []
            except AssertionError:
                assert compared.called
                return False

    def look(call: Any) -> None:
        if memo is None:
            seen["no memo"] += 1
            return
        memo.__init__()
        assert said(knowing, made, call.arguments) == []
        memo.learns = True
        seen["known" if known(call.arguments) else "not kept"] += 1
        for fault in every_fault(call):
            expected = said(plain, made, fault.call.arguments)
            assert expected, fault
            assert said(knowing, made, fault.call.arguments) == expected, fault
            seen["faults"] += 1
        assert said(knowing, made, call.arguments) == []

    for_each(calls(fn, data=False, **bounds), look, examples)
    return seen


@pytest.mark.parametrize(("name", "fn", "bounds"), ALL, ids=[name for name, _, _ in ALL])
def test_faults_of_a_known_call_are_refused_as_without_a_memo(name, fn, bounds):
    seen = compare(fn, bounds, 6)
    assert seen["no memo"] or seen["known"] or seen["not kept"], seen
    assert seen["no memo"] or seen["faults"], seen


def test_nearly_every_contract_gets_a_memo():
    have = [name for name, fn, _ in ALL if "_memo" in alone(fn.contract, remembers=True).__globals__]
    assert len(ALL) - len(have) <= 2, {name for name, _, _ in ALL} - set(have)
