"""Quantisation to MXFP8: rows to payload and scales, and new K and V rows straight into a paged cache.

Every offset below is computed by a function that a layout generated; nothing here knows how scales are interleaved.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from layoutcheck.kernels._launch import launch, raw
from layoutcheck.kernels._mxfp8 import BLOCK, abs_bits, inverse_scale, payload, scale_byte
from torch import Tensor

from layoutcheck import E4M3, Choose, Index, Layout, LayoutError, Violation, Writes, contract, when
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
def _store_one(
    x, cache, scale, token, slot, live, head, token_stride, head_stride,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of rows of one head and store payload and scales at its slots."""
    TILE: tl.constexpr = token.shape[0]
    GROUPS: tl.constexpr = BLOCK_D // BLOCK
    d = tl.arange(0, BLOCK_D)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    inside = live[:, None] & (d < HEAD_DIM)
    rows = tl.load(
        x + row_offset(token[:, None], head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride), inside, other=0.0
    )
    blocks = tl.reshape(rows, (TILE, GROUPS, BLOCK))
    byte = scale_byte(tl.max(abs_bits(blocks), axis=2), False)
    values = payload(blocks, tl.expand_dims(inverse_scale(byte), 2))
    tl.store(
        cache + cache_offset(slot[:, None], head, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM),
        tl.reshape(values, (TILE, BLOCK_D)),
        inside,
    )
    if INTERLEAVED:
        at = interleaved_offset(slot[:, None], head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        at = flat_offset(slot[:, None], head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    tl.store(scale + at, byte.to(tl.uint8), live[:, None] & (group * BLOCK < HEAD_DIM))


@triton.jit
def _store_kv_kernel(
    k, v, loc, k_cache, v_cache, k_scale, v_scale, tokens,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, loc_stride,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=0)
    live = slot > 0  # slot 0 is the sink of padded tokens, negative slots are padding
    _store_one(
        k, k_cache, k_scale, token, slot, live, head, k_token_stride, k_head_stride,
        HEAD, HEAD_DIM, PAGE_SIZE, BLOCK_D, INTERLEAVED,
    )  # fmt: skip
    _store_one(
        v, v_cache, v_scale, token, slot, live, head, v_token_stride, v_head_stride,
        HEAD, V_HEAD_DIM, PAGE_SIZE, BLOCK_V, INTERLEAVED,
    )  # fmt: skip


@contract("page_size % 32 == 0", same_device=True)
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

    - ``k`` (token, head, head_dim), ``v`` (token, head, v_head_dim): bf16, fp16 or fp32 rows; head_dim is packed, tokens
      and heads may have any stride, as in slices of a fused qkv.
    - ``loc`` (token,) int64: the slot of each row. Slot 0 and negative slots are skipped.
    - ``k_cache``, ``v_cache`` (slot, head, head_dim) e4m3, dense; ``k_scale``, ``v_scale`` E8M0 (or uint8) in
      ``mxfp8.interleaved`` or ``mxfp8.flat``, as ``scale_layout`` says.

    head_dim and page_size are multiples of 32. Numbers as :mod:`layoutcheck.kernels._mxfp8` says. Of two rows with one slot
    either may win. Raises :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    Source of the layouts and of the skipped slots: sglang 0.5.23 ``mxfp8_quant_store_kv.py``.
    """
    tokens, heads, head_dim = k.shape
    if tokens == 0 or heads == 0:
        return
    v_head_dim = v.shape[2]
    tile = 16
    launch(
        _store_kv_kernel, (triton.cdiv(tokens, tile), heads), k,
        k, v, loc, k_cache, v_cache, raw(k_scale), raw(v_scale), tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), loc.stride(0),
        HEAD=heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, PAGE_SIZE=page_size,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_V=triton.next_power_of_2(v_head_dim), TILE=tile,
        INTERLEAVED=scale_layout == "interleaved",
    )  # fmt: skip


@triton.jit
def _quantize_kernel(
    x, values, scale, tokens, scale_tokens, token_stride, head_stride,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    SCALES: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK_D // BLOCK
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    inside = (token < tokens)[:, None] & (d < HEAD_DIM)
    rows = tl.load(
        x + row_offset(token[:, None], head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride), inside, other=0.0
    )
    blocks = tl.reshape(rows, (TILE, GROUPS, BLOCK))
    byte = scale_byte(tl.max(abs_bits(blocks), axis=2), FLOOR)
    quantized = payload(blocks, tl.expand_dims(inverse_scale(byte), 2))
    at = cache_offset(token[:, None], head, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    tl.store(values + at, tl.reshape(quantized, (TILE, BLOCK_D)), inside)
    # Padding rows and columns of the tiles are written too: the hardware reads them.
    live = (token < tokens)[:, None] & (group * BLOCK < HEAD_DIM)
    byte = tl.where(live, byte, 0)
    if SCALES == "128x4":
        COL: tl.constexpr = HEAD_DIM // BLOCK
        at = tiled_offset(token[:, None], group, COL=COL)
        tl.store(scale + at, byte.to(tl.uint8), (token < scale_tokens)[:, None] & (group < (COL + 3) // 4 * 4))
    elif SCALES == "interleaved":
        at = interleaved_offset(token[:, None], head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
        tl.store(scale + at, byte.to(tl.uint8), live)
    else:
        at = flat_offset(token[:, None], head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
        tl.store(scale + at, byte.to(tl.uint8), live)


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

    ``x`` (*batch, head_dim): bf16, fp16 or fp32; head_dim packed, head_dim % 32 == 0. Returns the payload (*batch, head_dim)
    and the scales:

    - ``"linear"``: (*batch, head_dim / 32), ``scale.linear``;
    - ``"128x4"``: (rt, ct, 32, 4, 4), ``scale.128x4`` of the matrix (prod(batch), head_dim / 32), padding written as 0;
    - ``"interleaved"``: (page, head, 32, page_size / 32, head_dim / 32), ``mxfp8.interleaved``, where x is (slot, head,
      head_dim) and holds whole pages.

    ``rounding="rceil"`` takes the smallest scale with which no finite element saturates; ``"floor"`` is OCP MX v1.0's rule,
    with which about a fifth of all blocks saturates. Numbers as :mod:`layoutcheck.kernels._mxfp8` says. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    head_dim = x.shape[-1]
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scale_layout == "interleaved":
        rows = _three_dims(x)
        layout = MXFP8_SCALE_INTERLEAVED(
            slot=rows.shape[0], head=rows.shape[1], head_dim=head_dim, page_size=page_size
        )
        scale = torch.empty(layout.shape, dtype=torch.float8_e8m0fnu, device=x.device)
        scale_rows = rows.shape[0]
    else:
        rows = _matrix(x)
        scale_rows = rows.shape[0]
        if scale_layout == "128x4":
            tiles = SCALE_128X4(row=scale_rows, col=head_dim // 32)
            scale = torch.empty(tiles.shape, dtype=torch.float8_e8m0fnu, device=x.device)
            scale_rows = tiles.shape[0] * 128
        else:
            scale = torch.empty((*x.shape[:-1], head_dim // 32), dtype=torch.float8_e8m0fnu, device=x.device)
    if scale.numel() == 0:
        return values, scale
    heads = rows.shape[1]
    tile = 16
    launch(
        _quantize_kernel, (triton.cdiv(scale_rows, tile), heads), x,
        rows, values, raw(scale), rows.shape[0], scale_rows, rows.stride(0), rows.stride(1),
        HEAD=heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, BLOCK_D=triton.next_power_of_2(head_dim), TILE=tile,
        SCALES=scale_layout, FLOOR=rounding == "floor",
    )  # fmt: skip
    return values, scale


def _three_dims(x: Tensor) -> Tensor:
    """x as (slot, head, head_dim), checked against ``rows.thd``."""
    ROWS_THD(dtype=x.dtype).check(x)
    return x


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
