"""Quantisation to MXFP8, and K and V rows straight into a paged cache: against float64 and the golden vectors."""

from __future__ import annotations

from typing import Any

import mxfp8_reference as reference
import pytest
import torch
from golden_data import load, vector, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layoutcheck import LayoutError, layouts
from layoutcheck.kernels import quantize, quantize_mxfp8, quantize_store_kv_mxfp8

INTERLEAVED, FLAT = layouts.layout("mxfp8.interleaved"), layouts.layout("mxfp8.flat")
TILES = layouts.layout("scale.128x4")


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal payload and scales; a block with a NaN is all NaN, of either sign."""
    payload, scale = (codes(t) for t in actual)
    assert torch.equal(scale, expected[1])
    nan = (scale == 255).repeat_interleave(32, -1)
    assert torch.equal(payload[~nan], expected[0][~nan])
    assert (payload[nan] & 0x7F == 0x7F).all()


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is NaN, in whatever format: 0xFF everywhere."""
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

    monkeypatch.setattr(quantize, "launch", launch)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal draws whose blocks lie many powers of two apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = torch.randint(-12, 13, (*shape[:-1], -(-shape[-1] // 32)), generator=generator).double()
    return torch.ldexp(x, spread.repeat_interleave(32, -1)[..., : shape[-1]]).to(dtype)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_golden():
    arrays, rules = load("quant-mxfp8-s11"), vector("quant-mxfp8-s11")["rules"]
    assert rules.keys() == {"0", "1", "2", "3"}
    x = torch.from_numpy(arrays["x_bits"]).view(torch.bfloat16)
    payload, scale = quantize_mxfp8(x)
    rule = torch.from_numpy(arrays["rule"])
    expected_scale = torch.from_numpy(arrays["scale"]).reshape(scale.shape)
    expected = torch.from_numpy(arrays["payload"])
    assert torch.equal(codes(scale)[rule == 0], expected_scale[rule == 0])
    assert torch.equal(codes(payload)[rule == 0], expected[rule == 0])
    assert not reference.decode(payload, scale)[rule == 1].any()
    assert (codes(scale)[rule == 2] == 255).all()
    assert (rule == 3).sum() == 3
    assert (codes(scale)[rule == 3] != 255).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_edges(dtype, rounding, poisoned):
    x = reference.edges(dtype, 128)
    before = x.clone()
    same(quantize_mxfp8(x, rounding=rounding), reference.quantize(x, rounding))
    assert torch.equal(codes(x), codes(before))


def test_the_edges_hold_what_they_should():
    x = reference.edges(torch.bfloat16, 32)
    assert x.isnan().any()
    assert x.isinf().any()
    assert (x.abs() == torch.finfo(torch.bfloat16).max).any()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.bfloat16).smallest_normal)).any()
    scale = reference.scale_bytes(x)
    assert {0, 1, 247, 255} <= set(scale.flatten().tolist())
    assert len(scale.unique()) > 60


@pytest.mark.parametrize("head_dim", [32, 96, 128, 352, 1056])
def test_head_dims(head_dim, poisoned):
    x = rows(7, 3, head_dim)
    same(quantize_mxfp8(x), reference.quantize(x))


def test_infinity_saturates_and_nan_stays_in_its_block():
    x = rows(2, 96)
    x[0, 40], x[0, 41], x[1, 64] = torch.inf, -torch.inf, torch.nan
    payload, scale = (codes(t) for t in quantize_mxfp8(x))
    assert payload[0, 40] == 0x7E
    assert payload[0, 41] == 0xFE
    assert scale[1].tolist().count(255) == 1
    clean = [(0, 0), (0, 2), (1, 0), (1, 1)]
    expected = reference.quantize(x)
    for row, group in clean:
        block = slice(32 * group, 32 * group + 32)
        assert torch.equal(payload[row, block], expected[0][row, block])
        assert scale[row, group] == expected[1][row, group]


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), rounding=st.sampled_from(["rceil", "floor"]))
@settings(max_examples=60)
def test_any_block(bits, rounding):
    x = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    same(quantize_mxfp8(x, rounding=rounding), reference.quantize(x, rounding))


def test_floor_saturates_a_fifth_of_all_blocks_and_rceil_none():
    generator = torch.Generator().manual_seed(5)
    amax = torch.exp2(torch.rand(1000, 1, generator=generator, dtype=torch.float64) * 8)
    x = (amax * torch.ones(32)).float()
    for rounding, low, high in (("rceil", 0, 0), ("floor", 0.15, 0.23)):
        _, scale = quantize_mxfp8(x, rounding=rounding)
        beyond = x[:, 0].double() > torch.ldexp(torch.tensor(464.0).double(), codes(scale)[:, 0].double() - 127)
        assert low <= beyond.double().mean() <= high


