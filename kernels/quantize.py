"""Quantisation to MXFP8: rows to payload and scales, and new K and V rows straight into a paged cache.

Every offset below is computed by a function that a layout generated; nothing here knows how scales are interleaved.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from layoutcheck import E4M3, Choose, Index, Layout, LayoutError, Violation, Writes, contract, when
from layoutcheck.kernels._launch import cdiv, launch, next_power_of_2, raw
from layoutcheck.kernels._mxfp8 import BLOCK, abs_bits, inverse_scale, payload, scale_byte
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import PAGED_NHD
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.scale import SCALE_128X4

# A cache as sglang keeps it: one dense [slot, head, head_dim] tensor.
CACHE = PAGED_NHD(dtype=E4M3, view="slot head head_dim", pitch={})
LOC = Layout("loc", "token -> token", dtype=torch.int64, dense="")
SCALES = Choose({"scale_layout == 'interleaved'": MXFP8_SCALE_INTERLEAVED, "scale_layout == 'flat'": MXFP8_SCALE_FLAT})

row_offset = ROWS_THD.offset_fn("token", "head", "head_dim", name="row_offset", strides=("token", "head"))
cache_offset = CACHE.offset_fn("slot", "head", "head_dim", name="cache_offset")
interleaved_offset = MXFP8_SCALE_INTERLEAVED.offset_fn("slot", "head", "group", name="interleaved_offset")
flat_offset = MXFP8_SCALE_FLAT.offset_fn("slot", "head", "group", name="flat_offset")
tiled_offset = SCALE_128X4.offset_fn("row", "col", name="tiled_offset")


@triton.jit
def _quantized(rows, FLOOR: tl.constexpr):
    """Payload (row, d) and scale bytes (row, group) of a tile of rows (row, d)."""
    TILE: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = rows.shape[1] // BLOCK
    blocks = tl.reshape(rows, (TILE, GROUPS, BLOCK))
    byte = scale_byte(tl.max(abs_bits(blocks), axis=2), FLOOR)
    values = payload(blocks, tl.expand_dims(inverse_scale(byte), 2))
    return tl.reshape(values, (TILE, GROUPS * BLOCK)), byte.to(tl.uint8)


@triton.jit
def _load(
    x, token, head, live, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """A tile of rows, zero where they are not live."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = row_offset(token[:, None], head[:, None], d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    return tl.load(x + at, live[:, None] & (d < HEAD_DIM), other=0.0, eviction_policy=EVICTION)


