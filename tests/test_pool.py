"""Pools: buffers that share dims are allocated, placed, resized, moved and counted as one."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Annotated, Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layoutcheck import BF16, E8M0, FP32, Choose, Layout, LayoutError, Pool, layout
from layoutcheck.pools import MXFP8KVPool, PagedKVPool, UnifiedKVPool

SIZES = dict(page=3, page_size=128, head=2, head_dim=96, v_head_dim=64)
INTERLEAVED, FLAT = layout("mxfp8.interleaved"), layout("mxfp8.flat")


class RecordPool(Pool):
    """Records beside an ordinary buffer."""

    index: Annotated[Tensor, layout("dsa.index_132")]
    latent: Annotated[Tensor, layout("flashmla.v32_656")]
    seen: Annotated[Tensor, Layout("seen", "slot -> slot", dtype=FP32, fill=0)]


class ChosenPool(Pool):
    """A field that may be absent, and a default that is an expression."""

    default: ClassVar = {"rope": "dim / 2"}
    kv: Annotated[Tensor, Layout("kv", "slot dim -> slot dim", dtype=BF16, fill=0)]
    pe: Annotated[Tensor, Layout("pe", "slot rope -> slot rope", dtype=BF16, fill=0)]
    extra: Annotated[Tensor, Choose({"dim >= 64": Layout("extra", "slot -> slot", dtype=E8M0, fill=7)})] | None


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def randomise(pool: Pool, seed: int = 0) -> None:
    """Fill every buffer of a pool with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for _, _, tensor in pool.buffers():
        codes(tensor).copy_(torch.randint(0, 256, codes(tensor).shape, generator=generator))


def logical(pool: Pool) -> dict[str, Tensor]:
    """What a pool's buffers hold, by slot, as bytes; one layer."""
    return {name: codes(layout.unpack(tensor)) for name, layout, tensor in pool.buffers()}


def pointers(pool: Pool) -> list[int]:
    return [tensor.data_ptr() for _, _, tensor in pool.buffers()]


# --- making -----------------------------------------------------------------------------------------------------------


def test_allocate():
    pool = MXFP8KVPool.allocate(**SIZES)
    assert pool.k.shape == (384, 2, 96)
    assert pool.v.shape == (384, 2, 64)
    assert pool.k_scale.shape == (3, 2, 32, 4, 3)
    assert pool.v_scale.shape == (3, 2, 32, 4, 2)
    assert [t.dtype for _, _, t in pool.buffers()] == [torch.float8_e4m3fn] * 2 + [torch.float8_e8m0fnu] * 2
    assert not any(codes(t).any() for _, _, t in pool.buffers())
    assert pool.dims == SIZES | dict(slot=384)
    assert (pool.layers, pool.generation) == (None, 0)


@pytest.mark.parametrize(
    "dims",
    [
        dict(slot=384, page_size=128, head=2, head_dim=96, v_head_dim=64),
        dict(slot=384, page=3, head=2, head_dim=96, v_head_dim=64),
        SIZES | dict(slot=384),
    ],
)
def test_any_dims_from_which_the_others_follow(dims):
    assert MXFP8KVPool.allocate(**dims).dims == MXFP8KVPool.allocate(**SIZES).dims


@pytest.mark.parametrize("page_size", [1, 16, 64, 96, 256])
def test_scales_are_flat_at_other_page_sizes(page_size):
    pool = MXFP8KVPool.allocate(**SIZES | dict(page_size=page_size))
    assert pool.k_scale.shape == (3 * page_size, 2, 3)
    assert pool.v_scale.shape == (3 * page_size, 2, 2)
    assert [layout.name for _, layout, _ in pool.buffers()][2:] == ["mxfp8.flat", "mxfp8.flat"]


def test_the_width_of_v_is_that_of_k_unless_it_is_given():
    del (sizes := dict(SIZES))["v_head_dim"]
    for cls in (MXFP8KVPool, PagedKVPool):
        assert cls.allocate(**sizes).v.shape == (384, 2, 96)
        assert cls.allocate(**SIZES).v.shape == (384, 2, 64)
    assert PagedKVPool.allocate(**sizes).k.dtype is torch.bfloat16


def test_unified():
    bf16 = UnifiedKVPool.allocate(page=5, page_size=3, dim=128, kv_dtype="bf16")
    assert (bf16.kv.shape, bf16.kv.dtype, bf16.kv_scale) == ((15, 128), torch.bfloat16, None)
    fp8 = UnifiedKVPool.allocate(page=5, page_size=3, dim=128, kv_dtype="fp8")
    assert (fp8.kv.shape, fp8.kv.dtype) == ((15, 128), torch.float8_e4m3fn)
    assert (fp8.kv_scale.shape, fp8.kv_scale.dtype) == ((5, 2), torch.float32)
    assert [name for name, _, _ in bf16.buffers()] == ["kv"]


