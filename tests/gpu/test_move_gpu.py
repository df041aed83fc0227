"""Scales and rows between buffers and slots, compiled, at the sizes of production."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layoutcheck import layouts
from layoutcheck.pools import MXFP8KVPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
INTERLEAVED, FLAT = layouts.layout("mxfp8.interleaved"), layouts.layout("mxfp8.flat")


@pytest.fixture(scope="module")
def move() -> Any:
    """Imported late: kernels are compiled or interpreted as the environment says when they are defined."""
    from layoutcheck.kernels import move
    from layoutcheck.kernels._launch import interpreted

    if interpreted(move._rows_kernel):
        pytest.skip("kernels are interpreted in this process")
    return move


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def random(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8).view(dtype)


def random_loc(slots: int, tokens: int, seed: int = 2) -> Tensor:
    loc = torch.randperm(slots - 1, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:tokens] + 1
    loc[::50], loc[1::70], loc[3::110] = 0, -1, -(2**40)
    return loc


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("scale_layout", "page_size"), [("interleaved", 96), ("interleaved", 128), ("flat", 16)])
def test_scales(group, scale_layout, page_size, move):
    slots, head, tokens = 384 * 100, 5, 15013
    sizes = dict(slot=slots, head=head, head_dim=32 * group)
    layout = FLAT(**sizes) if scale_layout == "flat" else INTERLEAVED(**sizes, page_size=page_size)
    cache, rows, loc = random(*layout.shape), random(tokens, head, group, seed=1), random_loc(slots, tokens)
    logical = layout.unpack(cache)
    loaded = move.load_scales(cache, loc, page_size=page_size, scale_layout=scale_layout)
    expected = logical[loc.clamp(min=0)]
    expected[loc < 0] = 0
    assert torch.equal(codes(loaded), expected)
    logical[loc[loc > 0]] = rows[loc > 0]
    move.store_scales(rows, loc, cache, page_size=page_size, scale_layout=scale_layout)
    assert torch.equal(cache, layout.pack(logical))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(("head", "dim"), [(8, 128), (3, 96), (1, 576), (5, 7)])
def test_rows(dtype, head, dim, move):
    slots, tokens = 30011, 9001
    whole = random(slots, head, dim + 8, dtype=dtype)
    cache = whole[..., :dim]  # with gaps
    rows, loc = random(tokens, head, dim, dtype=dtype, seed=1), random_loc(slots, tokens)
    expected = codes(whole).clone()
    expected[loc[loc > 0], :, : dim * dtype.itemsize] = codes(rows)[loc > 0]
    move.store_rows(rows, loc, cache)
    assert torch.equal(codes(whole), expected)


@pytest.mark.parametrize("page_size", [128, 64])
def test_moves_that_overlap(page_size, move):
    """A permutation of half of all slots, and some that are skipped."""
    pool = MXFP8KVPool.allocate(page=600, page_size=page_size, head=4, head_dim=128, v_head_dim=96, device="cuda")
    for seed, (_, _, tensor) in enumerate(pool.buffers()):
        codes(tensor).copy_(random(*tensor.shape, seed=seed))
    slots = pool.dims["slot"]
    src = random_loc(slots, slots // 2)
    dst = src[torch.randperm(len(src), generator=torch.Generator("cuda").manual_seed(3), device="cuda")]
    live = (src > 0) & (dst > 0)
    expected = []
    for _, layout, tensor in pool.buffers():
        logical = codes(layout.unpack(tensor))
        moved = logical.clone()
        moved[dst[live]] = logical[src[live]]
        expected.append(moved)
    arguments = dict(page_size=page_size, scale_layout="interleaved" if page_size == 128 else "flat")
    move.move_slots(src, dst, pool.k, pool.v, pool.k_scale, pool.v_scale, **arguments)
    for (name, layout, tensor), bytes_ in zip(pool.buffers(), expected, strict=True):
        assert torch.equal(codes(layout.unpack(tensor)), bytes_), name


def test_offsets_beyond_32_bits(move):
    cache = torch.zeros(2**31 // 512 + 9, 1, 512, device="cuda", dtype=torch.uint8)
    rows, loc = random(2, 1, 512), torch.tensor([cache.shape[0] - 2, 3], device="cuda")
    move.store_rows(rows, loc, cache)
    assert torch.equal(cache[loc], rows)
    assert cache.count_nonzero() == rows.count_nonzero()
