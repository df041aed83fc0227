"""``MXFP8KVPool.store``: rows of bf16 and rows that are quantised already, in every layout that a pool may have."""

from __future__ import annotations

from typing import Any

import mxfp8_reference as reference
import pytest
import torch
from torch import Tensor

from layoutcheck import LayoutError, kernels
from layoutcheck.kernels import quantize_mxfp8
from layoutcheck.pools import MXFP8KVPool

SIZES = dict(page=3, head=2, head_dim=96, v_head_dim=64)
LOC = torch.tensor([5, 0, 90, -1, 31, 1, 64, -(2**40)])


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def random_pool(page_size: int | list[int], **dims: Any) -> MXFP8KVPool:
    pool = MXFP8KVPool.allocate(**SIZES | dims, page_size=page_size)
    generator = torch.Generator().manual_seed(1)
    for _, _, tensor in pool.buffers():
        codes(tensor).copy_(torch.randint(0, 256, tensor.shape, generator=generator))
    return pool


def rows(head_dim: int, tokens: int = len(LOC), head: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(tokens, head, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(dtype)


def held(pool: MXFP8KVPool) -> list[Tensor]:
    """What every buffer holds, by slot."""
    return [codes(layout.unpack(tensor)) for _, layout, tensor in pool.buffers()]


def stored(before: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """What four buffers of one layer hold after a store at LOC."""
    (k, k_scale), (v, v_scale) = reference.quantize(k), reference.quantize(v)
    live = LOC > 0
    result = [b.clone() for b in before]
    for buffer, new in zip(result, (k, v, k_scale, v_scale), strict=True):
        buffer[LOC[live]] = new[live]
    return result


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


each_page_size = pytest.mark.parametrize("page_size", [128, 64, 96, 36])


@each_page_size
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(page_size, dtype):
    pool = random_pool(page_size)
    k, v = rows(96, dtype=dtype), rows(64, dtype=dtype)
    expected = stored(held(pool), k, v)
    pool.store(k, v, LOC)
    assert same(held(pool), expected)


@each_page_size
@pytest.mark.parametrize("carrier", [torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_rows_that_are_quantised_already(page_size, carrier):
    pool = random_pool(page_size)
    k, v = rows(96), rows(64)
    expected = stored(held(pool), k, v)
    (k, k_scale), (v, v_scale) = quantize_mxfp8(k), quantize_mxfp8(v)
    pool.store(k, v, LOC, k_scale.view(carrier), v_scale.view(carrier))
    assert same(held(pool), expected)


@pytest.mark.parametrize("page_size", [128, 64])
def test_one_layer_of_several(page_size):
    pool = random_pool(page_size, head=[2, 3], layers=2)
    before = held(pool)
    k, v = rows(96, head=3), rows(64, head=3)
    pool.store(k, v, LOC, layer=1)
    after = held(pool)
    assert same(after[:4], before[:4])
    assert same(after[4:], stored(before[4:], k, v))


def test_layers_with_pages_of_different_sizes():
    pool = random_pool([128, 64], page=[3, 5], layers=2)
    before = held(pool)
    for layer in range(2):
        pool.store(rows(96), rows(64), LOC, layer=layer)
    assert same(held(pool), stored(before[:4], rows(96), rows(64)) + stored(before[4:], rows(96), rows(64)))


def test_after_a_resize_and_in_a_slab():
    slab = torch.zeros(MXFP8KVPool.nbytes(**SIZES, page_size=128, alignment=256), dtype=torch.uint8)
    pool = MXFP8KVPool.over(slab, **SIZES, page_size=128)
    k, v = rows(96), rows(64)
    expected = stored(held(pool), k, v)
    pool.store(k, v, LOC)
    assert same(held(pool), expected)
    pool.resize(page=4)
    expected = stored(held(pool), k.flip(0), v.flip(0))
    pool.store(k.flip(0), v.flip(0), LOC)
    assert same(held(pool), expected)


def test_no_tokens():
    pool = random_pool(128)
    before = held(pool)
    pool.store(rows(96, tokens=0), rows(64, tokens=0), LOC[:0])
    assert same(held(pool), before)


E4M3 = torch.float8_e4m3fn
K, V = rows(96), rows(64)
K_SCALE, V_SCALE = torch.zeros(len(LOC), 2, 3, dtype=torch.uint8), torch.zeros(len(LOC), 2, 2, dtype=torch.uint8)
FAULTS = {
    "scales of k alone": ((K.to(E4M3), V.to(E4M3), LOC, K_SCALE), {"k_scale", "v_scale"}),
    "scales of v alone": ((K.to(E4M3), V.to(E4M3), LOC, None, V_SCALE), {"k_scale", "v_scale"}),
    "e4m3 without scales": ((K.to(E4M3), V.to(E4M3), LOC), {"k_scale", "v_scale"}),
    "bf16 with scales": ((K, V, LOC, K_SCALE, V_SCALE), {"k", "v"}),
    "k e4m3, v bf16": ((K.to(E4M3), V, LOC, K_SCALE, V_SCALE), {"v"}),
    "k e4m3, v bf16, no scales": ((K.to(E4M3), V, LOC), {"k_scale", "v_scale"}),
    "k and v swapped": ((V, K, LOC), {"k", "v"}),
    "scales of another head_dim": ((K.to(E4M3), V.to(E4M3), LOC, V_SCALE, V_SCALE), {"k_scale"}),
    "fewer rows in v": ((K, V[:-1], LOC), {"v"}),
    "int32 loc": ((K, V, LOC.int()), {"loc"}),
    "other heads": ((K[:, :1], V[:, :1], LOC), {"k", "v"}),
    "k of e5m2": ((K.to(torch.float8_e5m2), V, LOC), {"k"}),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("page_size", [128, 64])
def test_refused(arguments, named, page_size, monkeypatch):
    """One error for the whole call, and nothing is written."""
    pool = random_pool(page_size)
    before = held(pool)
    for kernel in ("quantize_store_kv_mxfp8", "store_rows", "store_scales"):
        monkeypatch.setattr(kernels, kernel, lambda *args, **kwargs: pytest.fail("a kernel was called"))
    with pytest.raises(LayoutError) as caught:
        pool.store(*arguments)
    assert caught.value.where == "MXFP8KVPool.store"
    found = {v.argument for v in caught.value.violations}
    text = str(caught.value)
    assert found
    assert found <= named | {"k_scale", "v_scale"}, text  # the buffers of the pool are not at fault
    assert all(name in text for name in named)
    assert same(held(pool), before)


@pytest.mark.parametrize(("layers", "layer"), [(None, 0), (2, None)])
def test_which_layer_must_be_said(layers, layer):
    pool = MXFP8KVPool.allocate(**SIZES, page_size=128, layers=layers)
    with pytest.raises(TypeError, match="this pool has"):
        pool.store(K, V, LOC, layer=layer)