def test_records():
    pool = RecordPool.allocate(page=3, page_size=64)
    assert pool.index.shape == (3, 64 * 132)
    assert pool.latent.shape == (3, 64, 656)
    assert pool.seen.shape == (192,)
    assert RecordPool.nbytes(page=3, page_size=64) == 192 * (132 + 656 + 4)


def test_a_field_may_be_absent_and_defaults_are_expressions():
    small, large = ChosenPool.allocate(slot=5, dim=32), ChosenPool.allocate(slot=5, dim=64)
    assert small.extra is None
    assert codes(large.extra).tolist() == [7] * 5
    assert (small.pe.shape, large.pe.shape) == ((5, 16), (5, 32))
    assert ChosenPool.nbytes(slot=5, dim=64) == 5 * (128 + 64 + 1)
    assert ChosenPool.allocate(slot=5, dim=32, rope=7).pe.shape == (5, 7)


def test_a_pool_of_a_pool():
    class Wider(PagedKVPool):
        flags: Annotated[Tensor, Layout("flags", "slot -> slot", dtype=FP32, fill=0)]

    pool = Wider.allocate(**SIZES)
    assert [name for name, _, _ in pool.buffers()] == ["k", "v", "flags"]
    assert pool.v.shape == (384, 2, 64)


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        (dict(page=3, page_size=128, head=2), TypeError, "head_dim"),
        (SIZES | dict(heads=2), TypeError, "'heads' is no size of this pool"),
        (SIZES | dict(slot=385), LayoutError, "385"),
        (SIZES | dict(head_dim=100), LayoutError, "100"),
        (dict(slot=400, page_size=128, head=2, head_dim=64), LayoutError, "400"),
        (SIZES | dict(page=-1), LayoutError, "page"),
        (SIZES | dict(layers=2, head=[1, 2, 3]), TypeError, "head has 3 values for 2 layers"),
        (SIZES | dict(head=[1, 2]), TypeError, "head has 2 values for no layers"),
    ],
)
def test_sizes_that_do_not_do(dims, error, message):
    for make in (MXFP8KVPool.allocate, MXFP8KVPool.nbytes):
        with pytest.raises(error, match=message):
            make(**dims)


def test_a_pool_is_not_made_by_its_class():
    with pytest.raises(TypeError, match="allocate"):
        MXFP8KVPool()


def test_repr():
    assert repr(PagedKVPool.allocate(page=1, page_size=4, head=2, head_dim=8, layers=2)) == (
        "<PagedKVPool page=1, page_size=4, head=2, head_dim=8, layers=2>"
    )


# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers():
    pool = MXFP8KVPool.allocate(**SIZES | dict(head=[2, 1, 4], head_dim=(96, 64, 32)), layers=3)
    assert [k.shape for k in pool.k] == [(384, 2, 96), (384, 1, 64), (384, 4, 32)]
    assert [s.shape for s in pool.v_scale] == [(3, 2, 32, 4, 2), (3, 1, 32, 4, 2), (3, 4, 32, 4, 2)]
    assert pool.dims["head"] == (2, 1, 4)
    assert pool.dims["slot"] == 384
    assert len(list(pool.buffers())) == 12
    assert len(set(pointers(pool))) == 12


def test_layers_may_differ_in_what_their_choice_depends_on():
    pool = MXFP8KVPool.allocate(page=[2, 4], page_size=[128, 64], head=1, head_dim=32, layers=2)
    assert [s.shape for s in pool.k_scale] == [(2, 1, 32, 4, 1), (256, 1, 1)]


def test_layers_are_resized_and_moved_together():
    pool = MXFP8KVPool.allocate(**SIZES | dict(head=[2, 3]), layers=2)
    randomise(pool)
    before = [codes(k).clone() for k in pool.k]
    pool.resize(page=5)
    assert [k.shape for k in pool.k] == [(640, 2, 96), (640, 3, 96)]
    for old, new in zip(before, pool.k, strict=True):
        assert torch.equal(codes(new)[:384], old)
    pool.move(torch.tensor([5]), torch.tensor([600]))
    for old, new in zip(before, pool.k, strict=True):
        assert torch.equal(codes(new)[600], old[5])


