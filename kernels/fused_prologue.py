"""The attention prologue in one launch: RMSNorm of q and k, causal convolution of k and v, MXFP8, and the KV store.

What happens to a token, with the points at which a value is rounded to bf16:

- q: RMSNorm of each head, rounded; times the token's factor where one is given, rounded again.
- k: depthwise convolution over the width - 1 rows before the token and its own, SiLU, plus its own row, rounded;
  RMSNorm of each head, rounded.
- v: as k, without the norm.

Arithmetic between those points is fp32. In MXFP8 mode, which the dtype of the caches decides, q, k and v are quantised
from the bf16 values. The rows before a token come from its own sequence, then from the conv cache, and are zero where
the sequence has no history (mask off) or is padding (cache index -1); such history is not read at all.

The three entry points differ in where earlier rows lie and in what they leave behind: decode shifts the conv cache,
verify only reads it and saves the window after each token, extend sets it to the last rows of each sequence.
Source of the operation: sglang 0.5.23 ``kernels/ops/attention/inkling_attn_prologue.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    FP32,
    INT32,
    INT64,
    Index,
    Indptr,
    Layout,
    Writes,
    contract,
    forbids,
    needs,
    no_overlap,
    together,
    when,
)
from layoutcheck.kernels._launch import launch, raw
from layoutcheck.kernels._mxfp8 import BLOCK, abs_bits, inverse_scale, payload, scale_byte
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.rows import ROWS_THD

HEAD_DIM = tl.constexpr(128)

# A projection row is wider than the three slices in it; each slice is rows of heads that start at its own offset.
QKVR = Layout("prologue.qkvr", "token row -> token row", dtype=BF16, dense="row")
SLICE = ROWS_THD(dtype=BF16, head_dim=128, dense="head head_dim")
OUT = Layout(
    "prologue.out",
    "token channel(head head_dim) -> token head head_dim",
    dtype=(BF16, E4M3),
    head_dim=128,
    view="token channel",
)
Q_SCALE = MXFP8_SCALE_FLAT(slot="token", head_dim=128)
WEIGHT = Layout(
    "prologue.weight",
    "channel(head head_dim) tap -> head head_dim tap",
    dtype=BF16,
    head_dim=128,
    view="channel tap",
)(channel="dkv", tap="width")
CONV = Layout(
    "prologue.conv_cache",
    "pool tap channel(head head_dim) -> pool tap head head_dim",
    dtype=BF16,
    head_dim=128,
    view="pool tap channel",
    dense="head head_dim",
    fill=0,
)(channel="dkv", tap="width - 1")
WINDOW = Layout(
    "prologue.window",
    "seq draft tap channel(head head_dim) -> seq draft tap head head_dim",
    dtype=BF16,
    head_dim=128,
    view="seq draft tap channel",
)(channel="dkv", tap="width - 1", seq="window_seq", draft="draft_tokens")
# Without pages, which a bf16 cache may have of any size: only scales need whole pages.
CACHE = Layout("prologue.cache", "slot head head_dim -> slot head head_dim", dtype=(E4M3, BF16), head_dim=128, fill=0)(
    head="dkv / 128"
)
SCALE = MXFP8_SCALE_INTERLEAVED(head="dkv / 128", head_dim=128)
TRACK_ROWS = Layout("prologue.track_rows", "seq tap -> seq tap", dtype=INT64)(tap="width - 1")
GAMMA = Layout("prologue.gamma", "head_dim -> head_dim", dtype=BF16, head_dim=128)

slice_offset = SLICE.offset_fn("token", "head", "head_dim", name="prologue_slice_offset", strides=("token",))
out_offset = OUT.offset_fn("token", "head", "head_dim", name="prologue_out_offset")
q_scale_offset = Q_SCALE.offset_fn("slot", "head", "group", name="prologue_q_scale_offset")
weight_offset = WEIGHT.offset_fn("head", "head_dim", "tap", name="prologue_weight_offset")
conv_offset = CONV.offset_fn("pool", "tap", "head", "head_dim", name="prologue_conv_offset", strides=("pool", "tap"))
window_offset = WINDOW.offset_fn("seq", "draft", "tap", "head", "head_dim", name="prologue_window_offset")
cache_offset = CACHE.offset_fn("slot", "head", "head_dim", name="prologue_cache_offset")
scale_offset = SCALE.offset_fn("slot", "head", "group", name="prologue_scale_offset")
track_row_offset = TRACK_ROWS.offset_fn("seq", "tap", name="prologue_track_row_offset")


# --- on a tile of rows [row, head_dim] --------------------------------------------------------------------------------


@triton.jit
def _normed(x, gamma, eps):
    """RMSNorm of each fp32 row, rounded to bf16."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    weight = tl.load(gamma + tl.arange(0, HEAD_DIM)).to(tl.float32)
    return (x * inverse[:, None] * weight[None, :]).to(tl.bfloat16)


