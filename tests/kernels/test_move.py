"""Scales and rows between buffers and slots: every byte arrives, and no other changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_data import load, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layoutcheck import E4M3, LayoutError, layouts
from layoutcheck.kernels import load_scales, move, move_slots, store_rows, store_scales

INTERLEAVED, FLAT = layouts.layout("mxfp8.interleaved"), layouts.layout("mxfp8.flat")
BOTH = [("interleaved", 32), ("interleaved", 96), ("interleaved", 128), ("flat", 1), ("flat", 48)]
each_layout = pytest.mark.parametrize(("scale_layout", "page_size"), BOTH)


def codes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, the last dimension of which is packed."""
    return tensor.view(torch.uint8)


def random(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    """Random bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator).byte().view(dtype)


def scale_buffer(
    slots: int, head: int, group: int, scale_layout: str, page_size: int, seed: int = 0
) -> tuple[Any, Tensor]:
    """A concrete layout, and a buffer of it full of random bytes."""
    if scale_layout == "interleaved":
        layout = INTERLEAVED(slot=slots, page_size=page_size, head=head, head_dim=32 * group)
    else:
        layout = FLAT(slot=slots, head=head, head_dim=32 * group)
    return layout, random(*layout.shape, seed=seed).view(torch.float8_e8m0fnu)


def random_loc(slots: int, tokens: int, seed: int = 2) -> Tensor:
    """Different slots in any order, slots 0 and below among them."""
    loc = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(seed))[:tokens] + 1
    loc[::4] = 0
    loc[1::6] = -3
    loc[2::9] = -(2**40)
    return loc


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is 0xFF everywhere."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        tensor.view(torch.uint8).fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def unlaunched(monkeypatch):
    """No kernel may start."""

    def launch(*args: Any, **meta: Any) -> None:
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(move, "launch", launch)


# --- scales -----------------------------------------------------------------------------------------------------------


@each_layout
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_store_scales(scale_layout, page_size, group):
    slots, head, tokens = 3 * 96 * 4, 5, 37
    slots -= slots % page_size
    layout, cache = scale_buffer(slots, head, group, scale_layout, page_size)
    scale, loc = random(tokens, head, group, seed=1).view(torch.float8_e8m0fnu), random_loc(slots, tokens)
    logical = layout.unpack(codes(cache))
    logical[loc[loc > 0]] = codes(scale)[loc > 0]
    expected = layout.pack(logical)
    assert store_scales(scale, loc, cache, page_size=page_size, scale_layout=scale_layout) is None
    assert torch.equal(codes(cache), expected)


@each_layout
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_load_scales(scale_layout, page_size, group, poisoned):
    slots, head, tokens = 3 * 96 * 4, 5, 37
    slots -= slots % page_size
    layout, cache = scale_buffer(slots, head, group, scale_layout, page_size)
    loc = random_loc(slots, tokens)
    loc[-1] = loc[-2]  # a slot may be read twice
    before = codes(cache).clone()
    rows = load_scales(cache, loc, page_size=page_size, scale_layout=scale_layout)
    expected = layout.unpack(codes(cache))[loc.clamp(min=0)]
    expected[loc < 0] = 0
    assert rows.dtype is torch.float8_e8m0fnu
    assert torch.equal(codes(rows), expected)  # slot 0 is read, slots below are 0
    assert torch.equal(codes(cache), before)


@pytest.mark.parametrize("golden", vectors("store_kv_mxfp8"), ids=lambda v: v["id"])
def test_golden_scales(golden):
    """What the golden buffers hold after a store can be read, and written to an empty buffer."""
    arrays, page_size = load(golden["id"]), golden["sizes"]["page_size"]
    loc = torch.from_numpy(arrays["loc"])
    for name in ("k_scale", "v_scale"):
        stored = torch.from_numpy(arrays[name])
        fresh = torch.full_like(stored, golden["sizes"]["fill_scale"])
        store_scales(load_scales(stored, loc, page_size=page_size), loc, fresh, page_size=page_size)
        assert torch.equal(fresh, stored)
        assert not torch.equal(fresh, torch.full_like(stored, golden["sizes"]["fill_scale"]))


def test_rows_of_scales_with_strides():
    layout, cache = scale_buffer(96, 3, 4, "interleaved", 32)
    wide = random(26, 8, 6)
    scale, loc = wide[::2, 1:7:2, 1:5], torch.arange(4, 56, 4)
    assert scale.shape == (13, 3, 4)
    logical = layout.unpack(codes(cache))
    logical[loc] = scale
    expected = layout.pack(logical)
    store_scales(scale, loc, codes(cache), page_size=32)
    assert torch.equal(codes(cache), expected)


def test_scales_at_slots_that_are_not_contiguous():
    layout, cache = scale_buffer(96, 3, 2, "interleaved", 96)
    loc = torch.tensor([[5, 1], [0, 1], [90, 1], [-1, 1]])[:, 0]
    rows = load_scales(cache, loc, page_size=96)
    expected = layout.unpack(codes(cache))[[5, 0, 90, 0]]
    expected[3] = 0
    assert torch.equal(codes(rows), expected)


@given(data=st.data())
@settings(max_examples=25)
def test_any_scales_come_back(data):
    scale_layout = data.draw(st.sampled_from(["interleaved", "flat"]))
    page_size, page = 32 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    head, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    slots = page * page_size
    layout, cache = scale_buffer(slots, head, group, scale_layout, page_size)
    loc = torch.tensor(data.draw(st.lists(st.integers(1, slots - 1), unique=True, max_size=20)), dtype=torch.int64)
    scale = random(len(loc), head, group, seed=data.draw(st.integers(0, 99)))
    logical = layout.unpack(codes(cache))
    logical[loc] = scale
    store_scales(scale, loc, cache, page_size=page_size, scale_layout=scale_layout)
    assert torch.equal(layout.unpack(codes(cache)), logical)
    assert torch.equal(codes(load_scales(cache, loc, page_size=page_size, scale_layout=scale_layout)), scale)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64], ids=str
)
@pytest.mark.parametrize(("head", "dim"), [(3, 96), (1, 576), (5, 7)])
def test_store_rows(dtype, head, dim):
    slots, tokens = 70, 29
    cache, rows = random(slots, head, dim, dtype=dtype), random(tokens, head, dim, dtype=dtype, seed=1)
    loc = random_loc(slots, tokens)
    expected = codes(cache).clone()
    expected[loc[loc > 0]] = codes(rows)[loc > 0]
    assert store_rows(rows, loc, cache) is None
    assert torch.equal(codes(cache), expected)


def test_rows_with_strides_into_a_cache_with_gaps():
    whole = random(50, 4, 96, dtype=torch.bfloat16)
    cache = whole[:, 1:3, :64]
    rows = random(22, 8, 80, dtype=torch.bfloat16)[::2, 2:6:2, 3:67]
    loc = torch.arange(1, 23, 2)
    expected = whole.clone()
    expected[loc, 1:3, :64] = rows
    store_rows(rows, loc, cache)
    assert torch.equal(codes(whole), codes(expected))


# --- both, from slot to slot ------------------------------------------------------------------------------------------


def pool(
    slots: int, scale_layout: str, page_size: int, head: int = 3, dims: tuple[int, int] = (96, 64)
) -> dict[str, Any]:
    """Random caches, random scales, and how they are laid out."""
    result: dict[str, Any] = dict(page_size=page_size, scale_layout=scale_layout)
    for seed, (name, dim) in enumerate(zip("kv", dims, strict=True)):
        result[f"{name}_cache"] = random(slots, head, dim, seed=seed).view(torch.float8_e4m3fn)
        result[f"{name}_scale"] = scale_buffer(slots, head, dim // 32, scale_layout, page_size, seed)[1]
    return result


def check_moves(src: Tensor, dst: Tensor, given: dict[str, Any]) -> None:
    live = (src > 0) & (dst > 0)
    expected = {}
    for name, dim in (("k", given["k_cache"].shape[2]), ("v", given["v_cache"].shape[2])):
        cache = codes(given[f"{name}_cache"])
        slots, head, _ = cache.shape
        moved = cache.clone()
        moved[dst[live]] = cache[src[live]]
        expected[f"{name}_cache"] = moved
        layout = scale_buffer(slots, head, dim // 32, given["scale_layout"], given["page_size"])[0]
        logical = layout.unpack(codes(given[f"{name}_scale"]))
        moved = logical.clone()
        moved[dst[live]] = logical[src[live]]
        expected[f"{name}_scale"] = layout.pack(moved)
    inputs = src.clone(), dst.clone()
    assert move_slots(src, dst, **given) is None
    for name, bytes_ in expected.items():
        assert torch.equal(codes(given[name]), bytes_), name
    assert torch.equal(src, inputs[0])
    assert torch.equal(dst, inputs[1])


MOVES = {
    "elsewhere": ([3, 4, 5], [50, 40, 60]),
    "swap": ([7, 90], [90, 7]),
    "rotation": ([5, 6, 7, 8, 9], [6, 7, 8, 9, 5]),
    "shift over itself": (list(range(10, 80)), list(range(11, 81))),
    "one source twice": ([4, 4, 4], [5, 31, 32]),
    "to itself": ([4, 5], [4, 5]),
    "to slot 0 and below": ([4, 5, 6], [0, -1, 9]),
    "from slot 0 and below": ([0, -1, -(2**40), 3], [4, 5, 6, 7]),
    "two that are skipped": ([0, -1, 4, 5], [-7, 0, -1, 0]),
}


@pytest.mark.parametrize(("src", "dst"), MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize(("scale_layout", "page_size"), [("interleaved", 32), ("interleaved", 96), ("flat", 48)])
def test_moves(src, dst, scale_layout, page_size, poisoned):
    check_moves(torch.tensor(src), torch.tensor(dst), pool(96, scale_layout, page_size))


def test_moves_by_slices():
    pairs = torch.tensor([[3, 50], [0, 51], [4, 3], [50, 4]])
    check_moves(pairs[:, 0], pairs[:, 1], pool(96, "interleaved", 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_without_scales(dtype):
    k, v = (random(40, 3, dim, dtype=dtype) for dim in (96, 64))
    before = k.clone(), v.clone()
    move_slots(torch.tensor([1, 2]), torch.tensor([2, 1]), k, v)
    for cache, old in zip((k, v), before, strict=True):
        assert torch.equal(codes(cache)[[2, 1]], codes(old)[[1, 2]])
        assert torch.equal(codes(cache)[3:], codes(old)[3:])


@given(data=st.data())
@settings(max_examples=10)
def test_any_permutation(data):
    slots = data.draw(st.lists(st.integers(-2, 63), unique=True, min_size=1, max_size=12))
    dst = data.draw(st.permutations(slots))
    check_moves(
        torch.tensor(slots), torch.tensor(dst), pool(64, data.draw(st.sampled_from(["interleaved", "flat"])), 32)
    )


# --- what does not run ------------------------------------------------------------------------------------------------


def test_nothing_to_do(unlaunched):
    none = torch.empty(0, dtype=torch.int64)
    given = pool(96, "interleaved", 32)
    move_slots(none, none, **given)
    store_scales(random(0, 3, 3), none, given["k_scale"], page_size=32)
    store_rows(random(0, 3, 96).view(torch.float8_e4m3fn), none, given["k_cache"])
    assert load_scales(given["k_scale"], none, page_size=32).shape == (0, 3, 3)


ONE = torch.tensor([1])
FAULTS = {
    "scales of a wider head": (lambda c: store_scales(random(1, 3, 4), ONE, c["k_scale"], page_size=32), "cache"),
    "flat as interleaved": (
        lambda c: store_scales(random(1, 3, 3), ONE, random(96, 3, 3), page_size=32), "cache"
    ),
    "interleaved as flat": (
        lambda c: load_scales(c["k_scale"], ONE, scale_layout="flat"), "cache"
    ),
    "another page size": (lambda c: load_scales(c["k_scale"], ONE, page_size=64), "cache"),
    "int32 loc": (lambda c: load_scales(c["k_scale"], ONE.int(), page_size=32), "loc"),
    "a cache with gaps": (lambda c: load_scales(random(3, 4, 32, 1, 3)[:, :3], ONE, page_size=32), "cache"),
    "rows of another dtype": (
        lambda c: store_rows(random(1, 3, 96, dtype=torch.bfloat16), ONE, c["k_cache"]), "rows"
    ),
    "rows not packed": (
        lambda c: store_rows(random(1, 96, 3).mT.view(torch.float8_e4m3fn), ONE, c["k_cache"]), "rows"
    ),
    "fewer destinations": (lambda c: move_slots(torch.tensor([1, 2]), ONE, **c), "dst"),
    "k scales alone": (lambda c: move_slots(ONE, ONE, **c | dict(v_scale=None)), "v_scale"),
    "k as v": (lambda c: move_slots(ONE, ONE, **c | dict(v_cache=c["k_cache"], v_scale=c["k_scale"])), "v_cache"),
    "stale scales": (
        lambda c: move_slots(ONE, ONE, **c | dict(k_scale=pool(64, "interleaved", 32)["k_scale"])), "k_scale"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_refused(call, named, unlaunched):
    given = pool(96, "interleaved", 32)
    before = {n: codes(t).clone() for n, t in given.items() if isinstance(t, Tensor)}
    with pytest.raises(LayoutError) as caught:
        call(given)
    assert named in {v.argument for v in caught.value.violations}
    assert all(torch.equal(codes(given[n]), t) for n, t in before.items())


def test_a_layout_of_the_catalogue_is_a_cache():
    paged = layouts.layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
    cache = paged(page=3, page_size=32, head=2, head_dim=96).empty()
    rows = random(2, 2, 96).view(torch.float8_e4m3fn)
    store_rows(rows, torch.tensor([33, 5]), cache)
    assert torch.equal(codes(cache)[[33, 5]], codes(rows))