# --- over a slab ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("alignment", [256, 32])
def test_over(dtype, alignment):
    sizes = SIZES | dict(page=5, page_size=7, head=1)  # no buffer fills its last 32 bytes
    needed = MXFP8KVPool.nbytes(**sizes, layers=2, alignment=alignment)
    slab = torch.full((-(-needed // dtype.itemsize),), 0x5A, dtype=dtype)
    pool = MXFP8KVPool.over(slab, **sizes, layers=2, alignment=alignment)
    start, room = slab.data_ptr(), slab.numel() * dtype.itemsize
    before = codes(slab).clone()
    places = sorted((t.data_ptr() - start, t.numel()) for _, _, t in pool.buffers())
    assert places[0][0] == 0
    for (at, size), (following, _) in zip(places, [*places[1:], (room, 0)], strict=True):
        assert at % alignment == 0
        assert at + size <= following
    assert [p - start for p in pointers(pool)] == [at for at, _ in places]  # in the order of the declaration
    assert torch.equal(codes(slab), before)  # nothing is written
    fresh = MXFP8KVPool.allocate(**sizes, layers=2)
    assert [t.shape for _, _, t in pool.buffers()] == [t.shape for _, _, t in fresh.buffers()]


def test_over_a_slab_that_is_too_small():
    needed = PagedKVPool.nbytes(**SIZES, alignment=256)
    with pytest.raises(LayoutError, match=str(needed)) as caught:
        PagedKVPool.over(torch.empty(needed - 1, dtype=torch.uint8), **SIZES)
    assert [(v.argument, v.rule) for v in caught.value.violations] == [("raw", "shape")]


def test_over_memory_with_gaps():
    slab = torch.empty(2, PagedKVPool.nbytes(**SIZES, alignment=256), dtype=torch.uint8)
    with pytest.raises(LayoutError, match="dense memory"):
        PagedKVPool.over(slab.T, **SIZES)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_nbytes():
    slots, head = 384, 2
    assert MXFP8KVPool.nbytes(**SIZES) == slots * head * (96 + 64 + 3 + 2)
    assert PagedKVPool.nbytes(**SIZES) == slots * head * (96 + 64) * 2
    assert UnifiedKVPool.nbytes(page=5, page_size=3, dim=128, kv_dtype="fp8") == 15 * 128 + 5 * 2 * 4
    assert MXFP8KVPool.nbytes(**SIZES, layers=7) == 7 * MXFP8KVPool.nbytes(**SIZES)
    pool = MXFP8KVPool.allocate(**SIZES)
    assert sum(t.untyped_storage().nbytes() for _, _, t in pool.buffers()) == MXFP8KVPool.nbytes(**SIZES)


def test_alignment_counts_for_each_buffer():
    sizes = dict(page=1, page_size=1, head=1, head_dim=32)
    assert MXFP8KVPool.nbytes(**sizes) == 66
    assert MXFP8KVPool.nbytes(**sizes, alignment=256) == 1024


@given(
    budget=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 16, 64, 128]),
    head=st.integers(1, 3),
    layers=st.sampled_from([None, 1, 3]),
    alignment=st.sampled_from([1, 256]),
)
@settings(max_examples=40)
def test_fit_is_exact(budget, page_size, head, layers, alignment):
    rest: dict[str, Any] = dict(page_size=page_size, head=head, head_dim=64, layers=layers, alignment=alignment)
    page = MXFP8KVPool.fit(budget, free="page", **rest)
    assert page == 0 or MXFP8KVPool.nbytes(page=page, **rest) <= budget
    assert MXFP8KVPool.nbytes(page=page + 1, **rest) > budget


def test_fit_of_other_dims():
    rest = dict(page=4, page_size=128, head_dim=64)
    for budget in (4 * 128 * 132 * 5 - 1, 4 * 128 * 132 * 5):
        head = MXFP8KVPool.fit(budget, free="head", **rest)
        assert head == budget // (4 * 128 * 132)


def test_fit_of_a_dim_that_takes_no_memory():
    with pytest.raises(TypeError, match="head takes no memory"):
        MXFP8KVPool.fit(1000, free="head", page=0, page_size=128, head_dim=64)


# --- resizing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 4, 9])
@pytest.mark.parametrize("page_size", [128, 64])
def test_resize_keeps_the_contents(page, page_size):
    pool = MXFP8KVPool.allocate(**SIZES | dict(page_size=page_size))
    randomise(pool)
    before, old = logical(pool), pointers(pool)
    pool.resize(page=page)
    after = logical(pool)
    kept = min(page, 3) * page_size
    for name, bytes_ in after.items():
        assert bytes_.shape[0] == page * page_size
        assert torch.equal(bytes_[:kept], before[name][:kept])
        assert not bytes_[kept:].any()
    assert pool.dims["slot"] == page * page_size
    assert pool.dims["page"] == page
    assert pool.generation == 1
    assert not set(old) & set(pointers(pool))
    assert repr(pool) == repr(MXFP8KVPool.allocate(**SIZES | dict(page=page, page_size=page_size)))


@pytest.mark.parametrize(("before", "after"), [(128, 64), (64, 128), (128, 256), (16, 48)])
def test_resize_to_another_page_size(before, after):
    """Scales change their layout too: flat becomes interleaved, and back."""
    pool = MXFP8KVPool.allocate(**SIZES | dict(page_size=before))
    randomise(pool)
    old = logical(pool)
    pool.resize(page_size=after)
    new = logical(pool)
    kept = 3 * min(before, after)
    for name, bytes_ in new.items():
        assert bytes_.shape[0] == 3 * after
        assert torch.equal(bytes_[:kept], old[name][:kept])
        assert not bytes_[kept:].any()
    layouts = {layout.name for _, layout, _ in pool.buffers()}
    assert ("mxfp8.interleaved" in layouts) == (after == 128)


@pytest.mark.parametrize("change", [dict(head=5), dict(head=1), dict(head_dim=160), dict(v_head_dim=32)])
def test_resize_of_other_dims(change):
    pool = MXFP8KVPool.allocate(**SIZES)
    randomise(pool)
    before = logical(pool)
    pool.resize(**change)
    for name, bytes_ in logical(pool).items():
        common = tuple(slice(min(a, b)) for a, b in zip(bytes_.shape, before[name].shape, strict=True))
        assert torch.equal(bytes_[common], before[name][common])
        rest = bytes_.clone()
        rest[common] = 0
        assert not rest.any()
    assert pool.dims.items() >= change.items()


def test_resize_by_slots_what_was_made_by_pages():
    pool = PagedKVPool.allocate(**SIZES)
    pool.resize(slot=512)
    assert (pool.k.shape[0], pool.dims["page"]) == (512, 4)


def test_resize_of_records():
    pool = RecordPool.allocate(page=2, page_size=64)
    randomise(pool)
    index, latent, seen = codes(pool.index).clone(), codes(pool.latent).clone(), codes(pool.seen).clone()
    pool.resize(page=3)
    assert torch.equal(codes(pool.index)[:2], index)
    assert torch.equal(codes(pool.latent)[:2], latent)
    assert torch.equal(codes(pool.seen)[: len(seen)], seen)
    assert not codes(pool.index)[2:].any()
    assert not codes(pool.latent)[2:].any()


def test_resize_of_records_to_another_page_size():
    pool = RecordPool.allocate(page=4, page_size=32)
    randomise(pool)
    record = layout("dsa.index_132")
    old = record(page=4, page_size=32).split(pool.index)
    before = {n: codes(t).clone().flatten(0, 1) for n, t in old.items()}
    pool.resize(page=2, page_size=64)
    for name, section in record(page=2, page_size=64).split(pool.index).items():
        assert torch.equal(codes(section).flatten(0, 1), before[name])


def test_resize_of_a_unified_pool_copies_scales_by_page():
    pool = UnifiedKVPool.allocate(page=4, page_size=3, dim=128, kv_dtype="fp8")
    randomise(pool)
    kv, scale = codes(pool.kv).clone(), codes(pool.kv_scale).clone()
    pool.resize(page=6)
    assert torch.equal(codes(pool.kv)[:12], kv)
    assert torch.equal(codes(pool.kv_scale)[:4], scale)
    assert not codes(pool.kv_scale)[4:].any()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(head_dim=100), LayoutError),
        (dict(page=4, slot=501), LayoutError),
        (dict(heads=4), TypeError),
        (dict(page=-4), LayoutError),
    ],
)
def test_a_resize_that_fails_changes_nothing(change, error):
    pool = MXFP8KVPool.allocate(**SIZES)
    randomise(pool)
    before, old, dims = logical(pool), pointers(pool), dict(pool.dims)
    with pytest.raises(error):
        pool.resize(**change)
    assert pointers(pool) == old
    assert (pool.dims, pool.generation) == (dims, 0)
    assert all(torch.equal(b, before[n]) for n, b in logical(pool).items())
    pool.resize(page=4)
    assert pool.dims["page"] == 4


