"""What attention over the unified KV pool shares, and its kernel for few heads over FP8 rows of 512.

That kernel dequantises nothing. A code is exact in fp16, so the codes are the operands of the tensor cores. The scales
of a tile's slots and groups multiply, for Q K^T, the sums of a group; for P V, the weights: with scale s[g, n] of group
g and slot n, a head's weights are 2^(logit[n] - m[g]) s[g, n], where m[g] is such that the largest is about 1, and so
fit for fp16. The query is made fit by a power of two for each head.

Tiles of rows are copied to shared memory while those before them are used. Each of four warps has a pair of groups, 128
elements, of all slots, and reads them twice, as both products want them; the logits are sums over the warps.

The orders in which elements are taken are those of ``mma.m16n8k16`` (PTX ISA, "Matrix Fragments for mma.m16n8k16").
Lane 4 g + t has column g of the right operand, of the left one and of the result rows g and g + 8; of the result's
columns 2 t and 2 t + 1; and of what is summed over positions 2 t, 2 t + 1 and those 8 further, or four neighbours from
4 t on, as a version of Triton counts (its "kWidth"). Any order else would be as right, but slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutcheck import BF16, E4M3, FP16, FP32, INT32, Layout
from layoutcheck.kernels._launch import TRITON
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.unified_kv import UNIFIED_KV_ROWS, UNIFIED_KV_SCALE

GROUP = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Four warps have a pair of groups each, and exchange logits of 32 slots; registers are enough for two programs a
# multiprocessor. Two tiles are on their way: with one it took 9 % longer. From Triton 3.8 on a lane has two
# neighbours of what is summed over (tests/kernels/test_compile.py sees if that changes).
FEW_BLOCKS = dict(BLOCK_N=32, STAGES=3, K_WIDTH=4 if TRITON < (3, 8) else 2, num_warps=4, num_stages=1)

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
# A row of 512 elements: four pairs of groups, each of two parts; an element is one of a lane's two runs of eight.
ROW_GROUPS = Layout("unified_kv.row_groups", "pair part -> pair part", dtype=FP32, pair=4, part=2, offsets="int32")
ROW_WORDS = Layout(
    "unified_kv.row_words", "pair part word -> pair part word", dtype=INT32, pair=4, part=2, word=16, offsets="int32"
)
ROW_ELEMENTS = Layout(
    "unified_kv.row_elements",
    "pair part element(lane run unit) -> pair part lane run unit",
    dtype=E4M3,
    pair=4,
    part=2,
    lane=4,
    run=2,
    unit=8,
    offsets="int32",
)
# The slots of a tile in shared memory: the second bit of a slot's number comes last, so that 64 bytes of two slots lie
# side by side that both readers want at the same time. With another order one or both of them took longer.
TILE_SLOTS = Layout(
    "unified_kv.tile_slots",
    "row(eight four one two) -> eight four two one",
    dtype=INT32,
    four=2,
    one=2,
    two=2,
    offsets="int32",
)
QUERY = ROWS_THD(head_dim="dim", dtype=(BF16, FP16))
OUT = Layout("attention.out", "token head dim -> token head dim", dtype=(BF16, FP16))
PARTIAL = Layout("attention.partial", "token split head dim -> token split head dim", dtype=FP32)
LSE = Layout("attention.lse", "token split head -> token split head", dtype=FP32)

slot_offset = POOL.offset_fn("slot", "dim", name="slot_offset")
row_group = ROW_GROUPS.offset_fn("pair", "part", name="row_group")
row_word = ROW_WORDS.offset_fn("pair", "part", "word", name="row_word")
row_element = ROW_ELEMENTS.offset_fn("pair", "part", "element", name="row_element")
lane_element = ROW_ELEMENTS.offset_fn("pair", "part", "lane", "run", "unit", name="lane_element")
slot_of_row = TILE_SLOTS.offset_fn("row", name="slot_of_row")
slot_scale_offset = SCALE_OF_SLOT.offset_fn("slot", "group", name="slot_scale_offset", strides=("page",))
query_offset = QUERY.offset_fn("token", "head", "head_dim", name="query_offset", strides=("token", "head"))
out_offset = OUT.offset_fn("token", "head", "dim", name="out_offset")
partial_offset = PARTIAL.offset_fn("token", "split", "head", "dim", name="partial_offset")
lse_offset = LSE.offset_fn("token", "split", "head", name="lse_offset")


@triton.jit
def part_of_list(indptr, token, split, splits, BLOCK_N: tl.constexpr):
    """First and end of one of the ``splits`` parts, of whole tiles, of a token's list."""
    first, last = tl.load(indptr + token), tl.load(indptr + token + 1)
    length = tl.cdiv(tl.cdiv(last - first, BLOCK_N), splits) * BLOCK_N
    begin = first + split * length
    return begin, tl.minimum(begin + length, last)


