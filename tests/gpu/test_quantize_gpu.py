"""Quantisation to MXFP8 and into a paged cache, compiled: byte for byte what float64 says, at sizes of production."""

from __future__ import annotations

from typing import Any

import mxfp8_reference as reference
import pytest
import torch
from golden_data import load, vectors
from torch import Tensor

from layoutcheck import layouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
INTERLEAVED, FLAT = layouts.layout("mxfp8.interleaved"), layouts.layout("mxfp8.flat")
TILES = layouts.layout("scale.128x4")


@pytest.fixture(scope="module")
def quantize() -> Any:
    """Imported late: kernels are compiled or interpreted as the environment says when they are defined."""
    from layoutcheck.kernels import quantize
    from layoutcheck.kernels._launch import interpreted

    if interpreted(quantize._quantize_kernel):
        pytest.skip("kernels are interpreted in this process")
    return quantize


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal draws on the GPU whose blocks lie many powers of two apart."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    blocks = (*shape[:-1], -(-shape[-1] // 32))
    spread = torch.randint(-12, 13, blocks, generator=generator, device="cuda", dtype=torch.float32)
    return (x * torch.exp2(spread).repeat_interleave(32, -1)[..., : shape[-1]]).to(dtype)


def random_loc(slots: int, tokens: int, seed: int = 2) -> Tensor:
    loc = torch.randperm(slots - 1, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:tokens] + 1
    loc[::50], loc[1::70], loc[3::110] = 0, -1, -(2**40)
    return loc


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 352])
def test_edges(dtype, rounding, head_dim, quantize):
    x = reference.edges(dtype, head_dim)
    payload, scale = (codes(t).cpu() for t in quantize.quantize_mxfp8(x.cuda(), rounding=rounding))
    expected, bytes_ = reference.quantize(x, rounding)
    assert torch.equal(scale, bytes_)
    nan = (bytes_ == 255).repeat_interleave(32, -1)
    assert torch.equal(payload[~nan], expected[~nan])
    assert (payload[nan] & 0x7F == 0x7F).all()


def test_golden(quantize):
    arrays = {n: torch.from_numpy(a) for n, a in load("quant-mxfp8-s11").items()}
    payload, scale = quantize.quantize_mxfp8(arrays["x_bits"].view(torch.bfloat16).cuda())
    payload, scale, rule = codes(payload).cpu(), codes(scale).cpu()[:, 0], arrays["rule"]
    assert torch.equal(payload[rule == 0], arrays["payload"][rule == 0])
    assert torch.equal(scale[rule == 0], arrays["scale"][rule == 0])
    assert not reference.decode(payload, scale[:, None])[rule == 1].any()
    assert (scale[rule == 2] == 255).all()