# --- where they go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32,), (5, 32), (1, 64), (3, 43, 96), (128, 128), (130, 352), (2, 1056)], ids=str)
def test_tiles(shape, poisoned):
    x = rows(*shape)
    payload, scale = quantize_mxfp8(x, scale_layout="128x4")
    expected, bytes_ = reference.quantize(x)
    tiles = TILES(row=x.numel() // shape[-1], col=shape[-1] // 32)
    assert torch.equal(codes(payload), expected)
    assert torch.equal(codes(scale), tiles.pack(bytes_.reshape(-1, shape[-1] // 32)))  # padding is 0
    assert scale.dtype is torch.float8_e8m0fnu


@pytest.mark.parametrize("page_size", [32, 64, 96, 128])
def test_interleaved(page_size, poisoned):
    pages, heads, head_dim = 2, 2, 96
    x = rows(pages * page_size, heads, head_dim)
    payload, scale = quantize_mxfp8(x, scale_layout="interleaved", page_size=page_size)
    expected, bytes_ = reference.quantize(x)
    layout = INTERLEAVED(page=pages, page_size=page_size, head=heads, head_dim=head_dim)
    assert scale.shape == (pages, heads, 32, page_size // 32, head_dim // 32)
    assert torch.equal(codes(payload), expected)
    assert torch.equal(layout.unpack(codes(scale)), bytes_)


@pytest.mark.parametrize("shape", [(32,), (7, 64), (2, 3, 5, 96)], ids=str)
def test_linear_keeps_the_batch(shape, poisoned):
    x = rows(*shape)
    payload, scale = quantize_mxfp8(x)
    assert payload.shape == shape
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    same((payload, scale), reference.quantize(x))


VIEWS = {
    "slice of rows": lambda x: x[:, 1, 32:96],
    "every other row": lambda x: x[::2, 0],
    "storage offset": lambda x: x[3:, 2],
    "one row": lambda x: x[4, 1, 64:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("scale_layout", ["linear", "128x4"])
def test_strided(view, scale_layout, poisoned):
    x = view(rows(9, 3, 160))
    assert not x.is_contiguous() or x.storage_offset()
    actual = quantize_mxfp8(x, scale_layout=scale_layout)
    expected = reference.quantize(x)
    if scale_layout == "128x4":
        expected = (expected[0], TILES(row=x.numel() // x.shape[-1], col=x.shape[-1] // 32).pack(
            expected[1].reshape(-1, x.shape[-1] // 32)))  # fmt: skip
    assert torch.equal(codes(actual[0]), expected[0])
    assert torch.equal(codes(actual[1]), expected[1])


def test_interleaved_from_a_slice_of_a_fused_projection(poisoned):
    qkv = rows(64, 7 * 96)
    k = qkv[:, 96 : 96 * 3].unflatten(1, (2, 96))
    payload, scale = quantize_mxfp8(k, scale_layout="interleaved", page_size=64)
    expected, bytes_ = reference.quantize(k)
    assert torch.equal(codes(payload), expected)
    layout = INTERLEAVED(page=1, page_size=64, head=2, head_dim=96)
    assert torch.equal(layout.unpack(codes(scale)), bytes_)


@pytest.mark.parametrize(
    ("shape", "arguments", "scale_shape"),
    [
        ((0, 3, 64), {}, (0, 3, 2)),
        ((0, 64), dict(scale_layout="128x4"), (0, 1, 32, 4, 4)),
        ((0, 3, 64), dict(scale_layout="interleaved", page_size=96), (0, 3, 32, 3, 2)),
        ((5, 0, 64), {}, (5, 0, 2)),
    ],
)
def test_nothing_to_do(shape, arguments, scale_shape, unlaunched):
    payload, scale = quantize_mxfp8(torch.zeros(shape, dtype=torch.bfloat16), **arguments)
    assert payload.shape == shape
    assert scale.shape == scale_shape


@pytest.mark.parametrize(
    ("x", "arguments", "named", "rule"),
    [
        (torch.zeros(3, 48), {}, "x", None),
        (torch.zeros(3, 64, dtype=torch.float64), {}, "x", "dtype"),
        (torch.zeros(3, 64).to(torch.float8_e4m3fn), {}, "x", "dtype"),
        (torch.zeros(3, 64, dtype=torch.int32), {}, "x", "dtype"),
        (torch.zeros(5, 4, 64)[:, :3].transpose(0, 1), {}, "x", "stride"),
        (torch.zeros(3, 5, 64)[:, :4], {}, "x", "stride"),
        (torch.zeros(64, 5).T, {}, "x", "stride"),
        (rows(64, 96), dict(scale_layout="interleaved", page_size=32), "x", "shape"),
        (rows(64, 3, 48), dict(scale_layout="interleaved", page_size=32), "x", None),
        (rows(64, 32, 32)[:, :, :3].mT, dict(scale_layout="interleaved", page_size=32), "x", "stride"),
        (rows(65, 3, 64), dict(scale_layout="interleaved", page_size=32), "page_size", "relation"),
        (rows(96, 3, 64), dict(scale_layout="interleaved", page_size=48), "page_size", "relation"),
        (torch.zeros(3, 64), dict(scale_layout="swizzled"), "scale_layout", "value"),
        (torch.zeros(3, 64), dict(rounding="nearest"), "rounding", "value"),
    ],
)
def test_refused(x, arguments, named, rule, unlaunched):
    with pytest.raises(LayoutError) as caught:
        quantize_mxfp8(x, **arguments)
    assert caught.value.where == "quantize_mxfp8"
    assert {v.argument for v in caught.value.violations} == {named}
    assert rule is None or {v.rule for v in caught.value.violations} == {rule}
    assert named in str(caught.value)


# --- into a paged cache -----------------------------------------------------------------------------------------------


def buffers(
    page: int,
    page_size: int,
    head: int,
    head_dim: int,
    v_head_dim: int,
    scale_layout: str = "interleaved",
    seed: int = 1,
) -> dict[str, Any]:
    """Caches and scales full of random bytes, and what says how they are laid out."""
    generator = torch.Generator().manual_seed(seed)
    layout = INTERLEAVED if scale_layout == "interleaved" else FLAT

    def random(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    sizes = dict(slot=page * page_size, head=head) | (dict(page_size=page_size) if layout is INTERLEAVED else {})
    return dict(
        k_cache=random(page * page_size, head, head_dim).view(torch.float8_e4m3fn),
        v_cache=random(page * page_size, head, v_head_dim).view(torch.float8_e4m3fn),
        k_scale=random(*layout(**sizes, head_dim=head_dim).shape).view(torch.float8_e8m0fnu),
        v_scale=random(*layout(**sizes, head_dim=v_head_dim).shape).view(torch.float8_e8m0fnu),
        page_size=page_size,
        scale_layout=scale_layout,
    )


def expected_buffers(k: Tensor, v: Tensor, loc: Tensor, before: dict[str, Any]) -> dict[str, Tensor]:
    """The bytes of all four buffers after a store, by unpack and pack."""
    live = loc > 0
    result = {}
    for name, x in (("k", k), ("v", v)):
        payload, scale = reference.quantize(x)
        cache = codes(before[f"{name}_cache"]).clone()
        cache[loc[live]] = payload[live]
        result[f"{name}_cache"] = cache
        slot, head, head_dim = cache.shape
        layout = FLAT(slot=slot, head=head, head_dim=head_dim)
        if before["scale_layout"] == "interleaved":
            layout = INTERLEAVED(slot=slot, head=head, head_dim=head_dim, page_size=before["page_size"])
        logical = layout.unpack(codes(before[f"{name}_scale"]))
        logical[loc[live]] = scale[live]
        result[f"{name}_scale"] = layout.pack(logical)
    return result


def check_store(k: Tensor, v: Tensor, loc: Tensor, given: dict[str, Any]) -> None:
    expected = expected_buffers(k, v, loc, given)
    inputs = [t.clone() for t in (k, v, loc)]
    assert quantize_store_kv_mxfp8(k, v, loc, **given) is None
    for name, bytes_ in expected.items():
        assert torch.equal(codes(given[name]), bytes_), name
    for before, after in zip(inputs, (k, v, loc), strict=True):
        assert torch.equal(before, after)


def random_loc(slots: int, tokens: int, seed: int = 2) -> Tensor:
    """Different slots in any order, with some that are skipped: 0, -1 and others below 0."""
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randperm(slots - 1, generator=generator)[:tokens] + 1
    loc[::5] = 0
    loc[1::7] = -1
    loc[3::11] = -(2**40)
    return loc


@pytest.mark.parametrize("golden", vectors("store_kv_mxfp8"), ids=lambda v: v["id"])
@pytest.mark.parametrize("carrier", ["e8m0", "uint8"])
def test_store_golden(golden, carrier):
    arrays, sizes = load(golden["id"]), golden["sizes"]
    k, v = (torch.from_numpy(arrays[f"{n}_bits"]).view(torch.bfloat16) for n in "kv")
    given = {n: torch.full_like(torch.from_numpy(arrays[n]), sizes["fill_cache"]) for n in ("k_cache", "v_cache")}
    given = {n: t.view(torch.float8_e4m3fn) for n, t in given.items()}
    for name in ("k_scale", "v_scale"):
        scale = torch.full_like(torch.from_numpy(arrays[name]), sizes["fill_scale"])
        given[name] = scale.view(torch.float8_e8m0fnu) if carrier == "e8m0" else scale
    quantize_store_kv_mxfp8(k, v, torch.from_numpy(arrays["loc"]), **given, page_size=sizes["page_size"])
    for name, tensor in given.items():
        assert torch.equal(codes(tensor), torch.from_numpy(arrays[name])), name


LAYOUTS = [("interleaved", p) for p in (32, 64, 96, 128, 256)] + [("flat", p) for p in (1, 16, 48, 128)]


@pytest.mark.parametrize(("scale_layout", "page_size"), LAYOUTS)
def test_store(scale_layout, page_size):
    slots, head, head_dim, v_head_dim = max(768, 3 * page_size), 3, 96, 64
    given = buffers(slots // page_size, page_size, head, head_dim, v_head_dim, scale_layout)
    tokens = 41
    check_store(rows(tokens, head, head_dim), rows(tokens, head, v_head_dim, seed=1), random_loc(slots, tokens), given)


@pytest.mark.parametrize(
    ("head", "head_dim", "v_head_dim", "dtype"),
    [
        (1, 32, 352, torch.bfloat16),
        (5, 256, 32, torch.float16),
        (2, 512, 576, torch.float32),
        (16, 64, 64, torch.bfloat16),
    ],
)
def test_store_sizes(head, head_dim, v_head_dim, dtype):
    given = buffers(3, 64, head, head_dim, v_head_dim)
    k, v = rows(19, head, head_dim, dtype=dtype), rows(19, head, v_head_dim, dtype=dtype, seed=1)
    check_store(k, v, random_loc(192, 19), given)


def test_store_k_and_v_of_different_dtypes():
    check_store(rows(9, 2, 64), rows(9, 2, 96, dtype=torch.float32), random_loc(96, 9), buffers(3, 32, 2, 64, 96))


def test_store_slices_of_a_fused_projection():
    tokens, q_heads, head, head_dim, v_head_dim = 23, 4, 2, 96, 64
    k_at, v_at = q_heads * head_dim, (q_heads + head) * head_dim
    qkv = rows(tokens, v_at + head * v_head_dim + 32)
    k = qkv[:, k_at:v_at].unflatten(1, (head, head_dim))
    v = qkv[:, v_at : v_at + head * v_head_dim].unflatten(1, (head, v_head_dim))
    check_store(k, v, random_loc(160, tokens), buffers(5, 32, head, head_dim, v_head_dim))


@pytest.mark.parametrize("k", [rows(11, 7, 96)[:, ::2], rows(4, 11, 96).transpose(0, 1)], ids=["gaps", "heads first"])
def test_store_rows_with_any_strides(k):
    v = rows(22, 6, 64)[::2, 1:5]
    check_store(k, v, random_loc(96, 11), buffers(3, 32, 4, 96, 64))


@pytest.mark.parametrize("loc", [random_loc(128, 40)[::3], random_loc(128, 40).reshape(20, 2)[:, 1]])
def test_store_at_slots_that_are_not_contiguous(loc):
    check_store(rows(len(loc), 2, 64), rows(len(loc), 2, 96), loc, buffers(4, 32, 2, 64, 96))


def test_rows_that_are_skipped_are_not_looked_at():
    k, v = rows(6, 2, 64), rows(6, 2, 96)
    loc = torch.tensor([3, 0, -1, 40, -5, 1])
    k[loc <= 0], v[loc <= 0] = torch.nan, torch.nan
    given = buffers(2, 32, 2, 64, 96)
    expected = expected_buffers(k, v, loc, given)
    quantize_store_kv_mxfp8(k, v, loc, **given)
    assert all(torch.equal(codes(given[n]), b) for n, b in expected.items())


@pytest.mark.parametrize("tile", [1, 8, 128])
def test_any_tile(tile, monkeypatch):
    """A program may have any number of rows: parts of a token's heads, or several tokens."""
    monkeypatch.setattr(quantize, "_rows_per_program", lambda rows, block: tile)
    k, v = rows(13, 3, 96), rows(13, 3, 32)
    check_store(k, v, random_loc(128, 13), buffers(2, 64, 3, 96, 32))
    for x in (k, v):
        same(quantize_mxfp8(x), reference.quantize(x))


def test_more_rows_a_program_where_there_are_many():
    few, many = (quantize._rows_per_program(n, 128) for n in (128, 1 << 19))
    assert (few, many) == (8, 32)
    assert quantize._rows_per_program(7, 1 << 14) == 1


def test_canary():
    """Caches and scales that are slices of larger memory: nothing around them changes."""
    given = buffers(4, 32, 2, 64, 96)
    whole = {}
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        large = torch.full((given[name].numel() + 2 * 4096,), 0x5A, dtype=torch.uint8)
        inner = large[4096:-4096]
        inner.copy_(codes(given[name]).flatten())
        whole[name], given[name] = large, inner.view(given[name].dtype).view(given[name].shape)
    check_store(rows(9, 2, 64), rows(9, 2, 96), torch.tensor([1, 0, 127, -1, 64, 31, 32, -128, 2]), given)
    for large in whole.values():
        assert (large[:4096] == 0x5A).all()
        assert (large[-4096:] == 0x5A).all()


def test_store_without_tokens(unlaunched):
    given = buffers(2, 32, 2, 64, 96)
    quantize_store_kv_mxfp8(rows(0, 2, 64), rows(0, 2, 96), torch.empty(0, dtype=torch.int64), **given)


FAULTS = {
    "stale k_scale": (lambda c: c | dict(k_scale=buffers(2, 64, 3, 96, 64)["k_scale"]), {"k_scale"}),
    "stale scales": (
        lambda c: c | {n: buffers(2, 64, 3, 96, 64)[n] for n in ("k_scale", "v_scale")}, {"k_scale", "v_scale"}
    ),
    "scales of another page size": (
        lambda c: c | {n: buffers(6, 32, 3, 96, 64)[n] for n in ("k_scale", "v_scale")}, {"k_scale", "v_scale"}
    ),
    "flat scales": (lambda c: c | dict(v_scale=buffers(3, 64, 3, 96, 64, "flat")["v_scale"]), {"v_scale"}),
    "k and v scales swapped": (lambda c: c | dict(k_scale=c["v_scale"], v_scale=c["k_scale"]), {"k_scale", "v_scale"}),
    "int32 loc": (lambda c: c | dict(loc=c["loc"].int()), {"loc"}),
    "short loc": (lambda c: c | dict(loc=c["loc"][:-1]), {"loc"}),
    "fp8 k": (lambda c: c | dict(k=c["k"].to(torch.float8_e4m3fn)), {"k"}),
    "transposed k": (lambda c: c | dict(k=c["k"].transpose(1, 2).contiguous().transpose(1, 2)), {"k"}),
    "other heads in v": (lambda c: c | dict(v=c["v"][:, :2]), {"v"}),
    "bf16 cache": (lambda c: c | dict(k_cache=torch.zeros(192, 3, 96, dtype=torch.bfloat16)), {"k_cache"}),
    "e5m2 cache": (lambda c: c | dict(v_cache=codes(c["v_cache"]).view(torch.float8_e5m2)), {"v_cache"}),
    "cache that is a slice": (
        lambda c: c | dict(k_cache=torch.zeros(192, 4, 96).to(torch.float8_e4m3fn)[:, :3]), {"k_cache"}
    ),
    "page_size 48": (lambda c: c | dict(page_size=48), {"page_size"}),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_store_refused(fault, named, unlaunched):
    given = dict(k=rows(9, 3, 96), v=rows(9, 3, 64), loc=random_loc(192, 9)) | buffers(3, 64, 3, 96, 64)
    call = fault(given)
    with pytest.raises(LayoutError) as caught:
        quantize_store_kv_mxfp8(**call)
    assert named <= {v.argument for v in caught.value.violations}


@given(data=st.data())
@settings(max_examples=15)
def test_any_store(data):
    head = data.draw(st.integers(1, 4))
    head_dim, v_head_dim = (32 * data.draw(st.integers(1, 5)) for _ in "kv")
    scale_layout = data.draw(st.sampled_from(["interleaved", "flat"]))
    page_size, page = 32 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    slots = page * page_size
    chosen = data.draw(st.lists(st.integers(1, slots - 1), unique=True, max_size=12))
    skipped = data.draw(st.lists(st.integers(-3, 0), max_size=3))
    loc = torch.tensor(data.draw(st.permutations(chosen + skipped)), dtype=torch.int64)
    seed = data.draw(st.integers(0, 2**16))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    k, v = rows(len(loc), head, head_dim, dtype=dtype, seed=seed), rows(len(loc), head, v_head_dim, seed=seed + 1)
    check_store(k, v, loc, buffers(page, page_size, head, head_dim, v_head_dim, scale_layout))
