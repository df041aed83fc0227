"""DeepSeek-V4's unified KV pool: rows quantised into it, and attention over the slots that each token lists.

A slot holds one latent row, which is key and value at once. An FP8 pool has one fp32 scale per page and group of 64
elements, so that an element is worth its code times the scale of its page's group. With page_size 1, as in sglang, a
page is a slot. Every offset is computed by a function that a layout generated.

Source of the layouts and of what attention computes: sglang 0.5.23 ``srt/mem_cache/deepseek_v4_memory_pool.py``,
``kernels/ops/attention/dsv4/unified_kv_kernels``. Pages larger than a slot are not sglang's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    E4M3FNUZ,
    FP16,
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
    when,
)
from layoutcheck.kernels._launch import aligned, cdiv, interpreted, launch, next_power_of_2
from layoutcheck.kernels._unified_kv import (
    FEW_BLOCKS,
    GROUP,
    LOG2E,
    POOL,
    QUERY,
    SCALE,
    attend_few_kernel,
    lse_offset,
    out_offset,
    part_of_list,
    partial_offset,
    query_offset,
    slot_offset,
    slot_scale_offset,
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
new_row_offset = NEW_ROWS.offset_fn("entry", "token", "dim", name="new_row_offset", strides=("entry", "token"))
page_offset = POOL.offset_fn("page", "token", "dim", name="page_offset")
page_scale_offset = SCALE.offset_fn("page", "group", name="page_scale_offset", strides=("page",))


# --- quantise and store -----------------------------------------------------------------------------------------------


@triton.jit
def _new_rows(
    rows, entry, given, token, d, entry_stride, token_stride, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """fp32 rows [entry, token, group, 64]; zeros beyond the page and the row."""
    inside = given & (token < PAGE_SIZE) & (d < DIM)
    x = tl.load(
        rows + new_row_offset(entry, token, d, ENTRY_STRIDE=entry_stride, TOKEN_STRIDE=token_stride), inside, other=0.0
    )
    return tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1], x.shape[2] // GROUP, GROUP))


@triton.jit
def _amax(x):
    """The largest finite magnitude [entry, group]; 0 for NaN alone. An infinity counts as the largest finite value."""
    amax = tl.max(tl.max(tl.abs(x), axis=3), axis=1)  # of a NaN and a number it takes the number
    return tl.where(amax != amax, 0.0, tl.minimum(amax, 3.4028234663852886e38))


@triton.jit
def _store_rows(
    kv, x, inverse, page, live, token, d, LARGEST: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    y = tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
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
    row, at = entry[:, None, None], page[:, None, None]
    given, take = row < entries, live[:, None, None]  # loads do not wait for the page
    token = tl.arange(0, TOKENS)[None, :, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
    group = tl.program_id(1) * (BLOCK_D // GROUP) + tl.arange(0, BLOCK_D // GROUP)[None, :]

    # The first tokens stay in registers; those of pages with more are read again.
    x = _new_rows(rows, row, given, token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
    amax = _amax(x)
    for start in range(TOKENS, PAGE_SIZE, TOKENS):
        more = _new_rows(rows, row, given, start + token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
        amax = tl.maximum(amax, _amax(more))
    # 2^-126, the smallest normal number, keeps the inverse finite.
    scale = tl.maximum(tl.div_rn(amax, LARGEST), 1.1754943508222875e-38)
    inverse = tl.div_rn(1.0, scale)[:, None, :, None]
    _store_rows(kv, x, inverse, at, take, token, d, LARGEST, DIM, PAGE_SIZE)
    for start in range(TOKENS, PAGE_SIZE, TOKENS):
        more = _new_rows(rows, row, given, start + token, d, entry_stride, token_stride, DIM, PAGE_SIZE)
        _store_rows(kv, more, inverse, at, take, start + token, d, LARGEST, DIM, PAGE_SIZE)
    tl.store(
        kv_scale + page_scale_offset(page[:, None], group, PAGE_STRIDE=page_stride),
        scale,
        live[:, None] & (group < DIM // GROUP),
    )


@lru_cache
def _quantize_blocks(dim: int, page_size: int) -> dict[str, int]:
    """A tile of 4,096 elements, or 8,192 where a page has many rows: whole groups of at most 128 rows."""
    tokens = min(next_power_of_2(page_size), 128)
    block_d = min(next_power_of_2(dim), max(64, 8192 // tokens), 1024)
    entries = max(1, 4096 // (tokens * block_d))
    return dict(ENTRIES=entries, TOKENS=tokens, BLOCK_D=block_d, num_warps=4 if tokens * block_d <= 4096 else 8)


@contract("dim % 64 == 0", "page_size > 0", same_device=True)
def quantize_store_unified_kv(
    rows: Annotated[Tensor, NEW_ROWS],
    loc: Annotated[Tensor, Layout("loc", "entry -> entry", dtype=INT64, dense=""), Index("page", skip="<= 0")],
    kv: Annotated[Tensor, POOL(dtype=(E4M3, E4M3FNUZ)), Writes(at="loc")],
    kv_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    *,
    page_size: int = 1,
) -> None:
    """Quantise whole pages of rows to FP8 and store them, with one scale per page and group of 64; one launch.

    - ``rows`` (entry * page_size, dim): bf16, fp16 or fp32; dim is packed, rows may lie apart.
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
    if entries == 0 or dim == 0:
        return
    blocks = _quantize_blocks(dim, page_size)
    launch(
        _quantize_kernel, (cdiv(entries, blocks["ENTRIES"]), cdiv(dim, blocks["BLOCK_D"])), kv,
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
def _listed_codes(kv, slot, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """FP8 rows by their groups [slot, group, 64]; zeros where a slot is not live.

    In this shape the lanes of a warp go down the slots, and dequantised rows reach shared memory without conflicts.
    """
    d = tl.arange(0, BLOCK_D // GROUP)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    return tl.load(kv + slot_offset(slot[:, None, None], d, DIM=DIM), live[:, None, None] & (d < DIM), other=0.0)


@triton.jit
def _listed_scales(
    kv_scale, slot, live, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Scales [slot, group] of those rows."""
    group = tl.arange(0, BLOCK_D // GROUP)[None, :]
    at = slot_scale_offset(slot[:, None], group, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE)
    return tl.load(kv_scale + at, live[:, None] & (group < DIM // GROUP), other=0.0)


@triton.jit
def _dequantized(codes, scale, dtype: tl.constexpr):
    """Rows [slot, dim] of codes [slot, group, 64] and scales [slot, group]."""
    rows = (codes.to(tl.float32) * scale[:, :, None]).to(dtype)
    return tl.reshape(rows, (codes.shape[0], codes.shape[1] * GROUP))


@triton.jit
def _swapped_product(a, b, acc):
    """acc + a @ b by its transpose, which makes b the left operand."""
    return tl.trans(tl.dot(tl.trans(b), tl.trans(a), tl.trans(acc)))


@triton.jit
def _weigh(logits, m, l, APART: tl.constexpr):  # noqa: E741
    """Weights of a tile [head, slot], the factor of what came before, and the new maxima and sums of rows.

    ``APART`` keeps a sum for each slot of a tile, to be added up at the end: no warp waits for others.
    """
    new = tl.maximum(m, tl.max(logits, axis=1))
    p = tl.exp2(logits - new[:, None])
    correction = tl.exp2(m - new)
    l = l * correction[:, None] + p if APART else l * correction + tl.sum(p, axis=1)  # noqa: E741
    return p, correction, new, l


@triton.jit
def _attend_kernel(
    q, kv, kv_scale, indices, indptr, sink, out, lse, score_scale, splits, q_token_stride, q_head_stride,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token over one part of its list: the output, or with ``lse`` a part for the reduction.

    Logits are base 2: ``score_scale`` has the factor log2(e). With ``STAGES`` tiles are loaded ahead through shared
    memory, two with 5 of them since slots come first. With 0, for few heads over FP8, one tile is, into registers.
    """
    HEAD_BLOCKS: tl.constexpr = (HEAD + BLOCK_H - 1) // BLOCK_H
    token, split = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(1)
    head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (head < HEAD)[:, None] & (d < DIM)[None, :]
    at_query = query_offset(token, head[:, None], d[None, :], TOKEN_STRIDE=q_token_stride, HEAD_STRIDE=q_head_stride)
    queries = tl.load(q + at_query, inside, other=0.0)
    begin, end = part_of_list(indptr, token, split, splits, BLOCK_N)

    # The sink is one more logit, whose value is zero: it starts the maximum m and the sum l. Without one m is -inf, so
    # that the first tile's correction 2^(m - new) clears l, and an empty list ends as 0 / 1.
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    if sink is not None and lse is None:
        m = tl.load(sink + head, head < HEAD, other=0.0) * LOG2E
    n = tl.arange(0, BLOCK_N)
    APART: tl.constexpr = STAGES == 0  # rows of 16 bits would leave no registers for it
    if APART:
        l = tl.broadcast_to(tl.where(n == 0, 1.0, 0.0)[None, :], (BLOCK_H, BLOCK_N))  # noqa: E741 - as in the literature
    else:
        l = tl.full((BLOCK_H,), 1.0, tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    nothing = (tl.zeros((BLOCK_H, 16), q.dtype.element_ty), tl.zeros((16, BLOCK_N), q.dtype.element_ty))
    if STAGES > 0:
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            live = start + n < end
            slot = tl.load(indices + start + n, live, other=0)
            if kv_scale is None:
                rows = _listed_rows(kv, slot, live, DIM, BLOCK_D)
            else:
                codes = _listed_codes(kv, slot, live, DIM, BLOCK_D)
                scale = _listed_scales(kv_scale, slot, live, DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_D)
                rows = _dequantized(codes, scale, q.dtype.element_ty)
            logits = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
            # Triton gives a product that it sees to lead to another all warps along the rows. Where they are more than
            # the rows need, both halves of them would compute all of it. In a branch it does not see that; a product of
            # nothing, which it does see, then brings a row's logits together in one warp, for its maximum.
            if start < end:
                logits = tl.dot(queries, tl.trans(rows))
            logits = tl.dot(nothing[0], nothing[1], logits) * score_scale
            p, correction, m, l = _weigh(tl.where(live[None, :], logits, float("-inf")), m, l, APART)  # noqa: E741
            acc = tl.dot(p.to(q.dtype.element_ty), rows, acc * correction[:, None])
    else:
        slot = tl.load(indices + begin + n, begin + n < end, other=0)
        codes = _listed_codes(kv, slot, begin + n < end, DIM, BLOCK_D)
        scale = _listed_scales(kv_scale, slot, begin + n < end, DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_D)
        rows = _dequantized(codes, scale, q.dtype.element_ty)
        slot = tl.load(indices + begin + BLOCK_N + n, begin + n < end - BLOCK_N, other=0)
        for start in range(begin, end, BLOCK_N):
            at = start + n
            # While this tile is used, the rows of the next and the slots of the one after it are on their way.
            codes = _listed_codes(kv, slot, at < end - BLOCK_N, DIM, BLOCK_D)
            scale = _listed_scales(kv_scale, slot, at < end - BLOCK_N, DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_D)
            slot = tl.load(indices + 2 * BLOCK_N + at, at < end - 2 * BLOCK_N, other=0)
            logits = _swapped_product(queries, tl.trans(rows), tl.zeros((BLOCK_H, BLOCK_N), tl.float32)) * score_scale
            p, correction, m, l = _weigh(tl.where((at < end)[None, :], logits, float("-inf")), m, l, APART)  # noqa: E741
            acc = _swapped_product(p.to(q.dtype.element_ty), rows, acc * correction[:, None])
            # Dequantised here, not where it is used: Triton puts a left operand that the loop carries into shared
            # memory for both products, and one computed beside them into registers, which it then lacks.
            rows = _dequantized(codes, scale, q.dtype.element_ty)

    if APART:
        l = tl.sum(l, axis=1)  # noqa: E741
    acc = acc / l[:, None]
    if lse is None:
        at_out = out_offset(token, head[:, None], d[None, :], HEAD=HEAD, DIM=DIM)
        tl.store(out + at_out, acc.to(out.dtype.element_ty), inside)
    else:
        part = m + tl.log2(l)  # -inf for an empty part, whose accumulator the reduction does not read
        at_out = partial_offset(token, split, head[:, None], d[None, :], SPLIT=splits, HEAD=HEAD, DIM=DIM)
        tl.store(out + at_out, acc, inside & (part != float("-inf"))[:, None])
        tl.store(lse + lse_offset(token, split, head, SPLIT=splits, HEAD=HEAD), part, head < HEAD)


@triton.jit
def _reduce_kernel(
    partial, lse, sink, out, splits,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one token and head, each weighted by 2^lse, and the sink.

    ``EARLY``: launched while the kernel that writes the parts still runs.
    """
    token, head = tl.program_id(0) // HEAD, tl.program_id(0) % HEAD
    d = tl.arange(0, BLOCK_D)
    # As in the attention kernel, the sink or else nothing starts the maximum and the sum.
    m = tl.full((), float("-inf"), tl.float32)
    if sink is not None:
        m = tl.load(sink + head) * LOG2E
    l = tl.full((), 1.0, tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = lse_offset(token, split, head, SPLIT=splits, HEAD=HEAD)
        logit = tl.load(lse + at, split < splits, other=float("-inf"))
        at = partial_offset(token, split[:, None], head, d[None, :], SPLIT=splits, HEAD=HEAD, DIM=DIM)
        part = tl.load(partial + at, (logit != float("-inf"))[:, None] & (d < DIM)[None, :], other=0.0)
        new = tl.maximum(m, tl.max(logit, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is NaN
        weight = tl.exp2(logit - base)
        correction = tl.exp2(m - base)
        l = l * correction + tl.sum(weight, axis=0)  # noqa: E741
        acc = acc * correction + tl.sum(part * weight[:, None], axis=0)
        m = new
    acc = acc / tl.where(l == 0.0, 1.0, l)  # 0 where every part is empty and there is no sink
    tl.store(out + out_offset(token, head, d, HEAD=HEAD, DIM=DIM), acc.to(out.dtype.element_ty), d < DIM)


class _Device(NamedTuple):
    processors: int
    shared_memory: int  # bytes that one program can have
    few: bool  # whether few heads over FP8 have the kernel made for them
    early: bool  # whether the reduction is launched early (programmatic dependent launch)


@lru_cache
def _device(device: torch.device) -> _Device:
    """What sizes depend on. Without a GPU that of an H200."""
    if device.type == "cpu":
        return _Device(132, 232_448, True, False)
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if nvidia else (0, 0)
    # e4m3 are converted by an instruction of NVIDIA's.
    return _Device(
        found["multiprocessor_count"], found["max_shared_mem"], few=capability >= (8, 9),
        early=capability >= (9, 0) and not interpreted(_reduce_kernel),
    )  # fmt: skip


@lru_cache
def _attend_blocks(heads: int, dim: int, fp8: bool, room: int) -> dict[str, int]:
    """Tile sizes, warps and stages: the fastest of those timed on an H200 that fit into ``room`` bytes.

    Hopper's tensor cores want 64 rows on the left. Over FP8, fewer heads than that go to the right, where 8 columns
    are enough.
    """
    block_d = next_power_of_2(dim)
    block_h = max(16, min(64, next_power_of_2(heads), 32_768 // block_d))
    if fp8 and block_h < 64:
        warps, stages = 4 if block_h * block_d <= 8192 else 8, 0
        block_n = 32  # dequantised rows take the registers that a larger tile would need
        while block_n > 16 and _need(block_h, block_n, block_d, fp8, stages) > room:
            block_n //= 2
    else:
        warps = 4 if block_h * block_d <= 16_384 else 8
        block_n = 64 if block_h == 64 else max(16, min(128, 16_384 // block_d))
        while block_n > 16 and _need(block_h, block_n, block_d, fp8, 3) > room:
            block_n //= 2
        at_once = {s: room // _need(block_h, block_n, block_d, fp8, s) for s in (5, 3)}
        stages = max(at_once, key=lambda s: (min(at_once[s], 2), s))  # two programs rather than two tiles ahead
        if not at_once[stages]:
            if block_h > 16:
                return _attend_blocks(block_h // 2, dim, fp8, room)
            stages = 1
    return dict(
        BLOCK_H=block_h, BLOCK_N=block_n, BLOCK_D=block_d, STAGES=stages, num_warps=warps, num_stages=1
    )  # fmt: skip


def _need(block_h: int, block_n: int, block_d: int, fp8: bool, stages: int) -> int:
    """About how much shared memory a program needs, in bytes: for q, tiles of rows, and the weights of one."""
    ahead = max(0, (stages - 1) // 2)
    # FP8: codes, and what is dequantised. Otherwise, while a product of 64 rows reads a tile, the others are loaded.
    bytes_ = ahead + 2 if fp8 else 2 * max(1, ahead + (block_h == 64))
    return bytes_ * block_n * block_d + 2 * block_h * (block_d + block_n) + 5120


@lru_cache(maxsize=1024)
def _splits(programs: int, tiles: int, at_once: int) -> int:
    """Into how many parts to cut lists of ``tiles`` tiles, where ``at_once`` programs run at a time.

    The least of: rounds of programs, times the tiles of each and about 3 more to start and end; and the reduction.
    """
    options = (n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= max(tiles, 1))
    return min(options, key=lambda n: -(-programs * n // at_once) * (-(-tiles // n) + 3) + n / 8)


@contract(
    "dim % 64 == 0",
    "page_size > 0",
    when("dtype(kv) in (e4m3, e4m3fnuz)", needs("kv_scale")),
    when("dtype(kv) in (bf16, fp16)", forbids("kv_scale"), "dtype(q) == dtype(kv)"),
    same_device=True,
)
def sparse_attention_unified_kv(
    q: Annotated[Tensor, QUERY],
    kv: Annotated[Tensor, POOL],
    indices: Annotated[Tensor, Layout("indices", "entry -> entry", dtype=INT32), Index("slot", live="indptr")],
    indptr: Annotated[
        Tensor, Layout("indptr", "bound -> bound", dtype=INT32, bound="token + 1"), Indptr("entry", capacity=True)
    ],
    sink: Annotated[Tensor, Layout("sink", "head -> head", dtype=FP32)] | None = None,
    *,
    kv_scale: Annotated[Tensor, SCALE] | None = None,
    page_size: int = 1,
    softmax_scale: float | None = None,
) -> Tensor:
    """Attention of each token over the slots in its list; a slot's row is key and value of every head.

    - ``q`` (token, head, dim): bf16 or fp16; dim is packed, tokens and heads may lie apart.
    - ``kv`` (slot, dim): rows of q's dtype, or e4m3 (e4m3fnuz on gfx942) with ``kv_scale``.
    - ``indices`` (entry,) int32: slots; those of token t are ``indices[indptr[t]:indptr[t + 1]]``. A slot listed twice
      counts twice. What lies behind the last list is not read.
    - ``indptr`` (token + 1,) int32.
    - ``sink`` (head,) fp32: a natural-log logit that has a share of the softmax and no value; -inf is none.
    - ``kv_scale`` (page, dim / 64) fp32, where and only where ``kv`` is FP8: the scales of a slot are those of page
      slot // page_size. Its row stride is free.
    - ``softmax_scale``: factor of q . k; dim^-0.5 if not given.

    Returns (token, head, dim) of q's dtype: zeros for an empty list. FP8 rows are dequantised in fp32 and rounded to
    q's dtype, as probabilities are; everything else is fp32. On NVIDIA GPUs from capability 8.9 on, up to 32 heads
    over aligned e4m3 rows of 512 do better: rows are exact, and probabilities, with the scales that belong to them, are
    rounded to fp16. Rows that are not listed are not read. Long lists of few tokens are cut into parts, which a second
    launch reduces.

    Raises :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the interpreter.
    """
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    device = _device(q.device)
    # The kernel for few heads copies 16 bytes at a time. By timings of an earlier form of it, which took longer, two of
    # its blocks, of 16 heads, take less time than one of 32 of the other.
    few = kv.dtype is torch.float8_e4m3fn and dim == 512 and heads <= 32 and device.few and aligned(kv, 16)
    sizes = FEW_BLOCKS if few else _attend_blocks(heads, dim, kv_scale is not None, device.shared_memory)
    programs = tokens * cdiv(heads, 16 if few else sizes["BLOCK_H"])
    tiles = cdiv(cdiv(indices.shape[0], tokens), sizes["BLOCK_N"])
    splits = _splits(programs, tiles, device.processors * (8 // sizes["num_warps"]))
    parts = lse = None
    if splits > 1:
        parts = torch.empty((tokens, splits, heads, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((tokens, splits, heads), dtype=torch.float32, device=q.device)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    arguments = (
        q, kv, kv_scale, indices, indptr, sink, out if parts is None else parts, lse,
        scale * LOG2E.value, splits, q.stride(0), q.stride(1),
    )  # fmt: skip
    page_stride = 0 if kv_scale is None else kv_scale.stride(0)
    if few:
        launch(
            attend_few_kernel, (programs, splits), q, *arguments,
            HEAD=heads, PAGE_SIZE=page_size, PAGE_STRIDE=page_stride, INTERPRETED=interpreted(attend_few_kernel),
            **sizes,
        )  # fmt: skip
    else:
        launch(
            _attend_kernel, (programs, splits), q, *arguments,
            HEAD=heads, DIM=dim, PAGE_SIZE=page_size, PAGE_STRIDE=page_stride, **sizes,
        )  # fmt: skip
    if parts is not None:
        launch(
            _reduce_kernel, (tokens * heads,), q, parts, lse, sink, out, splits,
            HEAD=heads, DIM=dim, BLOCK_S=4, BLOCK_D=next_power_of_2(dim), EARLY=device.early,
            **(dict(launch_pdl=True) if device.early else {}),
        )  # fmt: skip
    return out


_PTX = "instructions of NVIDIA's, in PTX; elsewhere the kernel without them runs"
COMPILE_EXCEPTIONS = {
    target: {"attend few heads": _PTX, "reduce early": _PTX} for target in ("hip:gfx942", "hip:gfx950")
}


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constants) of the kernels at realistic sizes, for a compiler without a GPU."""
    cases = []

    def add(name: str, kernel: Any, constants: dict[str, Any], **types: str) -> None:
        signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
        absent = [n for n, t in signature.items() if t == "constexpr" and n not in constants]
        cases.append((name, kernel, signature, {**constants, **dict.fromkeys(absent)}))

    ints = dict.fromkeys(("entries", "entry_stride", "token_stride", "loc_stride", "page_stride"), "i32")
    for page_size in (1, 48, 256):
        blocks = _quantize_blocks(512, page_size)
        add(
            f"quantize page_size {page_size}", _quantize_kernel,
            dict(DIM=512, PAGE_SIZE=page_size, LARGEST=448.0, **_without_launch(blocks)),
            rows="*bf16", loc="*i64", kv="*fp8e4nv", kv_scale="*fp32", **ints,
        )  # fmt: skip
    common = dict(
        q="*bf16", indices="*i32", indptr="*i32", score_scale="fp32", splits="i32", q_token_stride="i32",
        q_head_stride="i32",
    )  # fmt: skip
    # Not every kind at the largest dim: without the alignment of real pointers the compiler is slow.
    for heads, dim, fp8, split in ((128, 256, True, False), (128, 128, True, True), (16, 128, False, True)):
        sizes = _attend_blocks(heads, dim, fp8, 232_448)
        pool = dict(kv="*fp8e4nv", kv_scale="*fp32") if fp8 else dict(kv="*bf16")
        output = dict(out="*fp32", lse="*fp32") if split else dict(out="*bf16", sink="*fp32")
        add(
            f"attend {heads} heads{' fp8' * fp8}{' split' * split}", _attend_kernel,
            dict(HEAD=heads, DIM=dim, PAGE_SIZE=64, PAGE_STRIDE=dim // 64, **_without_launch(sizes)),
            **common, **pool, **output,
        )  # fmt: skip
    add(
        "attend few heads", attend_few_kernel,
        dict(HEAD=16, PAGE_SIZE=64, PAGE_STRIDE=8, INTERPRETED=False, **_without_launch(FEW_BLOCKS)),
        **common, kv="*fp8e4nv", kv_scale="*fp32", out="*bf16", sink="*fp32",
    )  # fmt: skip
    for early in (False, True):
        add(
            f"reduce{' early' * early}", _reduce_kernel, dict(HEAD=16, DIM=512, BLOCK_S=4, BLOCK_D=512, EARLY=early),
            partial="*fp32", lse="*fp32", sink="*fp32", out="*bf16", splits="i32",
        )  # fmt: skip
    return cases


def _without_launch(blocks: dict[str, int]) -> dict[str, int]:
    return {n: v for n, v in blocks.items() if n.isupper()}