def test_a_resize_that_runs_out_of_memory_changes_nothing(monkeypatch):
    pool = MXFP8KVPool.allocate(**SIZES)
    randomise(pool)
    before, old, dims = logical(pool), pointers(pool), dict(pool.dims)
    empty, calls = Layout.empty, iter(range(100))

    def failing(self, **keywords):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return empty(self, **keywords)

    monkeypatch.setattr(Layout, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError):
        pool.resize(page=7)
    assert pointers(pool) == old
    assert (pool.dims, pool.generation) == (dims, 0)
    assert all(torch.equal(b, before[n]) for n, b in logical(pool).items())


def test_resize_cannot_add_or_drop_a_buffer():
    pool = ChosenPool.allocate(slot=5, dim=64)
    with pytest.raises(TypeError, match=r"cannot add or drop extra"):
        pool.resize(dim=32)
    assert pool.kv.shape == (5, 64)


# --- moving -----------------------------------------------------------------------------------------------------------

MOVES = [
    ([3, 4], [200, 40]),
    ([7, 300], [300, 7]),
    ([5, 6, 7], [6, 7, 5]),
    (list(range(9)), list(range(1, 10))),
    ([], []),
]


@pytest.mark.parametrize(("src", "dst"), MOVES)
@pytest.mark.parametrize("page_size", [128, 192])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_move(src, dst, page_size, dtype):
    pool = MXFP8KVPool.allocate(**SIZES | dict(page_size=page_size))
    randomise(pool)
    expected = logical(pool)
    for bytes_ in expected.values():
        bytes_[dst] = bytes_[src]
    pool.move(torch.tensor(src, dtype=dtype), torch.tensor(dst, dtype=dtype))
    assert all(torch.equal(b, expected[n]) for n, b in logical(pool).items())
    assert pool.generation == 0


