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
from torch import Tensor

from layoutcheck import (
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
from layoutcheck.kernels._launch import cdiv, launch, next_power_of_2, raw
from layoutcheck.kernels._mxfp8 import BLOCK
from layoutcheck.kernels._prologue import (
    CACHE,
    CONV,
    GAMMA,
    QKVR,
    SCALE,
    TRACK_ROWS,
    WEIGHT,
    WINDOW,
    conv_update_kernel,
    prologue_kernel,
)


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
    return (1, 4, 1) if tokens <= 128 else (4, 4, 2)


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
    heads, head_dim = k_cache.shape[1:]
    q_heads = dq // head_dim
    mxfp8 = k_cache.dtype == torch.float8_e4m3fn
    q = torch.empty(tokens, dq, dtype=torch.float8_e4m3fn if mxfp8 else torch.bfloat16, device=device)
    k = torch.empty(tokens, dkv, dtype=torch.bfloat16, device=device)
    v = torch.empty(tokens, dkv, dtype=torch.bfloat16, device=device)
    q_scale = None
    if mxfp8:
        q_scale = torch.empty(tokens, q_heads, head_dim // BLOCK.value, dtype=torch.float8_e8m0fnu, device=device)
    tile, q_tile, warps = _tiles(tokens)
    programs = cdiv(tokens, tile) * (cdiv(q_heads, q_tile) + 2 * heads)
    if programs:
        launch(
            prologue_kernel, (programs,), qkvr,
            qkvr, q_offset, k_offset, v_offset, k_weight, v_weight, q_gamma, k_gamma, k_conv, v_conv,
            cache_indices, cache_mask, track_indices, track_mask, cu_seqlens, seq_index, k_window, v_window,
            loc, k_cache, v_cache, *(None if t is None else raw(t) for t in (k_scale, v_scale)), q_factor,
            q, None if q_scale is None else raw(q_scale), k, v,
            tokens, eps, qkvr.stride(0), *k_conv.stride()[:2], *v_conv.stride()[:2], draft_tokens,
            Q_HEAD=q_heads, HEAD=heads, PAGE_SIZE=page_size if mxfp8 else None, WIDTH=width,
            TAPS=next_power_of_2(width), SILU=silu, RESIDUAL=residual, MXFP8=mxfp8, MODE=mode,
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
    heads, seqs, tile = k_cache.shape[1], cache_indices.shape[0], 2
    programs = cdiv(seqs, tile) * 2 * heads
    # Not in the first launch: its programs read the rows that this one replaces.
    if programs and qkvr.shape[0]:
        launch(
            conv_update_kernel, (programs,), qkvr,
            qkvr, k_offset, v_offset, k_conv, v_conv, cache_indices, cache_mask, track_indices, track_mask, track_rows,
            cu_seqlens, seqs, qkvr.stride(0), *k_conv.stride()[:2], *v_conv.stride()[:2],
            HEAD=heads, WIDTH=k_weight.shape[1], TILE=tile, num_warps=1,
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
    small, large = dict(TILE=1, Q_TILE=4), dict(TILE=4, Q_TILE=4)
    update = {n: shared[n] for n in ("qkvr", "k_conv", "v_conv", "cache_indices", "cache_mask")}
    return [
        case("decode", prologue_kernel, {**mxfp8, **track}, **sizes, **large, MXFP8=True, MODE="decode"),
        case("decode-small", prologue_kernel, mxfp8, **sizes, **small, MXFP8=True, MODE="decode"),
        case("decode-bf16", prologue_kernel, shared, **sizes, **large, MXFP8=False, MODE="decode"),
        case("verify", prologue_kernel, {**mxfp8, **window}, **sizes, **large, MXFP8=True, MODE="verify"),
        case("extend", prologue_kernel, {**mxfp8, **varlen}, **sizes, **large, MXFP8=True, MODE="extend"),
        case(
            "extend-update", conv_update_kernel, {**update, **track, "track_rows": "*i64", "cu_seqlens": "*i64"},
            HEAD=8, WIDTH=4, TILE=2,
        ),
    ]  # fmt: skip
