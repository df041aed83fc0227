"""DeepSeek-V4's unified KV pool: rows quantised into it, and attention over the slots that each token lists.

A slot holds one latent row, which is key and value at once. An FP8 pool has one fp32 scale per page and group of 64
elements, so that an element is worth its code times the scale of its page's group. With page_size 1, as in sglang, a
page is a slot. Every offset is computed by a function that a layout generated.

Source of the layouts and of what attention computes: sglang 0.5.23 ``srt/mem_cache/deepseek_v4_memory_pool.py``,
``kernels/ops/attention/dsv4/unified_kv_kernels``. Pages larger than a slot are not sglang's.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import BF16, E4M3, E4M3FNUZ, FP16, FP32, INT32, INT64, Index, Indptr, Layout, Writes
from layoutcheck import contract, forbids, needs, when
from layoutcheck.kernels._launch import launch
from layoutcheck.kernels._mxfp8 import abs_bits
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.unified_kv import UNIFIED_KV_ROWS, UNIFIED_KV_SCALE

GROUP = tl.constexpr(64)

POOL = UNIFIED_KV_ROWS
SCALE = UNIFIED_KV_SCALE(pitch={}, default={}, dense="group")
# The same scales as the slots of a page see them: the tokens of a page are zero elements apart.
SCALE_OF_SLOT = Layout(
    "unified_kv.kv_scale of slot",
    "slot(page token) group -> page token group",
    dtype=FP32,
    token="page_size",
    dim="group * 64",
    pitch={"page": "group + row_gap", "token": 0},
    default={"row_gap": 0},
)
# The new rows of whole pages, one page after the other.
NEW_ROWS = Layout(
    "unified_kv.new_rows",
    "row(entry token) dim -> entry token dim",
    dtype=(BF16, FP16, FP32),
    token="page_size",
    view="row dim",
    dense="dim",
    public="entry",
)
QUERY = ROWS_THD(head_dim="dim", dtype=(BF16, FP16))
OUT = Layout("attention.out", "token head dim -> token head dim", dtype=(BF16, FP16))
PARTIAL = Layout("attention.partial", "token split head dim -> token split head dim", dtype=FP32)
LSE = Layout("attention.lse", "token split head -> token split head", dtype=FP32)

new_row_offset = NEW_ROWS.offset_fn("entry", "token", "dim", name="new_row_offset", strides=("entry", "token"))
page_offset = POOL.offset_fn("page", "token", "dim", name="page_offset")
slot_offset = POOL.offset_fn("slot", "dim", name="slot_offset")
page_scale_offset = SCALE.offset_fn("page", "group", name="page_scale_offset", strides=("page",))
slot_scale_offset = SCALE_OF_SLOT.offset_fn("slot", "group", name="slot_scale_offset", strides=("page",))
query_offset = QUERY.offset_fn("token", "head", "head_dim", name="query_offset", strides=("token", "head"))
out_offset = OUT.offset_fn("token", "head", "dim", name="out_offset")
partial_offset = PARTIAL.offset_fn("token", "split", "head", "dim", name="partial_offset")
lse_offset = LSE.offset_fn("token", "split", "head", name="lse_offset")


# --- quantise and store -----------------------------------------------------------------------------------------------


@triton.jit
def _new_rows(
    rows, entry, live, token, d, entry_stride, token_stride, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """fp32 rows [entry, token, group, 64]; zeros beyond the page and the row."""
    inside = live & (token < PAGE_SIZE) & (d < DIM)
    x = tl.load(
        rows + new_row_offset(entry, token, d, ENTRY_STRIDE=entry_stride, TOKEN_STRIDE=token_stride), inside, other=0.0
    )
    return tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1], x.shape[2] // GROUP, GROUP))


@triton.jit
def _amax_bits(x):
    """Bits of the largest finite magnitude [entry, group]. An infinity counts as the largest finite value."""
    bits = abs_bits(x)
    bits = tl.where(bits > 0x7F800000, 0, tl.minimum(bits, 0x7F7FFFFF))
    return tl.max(tl.max(bits, axis=3), axis=1)


@triton.jit
def _store_rows(kv, x, inverse, page, live, token, d, LARGEST: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    y = x * inverse
    y = tl.where(y > LARGEST, LARGEST, y)
    y = tl.where(y < -LARGEST, -LARGEST, y)
    codes = tl.reshape(y, (x.shape[0], x.shape[1], x.shape[2] * GROUP)).to(kv.dtype.element_ty)
    inside = live & (token < PAGE_SIZE) & (d < DIM)
    tl.store(kv + page_offset(page, token, d, DIM=DIM, PAGE_SIZE=PAGE_SIZE), codes, inside)


@triton.jit
def _quantize_kernel(
    rows, loc, kv, kv_scale, entries, entry_stride, token_stride, loc_stride, page_stride,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LARGEST: tl.constexpr,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    page = tl.load(loc + entry.to(tl.int64) * loc_stride, entry < entries, other=0)
    live = page > 0  # page 0 is the sink of padded tokens, negative pages are padding
    row, at, take = entry[:, None, None], page[:, None, None], live[:, None, None]
    token = tl.arange(0, TOKENS)[None, :, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
    group = tl.program_id(1) * (BLOCK_D // GROUP) + tl.arange(0, BLOCK_D // GROUP)[None, :]

    # The first tokens stay in registers; those of pages with more are read again.
    x = _new_rows(rows, row, take, token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
    amax = _amax_bits(x)
    for start in range(TOKENS, PAGE_SIZE, TOKENS):
        more = _new_rows(rows, row, take, start + token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
        amax = tl.maximum(amax, _amax_bits(more))
    # 2^-126, the smallest normal number, keeps the inverse finite.
    scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST), 1.1754943508222875e-38)
    inverse = tl.div_rn(1.0, scale)[:, None, :, None]
    _store_rows(kv, x, inverse, at, take, token, d, LARGEST, DIM, PAGE_SIZE)
    for start in range(TOKENS, PAGE_SIZE, TOKENS):
        more = _new_rows(rows, row, take, start + token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
        _store_rows(kv, more, inverse, at, take, start + token, d, LARGEST, DIM, PAGE_SIZE)
    tl.store(
        kv_scale + page_scale_offset(page[:, None], group, PAGE_STRIDE=page_stride),
        scale,
        live[:, None] & (group < DIM // GROUP),
    )


@lru_cache
def _quantize_blocks(dim: int, page_size: int) -> dict[str, int]:
    """A tile of 4,096 elements, or 8,192 where a page has many rows: whole groups of at most 128 rows."""
    tokens = min(triton.next_power_of_2(page_size), 128)
    block_d = min(triton.next_power_of_2(dim), max(64, 8192 // tokens), 1024)
    entries = max(1, 4096 // (tokens * block_d))
    return dict(ENTRIES=entries, TOKENS=tokens, BLOCK_D=block_d, num_warps=4 if tokens * block_d <= 4096 else 8)


@contract("dim % 64 == 0", same_device=True)
def quantize_store_unified_kv(
    rows: Annotated[Tensor, NEW_ROWS],
    loc: Annotated[Tensor, Layout("loc", "entry -> entry", dtype=INT64, dense=""), Index("page", skip="<= 0")],
    kv: Annotated[Tensor, POOL(dtype=(E4M3, E4M3FNUZ)), Writes(at="loc")],
    kv_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    *,
    page_size: int = 1,
) -> None:
    """Quantise whole pages of rows to FP8 and store them, with one scale per page and group of 64; one launch.

    - ``rows`` (entry * page_size, dim): bf16, fp16 or fp32; dim is packed, rows may have any stride.
    - ``loc`` (entry,) int64: the page that each page_size rows become. With page_size 1 a page is a slot. Page 0 and
      negative pages are skipped.
    - ``kv`` (slot, dim): e4m3 or, as gfx942 has it, e4m3fnuz; slot = page * page_size + token.
    - ``kv_scale`` (page, dim / 64) fp32; its row stride is free.

    A scale is the largest magnitude of its page's group / 448 (240 for e4m3fnuz), rounded once, and at least 2^-126:
    also that of a group of zeros. Payload is rounded to nearest even and saturates. An infinity counts as the largest
    finite fp32. A NaN stays the NaN of its element: it has no part in the scale. Of two entries with one page either
    may win.

    Raises :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    entries, dim = loc.shape[0], rows.shape[1]
    if entries == 0 or dim == 0 or page_size == 0:
        return
    blocks = _quantize_blocks(dim, page_size)
    launch(
        _quantize_kernel, (triton.cdiv(entries, blocks["ENTRIES"]), triton.cdiv(dim, blocks["BLOCK_D"])), kv,
        rows, loc, kv, kv_scale, entries, page_size * rows.stride(0), rows.stride(0), loc.stride(0), kv_scale.stride(0),
        DIM=dim, PAGE_SIZE=page_size, LARGEST=240.0 if kv.dtype is torch.float8_e4m3fnuz else 448.0, **blocks,
    )  # fmt: skip


