"""Quantisation to MXFP8: rows to payload and scales, and new K and V rows straight into a paged cache.

Every offset below is computed by a function that a layout generated; nothing here knows how scales are interleaved.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import E4M3, Choose, Index, Layout, Writes, contract
from layoutcheck.kernels._launch import launch, raw
from layoutcheck.kernels._mxfp8 import BLOCK, abs_bits, inverse_scale, payload, scale_byte
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import PAGED_NHD
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.scale import SCALE_128X4, SCALE_LINEAR

# A cache as sglang keeps it: one dense [slot, head, head_dim] tensor.
CACHE = PAGED_NHD(dtype=E4M3, view="slot head head_dim", pitch={})
SCALES = Choose({"scale_layout == 'interleaved'": MXFP8_SCALE_INTERLEAVED, "scale_layout == 'flat'": MXFP8_SCALE_FLAT})

row_offset = ROWS_THD.offset_fn("token", "head", "head_dim", name="row_offset", strides=("token", "head"))
cache_offset = CACHE.offset_fn("slot", "head", "head_dim", name="cache_offset")
interleaved_offset = MXFP8_SCALE_INTERLEAVED.offset_fn("slot", "head", "group", name="interleaved_offset")
flat_offset = MXFP8_SCALE_FLAT.offset_fn("slot", "head", "group", name="flat_offset")
linear_offset = SCALE_LINEAR.offset_fn("row", "col", name="linear_offset")
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
    loc: Annotated[Tensor, Layout("loc", "token -> token", dtype=torch.int64, dense=""), Index("slot", skip="<= 0")],
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