@triton.jit
def _store(
    rows, cache, scale, slot, head, live,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of rows and store payload and scales at their slots."""
    BLOCK_D: tl.constexpr = rows.shape[1]
    d = tl.arange(0, BLOCK_D)[None, :]
    group = tl.arange(0, BLOCK_D // BLOCK)[None, :]
    values, byte = _quantized(rows, False)
    at = cache_offset(slot[:, None], head[:, None], d, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    tl.store(cache + at, values, live[:, None] & (d < HEAD_DIM), eviction_policy="evict_first")
    if INTERLEAVED:
        at = interleaved_offset(slot[:, None], head[:, None], group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        at = flat_offset(slot[:, None], head[:, None], group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    # Neighbouring slots share a sector of scales: kept in the cache, it can be written to memory once.
    tl.store(scale + at, byte, live[:, None] & (group < HEAD_DIM // BLOCK), eviction_policy="evict_last")


@triton.jit(do_not_specialize=["tokens"])
def _store_kv_kernel(
    k, v, loc, k_cache, v_cache, k_scale, v_scale, tokens,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, loc_stride,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = row // HEAD, row % HEAD
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=0)
    live = slot > 0  # slot 0 is the sink of padded tokens, negative slots are padding
    # Both loads before the first store, which the compiler cannot move them across. Where slots lie apart, the cache is
    # left to their scales, whose sectors other programs have yet to fill.
    if tl.max(slot, axis=0) - tl.min(slot, axis=0) < TILE:
        k_rows = _load(k, token, head, live, k_token_stride, k_head_stride, HEAD_DIM, BLOCK_D, "")
        v_rows = _load(v, token, head, live, v_token_stride, v_head_stride, V_HEAD_DIM, BLOCK_V, "")
    else:
        k_rows = _load(k, token, head, live, k_token_stride, k_head_stride, HEAD_DIM, BLOCK_D, "evict_first")
        v_rows = _load(v, token, head, live, v_token_stride, v_head_stride, V_HEAD_DIM, BLOCK_V, "evict_first")
    _store(k_rows, k_cache, k_scale, slot, head, live, HEAD, HEAD_DIM, PAGE_SIZE, INTERLEAVED)
    _store(v_rows, v_cache, v_scale, slot, head, live, HEAD, V_HEAD_DIM, PAGE_SIZE, INTERLEAVED)


@contract(when("scale_layout == 'interleaved'", "page_size % 32 == 0"), same_device=True)
def quantize_store_kv_mxfp8(
    k: Annotated[Tensor, ROWS_THD],
    v: Annotated[Tensor, ROWS_THD(head_dim="v_head_dim")],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALES, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALES(head_dim="v_head_dim"), Writes(at="loc")],
    *,
    page_size: int = 128,
    scale_layout: Literal["interleaved", "flat"] = "interleaved",
) -> None:
    """Quantise new K and V rows to MXFP8 and store them, with their scales, into a paged cache; one launch.

    - ``k`` (token, head, head_dim), ``v`` (token, head, v_head_dim): bf16, fp16 or fp32 rows; head_dim is packed,
      tokens and heads may have any stride, as in slices of a fused qkv.
    - ``loc`` (token,) int64: the slot of each row. Slot 0 and negative slots are skipped.
    - ``k_cache``, ``v_cache`` (slot, head, head_dim) e4m3, dense; ``k_scale``, ``v_scale`` E8M0 (or uint8) in
      ``mxfp8.interleaved`` or ``mxfp8.flat``, as ``scale_layout`` says.

    head_dim is a multiple of 32, and so is page_size where scales are interleaved. Numbers as
    :mod:`layoutcheck.kernels._mxfp8` says. Of two rows with one slot either may win. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    Source of the layouts and of the skipped slots: sglang 0.5.23 ``mxfp8_quant_store_kv.py``.
    """
    tokens, heads, head_dim = k.shape
    if tokens == 0 or heads == 0:
        return
    v_head_dim = v.shape[2]
    block_d, block_v = next_power_of_2(head_dim), next_power_of_2(v_head_dim)
    tile = _rows_per_program(tokens * heads, max(block_d, block_v))
    launch(
        _store_kv_kernel, (cdiv(tokens * heads, tile),), k,
        k, v, loc, k_cache, v_cache, raw(k_scale), raw(v_scale), tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), loc.stride(0),
        HEAD=heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, PAGE_SIZE=page_size,
        BLOCK_D=block_d, BLOCK_V=block_v, TILE=tile, INTERLEAVED=scale_layout == "interleaved",
    )  # fmt: skip


def _rows_per_program(rows: int, block: int) -> int:
    """Rows of ``block`` elements for each program: fewer where there would not be a program for every processor."""
    elements = 4096 if rows * block >= 1 << 20 else 1024
    return max(elements // block, 1)


@triton.jit(do_not_specialize=["rows", "scale_rows"])
def _quantize_kernel(
    x, values, scale, rows, scale_rows, token_stride, head_stride,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, COL: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, SCALES: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = (row // HEAD)[:, None], (row % HEAD)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    group = tl.program_id(1) * (BLOCK_D // BLOCK) + tl.arange(0, BLOCK_D // BLOCK)[None, :]
    inside = (row < rows)[:, None] & (d < HEAD_DIM)
    at = row_offset(token, head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    quantized, byte = _quantized(tl.load(x + at, inside, other=0.0), FLOOR)
    tl.store(values + cache_offset(token, head, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM), quantized, inside)
    if SCALES == "128x4":
        at = tiled_offset(token, group, COL=HEAD_DIM // BLOCK)
    elif SCALES == "interleaved":
        at = interleaved_offset(token, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        at = flat_offset(token, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    # Padding rows and columns of tiles are written too, since the hardware reads them: as 0, the scale of zeros.
    tl.store(scale + at, byte, (row < scale_rows)[:, None] & (group < COL))


@contract(
    "dtype(x) in (bf16, fp16, fp32)",
    "head_dim % 32 == 0",
    when("scale_layout == 'interleaved'", "page_size % 32 == 0"),
)
def quantize_mxfp8(
    x: Float[Tensor, "*batch head_dim"],
    *,
    scale_layout: Literal["linear", "128x4", "interleaved"] = "linear",
    page_size: int = 128,
    rounding: Literal["rceil", "floor"] = "rceil",
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP8: e4m3 payload and one E8M0 scale per 32 elements along head_dim.

    ``x`` (*batch, head_dim): bf16, fp16 or fp32; head_dim packed, head_dim % 32 == 0. Returns the payload
    (*batch, head_dim) and the scales:

    - ``"linear"``: (*batch, head_dim / 32), ``scale.linear``;
    - ``"128x4"``: (rt, ct, 32, 4, 4), ``scale.128x4`` of the matrix (prod(batch), head_dim / 32), padding written as 0;
    - ``"interleaved"``: (page, head, 32, page_size / 32, head_dim / 32), ``mxfp8.interleaved``, where x is (slot, head,
      head_dim) and holds whole pages.

    ``rounding="rceil"`` takes the smallest scale with which no finite element saturates; ``"floor"`` is OCP MX v1.0's
    rule, with which about a fifth of all blocks saturates. Numbers as :mod:`layoutcheck.kernels._mxfp8` says. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    head_dim = x.shape[-1]
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scale_layout == "interleaved":
        rows, shape = _pages(x, page_size)
    elif scale_layout == "128x4":
        rows = _matrix(x)
        shape = _tiled_shape(rows.shape[0], head_dim // BLOCK.value)
    else:
        rows, shape = _matrix(x), (*x.shape[:-1], head_dim // BLOCK.value)
    scale = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)
    if scale.numel() == 0:
        return values, scale
    heads = rows.shape[1]
    total = scale_rows = rows.shape[0] * heads
    cols = head_dim // BLOCK.value
    if scale_layout == "128x4":
        row_tiles, col_tiles, rl, rc, c = shape
        scale_rows, cols = row_tiles * rl * rc, col_tiles * c
    block = min(next_power_of_2(cols * BLOCK.value), 512)
    tile = _rows_per_program(scale_rows * cdiv(head_dim, block), block)
    launch(
        _quantize_kernel, (cdiv(scale_rows, tile), cdiv(cols * BLOCK.value, block)), x,
        rows, values, raw(scale), total, scale_rows, rows.stride(0), rows.stride(1),
        HEAD=heads, HEAD_DIM=head_dim, COL=cols, PAGE_SIZE=page_size, BLOCK_D=block, TILE=tile,
        SCALES=scale_layout, FLOOR=rounding == "floor",
    )  # fmt: skip
    return values, scale


@contract("token % page_size == 0")
def _whole_pages(x: Annotated[Tensor, ROWS_THD], *, page_size: int) -> None:
    """What interleaved scales ask of x, in words of its own: (token, head, head_dim)."""


def _pages(x: Tensor, page_size: int) -> tuple[Tensor, tuple[int, ...]]:
    """x as (slot, head, head_dim), and the shape of its interleaved scales."""
    try:
        _whole_pages(x, page_size=page_size)
    except LayoutError as error:
        raise LayoutError("quantize_mxfp8", error.violations) from None
    return x, _interleaved_shape(*x.shape, page_size)


# A concrete layout takes a fraction of a millisecond to make; a call has microseconds.
@functools.lru_cache(maxsize=4096)
def _interleaved_shape(slots: int, heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
    return MXFP8_SCALE_INTERLEAVED(slot=slots, head=heads, head_dim=head_dim, page_size=page_size).shape


@functools.lru_cache(maxsize=4096)
def _tiled_shape(rows: int, cols: int) -> tuple[int, ...]:
    return SCALE_128X4(row=rows, col=cols).shape


def _matrix(x: Tensor) -> Tensor:
    """x as (row, 1, head_dim), with one stride for all rows; never a copy."""
    try:
        rows = x.view(-1, 1, x.shape[-1]) if x.numel() else x.new_empty(0, 1, x.shape[-1])
    except RuntimeError:
        rows = None
    if rows is None or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise LayoutError(
            "quantize_mxfp8",
            [
                Violation(
                    "x", "stride", "rows of packed elements, one pitch for all rows", str(tuple(x.stride())),
                    "x is a view whose rows have no single pitch", "pass x.contiguous(), which copies it",
                    headline="x cannot be read as a matrix of rows",
                )
            ],
        )  # fmt: skip
    return rows


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constants) of typical launches, for a compiler without a GPU."""
    cases = []
    for name, dims, interleaved in (("interleaved", (128, 128), True), ("flat-96-64", (96, 64), False)):
        block_d, block_v = map(next_power_of_2, dims)
        signature = dict(k="*bf16", v="*bf16", loc="*i64", k_cache="*fp8e4nv", v_cache="*fp8e4nv")
        signature |= dict(k_scale="*u8", v_scale="*u8", tokens="i32", loc_stride="i32")
        signature |= dict(k_token_stride="i32", k_head_stride="i32", v_token_stride="i32", v_head_stride="i32")
        constants = dict(
            HEAD=8, HEAD_DIM=dims[0], V_HEAD_DIM=dims[1], PAGE_SIZE=128, BLOCK_D=block_d, BLOCK_V=block_v, TILE=32,
            INTERLEAVED=interleaved,
        )  # fmt: skip
        cases.append((f"store-{name}", _store_kv_kernel, signature, constants))
    for scales, element, heads, head_dim, col, floor in (
        ("linear", "*bf16", 1, 128, 4, False),
        ("128x4", "*fp32", 1, 352, 12, True),
        ("interleaved", "*fp16", 8, 96, 3, False),
    ):
        signature = dict(x=element, values="*fp8e4nv", scale="*u8", rows="i32", scale_rows="i32")
        signature |= dict(token_stride="i32", head_stride="i32")
        constants = dict(
            HEAD=heads, HEAD_DIM=head_dim, COL=col, PAGE_SIZE=128, BLOCK_D=next_power_of_2(head_dim), TILE=8,
            SCALES=scales, FLOOR=floor,
        )  # fmt: skip
        cases.append((f"quantize-{scales}", _quantize_kernel, signature, constants))
    return cases