# --- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _listed_rows(kv, slot, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [slot, dim] as they are stored; zeros where a slot is not live."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(kv + slot_offset(slot[:, None], d, DIM=DIM), live[:, None] & (d < DIM), other=0.0)


@triton.jit
def _listed_scales(
    kv_scale, slot, live, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Scales [slot, group] of those rows."""
    group = tl.arange(0, BLOCK_D // GROUP)[None, :]
    at = slot_scale_offset(slot[:, None], group, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE)
    return tl.load(kv_scale + at, live[:, None] & (group < DIM // GROUP), other=0.0)


@triton.jit
def _dequantized(rows, scale, dtype: tl.constexpr):
    groups = tl.reshape(rows.to(tl.float32), (rows.shape[0], rows.shape[1] // GROUP, GROUP)) * scale[:, :, None]
    return tl.reshape(groups, rows.shape).to(dtype)


@triton.jit
def _attend_kernel(
    q, kv, kv_scale, indices, indptr, sink, out, lse, softmax_scale_log2, q_token_stride, q_head_stride,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of a block of heads of one token over one part of its list.

    The tile of rows is the left operand of both products, so its slots and dims, not the few heads, fill the 64 rows
    that a Hopper tensor core works on at least. Scores are [slot, head], the accumulator is [dim, head].
    """
    HEAD_BLOCKS: tl.constexpr = (HEAD + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    group = tl.arange(0, BLOCK_D // GROUP)

    first, last = tl.load(indptr + token), tl.load(indptr + token + 1)
    length = tl.cdiv(tl.cdiv(last - first, BLOCK_N), SPLIT) * BLOCK_N
    begin = first + split * length
    end = tl.minimum(begin + length, last)

    queries = tl.load(
        q + query_offset(token, head[:, None], d[None, :], TOKEN_STRIDE=q_token_stride, HEAD_STRIDE=q_head_stride),
        (head < HEAD)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    queries = tl.trans(queries)
    # The sink is one more score, whose value is zero: it starts the maximum m and the sum l. Without one m is -inf, so
    # the first tile's correction 2^(m - new) clears l, and an empty list ends with 0 / 1.
    if sink is None or SPLIT > 1:
        m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    else:
        m = tl.load(sink + head, head < HEAD, other=0.0) * 1.4426950408889634
    l = tl.full((BLOCK_H,), 1.0, tl.float32)  # noqa: E741 - its name in the literature
    acc = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)

    at = begin + tl.arange(0, BLOCK_N)
    slot = tl.load(indices + at, at < end, other=0)
    rows = _listed_rows(kv, slot, at < end, DIM, BLOCK_D)
    if kv_scale is not None:
        scale = _listed_scales(kv_scale, slot, at < end, DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_D)
        rows = _dequantized(rows, scale, q.dtype.element_ty)
    slot = tl.load(indices + BLOCK_N + at, at < end - BLOCK_N, other=0)
    for start in range(begin, end, BLOCK_N):
        # The loads of the next tile, and of the slots of the one after it, are under way while this tile is used.
        at = start + tl.arange(0, BLOCK_N)
        more = _listed_rows(kv, slot, at < end - BLOCK_N, DIM, BLOCK_D)
        if kv_scale is not None:
            scale = _listed_scales(kv_scale, slot, at < end - BLOCK_N, DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_D)
        slot = tl.load(indices + 2 * BLOCK_N + at, at < end - 2 * BLOCK_N, other=0)
        scores = tl.dot(rows, queries) * softmax_scale_log2
        scores = tl.where((at < end)[:, None], scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=0))
        p = tl.exp2(scores - new[None, :])
        correction = tl.exp2(m - new)
        l = l * correction + tl.sum(p, axis=0)  # noqa: E741
        acc = tl.dot(tl.trans(rows), p.to(q.dtype.element_ty), acc * correction[None, :])
        m = new
        if kv_scale is not None:
            more = _dequantized(more, scale, q.dtype.element_ty)
        rows = more

    acc = tl.trans(acc / l[None, :])
    inside = (head < HEAD)[:, None] & (d < DIM)[None, :]
    if SPLIT == 1:
        tl.store(
            out + out_offset(token, head[:, None], d[None, :], HEAD=HEAD, DIM=DIM), acc.to(out.dtype.element_ty), inside
        )
    else:  # the reduction does not read the accumulator of an empty part
        tl.store(
            out + partial_offset(token, split, head[:, None], d[None, :], SPLIT=SPLIT, HEAD=HEAD, DIM=DIM),
            acc,
            inside & (begin < end),
        )
        tl.store(lse + lse_offset(token, split, head, SPLIT=SPLIT, HEAD=HEAD), m + tl.log2(l), head < HEAD)


@triton.jit
def _reduce_kernel(
    partial, lse, sink, out,
    HEAD: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The parts of one token and head, each weighted by 2^lse, and the sink."""
    token, head = tl.program_id(0) // HEAD, tl.program_id(0) % HEAD
    d = tl.arange(0, BLOCK_D)
    highest = float("-inf")
    if sink is not None:
        highest = tl.load(sink + head) * 1.4426950408889634
    total = 1.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, SPLIT, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        score = tl.load(
            lse + lse_offset(token, split, head, SPLIT=SPLIT, HEAD=HEAD), split < SPLIT, other=float("-inf")
        )
        live = score != float("-inf")
        part = tl.load(
            partial + partial_offset(token, split[:, None], head, d[None, :], SPLIT=SPLIT, HEAD=HEAD, DIM=DIM),
            live[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        new = tl.maximum(highest, tl.max(score, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(score - base)
        correction = tl.exp2(highest - base)
        total = total * correction + tl.sum(weight, axis=0)
        acc = acc * correction + tl.sum(part * weight[:, None], axis=0)
        highest = new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + out_offset(token, head, d, HEAD=HEAD, DIM=DIM), acc.to(out.dtype.element_ty), d < DIM)
