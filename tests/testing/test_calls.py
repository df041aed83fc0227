"""Valid calls: which edges occur, that they are what they claim to be, and what cannot be drawn."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from jaxtyping import BFloat16, Bool, Float32, Int32, Int64
from torch import Tensor

import layoutcheck
from layoutcheck import (
    BF16,
    E4M3,
    E8M0,
    Choose,
    Finite,
    Index,
    Indptr,
    Layout,
    Writes,
    contract,
    each,
    forbids,
    layout,
    needs,
    together,
    when,
)
from layoutcheck.testing import calls, tensor, tensors
from layoutcheck.testing._call import clone
from layoutcheck.testing._check import for_each
from layoutcheck.testing._guard import refused

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")
ROWS = Layout("t.rows", "token head head_dim -> token head head_dim", dtype=BF16, dense="head_dim")


@contract("page_size % 32 == 0", same_device=True)
def store(
    k: Annotated[Tensor, ROWS],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0", unique=True)],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALE, Writes(at="loc")] | None = None,
    *,
    page_size: int = 128,
) -> None: ...


def test_every_edge_occurs_in_1000_calls():
    seen: Counter[str] = Counter()

    def look(call: Any) -> None:
        k, loc, scale = call.arguments["k"], call.arguments["loc"], call.arguments["k_scale"]
        token, head, _ = k.shape
        seen["no tokens"] += token == 0
        seen["one head"] += head == 1
        seen["one page"] += call.sizes["page"] == 1
        seen["no pages"] += call.sizes["page"] == 0
        seen["an odd number of pages"] += call.sizes["page"] % 2 == 1 and call.sizes["page"] > 1
        seen["free outer strides"] += token > 1 and head > 1 and k.stride(0) > k.stride(1) * head
        seen["a slice of a wider buffer"] += head > 1 and k.stride(1) > k.shape[2]
        seen["a storage offset"] += k.storage_offset() > 0
        seen["an offset of scales"] += scale.storage_offset() > 0
        seen["odd strides of an axis of size 1"] += head == 1 and scale.stride(1) not in (
            1,
            scale.shape[2] * scale.stride(2),
        )
        seen["slot 0"] += 0 in loc.tolist()
        seen["a negative slot"] += token > 0 and int(loc.min()) < 0
        seen["the last slot"] += token > 0 and int(loc.max()) == call.sizes["slot"] - 1
        seen["uint8 for e8m0"] += scale.dtype is torch.uint8
        seen["an optional argument"] += call.arguments["v_scale"] is not None
        seen["none"] += call.arguments["v_scale"] is None
        seen["another page size"] += call.sizes["page_size"] != 128
        live = loc[loc > 0].tolist()
        assert len(set(live)) == len(live)
        assert call.arguments["k_cache"].shape[0] == call.sizes["page"] * call.sizes["page_size"]

    for_each(calls(store, data=False), look, 1000)
    missing = [edge for edge, n in seen.items() if not n]
    assert not missing, missing


def test_hnd_storage_is_seen_as_nhd():
    hnd = layout("paged.hnd")(dtype=BF16, pitch={}, view="page token head head_dim")
    seen: Counter[bool] = Counter()

    def look(x: Tensor) -> None:
        seen[x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2)] += 1
        hnd.check(x)

    for_each(tensors(hnd), look, 100)
    assert seen[True] > 20


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_of_every_catalogue_layout_are_of_it(data):
    entry = data.draw(st.sampled_from(sorted(layoutcheck.layouts.entries().items())))[1]
    x = data.draw(tensors(entry))
    with contextlib.suppress(TypeError):  # where its sizes do not follow from a tensor alone
        entry.check(x)
    assert x.dtype in (entry if isinstance(entry, Layout) else entry.buffer).accepted


def test_a_choice_of_layouts_gives_all_of_them():
    flat = layout("mxfp8.flat")
    seen: Counter[int] = Counter()
    for_each(tensors(Choose({"page_size == 128": SCALE}, default=flat)), lambda x: seen.update([x.dim()]), 40)
    assert set(seen) == {3, 5}


@contract(
    together("k_scale", "v_scale"),
    when("dtype(cache) == e4m3", needs("q_scale"), "width > 2"),
    when("dtype(cache) != e4m3", forbids("q_scale")),
    when("given(window)", "window > 0"),
    "heads % group == 0", "width % 4 == 0", "width <= limit", "scale > 0", "kind != 'never'",
)  # fmt: skip
def attend(
    cache: Annotated[Tensor, Layout("t.cache", "slot heads width -> slot heads width", dtype=(E4M3, BF16))],
    indptr: Annotated[Int32[Tensor, "entries"], Indptr("slot", longest="limit")],
    index: Annotated[Int32[Tensor, "entries-1 most"], Index("slot + 1")],
    q_scale: Float32[Tensor, "slot"] | None = None,
    k_scale: Float32[Tensor, "slot"] | None = None,
    v_scale: Float32[Tensor, "slot"] | None = None,
    window: int | None = None,
    *,
    group: int,
    limit: int,
    scale: float,
    kind: str = "a",
    mode: Literal["x", "y"] = "x",
    flag: bool = False,
    names: list[str],
    anything: Any = 3,
) -> None: ...


def test_rules_of_presence_words_numbers_and_values_hold():
    seen: Counter[Any] = Counter()

    def look(call: Any) -> None:
        a = call.arguments
        assert (a["q_scale"] is not None) == (a["cache"].dtype is torch.float8_e4m3fn)
        assert (a["k_scale"] is None) == (a["v_scale"] is None)
        assert call.sizes["heads"] % a["group"] == 0
        assert a["cache"].shape[2] % 4 == 0
        assert a["cache"].shape[2] <= a["limit"]
        steps = a["indptr"].diff()
        assert not len(steps) or int(steps.max()) <= a["limit"]
        assert a["scale"] > 0
        assert a["anything"] == 3
        assert refused(attend, a) == ()
        seen.update([a["window"] is None, a["mode"], a["flag"], a["cache"].dtype, a["k_scale"] is None])

    for_each(calls(attend), look, 150)
    assert {True, False, "x", "y", torch.bfloat16, torch.float8_e4m3fn} <= set(seen)


# The index comes first, so that what tells of it is drawn before it all the same.
@contract
def ragged(
    seq_index: Annotated[Int32[Tensor, "token"], Index("seq", segment_of="cu_seqlens")],
    cu_seqlens: Annotated[Int64[Tensor, "seq+1"], Indptr("token", capacity=True)],
    table: Annotated[Int32[Tensor, "seq width"], Index("page", live="cdiv(lens, page_size)")],
    lens: Annotated[Int32[Tensor, "seq"], Index("width * page_size + 1")],
    rows: Annotated[Int64[Tensor, "seq two"], Index("token", live="mask and slot >= 0")],
    slot: Annotated[Int64[Tensor, "seq"], Index("page", skip="< 0", live="mask", unique=True)],
    mask: Bool[Tensor, "seq"],
    kept: Annotated[Int64[Tensor, "entry"], Index("page", live="cu_seqlens")] | None = None,
    *,
    page: int,
    page_size: int,
) -> None: ...


@pytest.mark.parametrize("data", [True, False])
def test_indices_that_others_tell_of_follow_them_and_hold_garbage_where_nothing_is_read(data):
    seen: Counter[str] = Counter()

    def look(call: Any) -> None:
        a = call.arguments
        assert refused(ragged, a) == (), call
        last = int(a["cu_seqlens"][-1])
        seen["an empty segment"] += last > 0 and 0 in a["cu_seqlens"].diff()
        seen["several segments"] += len(a["seq_index"][:last].unique()) > 1
        seen["garbage behind the segments"] += bool((a["seq_index"][last:] > 2**29).any())
        seen["a negative page"] += bool((a["table"] == -1).any())
        seen["a page past the end"] += bool((a["table"] == a["page"]).any())
        seen["garbage in rows"] += bool((a["rows"][~a["mask"]] > 2**29).any())
        seen["rows that are read"] += bool(a["mask"].any())
        seen["a slot twice where it is not read"] += bool((a["slot"].unique(return_counts=True)[1] > 1).any())
        seen["entries behind a prefix sum"] += a["kept"] is not None and bool((a["kept"] > 2**29).any())

    for_each(calls(ragged, data=data), look, 300)
    missing = {
        "an empty segment", "several segments", "garbage behind the segments", "a negative page",
        "a page past the end", "garbage in rows", "rows that are read", "a slot twice where it is not read",
        "entries behind a prefix sum",
    } - {edge for edge, n in seen.items() if n}  # fmt: skip
    assert not missing


@contract(
    "sum(splits) == row", "len(splits) == group", each("splits", "% unit == 0"), each("splits", "!= 0"),
    when("given(more)", "len(more) == 2 * group"), each("odd", "% 2 == 1"),
)  # fmt: skip
def grouped(
    x: Float32[Tensor, "row"], scale: Float32[Tensor, "group"], splits: list[int], *, unit: int,
    more: Sequence[int] | None = None, odd: tuple[int, ...] = (),
) -> None: ...  # fmt: skip


@pytest.mark.parametrize("bounds", [dict(), dict(row=(0, 20)), dict(group=3, unit=7), dict(row=12, unit=4)])
def test_lists_and_the_sizes_that_they_must_add_up_to_are_chosen_together(bounds):
    seen: Counter[Any] = Counter()

    def look(call: Any) -> None:
        a = call.arguments
        assert refused(grouped, a) == ()
        assert isinstance(a["odd"], tuple)
        seen.update([("splits", *a["splits"]), ("odd", *a["odd"])])

    for_each(calls(grouped, **bounds), look, 100)
    assert len(seen) > 12


def test_a_list_of_ones_own_is_kept_to_the_rules_about_it():
    own = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    for_each(
        calls(grouped, more=None, odd=own, unit=1),
        lambda c: refused(grouped, c.arguments) == () or pytest.fail(repr(c)),
        30,
    )


@given(calls(store, head=(2, 3), page_size=64, k_cache=torch.float8_e4m3fn, v_scale=None, token=5))
@settings(max_examples=30, deadline=None)
def test_bounds_are_kept(call):
    assert call.sizes["head"] in (2, 3)
    assert call.arguments["page_size"] == 64
    assert call.arguments["v_scale"] is None
    assert len(call.arguments["loc"]) == 5


def test_a_method_gets_its_self_from_what_was_drawn():
    class Pool:
        def __init__(self, buffer: Tensor) -> None:
            self.buffer = buffer

        @contract(derive={"buffer": lambda self, **_: self.buffer}, buffer=Float32[Tensor, "slot dim"])
        def put(self, x: Float32[Tensor, "n dim"]) -> None: ...

    def look(call: Any) -> None:
        assert call.arguments["self"].buffer.shape[1] == call.arguments["x"].shape[1]
        assert refused(Pool.put, call.arguments) == ()

    for_each(calls(Pool.put, self=lambda drawn: Pool(drawn["buffer"])), look, 20)


@given(calls(store))
@settings(max_examples=20, deadline=None)
def test_a_call_prints_as_code_that_repeats_it(call):
    again: dict[str, Any] = {}

    def catch(**arguments: Any) -> None:
        again.update(arguments)

    eval(repr(call), {"store": catch, "tensor": tensor, "torch": torch, "layout": layout})
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            other = again[name]
            assert (other.shape, other.stride(), other.dtype) == (value.shape, value.stride(), value.dtype)
            assert torch.equal(_bytes(other), _bytes(value))
        else:
            assert again[name] == value


def _bytes(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_calls_shrink_to_small_ones():
    smallest = find(
        calls(store),
        lambda c: c.sizes["head"] >= 2 and len(c.arguments["loc"]) >= 1,
        settings=settings(database=None, deadline=None),
    )
    assert smallest.sizes["head"] == 2
    assert smallest.sizes["token"] == 1
    assert smallest.arguments["k"].is_contiguous()
    assert smallest.arguments["k"].storage_offset() == 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu]
)
def test_contents_are_finite_and_not_all_alike(dtype):
    x = tensor((64, 8), dtype=dtype, data=5).float()
    assert bool(x.isfinite().all())
    assert len(x.unique()) > 3
    scales = [tensor((64,), dtype=E8M0, data=i).float().log2().mean() for i in range(4)]
    assert min(scales) < -10
    assert max(scales) > 5


def test_padding_is_filled_and_data_is_not():
    padded = layout("scale.128x4")
    for_each(tensors(padded, row=(1, 5), col=(1, 3)), lambda x: None, 5)
    concrete = padded(row=3, col=2)
    x = tensor(concrete.shape, concrete.strides, "e8m0", data=1, padding=concrete)
    codes = x.view(torch.uint8)
    assert int((codes == 0).sum()) == concrete.padding
    assert bool((concrete.unpack(x).view(torch.uint8) > 0).all())


def test_a_clone_keeps_strides_offset_and_gaps():
    x = torch.arange(40)[3:].as_strided((3, 4), (9, 2), 3)
    y = clone(x)
    assert (y.stride(), y.storage_offset()) == (x.stride(), 3)
    assert torch.equal(x, y)
    assert y.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert y.data_ptr() != x.data_ptr()


def test_what_cannot_be_drawn_is_an_error():
    def plain(x): ...

    @contract
    def unknown(x: Float32[Tensor, "n"], y): ...

    @contract("dtype(x) == fp16")
    def never(x: BFloat16[Tensor, "n"]): ...

    with pytest.raises(TypeError, match="has no contract"):
        calls(plain)
    with pytest.raises(TypeError, match="nothing is known of y"):
        for_each(calls(unknown), lambda c: None, 1)
    with pytest.raises(TypeError, match="no call can keep the rules about x"):
        calls(never)
    with pytest.raises(TypeError, match="'hed' is neither a size nor an argument"):
        calls(store, hed=2)


def test_rules_that_read_data_hold_without_data():
    @contract
    def f(x: Annotated[Tensor, ROWS, Finite()], many: Sequence[int] = ()) -> None: ...

    for_each(calls(f, data=False), lambda c: refused(f, c.arguments) == () or pytest.fail(repr(c)), 50)