# --- few heads over FP8 -----------------------------------------------------------------------------------------------


@triton.jit
def _codes(words, INTERPRETED: tl.constexpr):
    """The bytes of words, from the lowest, in fp16."""
    if INTERPRETED:
        return _byte(words, 0), _byte(words, 8), _byte(words, 16), _byte(words, 24)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 lo, hi;
        .reg .b32 x;
        mov.b32 {lo, hi}, $4;
        cvt.rn.f16x2.e4m3x2 x, lo;
        mov.b32 {$0, $1}, x;
        cvt.rn.f16x2.e4m3x2 x, hi;
        mov.b32 {$2, $3}, x;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _interleaved(a, b, INTERPRETED: tl.constexpr):
    """The bytes of two words in turns, a first, from the lowest: two words."""
    if INTERPRETED:
        return _in_turns(a, b, 0), _in_turns(a, b, 16)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;",
        "=&r,=r,r,r",
        [a, b],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _in_turns(a, b, SHIFT: tl.constexpr):
    a, b = a >> SHIFT, b >> SHIFT
    return a & 0xFF | (b & 0xFF) << 8 | (a & 0xFF00) << 8 | (b & 0xFF00) << 16


@triton.jit
def _byte(words, SHIFT: tl.constexpr):
    return ((words >> SHIFT) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _four(x):
    """The four tensors along the last two dimensions, of 2 each."""
    a, b = tl.split(x)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    return a0, b0, a1, b1


@triton.jit
def _eight(x):
    """The eight tensors along the last three dimensions, of 2 each."""
    a, b = tl.split(x)
    a0, a1, a2, a3 = _four(a)
    b0, b1, b2, b3 = _four(b)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def _slots(indices, start, n, last):
    """Slots ``start + n`` of the list. Beyond its end it is the last one once more, whose weight will be zero."""
    return tl.load(indices + tl.minimum(start + n, last))


@triton.jit
def _tile_words(kv, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [(pair, row of TILE_SLOTS), word] to one group of each pair, of slot 0."""
    pair = tl.arange(0, 4 * BLOCK_N)[:, None] // BLOCK_N
    return kv.to(tl.pointer_type(tl.int32), bitcast=True) + row_word(pair, PART, tl.arange(0, 16)[None, :])


@triton.jit
def _tile_rows(slot, BLOCK_N: tl.constexpr):
    """Offsets, in words, of the rows of _tile_words, from slots in the order of TILE_SLOTS."""
    rows = tl.reshape(tl.broadcast_to(slot[None, :], (4, BLOCK_N)), (4 * BLOCK_N, 1))
    return slot_offset(rows, 0, DIM=128)


@triton.jit
def _tile_scales(kv_scale, slot, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Scales [pair, slot, part]."""
    group = row_group(tl.arange(0, 4)[:, None, None], tl.arange(0, 2)[None, None, :])
    scales = kv_scale + slot_scale_offset(0, group, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE)
    return tl.load(scales + slot_scale_offset(slot, 0, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE))


@triton.jit
def _query(q, token, head_block, token_stride, head_stride, HEAD: tl.constexpr):
    """q [t, g, pair, head / 8, part, run, unit], in fp32: lane t has 16 elements of each group."""
    t = tl.arange(0, 4)[:, None, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None, None]
    pair = tl.arange(0, 4)[None, None, :, None, None, None, None]
    head = head_block * 16 + tl.arange(0, 2)[None, None, None, :, None, None, None] * 8 + g
    part = tl.arange(0, 2)[None, None, None, None, :, None, None]
    run = tl.arange(0, 2)[None, None, None, None, None, :, None]
    d = lane_element(pair, part, t, run, tl.arange(0, 8)[None, None, None, None, None, None, :])
    at = query_offset(token, head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    return tl.load(q + at, head < HEAD, other=0.0).to(tl.float32)


@triton.jit
def _group_logits(queries, words, BLOCK_N: tl.constexpr, K_WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """q . codes [pair, head, slot] of one group of each pair, from _tile_words: a product for each word of a lane."""
    words = tl.reshape(words, (4, BLOCK_N // 8, 2, 2, 2, 4, 2, 2))  # pair, slot / 8, slot 4, slot 1, slot 2, t, word
    words = _four(tl.permute(words, (5, 0, 1, 2, 4, 3, 6, 7)))
    logits = tl.zeros((4, 16, BLOCK_N), tl.float32)
    for w in tl.static_range(4):
        b0, b1, b2, b3 = _codes(words[w], INTERPRETED)
        # [t, pair, slot / 8, slot 4, slot 2, slot 1, byte / 2, byte % 2]
        codes = tl.join(tl.join(b0, b2), tl.join(b1, b3))
        codes = tl.permute(codes, (1, 0, 6, 7, 2, 3, 4, 5) if K_WIDTH == 4 else (1, 6, 0, 7, 2, 3, 4, 5))
        logits = tl.dot(queries[w], tl.reshape(codes, (4, 16, BLOCK_N)), logits)
    return logits


@triton.jit
def _value_codes(words, BLOCK_N: tl.constexpr, K_WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes [pair, slot, column] in fp16 of one group of each pair, from _tile_words.

    Column 8 r + g is element 8 g + r. Slots are in their order, or in that of _weights.
    """
    # pair, slot / 16, slot 8, slot 4, slot 1, slot 2, g, word
    words = tl.reshape(words, (4, BLOCK_N // 16, 2, 2, 2, 2, 8, 2))
    a, b = tl.split(tl.permute(words, (0, 7, 6, 1, 2, 3, 5, 4)))  # neighbouring slots
    low, high = _interleaved(a, b, INTERPRETED)
    a0, b0, a1, b1 = _codes(low, INTERPRETED)
    a2, b2, a3, b3 = _codes(high, INTERPRETED)
    low = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    high = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    # pair, word, g, slot / 16, slot 8, slot 4, slot 2, slot 1, byte % 2, byte / 2
    codes = tl.join(low, high)
    codes = tl.permute(codes, (0, 3, 5, 6, 4, 7, 1, 9, 8, 2) if K_WIDTH == 4 else (0, 3, 4, 5, 6, 7, 1, 9, 8, 2))
    return tl.reshape(codes, (4, BLOCK_N, 64))


@triton.jit
def _weights(logits, scale, group_m, BLOCK_N: tl.constexpr, K_WIDTH: tl.constexpr):
    """Weights [pair, head, slot] of one group of each pair, and the new maximum.

    Where lanes have four neighbours, slots are in the order (slot / 16, t, slot / 8 % 2, slot % 2), for a lane has the
    logits of slots 2 t and 2 t + 1 of eight.
    """
    # The bits of a float, as a number, are 2^23 (log2 + 127) to within a factor of 1.09: enough for a maximum.
    power = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32)
    new = tl.max(logits * 2.0**23 + power[:, None, :], axis=2) * 2.0**-23 - 127.0
    new = tl.maximum(group_m, new)
    p = (tl.exp2(logits - new[:, :, None]) * scale[:, None, :]).to(tl.float16)
    if K_WIDTH == 4:
        p = tl.permute(tl.reshape(p, (4, 16, BLOCK_N // 16, 2, 4, 2)), (0, 1, 2, 4, 3, 5))
    return tl.reshape(p, (4, 16, BLOCK_N)), new


@triton.jit
def attend_few_kernel(
    q, kv, kv_scale, indices, indptr, sink, out, lse, score_scale, splits, q_token_stride, q_head_stride,
    HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, K_WIDTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """16 heads of one token over one part of its list: the output, or with ``lse`` a part for the reduction.

    Rows of 512 e4m3 elements, in four pairs of groups, each pair in two parts. Logits are base 2: ``score_scale`` has
    the factor log2(e).
    """
    tl.static_assert(BLOCK_N == 32, "each of four warps sums the logits of eight slots")
    DIM: tl.constexpr = 512
    HEAD_BLOCKS: tl.constexpr = (HEAD + 15) // 16
    token, split = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(1)
    x = _query(q, token, tl.program_id(0) % HEAD_BLOCKS, q_token_stride, q_head_stride, HEAD)
    # A power of two brings the largest element of a head to 2^14 or above, below 2^15.
    largest = tl.max(tl.max(tl.max(tl.max(tl.max(tl.abs(x), axis=6), axis=5), axis=4), axis=2), axis=0)  # [g, head / 8]
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15), 254)
    x = x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :, None, :, None, None, None]
    head_scale = tl.reshape(tl.trans(((exponent - 14) << 23).to(tl.float32, bitcast=True)), (16,)) * score_scale
    # Of each part and word [pair, head, position], as the keys are.
    x = tl.reshape(x.to(tl.float16), (4, 8, 4, 2, 2, 2, 2, 2, 2))
    x = tl.permute(x, (2, 3, 1, 0, 7, 8, 4, 5, 6) if K_WIDTH == 4 else (2, 3, 1, 7, 0, 8, 4, 5, 6))
    q0, q1, q2, q3, q4, q5, q6, q7 = _eight(tl.reshape(x, (4, 16, 16, 2, 2, 2)))
    queries = ((q0, q1, q2, q3), (q4, q5, q6, q7))

    begin, end = part_of_list(indptr, token, split, splits, BLOCK_N)
    # m starts at the lowest number, not at -inf, whose difference to itself is no number. Each element of a tile, in
    # the order [slot / 8, head, slot % 8], has a maximum and a sum of its own over the tiles, so that no lane waits for
    # others.
    m = tl.full((BLOCK_N // 8, 16, 8), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_N // 8, 16, 8), tl.float32)  # noqa: E741 - its name in the literature
    m0, m1 = tl.full((4, 16), LOWEST, tl.float32), tl.full((4, 16), LOWEST, tl.float32)
    acc0, acc1 = tl.zeros((4, 16, 64), tl.float32), tl.zeros((4, 16, 64), tl.float32)
    nothing = (tl.zeros((4, 16, 16), tl.float16), tl.zeros((4, 16, BLOCK_N), tl.float16))
    words0, words1 = _tile_words(kv, 0, BLOCK_N), _tile_words(kv, 1, BLOCK_N)

    n = tl.arange(0, BLOCK_N)
    row_n = slot_of_row(n)
    scale_n = n[None, :, None]
    lane_n = tl.arange(0, BLOCK_N // 8)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    if begin < end:
        last = end - 1
        row_slot, scale_slot = _slots(indices, begin, row_n, last), _slots(indices, begin, scale_n, last)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            rows = _tile_rows(row_slot, BLOCK_N)
            tile0, tile1 = tl.load(words0 + rows), tl.load(words1 + rows)
            scale0, scale1 = tl.split(_tile_scales(kv_scale, scale_slot, PAGE_SIZE, PAGE_STRIDE))
            row_slot = _slots(indices, start + BLOCK_N, row_n, last)
            scale_slot = _slots(indices, start + BLOCK_N, scale_n, last)

            sums = _group_logits(queries[0], tile0, BLOCK_N, K_WIDTH, INTERPRETED) * scale0[:, None, :]
            sums += _group_logits(queries[1], tile1, BLOCK_N, K_WIDTH, INTERPRETED) * scale1[:, None, :]
            # Each warp sums the logits of eight slots. A product whose layout has them there puts them there; it adds
            # nothing.
            sums = tl.permute(tl.reshape(sums, (4, 16, BLOCK_N // 8, 8)), (2, 1, 0, 3))
            sums = tl.dot(nothing[0], nothing[1], tl.reshape(sums, (BLOCK_N // 8, 16, 32)))
            a, b = tl.split(tl.permute(tl.reshape(sums, (BLOCK_N // 8, 16, 2, 2, 8)), (0, 1, 4, 2, 3)))
            a, b = tl.split(a + b)
            logits = (a + b) * head_scale[None, :, None]
            logits = tl.where(start + lane_n < end, logits, float("-inf"))
            new = tl.maximum(m, logits)
            l = l * tl.exp2(m - new) + tl.exp2(logits - new)  # noqa: E741
            m = new

            # Now every warp needs all logits.
            logits = tl.reshape(tl.permute(logits, (1, 0, 2)), (1, 16, BLOCK_N))
            logits = tl.dot(nothing[0], nothing[1], tl.broadcast_to(logits, (4, 16, BLOCK_N)))
            p, new = _weights(logits, scale0, m0, BLOCK_N, K_WIDTH)
            acc0 = acc0 * tl.exp2(m0 - new)[:, :, None]
            acc0 = tl.dot(p, _value_codes(tile0, BLOCK_N, K_WIDTH, INTERPRETED), acc0)
            m0 = new
            p, new = _weights(logits, scale1, m1, BLOCK_N, K_WIDTH)
            acc1 = acc1 * tl.exp2(m1 - new)[:, :, None]
            acc1 = tl.dot(p, _value_codes(tile1, BLOCK_N, K_WIDTH, INTERPRETED), acc1)
            m1 = new

    # The sink is one more logit, whose value is zero.
    head = tl.program_id(0) % HEAD_BLOCKS * 16 + tl.arange(0, 16)
    row_m = tl.max(tl.max(m, axis=2), axis=0)
    if sink is not None and lse is None:
        last_logit = tl.load(sink + head, head < HEAD, other=0.0) * LOG2E
        row_m = tl.maximum(row_m, last_logit)
    row_l = tl.sum(tl.sum(l * tl.exp2(m - row_m[None, :, None]), axis=2), axis=0)
    if sink is not None and lse is None:
        row_l += tl.exp2(last_logit - row_m)
    empty = row_l == 0.0
    row_l = tl.where(empty, 1.0, row_l)
    inside = (head < HEAD)[None, :, None]
    if lse is not None:
        part_lse = tl.where(empty, float("-inf"), row_m + tl.log2(row_l))
        tl.store(lse + lse_offset(token, split, head, SPLIT=splits, HEAD=HEAD), part_lse, head < HEAD)
        inside = inside & ~empty[None, :, None]  # the reduction does not read an empty part
    for part in tl.static_range(2):
        acc, group_m = (acc0, m0) if part == 0 else (acc1, m1)
        acc = acc * (tl.exp2(group_m - row_m[None, :]) / row_l[None, :])[:, :, None]
        acc = tl.reshape(tl.permute(tl.reshape(acc, (4, 16, 8, 8)), (0, 1, 3, 2)), (4, 16, 64))  # columns to elements
        d = row_element(tl.arange(0, 4)[:, None, None], part, tl.arange(0, GROUP)[None, None, :])
        if lse is None:
            at = out_offset(token, head[None, :, None], d, HEAD=HEAD, DIM=DIM)
        else:
            at = partial_offset(token, split, head[None, :, None], d, SPLIT=splits, HEAD=HEAD, DIM=DIM)
        tl.store(out + at, acc.to(out.dtype.element_ty), inside)