@pytest.mark.parametrize("shape", [(16384, 8, 128), (4099, 7168), (513, 3, 96)], ids=str)
@pytest.mark.parametrize("scale_layout", ["linear", "128x4"])
def test_large(shape, scale_layout, quantize):
    x = rows(*shape)
    payload, scale = quantize.quantize_mxfp8(x, scale_layout=scale_layout)
    expected, bytes_ = reference.quantize(x)
    assert torch.equal(codes(payload), expected)
    if scale_layout == "128x4":
        tiles = TILES(row=x.numel() // shape[-1], col=shape[-1] // 32)
        bytes_ = tiles.pack(bytes_.flatten(0, -2))
    assert torch.equal(codes(scale), bytes_)


@pytest.mark.parametrize("page_size", [32, 96, 128])
def test_interleaved(page_size, quantize):
    x = rows(page_size * 50, 5, 160)
    payload, scale = quantize.quantize_mxfp8(x, scale_layout="interleaved", page_size=page_size)
    expected, bytes_ = reference.quantize(x)
    assert torch.equal(codes(payload), expected)
    assert torch.equal(INTERLEAVED(page=50, page_size=page_size, head=5, head_dim=160).unpack(codes(scale)), bytes_)


@pytest.mark.parametrize("golden", vectors("store_kv_mxfp8"), ids=lambda v: v["id"])
def test_store_golden(golden, quantize):
    arrays, sizes = {n: torch.from_numpy(a) for n, a in load(golden["id"]).items()}, golden["sizes"]
    given = {}
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        given[name] = torch.full_like(arrays[name], sizes["fill_cache" if "cache" in name else "fill_scale"]).cuda()
        given[name] = given[name].view(torch.float8_e4m3fn if "cache" in name else torch.float8_e8m0fnu)
    k, v = (arrays[f"{n}_bits"].view(torch.bfloat16).cuda() for n in "kv")
    quantize.quantize_store_kv_mxfp8(k, v, arrays["loc"].cuda(), **given, page_size=sizes["page_size"])
    for name, tensor in given.items():
        assert torch.equal(codes(tensor).cpu(), arrays[name]), name


@pytest.mark.parametrize(
    ("tokens", "head", "head_dim", "v_head_dim", "page_size", "scale_layout"),
    [
        (1, 8, 128, 128, 128, "interleaved"),
        (16, 8, 128, 128, 128, "interleaved"),
        (65536, 8, 128, 128, 128, "interleaved"),
        (10007, 3, 96, 352, 32, "interleaved"),
        (4099, 1, 576, 512, 64, "flat"),
        (20011, 5, 64, 256, 96, "interleaved"),
    ],
)
def test_store(tokens, head, head_dim, v_head_dim, page_size, scale_layout, quantize):
    pages = -(-2 * tokens // page_size) + 1
    slots = pages * page_size
    qkv = rows(tokens, head * (head_dim + v_head_dim) + 64)  # K and V are slices of one projection
    k = qkv[:, 32 : 32 + head * head_dim].unflatten(1, (head, head_dim))
    v = qkv[:, 64 + head * head_dim :].unflatten(1, (head, v_head_dim))
    loc = random_loc(slots, tokens)
    live = loc > 0
    given, expected, layout = {}, {}, {}
    for seed, (name, x) in enumerate((("k", k), ("v", v))):
        sizes = dict(slot=slots, head=head, head_dim=x.shape[2])
        layout[name] = FLAT(**sizes) if scale_layout == "flat" else INTERLEAVED(**sizes, page_size=page_size)
        payload, bytes_ = reference.quantize(x)
        cache, scale = (
            random_bytes(slots, head, x.shape[2], seed=seed),
            random_bytes(*layout[name].shape, seed=9 + seed),
        )
        given[f"{name}_cache"], given[f"{name}_scale"] = cache.view(torch.float8_e4m3fn), scale
        expected[f"{name}_cache"] = cache.clone()
        expected[f"{name}_cache"][loc[live]] = payload[live]
        logical = layout[name].unpack(scale)
        logical[loc[live]] = bytes_[live]
        expected[f"{name}_scale"] = layout[name].pack(logical)
    quantize.quantize_store_kv_mxfp8(k, v, loc, **given, page_size=page_size, scale_layout=scale_layout)
    for name, bytes_ in expected.items():
        assert torch.equal(codes(given[name]), bytes_), name


def test_offsets_beyond_32_bits(quantize):
    head, head_dim, page_size = 8, 128, 128
    slots = (2**31 // (head * head_dim)) + 2 * page_size
    k_cache, v_cache = (torch.zeros(slots, head, head_dim, device="cuda", dtype=torch.uint8) for _ in "kv")
    layout = INTERLEAVED(slot=slots, head=head, head_dim=head_dim, page_size=page_size)
    k_scale, v_scale = (layout.empty(device="cuda") for _ in "kv")
    k, v = rows(2, head, head_dim), rows(2, head, head_dim, seed=1)
    loc = torch.tensor([slots - 3, 2], device="cuda")
    quantize.quantize_store_kv_mxfp8(
        k, v, loc, k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn), k_scale, v_scale,
        page_size=page_size,
    )  # fmt: skip
    for x, cache in ((k, k_cache), (v, v_cache)):
        expected = reference.quantize(x)[0]
        assert torch.equal(cache[loc], expected)
        assert cache.count_nonzero() == expected.count_nonzero()


def test_rows_beyond_32_bits(quantize):
    """More than 2**31 elements of x, tiled in two directions."""
    x = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(2**31 // 4096 + 3, 4096).contiguous()
    x[-1] = 3
    payload, scale = quantize.quantize_mxfp8(x)
    expected = reference.quantize(x[-2:].clone())
    assert torch.equal(codes(payload)[-2:], expected[0])
    assert torch.equal(codes(scale)[-2:], expected[1])
    assert (codes(payload)[:-1] == expected[0][0, 0]).all()
