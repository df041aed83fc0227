"""The layouts of the attention prologue, and its kernels; what they compute is said in ``fused_prologue``."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutcheck import BF16, E4M3, INT64, Layout
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
    WIDTH: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The WIDTH - 1 rows before ``token``, oldest first, as stored in bf16; zero where there is no history.

    ``position`` rows of the token's sequence lie before it; what is older comes from slot ``pool`` of the conv cache,
    unless that is negative. In decode every position is 0.
    """
    d = tl.arange(0, HEAD_DIM)[None, :]
    cached = live & (pool >= 0)
    pool = tl.maximum(pool, 0)
    at_start = True
    if MODE == "extend":  # most tiles need nothing of the conv cache
        at_start = tl.min(position) < WIDTH - 1
    earlier = ()
    for i in tl.static_range(WIDTH - 1):
        if MODE != "decode":
            own = position + i >= WIDTH - 1
            at = slice_offset(tl.where(own, token - (WIDTH - 1 - i), 0), head, d, TOKEN_STRIDE=token_stride)
            row = tl.load(rows + at, live & own, other=0.0)
            if at_start:
                tap = tl.where(own, 0, position + i)
                at = conv_offset(pool, tap, head, d, POOL_STRIDE=pool_stride, TAP_STRIDE=tap_stride)
                row = tl.where(own, row, tl.load(conv + at, cached & (position + i < WIDTH - 1), other=0.0))
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
        rows, conv, token, position, history, head, live, token_stride, pool_stride, tap_stride, WIDTH, MODE
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
def prologue_kernel(
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
def conv_update_kernel(
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
        rows, conv, end, end - start, history, head, live, token_stride, pool_stride, tap_stride, WIDTH, "extend"
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
