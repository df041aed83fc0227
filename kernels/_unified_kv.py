"""What attention over the unified KV pool shares, and its kernel for few heads over FP8 rows of 512.

That kernel takes rows from memory into the registers of the tensor cores, in the order in which these want them: a tile
is neither dequantised nor stored to shared memory. A code is exact in fp16, so the codes are the operands. The scales
of a tile's slots and groups multiply, for Q K^T, the sums of a group; for P V, the weights: with group g's scale of
slot n, s[g, n], a head's weights are 2^(logit[n] + log2 s[g, n] - m[g]). They are at most 2 in each group, and so fit
for fp16. The query is made fit by a power of two for each head.

The order is that of ``mma.m16n8k16`` (PTX ISA, "Matrix Fragments for mma.m16n8k16"). Lane 4 g + t has column g of the
right operand, of the left one and of the result rows g and g + 8; of what is summed over, and of the result's columns,
positions 2 t, 2 t + 1 and those 8 further. Triton gives the dimensions of a load, after the last, to lanes and then to
warps from the first on. So a tile's first dimensions are t, g and then what is divided among warps; any order else
would be as right, but slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutcheck import BF16, FP16, FP32, INT32, Layout
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.unified_kv import UNIFIED_KV_ROWS, UNIFIED_KV_SCALE

GROUP = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# What the order of loads is made for: 4 warps of 8 slots, and registers for two programs a multiprocessor.
FEW_BLOCKS = dict(BLOCK_N=32, num_warps=4, num_stages=1)

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
# Rows of 512 elements in words of four, as the lanes of the kernel for few heads load them: 16 or 8 of each group.
ROW_WORDS = Layout("unified_kv.row_words", "group lane word -> group lane word", dtype=INT32, group=8, offsets="int32")
QUERY = ROWS_THD(head_dim="dim", dtype=(BF16, FP16))
OUT = Layout("attention.out", "token head dim -> token head dim", dtype=(BF16, FP16))
PARTIAL = Layout("attention.partial", "token split head dim -> token split head dim", dtype=FP32)
LSE = Layout("attention.lse", "token split head -> token split head", dtype=FP32)

slot_offset = POOL.offset_fn("slot", "dim", name="slot_offset")
key_word = ROW_WORDS(lane=4, word=4).offset_fn("group", "lane", "word", name="key_word")
value_word = ROW_WORDS(lane=8, word=2).offset_fn("group", "lane", "word", name="value_word")
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
    """The four e4m3 bytes of int32 words, from the lowest, in fp16. Neighbouring words give neighbouring halves."""
    if INTERPRETED:
        return _byte(words, 0), _byte(words, 8), _byte(words, 16), _byte(words, 24)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 lo, hi;
        .reg .b32 t;
        prmt.b32 t, $8, $9, 0x5140;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 $0, lo;
        cvt.rn.f16x2.e4m3x2 $2, hi;
        prmt.b32 t, $8, $9, 0x7362;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 $4, lo;
        cvt.rn.f16x2.e4m3x2 $6, hi;
        prmt.b32 t, $10, $11, 0x5140;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 $1, lo;
        cvt.rn.f16x2.e4m3x2 $3, hi;
        prmt.b32 t, $10, $11, 0x7362;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 $5, lo;
        cvt.rn.f16x2.e4m3x2 $7, hi;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _codes_of_two(a, b, INTERPRETED: tl.constexpr):
    """The bytes of two tensors of words, of both from the lowest: a, b, a, b, ..., in fp16."""
    if INTERPRETED:
        return (
            _byte(a, 0), _byte(b, 0), _byte(a, 8), _byte(b, 8), _byte(a, 16), _byte(b, 16), _byte(a, 24), _byte(b, 24)
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 lo, hi;
        .reg .b32 t, x;
        prmt.b32 t, $8, $9, 0x5140;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 x, lo;
        mov.b32 {$0, $1}, x;
        cvt.rn.f16x2.e4m3x2 x, hi;
        mov.b32 {$2, $3}, x;
        prmt.b32 t, $8, $9, 0x7362;
        mov.b32 {lo, hi}, t;
        cvt.rn.f16x2.e4m3x2 x, lo;
        mov.b32 {$4, $5}, x;
        cvt.rn.f16x2.e4m3x2 x, hi;
        mov.b32 {$6, $7}, x;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [a, b],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


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
def _joined(x):
    """The inverse of _eight."""
    a = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    b = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.join(a, b)


@triton.jit
def _key_words(kv, slot, DIM: tl.constexpr):
    """Words [t, g, slot / 8, group, word] of slots [g, slot / 8]: lane t has 16 elements of each group."""
    t, group = tl.arange(0, 4)[:, None, None, None, None], tl.arange(0, 8)[None, None, None, :, None]
    word = key_word(group, t, tl.arange(0, 4)[None, None, None, None, :])
    words = kv.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + slot_offset(slot[None, :, :, None, None], word, DIM=DIM // 4))


@triton.jit
def _value_words(kv, slot, DIM: tl.constexpr):
    """Words [t, g, group, slot / 16, i, word] of slots [t, slot / 16, i]: lane g has 8 elements of each group."""
    g, group = tl.arange(0, 8)[None, :, None, None, None, None], tl.arange(0, 8)[None, None, :, None, None, None]
    word = value_word(group, g, tl.arange(0, 2)[None, None, None, None, None, :])
    words = kv.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + slot_offset(slot[:, None, None, :, :, None], word, DIM=DIM // 4))


@triton.jit
def _tile_scales(kv_scale, slot, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    """Scales [group, slot]."""
    group = tl.arange(0, 8)[:, None]
    return tl.load(kv_scale + slot_scale_offset(slot[None, :], group, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE))


@triton.jit
def _group_logits(queries, words, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """q . codes [head, slot] of one group, from its words [t, g, slot / 8, word].

    One product for each byte of the words: joining the bytes to longer rows would have Triton load the query, whose
    order has to agree, with moves between registers.
    """
    codes = _codes(words, INTERPRETED)
    logits = tl.zeros((16, BLOCK_N), tl.float32)
    for b in tl.static_range(4):
        # position 8 (word // 2) + 2 t + word % 2
        keys = tl.permute(tl.reshape(codes[b], (4, 8, BLOCK_N // 8, 2, 2)), (3, 0, 4, 2, 1))
        logits = tl.dot(queries[b], tl.reshape(keys, (16, BLOCK_N)), logits)
    return logits


@triton.jit
def _value_codes(words, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes [group, slot, column] in fp16: column 8 r + g is element 8 g + r, slots are ordered as _value_slots."""
    words = tl.reshape(words, (4, 8, 8, BLOCK_N // 16, 2, 2, 2))
    a, b = tl.split(tl.permute(words, (0, 1, 2, 3, 4, 6, 5)))  # neighbouring slots
    a0, b0, a1, b1, a2, b2, a3, b3 = _codes_of_two(a, b, INTERPRETED)
    low = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    high = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    # [t, g, group, slot / 16, i // 2, word, i % 2, byte % 2, byte // 2]
    codes = tl.permute(tl.join(low, high), (2, 3, 0, 4, 6, 5, 8, 7, 1))
    return tl.reshape(codes, (8, BLOCK_N, 64))


@triton.jit
def _value_slots(BLOCK_N: tl.constexpr):
    """Numbers [t, slot / 16, i] of the slots of a tile: those that lane t has of the weights."""
    i = tl.arange(0, 4)[None, None, :]
    return tl.arange(0, 4)[:, None, None] * 2 + tl.arange(0, BLOCK_N // 16)[None, :, None] * 16 + i // 2 * 8 + i % 2


@triton.jit
def _weights_of_value_slots(p, BLOCK_N: tl.constexpr):
    """Weights [group, head, slot], their slots put into the order [slot / 16, t, i] of the values."""
    p = tl.reshape(p, (8, 16, BLOCK_N // 16, 2, 4, 2))
    return tl.reshape(tl.permute(p, (0, 1, 2, 4, 3, 5)), (8, 16, BLOCK_N))


@triton.jit
def attend_few_kernel(
    q, kv, kv_scale, indices, indptr, sink, out, lse, score_scale, splits, q_token_stride, q_head_stride,
    HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """16 heads of one token over one part of its list: the output, or with ``lse`` a part for the reduction.

    Rows of 512 e4m3 elements. Tiles of 32 slots and 4 warps are what the order of loads is made for. Logits are base 2:
    ``score_scale`` has the factor log2(e).
    """
    DIM: tl.constexpr = 512
    HEAD_BLOCKS: tl.constexpr = (HEAD + 15) // 16
    token, split = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(1)
    head = tl.program_id(0) % HEAD_BLOCKS * 16 + tl.arange(0, 16)
    d = tl.arange(0, 8)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    at = query_offset(token, head[:, None, None], d, TOKEN_STRIDE=q_token_stride, HEAD_STRIDE=q_head_stride)
    x = tl.load(q + at, (head < HEAD)[:, None, None], other=0.0).to(tl.float32)
    # A power of two brings the largest element of a head to 2^14 or above, below 2^15.
    exponent = tl.max(tl.max(tl.abs(x), axis=2), axis=1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    x = x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None, None]
    head_scale = ((exponent - 14) << 23).to(tl.float32, bitcast=True) * score_scale
    # Of each group and byte [head, position], as the keys are: element 16 t + 4 word + byte.
    x = tl.permute(tl.reshape(x.to(tl.float16), (16, 8, 4, 2, 2, 4)), (0, 3, 2, 4, 5, 1))
    by_group = _eight(tl.reshape(x, (16, 16, 4, 2, 2, 2)))
    queries = ()
    for g in tl.static_range(8):
        queries = queries + (_four(tl.reshape(by_group[g], (16, 16, 2, 2))),)  # noqa: RUF005 - Triton has no unpacking

    begin, end = part_of_list(indptr, token, split, splits, BLOCK_N)
    # m starts at the lowest number, not at -inf, whose difference to itself is no number. Each element of a tile has a
    # maximum and a sum of its own over the tiles, so that no lane waits for others.
    m = tl.full((16, BLOCK_N), LOWEST, tl.float32)
    l = tl.zeros((16, BLOCK_N), tl.float32)  # noqa: E741 - its name in the literature
    group_m = tl.full((8, 16), LOWEST, tl.float32)
    acc = tl.zeros((8, 16, 64), tl.float32)
    nothing = (tl.zeros((8, 16, 16), tl.float16), tl.zeros((8, 16, BLOCK_N), tl.float16))

    n = tl.arange(0, BLOCK_N)
    key_n = tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK_N // 8)[None, :] * 8
    value_n = _value_slots(BLOCK_N)
    if begin < end:
        # No load has a mask: beyond the end it is the last row once more, whose weight will be zero.
        last = end - 1
        key_slot = tl.load(indices + tl.minimum(begin + key_n, last))
        value_slot = tl.load(indices + tl.minimum(begin + value_n, last))
        scale_slot = tl.load(indices + tl.minimum(begin + n, last))
        more = _key_words(kv, key_slot, DIM)
        more_scale = _tile_scales(kv_scale, scale_slot, PAGE_SIZE, PAGE_STRIDE)
        key_slot = tl.load(indices + tl.minimum(begin + BLOCK_N + key_n, last))
        scale_slot = tl.load(indices + tl.minimum(begin + BLOCK_N + n, last))
        for start in range(begin, end, BLOCK_N):
            # While this tile is used, keys and scales of the next and slots of the one after it are on their way. The
            # values were loaded as keys a moment ago.
            values = _value_words(kv, value_slot, DIM)
            value_slot = tl.load(indices + tl.minimum(start + BLOCK_N + value_n, last))
            scale = more_scale
            more_scale = _tile_scales(kv_scale, scale_slot, PAGE_SIZE, PAGE_STRIDE)
            scale_slot = tl.load(indices + tl.minimum(start + 2 * BLOCK_N + n, last))

            keys = _eight(tl.reshape(tl.permute(more, (0, 1, 2, 4, 3)), (4, 8, BLOCK_N // 8, 4, 2, 2, 2)))
            parts = ()
            for g in tl.static_range(8):
                parts = parts + (_group_logits(queries[g], keys[g], BLOCK_N, INTERPRETED),)  # noqa: RUF005
            more = _key_words(kv, key_slot, DIM)
            key_slot = tl.load(indices + tl.minimum(start + 2 * BLOCK_N + key_n, last))
            sums = _joined(parts) * tl.reshape(tl.trans(scale), (1, BLOCK_N, 2, 2, 2))  # [head, slot, group]
            a, b = tl.split(sums)
            a, b = tl.split(a + b)
            a, b = tl.split(a + b)
            logits = (a + b) * head_scale[:, None]
            logits = tl.where((start + n < end)[None, :], logits, float("-inf"))
            new = tl.maximum(m, logits)
            l = l * tl.exp2(m - new) + tl.exp2(logits - new)  # noqa: E741
            m = new

            # Every warp needs all logits. A product whose layout has them there puts them there; it adds nothing.
            logits = tl.dot(nothing[0], nothing[1], tl.broadcast_to(logits[None], (8, 16, BLOCK_N)))
            bits = scale.to(tl.int32, bitcast=True)
            power = (((bits >> 23) & 0xFF) - 127).to(tl.float32)
            mantissa = ((bits & -0x7F800001) | 0x3F800000).to(tl.float32, bitcast=True)  # and its sign
            logits = logits + power[:, None, :]
            new_group_m = tl.maximum(group_m, tl.max(logits, axis=2))
            p = tl.exp2(logits - new_group_m[:, :, None]) * mantissa[:, None, :]
            acc = acc * tl.exp2(group_m - new_group_m)[:, :, None]
            p = _weights_of_value_slots(p.to(tl.float16), BLOCK_N)
            acc = tl.dot(p, _value_codes(values, BLOCK_N, INTERPRETED), acc)
            group_m = new_group_m

    # The sink is one more logit, whose value is zero.
    row_m = tl.max(m, axis=1)
    if sink is not None and lse is None:
        last_logit = tl.load(sink + head, head < HEAD, other=0.0) * LOG2E
        row_m = tl.maximum(row_m, last_logit)
    row_l = tl.sum(l * tl.exp2(m - row_m[:, None]), axis=1)
    if sink is not None and lse is None:
        row_l += tl.exp2(last_logit - row_m)
    empty = row_l == 0.0
    row_l = tl.where(empty, 1.0, row_l)
    acc = acc * (tl.exp2(group_m - row_m[None, :]) / row_l[None, :])[:, :, None]
    acc = tl.reshape(tl.permute(tl.reshape(acc, (8, 16, 8, 8)), (0, 1, 3, 2)), (8, 16, 64))  # columns to elements
    d = tl.arange(0, 8)[:, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (head < HEAD)[None, :, None]
    if lse is None:
        tl.store(
            out + out_offset(token, head[None, :, None], d, HEAD=HEAD, DIM=DIM), acc.to(out.dtype.element_ty), inside
        )
    else:
        part = tl.where(empty, float("-inf"), row_m + tl.log2(row_l))
        at = partial_offset(token, split, head[None, :, None], d, SPLIT=splits, HEAD=HEAD, DIM=DIM)
        tl.store(out + at, acc, inside & ~empty[None, :, None])  # the reduction does not read an empty part
        tl.store(lse + lse_offset(token, split, head, SPLIT=splits, HEAD=HEAD), part, head < HEAD)
