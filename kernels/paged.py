"""Attention over a paged KV cache, bf16, fp16 or MXFP8: decode, and extend with varlen causal queries.

One program takes the query heads that share a KV head, for one or more query tokens, and a part of the keys; a second
kernel joins the parts. Softmax in fp32 with exp2. Slots that no query of the program reads are never loaded, so what
they hold cannot reach the output.

Over MXFP8 the E8M0 factors stay out of a decode's matrix products, whose operands are the e4m3 payload, exact in fp16.
Factors vary along the reduced axis of Q K^T, so the rows of Q are spread over the groups of head_dim: row (query,
group) holds that group and zero elsewhere. Tensor cores have the rows to spare, and a row of scores has one factor per
key. V's factors, one per key and group, are powers of two: their exponents are added to the logits of rows (query,
group), each with a maximum of its own, so probabilities times factors stay in [0, 1] whatever the factors are. Many
queries have no rows to spare: there the tiles of K and V are dequantised to bf16, exactly, once for all queries of a
program, or by a kernel of their own where whole prompts are read by all of theirs. But where the hardware multiplies
blocks with their scales (``tl.dot_scaled``) Q K^T is left to it. V's factors do not lie along the axis that its product
reduces, which is what such hardware asks for.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import FP32, INT32, Index, Indptr, Layout, contract, forbids, needs, when
from layoutcheck.kernels._launch import TRITON, aligned, cdiv, launch, next_power_of_2, raw
from layoutcheck.kernels._mxfp8 import BLOCK, scale_value
from layoutcheck.kernels._paged import (
    CACHE,
    HEADROOM,
    PAGE_TABLE,
    QUARTER,
    QUERY,
    RESTORE,
    cache_offset,
    cache_offset_32,
    dequantise,
    expand_kernel,
    expanded,
    flat_offset,
    interleaved_offset,
    interleaved_offset_32,
    page_of_key,
    query_offset,
    slot_of,
    token_of_key,
)
from layoutcheck.kernels.quantize import SCALES
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT
from layoutcheck.layouts.rows import ROWS_THD

PER_SEQ = Layout("seq_lens", "seq -> seq", dtype=INT32)
QUERY_START = Layout("query_start", "entry -> entry", dtype=INT32, entry="seq + 1")
# The parts of a split sequence: a normalised output each, and the log2 of its softmax's denominator.
PART = Layout("attention.part", "token q_head split v_head_dim -> token q_head split v_head_dim", dtype=FP32)
PART_LSE = Layout("attention.lse", "token q_head split -> token q_head split", dtype=FP32)

part_offset = PART.offset_fn("token", "q_head", "split", "v_head_dim", name="part_offset")
lse_offset = PART_LSE.offset_fn("token", "q_head", "split", name="part_lse_offset")

LOG2_E = 1.4426950408889634


@triton.jit
def _find_sequence(query_start, block, seqs, BLOCK_Q: tl.constexpr):
    """The sequence of a block of queries: the last s with query_start[s] // BLOCK_Q + s <= block.

    Counted so, every sequence has room for its blocks, and the grid follows from shapes alone.
    """
    low = 0
    high = seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _page(
    page_table, seq, start, stop, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The page of a tile of keys, where it lies in one; else a column, one for each key."""
    key = start if WHOLE else (start + tl.arange(0, BLOCK_N))[:, None]
    at = page_of_key(seq, key, PAGE_SIZE=PAGE_SIZE, SEQ_STRIDE=table_stride)
    return tl.load(page_table + at, key < stop, other=0)


