"""Every case of ``cases/cases.json``: the bad call is refused for the right reason and in words that name it; its close
neighbours are accepted, or refused, as they must be."""

from __future__ import annotations

from typing import Any

import pytest
from cases import contracts_cache, contracts_rows, contracts_scale  # noqa: F401 - they register their functions
from cases.harness import CASES, OPS, arguments, call, missing, neighbour

from layoutcheck import LayoutError

REJECTED = [c for c in CASES if c["expect"] == "reject"]
ACCEPTED = [c for c in CASES if c["expect"] == "accept"]


def ids(case: dict[str, Any]) -> str:
    return f"{case['id']}-{case['op']}"


def refused(case: dict[str, Any], items: list[str]) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        call(case)
    assert not missing(str(caught.value), items, case), str(caught.value)
    return caught.value


def test_every_case_has_its_contract():
    assert len(CASES) == 68
    assert {c["op"] for c in CASES} == set(OPS)


@pytest.mark.parametrize("case", REJECTED, ids=ids)
def test_a_wrong_call_is_refused_and_the_text_names_why(case):
    error = refused(case, case["message_must_name"])
    assert {v.rule for v in error.violations} <= {case["rule"], *case.get("rule_also", [])}, str(error)
    assert all(len(str(v)) <= 700 for v in error.violations), str(error)


@pytest.mark.parametrize("case", [c for c in CASES if "good_neighbour" in c], ids=ids)
def test_the_close_call_is_accepted(case):
    call(neighbour(case, "good_neighbour"))


@pytest.mark.parametrize("case", ACCEPTED, ids=ids)
def test_a_call_that_only_looks_unusual_is_accepted(case):
    call(case)


@pytest.mark.parametrize("case", [c for c in CASES if "bad_neighbour" in c], ids=ids)
def test_the_close_wrong_call_is_refused(case):
    case = neighbour(case, "bad_neighbour")
    refused(case, case["message_must_name"])


def test_arguments_are_what_the_case_says():
    case = next(c for c in CASES if c["id"] == "C009")
    made = arguments(case)
    assert made["k_sf"].stride() == (9216, 576, 72, 1)
    assert made["k_sf"].storage_offset() == 64
    assert made["k_sf"].untyped_storage().nbytes() == 36864
