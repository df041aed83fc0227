"""Faults: which there are, that each is one, and that a guard with a hole is found out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    E8M0,
    FP32,
    Finite,
    Index,
    Indptr,
    Layout,
    Writes,
    contract,
    layout,
    needs,
    no_overlap,
    when,
)
from layoutcheck.testing import _faults as module
from layoutcheck.testing import calls, faults
from layoutcheck.testing._check import for_each
from layoutcheck.testing._faults import contradicts, every_fault

CACHE = layout("paged.nhd")(dtype=(E4M3, BF16), view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")
WIDE = Layout("t.wide", "row col -> row col", dtype=FP32, dense="col", align={"base": 16}, offsets="int32")
TILES = layout("scale.128x4")(dtype=E8M0, row="token", col="head")


@contract(
    when("dtype(k_cache) == e4m3", needs("k_scale")),
    when("dtype(k_cache) != e4m3", "dtype(v_cache) == bf16"),
    no_overlap("k_cache", "v_cache"), "dtype(k_cache) == dtype(v_cache)", same_device=True,
)  # fmt: skip
def serve(
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="== 0", unique=True)],
    indptr: Annotated[Int32[Tensor, "seq+1"], Indptr("token", longest="longest")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    wide: Annotated[Tensor, WIDE, Finite()],
    tiles: Annotated[Tensor, TILES],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")] | None = None,
    *,
    longest: int,
    page_size: int = 128,
) -> None: ...


KINDS = {
    "one_too_many_of_an_axis", "one_too_few_of_an_axis", "one_page_too_many", "other_page_size", "stale_after_resize",
    "all_stale_after_resize", "transposed", "flat", "axis_missing", "axis_too_many", "same_width", "int64_as_int32",
    "int32_as_int64", "fnuz_for_fn", "slice_of_a_wider_tensor", "every_other_element", "expanded", "misaligned_base",
    "overflow", "other_device", "missing", "swapped", "wrong_scalar", "scalar_that_breaks_a_rule", "other_layout",
    "element_of_another_mode", "overlapping", "index_out_of_range", "index_far_out_of_range", "index_below_range",
    "duplicate_index", "indptr_ends_too_late", "indptr_ends_too_early", "indptr_does_not_start_at_0",
    "indptr_decreases",
    "indptr_step_too_long", "nan_in_the_padding", "not_finite",
}  # fmt: skip


def test_every_kind_of_fault_occurs_and_is_rejected_for_the_right_reason():
    seen: Counter[str] = Counter()

    def look(call: Any) -> None:
        for fault in every_fault(call):
            seen[fault.name] += 1
            assert fault.missed() is None, f"{fault.missed()}\n{fault!r}"

    for_each(calls(serve, data=False), look, 12)
    for_each(calls(serve, data=False, k_cache=E4M3, token=(3, 5), longest=2), look, 12)
    assert KINDS - set(seen) == set()


@contract
def ragged(
    seq_index: Annotated[Int32[Tensor, "token"], Index("seq", segment_of="cu_seqlens")],
    cu_seqlens: Annotated[Int64[Tensor, "seq+1"], Indptr("token", capacity=True)],
    table: Annotated[Int32[Tensor, "seq width"], Index("page", live="cdiv(lens, page_size)", unique=True)],
    lens: Annotated[Int32[Tensor, "seq"], Index("width * page_size + 1")],
    slot: Annotated[Int64[Tensor, "seq"], Index("page", live="mask", unique=True, apart_from="own")],
    own: Annotated[Int64[Tensor, "seq"], Index("page", skip="< 0")],
    query_start: Annotated[Int64[Tensor, "seq+1"], Indptr("token", capacity=True, longest="lens")],
    mask: Bool[Tensor, "seq"],
    *,
    page: int,
    page_size: int,
) -> None: ...


def test_only_entries_that_are_read_are_made_wrong():
    seen: Counter[tuple[str, str]] = Counter()

    def look(call: Any) -> None:
        for fault in every_fault(call):
            seen[fault.name, fault.argument] += 1
            assert fault.missed() is None, f"{fault.missed()}\n{fault!r}"

    for_each(calls(ragged, data=False), look, 30)
    for_each(calls(ragged, data=False, seq=(3, 5), page=(9, 12), token=(3, 6)), look, 30)
    kinds = ("index_out_of_range", "index_far_out_of_range", "index_below_range")
    wanted = {(kind, argument) for kind in kinds for argument in ("seq_index", "table", "lens", "slot")}
    wanted |= {("duplicate_index", "table"), ("duplicate_index", "slot")}
    wanted |= {("index_of_another_argument", "slot"), ("indptr_step_too_long", "query_start")}
    wanted |= {("index_of_a_neighbouring_segment", "seq_index"), ("indptr_decreases", "cu_seqlens")}
    assert wanted <= set(seen)


def test_drawn_faults_are_of_many_kinds():
    seen: Counter[str] = Counter()

    def look(fault: Any) -> None:
        seen[fault.name] += 1
        assert fault.missed() is None, f"{fault.missed()}\n{fault!r}"

    for_each(faults(serve, data=False), look, 150)
    assert len(seen) > 12


@given(faults(serve, token=(2, 5)))
@settings(max_examples=40, deadline=None)
def test_a_fault_changes_what_it_names_and_leaves_the_valid_call_alone(fault):
    changed = [
        n for n, v in fault.valid.arguments.items()
        if not (fault.call.arguments[n] is v or (isinstance(v, int | str | float) and fault.call.arguments[n] == v))
    ]  # fmt: skip
    assert changed
    if fault.name not in ("overflow",):
        assert set(changed) == set(fault.argument.split(" and "))
    assert fault.argument.split(" ")[0] in repr(fault)
    from layoutcheck.testing._guard import refused

    assert refused(serve, fault.valid.arguments) == ()


def test_a_guard_with_a_hole_is_found_out():
    """A guard that accepts everything, one that blames another argument, and one that gives another reason."""
    fault = next(f for f in every_fault(_one()) if f.name == "same_width" and f.argument == "loc")
    (violation,) = fault.rejected()
    with mock.patch.object(module, "refused", return_value=()):
        assert "was accepted" in str(fault.missed())
    with mock.patch.object(module, "refused", return_value=(replace(violation, rule="shape"),)):
        assert "not for dtype" in str(fault.missed())
    with mock.patch.object(module, "refused", return_value=(violation, replace(violation, argument="wide"))):
        assert "wide was blamed too" in str(fault.missed())


def _one(**bounds: Any) -> Any:
    found: list[Any] = []
    for_each(calls(serve, token=(3, 4), head=2, page=(2, 3), **bounds), found.append, 3)
    return found[-1]


def test_what_the_contract_allows_is_no_fault():
    call = _one()
    more = torch.zeros(call.arguments["wide"].shape[0] + 1, call.arguments["wide"].shape[1])
    assert not contradicts(call, {"wide": more}), "nothing else speaks of the rows of wide"
    assert contradicts(call, {"v_cache": call.arguments["v_cache"][:-1]})
    assert not contradicts(call, {})
    names = {(f.name, f.argument) for f in every_fault(call)}
    assert ("one_too_many_of_an_axis", "wide") not in names


def test_tensors_without_memory_are_never_launched():
    for fault in every_fault(_one()):
        meta = any(isinstance(v, Tensor) and v.device.type == "meta" for v in fault.call.arguments.values())
        assert fault.launchable is not meta


@pytest.mark.parametrize("extra", [dict(k_scale=None), dict(page_size=64)])
def test_faults_take_bounds(extra):
    for_each(faults(serve, data=False, **extra), lambda f: f.missed() is None or pytest.fail(str(f)), 30)


def test_a_sum_of_sizes_is_followed_in_any_direction():
    @contract("row == q + k", "k == 2 * q")
    def f(x: Float32[Tensor, "row"], y: Float32[Tensor, "k"], q: int) -> None: ...

    def look(fault: Any) -> None:
        assert fault.missed() is None, fault.missed()

    for_each(faults(f), look, 60)