@triton.jit
def _quantised(x):
    """The e4m3 payload [row, head_dim] and the scale bytes [row, group]."""
    ROW: tl.constexpr = x.shape[0]
    blocks = tl.reshape(x, (ROW, HEAD_DIM // BLOCK, BLOCK))
    byte = scale_byte(tl.max(abs_bits(blocks), axis=2), False)
    values = payload(blocks, tl.expand_dims(inverse_scale(byte), 2))
    return tl.reshape(values, (ROW, HEAD_DIM)), byte.to(tl.uint8)


@triton.jit
def _earlier_rows(
    rows, conv, token, position, pool, head, live, token_stride, pool_stride, tap_stride,
    WIDTH: tl.constexpr, IN_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """The WIDTH - 1 rows before ``token``, oldest first, as stored in bf16; zero where there is no history.

    ``position`` rows of the token's sequence lie before it; what is older comes from slot ``pool`` of the conv cache,
    unless that is negative. Without ``IN_SEQUENCE`` every position is 0.
    """
    d = tl.arange(0, HEAD_DIM)[None, :]
    cached = live & (pool >= 0)
    pool = tl.maximum(pool, 0)
    earlier = ()
    for i in tl.static_range(WIDTH - 1):
        if IN_SEQUENCE:
            own = position + i >= WIDTH - 1
            tap = tl.where(own, 0, position + i)
            at = conv_offset(pool, tap, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
            row = tl.load(conv + at, cached & (position + i < WIDTH - 1), other=0.0)
            at = slice_offset(tl.where(own, token - (WIDTH - 1 - i), 0), head, d, TOKEN_STRIDE=token_stride)
            row = tl.where(own, tl.load(rows + at, live & own, other=0.0), row)
        else:
            at = conv_offset(pool, i, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
            row = tl.load(conv + at, cached, other=0.0)
        earlier = earlier + (row,)  # noqa: RUF005 - Triton knows no star in a tuple
    return earlier


@triton.jit
def _convolved(
    window, weight, head, WIDTH: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr
):
    """The convolution of a window of WIDTH rows, the newest last; fp32, not yet rounded."""
    d = tl.arange(0, HEAD_DIM)
    tap = tl.arange(0, TAPS)[None, :]
    # The taps of a channel are adjacent in memory: one wide load, then each tap is picked out of it.
    weights = tl.load(weight + weight_offset(head, d[:, None], tap, WIDTH=WIDTH), tap < WIDTH, other=0.0)
    weights = weights.to(tl.float32)
    x = window[WIDTH - 1].to(tl.float32)
    y = tl.zeros_like(x)
    for i in tl.static_range(WIDTH):
        one = tl.sum(tl.where(tap == i, weights, 0.0), axis=1)
        y += window[i].to(tl.float32) * one[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    if RESIDUAL:
        y += x
    return y


@triton.jit
def _q_tile(
    rows, gamma, factor, out, scale, token, head, tokens, token_stride, eps,
    Q_HEAD: tl.constexpr, MXFP8: tl.constexpr,
):  # fmt: skip
    """Rows of q, each of its own token and head: normed, scaled, quantised and stored."""
    d = tl.arange(0, HEAD_DIM)[None, :]
    live = (token < tokens) & (head < Q_HEAD)
    x = tl.load(rows + slice_offset(token, head, d, TOKEN_STRIDE=token_stride), live, other=0.0)
    y = _normed(x.to(tl.float32), gamma, eps)
    if factor is not None:
        y = (y.to(tl.float32) * tl.load(factor + token, live, other=0.0)).to(tl.bfloat16)
    at = out_offset(token, head, d, CHANNEL=Q_HEAD * HEAD_DIM)
    if MXFP8:
        values, byte = _quantised(y)
        group = tl.arange(0, HEAD_DIM // BLOCK)[None, :]
        tl.store(out + at, values, live)
        tl.store(scale + q_scale_offset(token, head, group, HEAD=Q_HEAD), byte, live)
    else:
        tl.store(out + at, y, live)


@triton.jit
def _kv_tile(
    rows, conv, weight, gamma, window, out, cache, scale,
    token, seq, position, pool, masked, track, slot, head, live,
    token_stride, pool_stride, tap_stride, draft_tokens, eps,
    HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    SILU: tl.constexpr, RESIDUAL: tl.constexpr, MXFP8: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Rows of k or v of one head: convolved, normed where ``gamma`` is given, quantised and stored; history kept."""
    d = tl.arange(0, HEAD_DIM)[None, :]
    x = tl.load(rows + slice_offset(token, head, d, TOKEN_STRIDE=token_stride), live, other=0.0)
    history = tl.where(masked, pool, -1)
    # Everything is loaded before anything is stored: the conv cache is shifted in place.
    earlier = _earlier_rows(
        rows, conv, token, position, history, head, live, token_stride, pool_stride, tap_stride, WIDTH, MODE != "decode"
    )
    window_rows = earlier + (x,)  # noqa: RUF005
    y = _convolved(window_rows, weight, head, WIDTH, TAPS, SILU, RESIDUAL).to(tl.bfloat16)

    kept = live & (pool >= 0)
    for i in tl.static_range(WIDTH - 1):
        if MODE == "decode":
            at = conv_offset(tl.maximum(pool, 0), i, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
            tl.store(conv + at, window_rows[i + 1], kept)
            if track is not None:
                at = conv_offset(tl.maximum(track, 0), i, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
                tl.store(conv + at, window_rows[i + 1], kept & (track >= 0))
        elif MODE == "verify":
            at = window_offset(seq, position, i, head, d, DKV=HEAD * HEAD_DIM, DRAFT_TOKENS=draft_tokens, WIDTH=WIDTH)
            tl.store(window + at, window_rows[i + 1], kept)

    if gamma is not None:
        y = _normed(y.to(tl.float32), gamma, eps)
    tl.store(out + out_offset(token, head, d, CHANNEL=HEAD * HEAD_DIM), y, live)
    stored = kept & (slot > 0)  # slot 0 is the sink of padded tokens, negative slots are padding
    at = cache_offset(tl.maximum(slot, 0), head, d, DKV=HEAD * HEAD_DIM)
    if MXFP8:
        values, byte = _quantised(y)
        group = tl.arange(0, HEAD_DIM // BLOCK)[None, :]
        tl.store(cache + at, values, stored)
        at = scale_offset(tl.maximum(slot, 0), head, group, DKV=HEAD * HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
        tl.store(scale + at, byte, stored)
    else:
        tl.store(cache + at, y, stored)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prologue_kernel(
    qkvr, q_offset, k_offset, v_offset, k_weight, v_weight, q_gamma, k_gamma,
    k_conv, v_conv, cache_indices, cache_mask, track_indices, track_mask, cu_seqlens, seq_index, k_window, v_window,
    loc, k_cache, v_cache, k_scale, v_scale, q_factor, q_out, q_scale, k_out, v_out,
    tokens, eps, token_stride, k_pool_stride, k_tap_stride, v_pool_stride, v_tap_stride, draft_tokens,
    Q_HEAD: tl.constexpr, HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    SILU: tl.constexpr, RESIDUAL: tl.constexpr, MXFP8: tl.constexpr, MODE: tl.constexpr,
    TILE: tl.constexpr, Q_TILE: tl.constexpr,
):  # fmt: skip
    # A program has TILE tokens and Q_TILE heads of q, or one head of k or v; those of the same tokens are neighbours.
    Q_PROGRAMS: tl.constexpr = (Q_HEAD + Q_TILE - 1) // Q_TILE
    program = tl.program_id(0) % (Q_PROGRAMS + 2 * HEAD)
    first = tl.program_id(0) // (Q_PROGRAMS + 2 * HEAD) * TILE
    if program < Q_PROGRAMS:
        row = tl.arange(0, TILE * Q_TILE)[:, None]
        _q_tile(
            qkvr + q_offset, q_gamma, q_factor, q_out, q_scale, first + row // Q_TILE, program * Q_TILE + row % Q_TILE,
            tokens, token_stride, eps, Q_HEAD, MXFP8,
        )  # fmt: skip
    else:
        token = first + tl.arange(0, TILE)[:, None]
        live = token < tokens
        slot = tl.load(loc + token, live, other=0)
        if MODE == "decode":
            seq = token
            position = 0
        elif MODE == "verify":
            seq = token // draft_tokens
            position = token % draft_tokens
        else:
            seq = tl.load(seq_index + token, live, other=0)
            position = token - tl.load(cu_seqlens + seq, live, other=0).to(tl.int32)
        pool = tl.load(cache_indices + seq, live, other=-1)
        masked = tl.load(cache_mask + seq, live, other=0) != 0
        track = None
        if track_mask is not None:
            tracked = tl.load(track_mask + token, live, other=0) != 0
            track = tl.load(track_indices + token, tracked, other=-1)
        if program < Q_PROGRAMS + HEAD:
            _kv_tile(
                qkvr + k_offset, k_conv, k_weight, k_gamma, k_window, k_out, k_cache, k_scale,
                token, seq, position, pool, masked, track, slot, program - Q_PROGRAMS, live,
                token_stride, k_pool_stride, k_tap_stride, draft_tokens, eps,
                HEAD, PAGE_SIZE, WIDTH, TAPS, SILU, RESIDUAL, MXFP8, MODE,
            )  # fmt: skip
        else:
            _kv_tile(
                qkvr + v_offset, v_conv, v_weight, None, v_window, v_out, v_cache, v_scale,
                token, seq, position, pool, masked, track, slot, program - Q_PROGRAMS - HEAD, live,
                token_stride, v_pool_stride, v_tap_stride, draft_tokens, eps,
                HEAD, PAGE_SIZE, WIDTH, TAPS, SILU, RESIDUAL, MXFP8, MODE,
            )  # fmt: skip


@triton.jit
def _conv_update_kernel(
    qkvr, k_offset, v_offset, k_conv, v_conv, cache_indices, cache_mask, track_indices, track_mask, track_rows,
    cu_seqlens, seqs, token_stride, k_pool_stride, k_tap_stride, v_pool_stride, v_tap_stride,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % (2 * HEAD)
    seq = tl.program_id(0) // (2 * HEAD) * TILE + tl.arange(0, TILE)[:, None]
    live = seq < seqs
    start = tl.load(cu_seqlens + seq, live, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + seq + 1, live, other=0).to(tl.int32)
    pool = tl.load(cache_indices + seq, live & (end > start), other=-1)
    masked = tl.load(cache_mask + seq, live, other=0) != 0
    track = None
    if track_mask is not None:
        tracked = tl.load(track_mask + seq, live, other=0) != 0
        track = tl.load(track_indices + seq, tracked, other=-1)
    if head < HEAD:
        _update_tile(
            qkvr + k_offset, k_conv, seq, start, end, pool, masked, track, track_rows, head, live,
            token_stride, k_pool_stride, k_tap_stride, WIDTH,
        )  # fmt: skip
    else:
        _update_tile(
            qkvr + v_offset, v_conv, seq, start, end, pool, masked, track, track_rows, head - HEAD, live,
            token_stride, v_pool_stride, v_tap_stride, WIDTH,
        )  # fmt: skip


@triton.jit
def _update_tile(
    rows, conv, seq, start, end, pool, masked, track, track_rows, head, live, token_stride, pool_stride, tap_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Set one head of the conv cache to the last rows of each sequence, and tracked slots to the rows asked for."""
    d = tl.arange(0, HEAD_DIM)[None, :]
    live &= pool >= 0
    history = tl.where(masked, pool, -1)
    last = _earlier_rows(
        rows, conv, end, end - start, history, head, live, token_stride, pool_stride, tap_stride, WIDTH, True
    )  # fmt: skip
    for i in tl.static_range(WIDTH - 1):
        at = conv_offset(tl.maximum(pool, 0), i, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
        tl.store(conv + at, last[i], live)
        if track is not None:
            wanted = live & (track >= 0)
            row = tl.load(track_rows + track_row_offset(seq, i, WIDTH=WIDTH), wanted, other=0)
            x = tl.load(rows + slice_offset(row, head, d, TOKEN_STRIDE=token_stride), wanted, other=0.0)
            at = conv_offset(tl.maximum(track, 0), i, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
            tl.store(conv + at, x, wanted)


# --- contracts --------------------------------------------------------------------------------------------------------


def _each(name: str, dim: str, *dtypes: Any) -> Layout:
    """One value for each token or sequence."""
    return Layout(name, f"{dim} -> {dim}", dtype=dtypes)


Qkvr = Annotated[Tensor, QKVR]
Weight = Annotated[Tensor, WEIGHT]
Gamma = Annotated[Tensor, GAMMA]
Conv = Annotated[Tensor, CONV]
ConvInPlace = Annotated[Tensor, CONV, Writes()]
Loc = Annotated[Tensor, _each("loc", "token", INT64), Index("slot", skip="<= 0", unique=True)]
Cache = Annotated[Tensor, CACHE, Writes(at="loc")]
Scale = Annotated[Tensor, SCALE, Writes(at="loc")]
Window = Annotated[Tensor, WINDOW, Writes()]
Factor = Annotated[Tensor, _each("q_factor", "token", FP32)]
TRACK = "track_mask and cache_indices >= 0"
TRACKED = Index("pool", skip="< 0", unique=True, apart_from="cache_indices", live=TRACK)
TokenPool = Annotated[Tensor, _each("cache_indices", "token", INT32, INT64), Index("pool", skip="== -1", unique=True)]
TokenMask = Annotated[Tensor, _each("mask", "token", torch.bool)]
TokenTrack = Annotated[Tensor, _each("track_indices", "token", INT64), TRACKED]
SeqPool = Annotated[Tensor, _each("cache_indices", "seq", INT32, INT64), Index("pool", skip="== -1", unique=True)]
SeqMask = Annotated[Tensor, _each("mask", "seq", torch.bool)]
CuSeqlens = Annotated[Tensor, _each("cu_seqlens", "bound", INT32, INT64)(bound="seq + 1"), Indptr("token")]
SeqIndex = Annotated[Tensor, _each("seq_index", "token", INT32, INT64), Index("seq", segment_of="cu_seqlens")]
TrackRows = Annotated[Tensor, TRACK_ROWS, Index("token", live=f"{TRACK} and track_indices >= 0")]
SeqTrack = Annotated[Tensor, _each("track_indices", "seq", INT64), TRACKED]

RULES = (
    "dq % 128 == 0",
    "dkv % 128 == 0",
    "width >= 2",
    "0 <= q_offset",
    "0 <= k_offset",
    "0 <= v_offset",
    "q_offset + dq <= row",
    "k_offset + dkv <= row",
    "v_offset + dkv <= row",
    when("dtype(k_cache) == e4m3", "dtype(v_cache) == e4m3", needs("k_scale", "v_scale")),
    when("dtype(k_cache) == bf16", "dtype(v_cache) == bf16", forbids("k_scale", "v_scale")),
    no_overlap("k_cache", "v_cache"),
)


class Prologue(NamedTuple):
    """What attention reads: ``q`` (token, dq), ``k`` and ``v`` (token, dkv), ``q_scale`` (token, dq / 128, 4) or None.

    q is e4m3 with E8M0 scales over an MXFP8 cache, bf16 otherwise; k (normed) and v (convolved) are bf16.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None


def _tiles(tokens: int) -> tuple[int, int, int]:
    """Tokens of a program, heads of q in it, and its warps: few tokens need many programs, many need few loads each."""
    if tokens <= 128:
        return 1, 4, 1
    if tokens <= 1024:
        return 4, 2, 2
    return 8, 4, 4


def _run(
    mode: str, qkvr: Tensor, k_weight: Tensor, v_weight: Tensor, q_gamma: Tensor, k_gamma: Tensor,
    k_conv: Tensor, v_conv: Tensor, cache_indices: Tensor, cache_mask: Tensor,
    loc: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dq: int, q_offset: int, k_offset: int, v_offset: int, page_size: int, eps: float, silu: bool, residual: bool,
    q_factor: Tensor | None, *, track_indices: Tensor | None = None, track_mask: Tensor | None = None,
    k_window: Tensor | None = None, v_window: Tensor | None = None, draft_tokens: int = 1,
    cu_seqlens: Tensor | None = None, seq_index: Tensor | None = None,
) -> Prologue:  # fmt: skip
    """Allocate the results and start the kernel."""
    tokens, (dkv, width), device = qkvr.shape[0], k_weight.shape, qkvr.device
    mxfp8 = k_cache.dtype == torch.float8_e4m3fn
    q = torch.empty(tokens, dq, dtype=torch.float8_e4m3fn if mxfp8 else torch.bfloat16, device=device)
    k = torch.empty(tokens, dkv, dtype=torch.bfloat16, device=device)
    v = torch.empty(tokens, dkv, dtype=torch.bfloat16, device=device)
    q_scale = torch.empty(tokens, dq // 128, 4, dtype=torch.float8_e8m0fnu, device=device) if mxfp8 else None
    tile, q_tile, warps = _tiles(tokens)
    programs = triton.cdiv(tokens, tile) * (triton.cdiv(dq // 128, q_tile) + 2 * (dkv // 128))
    if programs:
        launch(
            _prologue_kernel, (programs,), qkvr,
            qkvr, q_offset, k_offset, v_offset, k_weight, v_weight, q_gamma, k_gamma, k_conv, v_conv,
            cache_indices, cache_mask, track_indices, track_mask, cu_seqlens, seq_index, k_window, v_window,
            loc, k_cache, v_cache, *(None if t is None else raw(t) for t in (k_scale, v_scale)), q_factor,
            q, None if q_scale is None else raw(q_scale), k, v,
            tokens, eps, qkvr.stride(0), *k_conv.stride()[:2], *v_conv.stride()[:2], draft_tokens,
            Q_HEAD=dq // 128, HEAD=dkv // 128, PAGE_SIZE=page_size if mxfp8 else None, WIDTH=width,
            TAPS=triton.next_power_of_2(width), SILU=silu, RESIDUAL=residual, MXFP8=mxfp8, MODE=mode,
            TILE=tile, Q_TILE=q_tile, num_warps=warps,
        )  # fmt: skip
    return Prologue(q, k, v, q_scale)


@contract(*RULES, together("track_indices", "track_mask"), same_device=True)
def fused_prologue_decode(
    qkvr: Qkvr,
    k_weight: Weight,
    v_weight: Weight,
    q_gamma: Gamma,
    k_gamma: Gamma,
    k_conv: ConvInPlace,
    v_conv: ConvInPlace,
    cache_indices: TokenPool,
    cache_mask: TokenMask,
    loc: Loc,
    k_cache: Cache,
    v_cache: Cache,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    *,
    dq: int,
    q_offset: int,
    k_offset: int,
    v_offset: int,
    page_size: int = 128,
    eps: float = 1e-6,
    silu: bool = False,
    residual: bool = True,
    q_factor: Factor | None = None,
    track_indices: TokenTrack | None = None,
    track_mask: TokenMask | None = None,
) -> Prologue:
    """The prologue of one token per sequence; one launch.

    - ``qkvr`` (token, row) bf16: projection rows, packed, any pitch. q is ``dq`` elements from element ``q_offset`` of
      a row, k and v are dkv each from ``k_offset`` and ``v_offset``. head_dim is 128; dq and dkv are multiples of it.
    - ``k_weight``, ``v_weight`` (dkv, width) bf16: taps of each channel, the last for the token itself; width >= 2.
    - ``q_gamma``, ``k_gamma`` (128,) bf16: weights of the norms, the same for all heads; ``eps`` is added to the mean
      of the squares.
    - ``k_conv``, ``v_conv`` (pool, width - 1, dkv) bf16, channels packed: the raw rows before each token, oldest
      first. Slot ``cache_indices`` (token,) int32 or int64 is read where ``cache_mask`` (token,) bool is set, taken
      for zero where not, and shifted by one row in place. -1 marks padding: results are computed without history, and
      neither the conv cache nor the KV cache is written.
    - ``loc`` (token,) int64: slots of the KV cache; 0 and negative slots are skipped.
    - ``k_cache``, ``v_cache`` (slot, dkv / 128, 128), dense: e4m3, with both ``k_scale`` and ``v_scale`` (slot /
      page_size, dkv / 128, 32, page_size / 32, 4) E8M0 or uint8, dense, ``mxfp8.interleaved``; or bf16 without them,
      and then ``page_size`` (tokens, a multiple of 32) does not matter.
    - ``silu``, ``residual``: what follows the convolution. ``q_factor`` (token,) fp32: multiplies the normed q.
    - ``track_indices`` (token,) int64, ``track_mask`` (token,) bool: where set, the shifted rows are copied to that
      slot of the conv cache too. Negative slots are skipped.

    Returns :class:`Prologue`. Two tokens must not write one slot of either cache. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    return _run(
        "decode", qkvr, k_weight, v_weight, q_gamma, k_gamma, k_conv, v_conv, cache_indices, cache_mask,
        loc, k_cache, v_cache, k_scale, v_scale, dq, q_offset, k_offset, v_offset, page_size, eps, silu, residual,
        q_factor, track_indices=track_indices, track_mask=track_mask,
    )  # fmt: skip


@contract(
    *RULES, "token == seq * draft_tokens", "draft_tokens >= 1", "window_seq >= seq",
    no_overlap("k_window", "v_window"), same_device=True,
)  # fmt: skip
def fused_prologue_verify(
    qkvr: Qkvr,
    k_weight: Weight,
    v_weight: Weight,
    q_gamma: Gamma,
    k_gamma: Gamma,
    k_conv: Conv,
    v_conv: Conv,
    cache_indices: SeqPool,
    cache_mask: SeqMask,
    k_window: Window,
    v_window: Window,
    loc: Loc,
    k_cache: Cache,
    v_cache: Cache,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    *,
    draft_tokens: int,
    dq: int,
    q_offset: int,
    k_offset: int,
    v_offset: int,
    page_size: int = 128,
    eps: float = 1e-6,
    silu: bool = False,
    residual: bool = True,
    q_factor: Factor | None = None,
) -> Prologue:
    """The prologue of ``draft_tokens`` tokens per sequence, of which later only some are kept; one launch.

    As :func:`fused_prologue_decode`, but for:

    - token = seq * draft_tokens + position. ``cache_indices`` and ``cache_mask`` are (seq,). Earlier rows come from
      the same sequence first; the conv cache, which holds the rows before its first token, is only read.
    - ``k_window``, ``v_window`` (seq or more, draft_tokens, width - 1, dkv) bf16, dense: receive the raw rows that a
      conv cache holds after each token, zero where there is no history. Those of padding (index -1) are not written.

    Returns :class:`Prologue`. Two tokens must not write one slot of the KV cache. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    return _run(
        "verify", qkvr, k_weight, v_weight, q_gamma, k_gamma, k_conv, v_conv, cache_indices, cache_mask,
        loc, k_cache, v_cache, k_scale, v_scale, dq, q_offset, k_offset, v_offset, page_size, eps, silu, residual,
        q_factor, k_window=k_window, v_window=v_window, draft_tokens=draft_tokens,
    )  # fmt: skip


@contract(*RULES, together("track_indices", "track_mask", "track_rows"), same_device=True)
def fused_prologue_extend(
    qkvr: Qkvr,
    k_weight: Weight,
    v_weight: Weight,
    q_gamma: Gamma,
    k_gamma: Gamma,
    k_conv: ConvInPlace,
    v_conv: ConvInPlace,
    cache_indices: SeqPool,
    cache_mask: SeqMask,
    cu_seqlens: CuSeqlens,
    seq_index: SeqIndex,
    loc: Loc,
    k_cache: Cache,
    v_cache: Cache,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    *,
    dq: int,
    q_offset: int,
    k_offset: int,
    v_offset: int,
    page_size: int = 128,
    eps: float = 1e-6,
    silu: bool = False,
    residual: bool = True,
    q_factor: Factor | None = None,
    track_indices: SeqTrack | None = None,
    track_mask: SeqMask | None = None,
    track_rows: TrackRows | None = None,
) -> Prologue:
    """The prologue of sequences of any lengths; one launch, and a small one that updates the conv cache.

    As :func:`fused_prologue_decode`, but for:

    - ``cu_seqlens`` (seq + 1,) int32 or int64: the tokens of sequence s are cu_seqlens[s] to cu_seqlens[s + 1]; there
      may be none. ``seq_index`` (token,) int32 or int64: the sequence in which each token lies.
    - ``cache_indices`` and ``cache_mask`` are (seq,). Earlier rows come from the same sequence first, then from the
      conv cache, which afterwards holds the last width - 1 rows of each sequence, its history counted.
    - ``track_indices`` (seq,) int64, ``track_mask`` (seq,) bool, ``track_rows`` (seq, width - 1) int64: where set,
      these rows of qkvr are copied to that slot of the conv cache too. Negative slots, padding and empty sequences are
      skipped.

    Returns :class:`Prologue`. Two tokens or sequences must not write one slot of either cache. Raises
    :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    result = _run(
        "extend", qkvr, k_weight, v_weight, q_gamma, k_gamma, k_conv, v_conv, cache_indices, cache_mask,
        loc, k_cache, v_cache, k_scale, v_scale, dq, q_offset, k_offset, v_offset, page_size, eps, silu, residual,
        q_factor, cu_seqlens=cu_seqlens, seq_index=seq_index,
    )  # fmt: skip
    (dkv, width), seqs, tile = k_weight.shape, cache_indices.shape[0], 2
    programs = triton.cdiv(seqs, tile) * 2 * (dkv // 128)
    # Not in the first launch: its programs read the rows that this one replaces.
    if programs and qkvr.shape[0]:
        launch(
            _conv_update_kernel, (programs,), qkvr,
            qkvr, k_offset, v_offset, k_conv, v_conv, cache_indices, cache_mask, track_indices, track_mask, track_rows,
            cu_seqlens, seqs, qkvr.stride(0), *k_conv.stride()[:2], *v_conv.stride()[:2],
            HEAD=dkv // 128, WIDTH=width, TILE=tile, num_warps=1,
        )  # fmt: skip
    return result


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constexprs) of launches as they occur, for compiling without a GPU."""

    def case(name: str, kernel: Any, pointers: dict[str, str], **constexprs: Any) -> tuple[str, Any, Any, Any]:
        optional = ("track_", "cu_", "seq_index", "k_window", "v_window", "k_scale", "v_scale", "q_factor", "q_scale")
        every = kernel.arg_names
        constexprs |= {n: None for n in every if n.startswith(optional) and n not in pointers}
        signature = {
            n: "constexpr" if n in constexprs else pointers.get(n, "fp32" if n == "eps" else "i32") for n in every
        }
        return name, kernel, signature, constexprs

    rows = ("qkvr", "k_weight", "v_weight", "q_gamma", "k_gamma", "k_conv", "v_conv", "q_out", "k_out", "v_out")
    bf16 = dict.fromkeys((*rows, "k_cache", "v_cache"), "*bf16")
    shared = {**bf16, "cache_indices": "*i32", "cache_mask": "*i1", "loc": "*i64"}
    mxfp8 = {
        **shared, **dict.fromkeys(("k_cache", "v_cache", "q_out"), "*fp8e4nv"),
        **dict.fromkeys(("k_scale", "v_scale", "q_scale"), "*u8"), "q_factor": "*fp32",
    }  # fmt: skip
    track = {"track_indices": "*i64", "track_mask": "*i1"}
    window = {"k_window": "*bf16", "v_window": "*bf16"}
    varlen = {"cu_seqlens": "*i64", "seq_index": "*i32"}
    sizes = dict(Q_HEAD=32, HEAD=8, PAGE_SIZE=128, WIDTH=4, TAPS=4, SILU=True, RESIDUAL=True)
    small, large = dict(TILE=1, Q_TILE=4), dict(TILE=8, Q_TILE=4)
    update = {n: shared[n] for n in ("qkvr", "k_conv", "v_conv", "cache_indices", "cache_mask")}
    return [
        case("decode", _prologue_kernel, {**mxfp8, **track}, **sizes, **large, MXFP8=True, MODE="decode"),
        case("decode-small", _prologue_kernel, mxfp8, **sizes, **small, MXFP8=True, MODE="decode"),
        case("decode-bf16", _prologue_kernel, shared, **sizes, **large, MXFP8=False, MODE="decode"),
        case("verify", _prologue_kernel, {**mxfp8, **window}, **sizes, **large, MXFP8=True, MODE="verify"),
        case("extend", _prologue_kernel, {**mxfp8, **varlen}, **sizes, **large, MXFP8=True, MODE="extend"),
        case(
            "extend-update", _conv_update_kernel, {**update, **track, "track_rows": "*i64", "cu_seqlens": "*i64"},
            HEAD=8, WIDTH=4, TILE=2,
        ),
    ]  # fmt: skip