def test_move_leaves_what_has_no_slots():
    """Scales that all slots of a page share stay where they are."""
    pool = UnifiedKVPool.allocate(page=4, page_size=3, dim=128, kv_dtype="fp8")
    randomise(pool)
    kv, scale = codes(pool.kv).clone(), codes(pool.kv_scale).clone()
    pool.move(torch.tensor([1]), torch.tensor([11]))
    assert torch.equal(codes(pool.kv)[11], kv[1])
    assert torch.equal(codes(pool.kv_scale), scale)


def test_move_in_a_pool_over_a_slab():
    slab = torch.zeros(MXFP8KVPool.nbytes(**SIZES, alignment=256), dtype=torch.uint8)
    pool = MXFP8KVPool.over(slab, **SIZES)
    randomise(pool)
    before = logical(pool)
    pool.move(torch.tensor([1]), torch.tensor([383]))
    for name, bytes_ in logical(pool).items():
        assert torch.equal(bytes_[383], before[name][1])
        assert torch.equal(bytes_[:383], before[name][:383])


@pytest.mark.parametrize(
    ("src", "dst", "named"),
    [
        ([1, 384], [2, 3], {"src"}),
        ([1, 2], [-1, 3], {"dst"}),
        ([-5], [400], {"src", "dst"}),
        ([1, 2], [3], {"dst"}),
    ],
)
def test_a_move_that_is_refused_changes_nothing(src, dst, named):
    pool = MXFP8KVPool.allocate(**SIZES)
    randomise(pool)
    before = logical(pool)
    with pytest.raises(LayoutError) as caught:
        pool.move(torch.tensor(src), torch.tensor(dst))
    assert {v.argument for v in caught.value.violations} == named
    assert all(torch.equal(b, before[n]) for n, b in logical(pool).items())


# --- copies -----------------------------------------------------------------------------------------------------------


def saved(pool: Pool) -> Pool:
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(pool: Pool) -> Pool:
    return pickle.loads(pickle.dumps(pool))


@pytest.mark.parametrize(("cls", "again"), [(MXFP8KVPool, saved), (MXFP8KVPool, copy.deepcopy), (PagedKVPool, pickled)])
def test_copies(cls, again):
    """``pickle`` itself cannot hold torch's float8 tensors; ``torch.save`` can."""
    pool = cls.allocate(**SIZES)
    randomise(pool)
    other = again(pool)
    assert repr(other) == repr(pool)
    assert other.dims == pool.dims
    assert not set(pointers(pool)) & set(pointers(other))
    before = logical(pool)
    assert all(torch.equal(b, before[n]) for n, b in logical(other).items())
    other.resize(page=4)
    assert pool.dims["page"] == 3
