"""What attention over a paged cache shares: the layouts, their offsets, and rows dequantised from MXFP8 to bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import BF16, E4M3, FP16, INT32, Layout
from layoutcheck.kernels._launch import cdiv, launch, next_power_of_2, raw
from layoutcheck.kernels._mxfp8 import BLOCK, scale_value
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import PAGED_NHD
from layoutcheck.layouts.rows import ROWS_THD

QUERY = ROWS_THD(head="q_head", dtype=(BF16, FP16, E4M3))
CACHE = PAGED_NHD(dtype=(BF16, FP16, E4M3), view="slot head head_dim", pitch={})
PAGE_TABLE = Layout("page_table", "seq max_pages -> seq max_pages", dtype=INT32, dense="max_pages")
# The page table as the keys of a sequence see it, whose tokens of a page are zero entries apart; and those tokens.
PAGE_OF_KEY = Layout(
    "page_table of key",
    "seq key(max_pages token) -> seq max_pages token",
    dtype=INT32,
    token="page_size",
    pitch={"seq": "max_pages + row_gap", "max_pages": 1, "token": 0},
    default={"row_gap": 0},
)
TOKEN_OF_KEY = Layout(
    "token of key",
    "key(max_pages token) -> max_pages token",
    dtype=INT32,
    token="page_size",
    pitch={"max_pages": 0, "token": 1},
    offsets="int32",
)
SLOTS = Layout("slots", "slot(page token) -> page token", dtype=INT32, token="page_size")

query_offset = QUERY.offset_fn("token", "head", "head_dim", name="query_offset", strides=("token", "head"))
flat_offset = MXFP8_SCALE_FLAT.offset_fn("slot", "head", "group", name="paged_flat_offset")
slot_of = SLOTS.offset_fn("page", "token", name="slot_of")
page_of_key = PAGE_OF_KEY.offset_fn("seq", "key", name="page_of_key", strides=("seq",))
token_of_key = TOKEN_OF_KEY.offset_fn("key", name="token_of_key")
# These two also in 32 bits, for offsets within a page.
CACHE_AXES, INTERLEAVED_AXES = ("page", "token", "head", "head_dim"), ("page", "token", "head", "group")
cache_offset = CACHE.offset_fn(*CACHE_AXES, name="paged_cache_offset")
cache_offset_32 = CACHE(offsets="int32").offset_fn(*CACHE_AXES, name="paged_cache_offset_32")
interleaved_offset = MXFP8_SCALE_INTERLEAVED.offset_fn(*INTERLEAVED_AXES, name="paged_interleaved_offset")
interleaved_offset_32 = MXFP8_SCALE_INTERLEAVED(offsets="int32").offset_fn(
    *INTERLEAVED_AXES, name="paged_interleaved_offset_32"
)

# A block may decode to 2^128, as that of the largest bf16 does: dequantised Q and K are smaller by this.
QUARTER = tl.constexpr(0.25)
# Dequantised tiles of V are smaller by this power of two, given back at the end: a sum of finite values is finite.
HEADROOM = tl.constexpr(2.0**-32)
RESTORE = tl.constexpr(2.0**32)


@triton.jit
def dequantise(x, factor, N: tl.constexpr, GROUPS: tl.constexpr):
    """e4m3 rows (N, GROUPS * 32) times their factors (N, GROUPS), in bf16: exact, unless below 2^-133."""
    blocks = tl.reshape(x.to(tl.float32), (N, GROUPS, BLOCK)) * factor[:, :, None]
    return tl.reshape(blocks, (N, GROUPS * BLOCK)).to(tl.bfloat16)


@triton.jit
def expand_kernel(
    x, scale, page_table, seq_lens, out, rows, token_stride, head_stride, table_stride, max_keys,
    HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, FACTOR: tl.constexpr,
    PAGED: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of q, or of each sequence's keys, dequantised to bf16 one after the other: (row, head, head_dim)."""
    GROUPS: tl.constexpr = BLOCK_D // BLOCK
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, head = (at // HEAD)[:, None], (at % HEAD)[:, None]
    d, group = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, GROUPS)[None, :]
    live = row < rows
    if PAGED:
        seq, key = row // max_keys, row % max_keys
        live = live & (key < tl.load(seq_lens + seq, live, other=0))
        page = tl.load(page_table + page_of_key(seq, key, PAGE_SIZE=PAGE_SIZE, SEQ_STRIDE=table_stride), live, other=0)
        token = token_of_key(key, PAGE_SIZE=PAGE_SIZE)
        from_row = cache_offset(page, token, head, d, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
        slot = slot_of(page, token, PAGE_SIZE=PAGE_SIZE)
    else:
        from_row = query_offset(row, head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
        slot = row
    if INTERLEAVED:
        from_scale = interleaved_offset(page, token, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        from_scale = flat_offset(slot, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    inside = live & (d < HEAD_DIM)
    byte = tl.load(scale + from_scale, live & (group * BLOCK < HEAD_DIM), other=127).to(tl.int32)
    values = dequantise(tl.load(x + from_row, inside, other=0.0), scale_value(byte) * FACTOR, TILE, GROUPS)
    to = query_offset(row, head, d, TOKEN_STRIDE=HEAD * HEAD_DIM, HEAD_STRIDE=HEAD_DIM)
    tl.store(out + to, values, inside)


def expanded(
    x: Tensor, scale: Tensor, factor: float, page_table: Tensor | None = None, seq_lens: Tensor | None = None,
    page_size: int = 1, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """x (row, head, head_dim) in bf16, times ``factor``; of a cache, the keys of one sequence after the other."""
    rows, heads, head_dim = x.shape
    max_keys = 1
    if page_table is not None:
        seqs, max_pages = page_table.shape
        max_keys = max_pages * page_size
        rows = seqs * max_keys
    out = torch.empty((rows, heads, head_dim), dtype=torch.bfloat16, device=x.device)
    block_d = max(BLOCK.value, next_power_of_2(head_dim))
    tile = max(1, 4096 // block_d)
    launch(
        expand_kernel, (cdiv(rows * heads, tile),), x,
        x, raw(scale), page_table, seq_lens, out, rows, x.stride(0), x.stride(1),
        0 if page_table is None else page_table.stride(0), max_keys,
        HEAD=heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, FACTOR=factor,
        PAGED=page_table is not None, INTERLEAVED=interleaved, TILE=tile, BLOCK_D=block_d,
    )  # fmt: skip
    return out