@triton.jit
def _rows(
    cache, page, start, lowest, stop, head,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + BLOCK_N) of a sequence, (key, head_dim); zero outside [lowest, stop) if masked."""
    n = tl.arange(0, BLOCK_N)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    if WHOLE:  # the map is linear in the token of a page: one address for the tile, and offsets that no tile changes
        first = token_of_key(start, PAGE_SIZE=PAGE_SIZE)
        cache += cache_offset(page, first, head, 0, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
        at = cache_offset_32(0, n, 0, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        token = token_of_key(start + n, PAGE_SIZE=PAGE_SIZE)
        at = cache_offset(page, token, head, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    inside = d < HEAD_DIM
    if MASKED:
        rows = (n >= lowest - start) & (n < stop - start)
        inside = rows if BLOCK_D == HEAD_DIM else inside & rows
    return tl.load(cache + at, inside, other=0.0)


@triton.jit
def _scales(
    scale, page, start, lowest, stop, head,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """The E8M0 bytes of the same rows, (key, group); with ``WORD`` those of a key as one number of that type, (key, 1).

    Bytes are taken apart as soon as they come, which waits for them however early they were asked for. Words are not.
    """
    n = tl.arange(0, BLOCK_N)[:, None]
    group = tl.arange(0, GROUPS)[None, :] if WORD is None else 0
    token = token_of_key(start + n, PAGE_SIZE=PAGE_SIZE)
    if not INTERLEAVED:
        at = flat_offset(slot_of(page, token, PAGE_SIZE=PAGE_SIZE), head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    elif WHOLE:  # linear likewise: a tile has whole chunks of a page, or lies in one
        first = token_of_key(start, PAGE_SIZE=PAGE_SIZE)
        scale += interleaved_offset(page, first, head, 0, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
        at = interleaved_offset_32(0, n, 0, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        at = interleaved_offset(page, token, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    inside = (n >= lowest - start) & (n < stop - start)
    if WORD is not None:
        scales = tl.load((scale + at).to(tl.pointer_type(WORD), bitcast=True), inside, other=0)
    else:
        if GROUPS * BLOCK != HEAD_DIM:
            inside = inside & (group * BLOCK < HEAD_DIM)
        scales = tl.load(scale + at, inside, other=127)
    return scales


@triton.jit
def _scale_bytes(scales, GROUPS: tl.constexpr, WORD: tl.constexpr):
    """What ``_scales`` loaded as bytes (key, group), in 32 bits: a layout is changed faster than in 8."""
    if WORD is not None:
        scales = (scales >> (tl.arange(0, GROUPS) * 8)[None, :]) & 0xFF
    return scales.to(tl.int32)


@triton.jit
def _exponent(byte):
    """The exponent of an E8M0 byte as fp32, NaN for 0xFF."""
    return tl.where(byte == 255, float("nan"), byte.to(tl.float32) - 127.0)


@triton.jit
def _step(top, logits):
    """One step of an online softmax: the new maximum, 2^(logits - it), and the factor of what was summed before."""
    new = tl.maximum(top, tl.max(logits, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    return new, tl.exp2(logits - base[:, None]), tl.exp2(top - base)


@triton.jit
def _attend_kernel(
    q, k_cache, v_cache, q_scale, k_scale, v_scale, page_table, seq_lens, query_start, out, part, lse,
    seqs, q_token_stride, q_head_stride, table_stride, out_token_stride, out_head_stride, qk_scale, cap, window,
    Q_HEAD: tl.constexpr, HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr, MX: tl.constexpr, SPREAD: tl.constexpr, SCALED: tl.constexpr, EXPANDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, VARLEN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    K_WORD: tl.constexpr, V_WORD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The queries of one tile and KV head over one split of the keys.

    Logits are in base 2. With ``CAPPED``, ``qk_scale`` holds softmax_scale / soft_cap * 2 * log2(e).
    """
    GROUP: tl.constexpr = Q_HEAD // HEAD
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_H
    WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    K_GROUPS: tl.constexpr = BLOCK_D // BLOCK
    V_GROUPS: tl.constexpr = BLOCK_V // BLOCK
    K_SPREAD: tl.constexpr = K_GROUPS if SPREAD else 1
    V_SPREAD: tl.constexpr = V_GROUPS if SPREAD else 1

    head = tl.program_id(0) % HEAD
    block = tl.program_id(0) // HEAD
    split = tl.program_id(1)
    if VARLEN:
        seq = _find_sequence(query_start, block, seqs, BLOCK_Q)
        first_token = tl.load(query_start + seq)
        queries = tl.load(query_start + seq + 1) - first_token
        first = (block - (first_token // BLOCK_Q + seq)) * BLOCK_Q
        if first >= queries:
            return
    else:
        seq = block
        first_token = block
        queries = 1
        first = 0

    # Query i of a sequence is at position seq_len - queries + i.
    offset = tl.load(seq_lens + seq) - queries
    row = tl.arange(0, ROWS)
    query = first + row // BLOCK_H
    q_head = head * GROUP + row % BLOCK_H
    alive = (query < queries) & (row % BLOCK_H < GROUP)
    position = tl.where(alive, offset + query, -1)

    # Row (query, group) of the spread Q.
    spread = tl.arange(0, ROWS * K_SPREAD)
    own = spread // K_SPREAD
    own_query = first + own // BLOCK_H
    own_token = first_token + own_query
    own_head = head * GROUP + own % BLOCK_H
    own_alive = (own_query < queries) & (own % BLOCK_H < GROUP)
    d = tl.arange(0, BLOCK_D)[None, :]
    q_at = query_offset(
        own_token[:, None], own_head[:, None], d, TOKEN_STRIDE=q_token_stride, HEAD_STRIDE=q_head_stride
    )
    inside = own_alive[:, None] & (d < HEAD_DIM)
    if SPREAD:
        inside = inside & (d // BLOCK == (spread % K_SPREAD)[:, None])
    q_rows = tl.load(q + q_at, inside, other=0.0)
    if MX:
        group = tl.arange(0, K_GROUPS)[None, :]
        token = first_token + query
        q_byte = tl.load(
            q_scale + flat_offset(token[:, None], q_head[:, None], group, HEAD=Q_HEAD, HEAD_DIM=HEAD_DIM),
            alive[:, None] & (group * BLOCK < HEAD_DIM),
            other=0,
        ).to(tl.int32)
        if SPREAD:
            # What a row's largest factor is above 1 is held back to the end: no step is larger than the result.
            lift = tl.maximum(tl.max(tl.where(q_byte == 255, 0, q_byte), axis=1), 127)
            q_factor = scale_value(q_byte) * scale_value(254 - lift)[:, None] * qk_scale
            lift_factor = scale_value(lift)
            q_rows = q_rows.to(tl.float16)
        elif not SCALED:
            q_rows = dequantise(q_rows, scale_value(q_byte) * QUARTER, ROWS, K_GROUPS)

    # Keys [begin, stop) of this split, out of [lowest, end) that any query of the tile sees.
    end = tl.maximum(offset + tl.minimum(first + BLOCK_Q, queries), 0)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(offset + first - window + 1, 0)
    tiles = tl.cdiv(end, BLOCK_N) - lowest // BLOCK_N
    length = tl.cdiv(tiles, SPLITS) * BLOCK_N
    begin = lowest // BLOCK_N * BLOCK_N + split * length
    stop = tl.minimum(begin + length, end)

    n = tl.arange(0, BLOCK_N)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS * V_SPREAD, BLOCK_V), tl.float32)
    v_top = tl.full((ROWS * V_SPREAD,), float("-inf"), tl.float32)
    # Scales by hand a tile ahead, and their pages two. The loop takes this tile's apart before it asks for the next:
    # the other way round, programs of one tile have more instructions, and spill.
    if AHEAD:
        page = _page(page_table, seq, begin, stop, table_stride, PAGE_SIZE, BLOCK_N, WHOLE)
        next_k = _scales(
            k_scale, page, begin, lowest, stop, head,
            HEAD, HEAD_DIM, PAGE_SIZE, BLOCK_N, K_GROUPS, WHOLE, INTERLEAVED, K_WORD,
        )  # fmt: skip
        next_v = _scales(
            v_scale, page, begin, lowest, stop, head,
            HEAD, V_HEAD_DIM, PAGE_SIZE, BLOCK_N, V_GROUPS, WHOLE, INTERLEAVED, V_WORD,
        )  # fmt: skip
        next_page = _page(page_table, seq, begin + BLOCK_N, stop, table_stride, PAGE_SIZE, BLOCK_N, WHOLE)
    # The tiles of keys that every query sees come first, without a mask. A second loop does not pay for a bf16 decode.
    ALL_SEEN: tl.constexpr = (MX or VARLEN) and not WINDOWED
    middle = begin
    if ALL_SEEN:
        middle += tl.maximum(tl.minimum(offset + first + 1, stop) - begin, 0) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(0 if ALL_SEEN else 1, 2):
        for start in tl.range(middle if MASKED else begin, stop if MASKED else middle, BLOCK_N):
            page = _page(page_table, seq, start, stop, table_stride, PAGE_SIZE, BLOCK_N, WHOLE)
            k = _rows(
                k_cache, page, start, lowest, stop, head, HEAD, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, WHOLE, MASKED
            )  # fmt: skip
            if AHEAD:
                k_byte = _scale_bytes(next_k, K_GROUPS, K_WORD)
                v_byte = _scale_bytes(next_v, V_GROUPS, V_WORD)
                ahead = start + BLOCK_N
                next_k = _scales(
                    k_scale, next_page, ahead, lowest, stop, head,
                    HEAD, HEAD_DIM, PAGE_SIZE, BLOCK_N, K_GROUPS, WHOLE, INTERLEAVED, K_WORD,
                )  # fmt: skip
                next_v = _scales(
                    v_scale, next_page, ahead, lowest, stop, head,
                    HEAD, V_HEAD_DIM, PAGE_SIZE, BLOCK_N, V_GROUPS, WHOLE, INTERLEAVED, V_WORD,
                )  # fmt: skip
                next_page = _page(page_table, seq, ahead + BLOCK_N, stop, table_stride, PAGE_SIZE, BLOCK_N, WHOLE)
            elif MX:
                k_scales = _scales(
                    k_scale, page, start, lowest, stop, head,
                    HEAD, HEAD_DIM, PAGE_SIZE, BLOCK_N, K_GROUPS, WHOLE, INTERLEAVED, K_WORD,
                )  # fmt: skip
                k_byte = _scale_bytes(k_scales, K_GROUPS, K_WORD)
                v_scales = _scales(
                    v_scale, page, start, lowest, stop, head,
                    HEAD, V_HEAD_DIM, PAGE_SIZE, BLOCK_N, V_GROUPS, WHOLE, INTERLEAVED, V_WORD,
                )  # fmt: skip
                v_byte = _scale_bytes(v_scales, V_GROUPS, V_WORD)

            if SPREAD:
                logits = tl.reshape(tl.dot(q_rows, tl.trans(k.to(tl.float16))), (ROWS, K_GROUPS, BLOCK_N))
                logits *= q_factor[:, :, None] * tl.trans(scale_value(k_byte))[None, :, :]
                logits = tl.sum(logits, axis=1) * lift_factor[:, None]
            elif SCALED:
                q_scales, k_scales = q_byte.to(tl.uint8), k_byte.to(tl.uint8)
                logits = tl.dot_scaled(q_rows, q_scales, "e4m3", tl.trans(k), k_scales, "e4m3") * qk_scale
            elif MX:
                k = dequantise(k, scale_value(k_byte) * QUARTER, BLOCK_N, K_GROUPS)
                logits = tl.dot(q_rows, tl.trans(k)) * (qk_scale / (QUARTER * QUARTER))
            else:
                logits = tl.dot(q_rows, tl.trans(k)) * qk_scale
            if CAPPED:
                logits = cap * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
            if MASKED:
                key = start + n
                seen = key[None, :] <= position[:, None]
                if WINDOWED:
                    seen = seen & (key[None, :] > position[:, None] - window)
                logits = tl.where(seen, logits, float("-inf"))
            top, p, shrink = _step(top, logits)
            v = _rows(
                v_cache, page, start, lowest, stop, head, HEAD, V_HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_V, WHOLE, MASKED
            )  # fmt: skip
            total = total * shrink + tl.sum(p, axis=1)
            if SPREAD:
                logits = logits[:, None, :] + tl.trans(_exponent(v_byte))[None, :, :]
                v_top, p, shrink = _step(v_top, tl.reshape(logits, (ROWS * V_GROUPS, BLOCK_N)))
                acc = tl.dot(p.to(tl.float16), v.to(tl.float16), acc * shrink[:, None])
            else:
                if MX:
                    v = dequantise(v, scale_value(v_byte) * HEADROOM, BLOCK_N, V_GROUPS)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    dv = tl.arange(0, BLOCK_V)[None, :]
    if SPREAD:
        # Rows (query, group) back to their query, each with the columns of its group.
        own_group = dv[:, None, :] // BLOCK == tl.arange(0, V_GROUPS)[None, :, None]
        acc = tl.where(own_group, tl.reshape(acc, (ROWS, V_GROUPS, BLOCK_V)) / total[:, None, None], 0.0)
        weight = tl.exp2(tl.reshape(v_top, (ROWS, V_GROUPS)) - tl.where(empty, 0.0, top)[:, None])
        result = tl.sum(acc * weight[:, :, None], axis=1)
    else:
        result = acc / total[:, None]
        if MX or EXPANDED:
            result *= RESTORE
    token = (first_token + query)[:, None]
    inside = alive[:, None] & (dv < V_HEAD_DIM)
    if SPLITS == 1:
        at = query_offset(token, q_head[:, None], dv, TOKEN_STRIDE=out_token_stride, HEAD_STRIDE=out_head_stride)
        tl.store(out + at, result.to(out.dtype.element_ty), inside)
    else:
        at = part_offset(token, q_head[:, None], split, dv, Q_HEAD=Q_HEAD, SPLIT=SPLITS, V_HEAD_DIM=V_HEAD_DIM)
        tl.store(part + at, result, inside)
        denominator = tl.where(empty, float("-inf"), top + tl.log2(total))
        at = lse_offset(first_token + query, q_head, split, Q_HEAD=Q_HEAD, SPLIT=SPLITS)
        tl.store(lse + at, denominator, alive)


@triton.jit
def _join_kernel(
    part, lse, out, out_token_stride, out_head_stride,
    Q_HEAD: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The splits of columns of one query head, weighted by their denominators; zero where none has seen a key."""
    token = tl.program_id(0) // Q_HEAD
    q_head = tl.program_id(0) % Q_HEAD
    split = tl.arange(0, BLOCK_S)
    dv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = lse_offset(token, q_head, split, Q_HEAD=Q_HEAD, SPLIT=SPLITS)
    log = tl.load(lse + at, split < SPLITS, other=float("-inf"))
    top = tl.max(log, axis=0)
    weight = tl.exp2(log - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    at = part_offset(
        token, q_head, split[:, None], dv[None, :], Q_HEAD=Q_HEAD, SPLIT=SPLITS, V_HEAD_DIM=V_HEAD_DIM
    )  # fmt: skip
    inside = (split < SPLITS)[:, None] & (dv < V_HEAD_DIM)[None, :]
    result = tl.sum(tl.load(part + at, inside, other=0.0) * weight[:, None], axis=0)
    at = query_offset(token, q_head, dv, TOKEN_STRIDE=out_token_stride, HEAD_STRIDE=out_head_stride)
    tl.store(out + at, result.to(out.dtype.element_ty), dv < V_HEAD_DIM)


@contract(
    "q_head % head == 0",
    "dtype(q) == dtype(k_cache)",
    "dtype(v_cache) == dtype(k_cache)",
    when("dtype(k_cache) == e4m3", needs("q_scale", "k_scale", "v_scale")),
    when("dtype(k_cache) != e4m3", forbids("q_scale", "k_scale", "v_scale")),
    when("not given(query_start)", "token == seq"),
    when("given(soft_cap)", "soft_cap > 0"),
    when("given(window)", "window > 0"),
    same_device=True,
)
def paged_attention(
    q: Annotated[Tensor, QUERY],
    k_cache: Annotated[Tensor, CACHE],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim")],
    page_table: Annotated[Tensor, PAGE_TABLE, Index("page", live="cdiv(seq_lens, page_size)")],
    seq_lens: Annotated[Tensor, PER_SEQ, Index("max_pages * page_size + 1")],
    *,
    q_scale: Annotated[Tensor, MXFP8_SCALE_FLAT(slot="token", head="q_head")] | None = None,
    k_scale: Annotated[Tensor, SCALES] | None = None,
    v_scale: Annotated[Tensor, SCALES(head_dim="v_head_dim")] | None = None,
    query_start: Annotated[Tensor, QUERY_START, Indptr("token", longest="seq_lens")] | None = None,
    softmax_scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    page_size: int = 128,
    scale_layout: Literal["interleaved", "flat"] = "interleaved",
) -> Annotated[Tensor, ROWS_THD(head="q_head", head_dim="v_head_dim")]:
    """Causal attention of each sequence's newest tokens over a paged KV cache that already holds them.

    - ``q`` (token, q_head, head_dim): bf16 or fp16 as the cache is, e4m3 over an MXFP8 cache; head_dim is packed.
      Without ``query_start`` there is one token per sequence (decode). With it, (seq + 1,) int32, tokens
      ``query_start[s]`` to ``query_start[s + 1]`` are sequence s's (extend): none, or up to ``seq_lens[s]``.
    - ``k_cache`` (slot, head, head_dim), ``v_cache`` (slot, head, v_head_dim): bf16, fp16, or e4m3, dense. Query head h
      reads head h // (q_head / head).
    - ``page_table`` (seq, max_pages) int32: key j of sequence s is in page ``page_table[s, j // page_size]``. Entries
      behind a sequence's last page are not read, slots behind its last key neither.
    - ``seq_lens`` (seq,) int32: keys of each sequence, those of the new tokens included: 0 to max_pages * page_size.
    - ``q_scale`` (token, q_head, head_dim / 32), ``k_scale``, ``v_scale`` (``mxfp8.interleaved`` or ``mxfp8.flat``, as
      ``scale_layout`` says): E8M0 or uint8. Required over an e4m3 cache, refused over another.

    Query i of n of a sequence stands at position p = seq_len - n + i and sees the keys 0 to p, or with ``window`` the
    newest ``window`` of them. Logits are q . k * softmax_scale (default head_dim ** -0.5), with ``soft_cap``
    soft_cap * tanh(logits / soft_cap). A query that sees nothing gets 0. Queries of one tile share their loads: a NaN
    in V that one of them sees may reach the others, one that none sees reaches nobody.

    Over MXFP8, where token * q_head is at least seq * max_pages * page_size * head, as in prefill, q, K and V are first
    dequantised to bf16. While the call runs, that takes at most the memory of two q in bf16 and of another output.

    Returns (token, q_head, v_head_dim) in the dtype of q, bf16 over MXFP8. All arithmetic is fp32, but for the second
    product's probabilities: in the dtype of V, over MXFP8 fp16 where a program has few queries and bf16 where many.
    Raises :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.

    Sources: of the layouts, sglang 0.5.23 ``mxfp8_interleave_sf.py``; of a grid that follows from shapes though query
    counts vary, vLLM ``v1/attention/ops/triton_unified_attention.py``.
    """
    tokens, q_heads, head_dim = q.shape
    heads, v_head_dim = v_cache.shape[1:]
    mx = q_scale is not None
    out = torch.empty((tokens, q_heads, v_head_dim), dtype=torch.bfloat16 if mx else q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    seqs, max_pages = page_table.shape
    varlen = query_start is not None
    room = _room(q.device)
    queries = cdiv(tokens, seqs) if varlen else 1
    sizes = _sizes(q_heads // heads, head_dim, v_head_dim, queries, mx, room)
    scaled = mx and _block_scaled(q.device)
    interleaved = mx and scale_layout == "interleaved"
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    expand = mx and _worth_expanding(tokens * q_heads, seqs * max_pages * page_size * heads, sizes, scaled)
    if expand:
        keys = (page_table, seq_lens, page_size, interleaved)
        q = expanded(q, q_scale, QUARTER.value)
        k_cache = expanded(k_cache, k_scale, QUARTER.value, *keys)
        v_cache = expanded(v_cache, v_scale, HEADROOM.value, *keys)
        page_table = torch.arange(seqs * max_pages, dtype=torch.int32, device=q.device).view(seqs, max_pages)
        softmax_scale /= QUARTER.value**2
        mx = scaled = interleaved = False
        q_scale = k_scale = v_scale = None
        sizes = _sizes(q_heads // heads, head_dim, v_head_dim, queries, mx, room)
    blocks = tokens // sizes["BLOCK_Q"] + seqs if varlen else seqs
    splits = _splits(blocks * heads, max_pages * page_size, sizes["SPREAD"])
    once = sizes["SPREAD"] and page_size % 64 == 0 and cdiv(max_pages * page_size, splits) <= 64
    if once and max(head_dim, v_head_dim) <= 128:  # one tile a program; of wider heads two take fewer registers
        sizes = sizes | dict(BLOCK_N=64)
    k_word, v_word = (None if once else _word(scale) for scale in (k_scale, v_scale))
    # Triton loads scales tiles ahead where those of a key are one number of 4 bytes or 8, and more than one tile is.
    ahead = sizes["SPREAD"] and any(word is None or word.primitive_bitwidth < 32 for word in (k_word, v_word))
    part = lse = out  # not used
    if splits > 1:
        part = torch.empty((tokens, q_heads, splits, v_head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((tokens, q_heads, splits), dtype=torch.float32, device=q.device)
    launch(
        _attend_kernel, (blocks * heads, splits), q,
        q, k_cache, v_cache, _bytes(q_scale, q), _bytes(k_scale, q), _bytes(v_scale, q), page_table, seq_lens,
        query_start if varlen else seq_lens, out, part, lse,
        seqs, q.stride(0), q.stride(1), page_table.stride(0), out.stride(0), out.stride(1),
        softmax_scale * LOG2_E if soft_cap is None else softmax_scale / soft_cap * 2.0 * LOG2_E,
        0.0 if soft_cap is None else soft_cap * LOG2_E, window or 0,
        Q_HEAD=q_heads, HEAD=heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, PAGE_SIZE=page_size, **sizes,
        SPLITS=splits, MX=mx, SCALED=scaled, EXPANDED=expand, INTERLEAVED=interleaved,
        VARLEN=varlen, CAPPED=soft_cap is not None, WINDOWED=window is not None,
        K_WORD=k_word, V_WORD=v_word, AHEAD=ahead,
        **_schedule(sizes, mx, room, once),
    )  # fmt: skip
    if splits > 1:
        block_s = next_power_of_2(splits)
        columns = min(sizes["BLOCK_V"], max(32, 4096 // block_s))  # of many parts few columns: their loads take time
        launch(
            _join_kernel, (tokens * q_heads, cdiv(v_head_dim, columns)), q,
            part, lse, out, out.stride(0), out.stride(1),
            Q_HEAD=q_heads, V_HEAD_DIM=v_head_dim, BLOCK_V=columns, SPLITS=splits, BLOCK_S=block_s, num_warps=4,
        )  # fmt: skip
    return out


def _worth_expanding(query_rows: int, key_rows: int, sizes: dict[str, Any], scaled: bool) -> bool:
    """Whether to dequantise q, K and V once, before attention, and not in every program that uses them.

    With at least as many rows of q as of keys, the copy of K is no larger than that of q, that of V than the output.
    """
    return not sizes["SPREAD"] and not scaled and key_rows <= query_rows


def _word(scale: Tensor | None) -> Any:
    """The type of one number that has all groups of a key and head; None where there is none, or not at each.

    In both layouts the groups of a key and head lie side by side, in dense buffers at a multiple of their number.
    """
    if scale is None:
        return None
    groups = scale.shape[-1]
    word = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}.get(groups)
    return word if word is not None and aligned(scale, groups) else None


def _bytes(scale: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if scale is None else raw(scale)


@functools.lru_cache
def _sizes(group: int, head_dim: int, v_head_dim: int, queries: int, mx: bool, room: int) -> dict[str, Any]:
    """The tile of a program: queries, heads, keys. ``queries`` is how many a sequence has, on average."""
    block_h = next_power_of_2(group)
    block_d, block_v = (max(BLOCK.value, next_power_of_2(d)) for d in (head_dim, v_head_dim))
    narrow, wide = sorted((block_d, block_v))
    most = 16384 // wide if mx or wide > 128 else 256
    wanted = min(next_power_of_2(queries) * block_h, most)
    # Spread tiles have a row for each query and group: only where that is about the 16 that a product needs anyway.
    spread = mx and wanted * (wide // BLOCK.value) <= 32
    least = cdiv(16 * BLOCK.value, narrow) if spread else 16
    sizes = dict(
        BLOCK_Q=max(wanted, least) // block_h or 1, BLOCK_H=block_h, BLOCK_N=64 if wide <= 256 and not spread else 32,
        BLOCK_D=block_d, BLOCK_V=block_v, SPREAD=spread,
    )  # fmt: skip
    while sizes["BLOCK_N"] > 16 and _need(sizes, mx, 1) > room:
        sizes["BLOCK_N"] //= 2
    return sizes


def _need(sizes: dict[str, Any], mx: bool, tiles: int) -> int:
    """About how much shared memory a program needs with so many tiles of K and V in flight, in bytes."""
    tile = sizes["BLOCK_N"] * (sizes["BLOCK_D"] + sizes["BLOCK_V"])
    dequantised = 2 * tile if mx and not sizes["SPREAD"] else 0
    queries = sizes["BLOCK_Q"] * sizes["BLOCK_H"] * (sizes["BLOCK_D"] + sizes["BLOCK_N"])
    return tiles * tile * (1 if mx else 2) + dequantised + 2 * queries


def _schedule(sizes: dict[str, Any], mx: bool, room: int, once: bool) -> dict[str, int]:
    """Warps and pipeline stages. A page is looked up before its rows are loaded, so two tiles in flight take five; with
    one tile in all there is nothing to overlap.

    Over MXFP8 the fastest of those timed on an H200. Where query rows are spread over groups, 64 accumulators a thread:
    that is one warp for 16 rows of 128, and one warp waits for no other. Where K and V are dequantised, four warps
    without a pipeline, which takes the registers.
    """
    stages = 5 if _need(sizes, mx, 2) <= room else 3
    rows = sizes["BLOCK_Q"] * sizes["BLOCK_H"]
    if sizes["SPREAD"]:
        accumulators = rows * (sizes["BLOCK_V"] // BLOCK.value) * sizes["BLOCK_V"]
        return dict(num_warps=max(1, min(4, accumulators // 2048)), num_stages=1 if once else stages)
    if mx:
        return dict(num_warps=4, num_stages=1)
    return dict(num_warps=8 if rows >= 128 else 4, num_stages=stages)


def _splits(programs: int, longest: int, spread: bool) -> int:
    """Parts of each sequence: enough programs to fill a GPU, each with enough keys to be worth its start.

    Programs of one warp start and end quickly: they are best where all of them run at once.
    """
    wanted, keys, most = (1024, 64, 128) if spread else (2048, 128, 32)
    return max(1, min(cdiv(wanted, programs), longest // keys, most))


@functools.cache
def _block_scaled(device: torch.device) -> bool:
    """Whether the GPU multiplies MXFP8 blocks itself: NVIDIA's from Blackwell on, AMD's from CDNA4 on."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.startswith("gfx950")
    # Before Triton 3.9 the product does not compile for the tensor memory of compute capability 10.
    return properties.major >= 12 or (properties.major == 10 and TRITON >= (3, 9))


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Realistic launches for a compiler without a GPU: (name, kernel, signature, constants)."""
    numbers = "seqs q_token_stride q_head_stride table_stride out_token_stride out_head_stride window"
    cases = []
    for name, mx, queries, page_size, options in (
        ("decode-bf16", False, 1, 128, dict()),
        ("decode-bf16-page16-window", False, 1, 16, dict(WINDOWED=True)),
        ("decode-mxfp8", True, 1, 128, dict()),
        ("decode-mxfp8-flat-page32", True, 1, 32, dict(INTERLEAVED=False, CAPPED=True, K_WORD=None, AHEAD=True)),
        ("extend-bf16", False, 512, 128, dict(SPLITS=1)),
        ("extend-mxfp8", True, 512, 128, dict(SPLITS=1)),
        ("extend-mxfp8-scaled", True, 512, 128, dict(SPLITS=1, SCALED=True)),
    ):
        data, scale = ("*fp8e4nv", "*u8") if mx else ("*bf16", "*bf16")
        signature = dict(q=data, k_cache=data, v_cache=data, q_scale=scale, k_scale=scale, v_scale=scale)
        signature |= dict.fromkeys(("page_table", "seq_lens", "query_start"), "*i32")
        signature |= dict(out="*bf16", part="*fp32", lse="*fp32") | dict.fromkeys(numbers.split(), "i32")
        signature |= dict(qk_scale="fp32", cap="fp32")
        constants = dict(
            Q_HEAD=32, HEAD=8, HEAD_DIM=128, V_HEAD_DIM=128, PAGE_SIZE=page_size, SPLITS=8, MX=mx, SCALED=False,
            EXPANDED=False, INTERLEAVED=mx, VARLEN=queries > 1, CAPPED=False, WINDOWED=False,
            K_WORD=tl.int32 if mx else None, V_WORD=tl.int32 if mx else None, AHEAD=False,
            **_sizes(4, 128, 128, queries, mx, 64 * 1024),
        )  # fmt: skip
        cases.append((name, _attend_kernel, signature, constants | options))
    signature = dict(x="*fp8e4nv", scale="*u8", page_table="*i32", seq_lens="*i32", out="*bf16")
    signature |= dict.fromkeys(("rows", "token_stride", "head_stride", "table_stride", "max_keys"), "i32")
    constants = dict(HEAD=8, HEAD_DIM=96, PAGE_SIZE=64, FACTOR=QUARTER.value, INTERLEAVED=True, TILE=32, BLOCK_D=128)
    cases.append(("expand", expand_kernel, signature, constants | dict(PAGED=True)))
    signature = dict(part="*fp32", lse="*fp32", out="*bf16", out_token_stride="i32", out_head_stride="i32")
    cases.append(("join", _join_kernel, signature, dict(Q_HEAD=32, V_HEAD_DIM=128, BLOCK_V=128, SPLITS=8, BLOCK_S=8)))
    return cases
