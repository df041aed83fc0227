"""Rows and scales between buffers and slots: scatter, gather, relocate. Bytes are moved, nothing is computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import E8M0, Index, Layout, Writes, contract, no_overlap, together
from layoutcheck._dtypes import ELEMENTS
from layoutcheck.kernels._launch import launch, raw
from layoutcheck.kernels.quantize import LOC, SCALES
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED

ROW_SCALES = Layout(
    "row scales", "token head group -> token head group", dtype=E8M0, head_dim="group * 32", dense="group"
)
# Rows of any element of whole bytes, and a cache of them: what is moved is not looked at.
ANY = tuple(e for e in ELEMENTS if e.bits % 8 == 0)
ROWS = Layout("rows", "token head dim -> token head dim", dtype=ANY, dense="dim")
CACHE = Layout("cache", "slot head dim -> slot head dim", dtype=ANY, dense="dim")

interleaved_offset = MXFP8_SCALE_INTERLEAVED.offset_fn("slot", "head", "group", name="moved_interleaved_offset")
flat_offset = MXFP8_SCALE_FLAT.offset_fn("slot", "head", "group", name="moved_flat_offset")
scale_row_offset = ROW_SCALES.offset_fn("token", "head", "group", name="scale_row_offset", strides=("token", "head"))
moved_row_offset = ROWS.offset_fn("token", "head", "dim", name="moved_row_offset", strides=("token", "head"))
moved_cache_offset = CACHE.offset_fn("slot", "head", "dim", name="moved_cache_offset", strides=("slot", "head"))


@triton.jit(do_not_specialize=["tokens"])
def _scales_kernel(
    rows, loc, cache, tokens, token_stride, head_stride, loc_stride,
    HEAD: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_G: tl.constexpr,
    TILE: tl.constexpr, INTERLEAVED: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = row // HEAD, (row % HEAD)[:, None]
    group = tl.arange(0, BLOCK_G)[None, :]
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=-1)
    inside = (token < tokens)[:, None] & (group < GROUP)
    row_at = scale_row_offset(token[:, None], head, group, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    # A store skips slot 0, the sink of padded tokens, as well as negative slots; a load skips negative ones.
    live = inside & (slot >= (0 if LOAD else 1))[:, None]
    at = tl.maximum(slot, 0)[:, None]
    if INTERLEAVED:
        at = interleaved_offset(at, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)
    else:
        at = flat_offset(at, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)
    if LOAD:
        tl.store(rows + row_at, tl.load(cache + at, live, other=0), inside)
    else:
        tl.store(cache + at, tl.load(rows + row_at, live, other=0), live)


def _move_scales(rows: Tensor, loc: Tensor, cache: Tensor, page_size: int, scale_layout: str, load: bool) -> None:
    tokens, heads, groups = rows.shape
    if rows.numel() == 0:
        return
    block = triton.next_power_of_2(groups)
    tile = max(1024 // block, 1)
    launch(
        _scales_kernel, (triton.cdiv(tokens * heads, tile),), cache,
        raw(rows), loc, raw(cache), tokens, rows.stride(0), rows.stride(1), loc.stride(0),
        HEAD=heads, GROUP=groups, HEAD_DIM=groups * 32, PAGE_SIZE=page_size, BLOCK_G=block, TILE=tile,
        INTERLEAVED=scale_layout == "interleaved", LOAD=load,
    )  # fmt: skip


@contract(same_device=True)
def store_scales(
    scale: Annotated[Tensor, ROW_SCALES],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    cache: Annotated[Tensor, SCALES, Writes(at="loc")],
    *,
    page_size: int = 128,
    scale_layout: Literal["interleaved", "flat"] = "interleaved",
) -> None:
    """Store rows of scales at their slots; slot 0 and negative slots are skipped.

    ``scale`` (token, head, group) E8M0 or uint8, ``loc`` (token,) int64, ``cache`` in ``mxfp8.interleaved`` or
    ``mxfp8.flat``; any number of groups. Raises :class:`layoutcheck.LayoutError`; ``RuntimeError`` without a GPU or the
    interpreter.
    """
    _move_scales(scale, loc, cache, page_size, scale_layout, load=False)


@contract(same_device=True)
def load_scales(
    cache: Annotated[Tensor, SCALES],
    loc: Annotated[Tensor, LOC, Index("slot", skip="< 0")],
    *,
    page_size: int = 128,
    scale_layout: Literal["interleaved", "flat"] = "interleaved",
) -> Annotated[Tensor, ROW_SCALES]:
    """The rows of scales at slots ``loc`` (token,) int64 as (token, head, group) E8M0; bytes 0 for negative slots.

    ``cache`` as in :func:`store_scales`. Raises as there.
    """
    heads, groups = (cache.shape[1], cache.shape[-1])
    rows = torch.empty((loc.shape[0], heads, groups), dtype=torch.float8_e8m0fnu, device=cache.device)
    _move_scales(rows, loc, cache, page_size, scale_layout, load=True)
    return rows


@triton.jit(do_not_specialize=["tokens"])
def _rows_kernel(
    rows, loc, cache, tokens, token_stride, head_stride, slot_stride, cache_head_stride, loc_stride,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = row // HEAD, (row % HEAD)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=-1)
    inside = (token < tokens)[:, None] & (d < DIM)
    live = inside & (slot >= (0 if LOAD else 1))[:, None]
    row_at = moved_row_offset(token[:, None], head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    at = moved_cache_offset(
        tl.maximum(slot, 0)[:, None], head, d, SLOT_STRIDE=slot_stride, HEAD_STRIDE=cache_head_stride
    )
    if LOAD:
        tl.store(rows + row_at, tl.load(cache + at, live, other=0), inside)
    else:
        tl.store(cache + at, tl.load(rows + row_at, live, other=0), live)


def _move_rows(rows: Tensor, loc: Tensor, cache: Tensor, load: bool) -> None:
    tokens, heads, dim = rows.shape
    if rows.numel() == 0:
        return
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    block = triton.next_power_of_2(dim)
    tile = max(8192 // (block * rows.element_size()), 1)
    launch(
        _rows_kernel, (triton.cdiv(tokens * heads, tile),), cache,
        rows.view(integers), loc, cache.view(integers), tokens,
        rows.stride(0), rows.stride(1), cache.stride(0), cache.stride(1), loc.stride(0),
        HEAD=heads, DIM=dim, BLOCK_D=block, TILE=tile, LOAD=load,
    )  # fmt: skip


@contract("dtype(rows) == dtype(cache)", same_device=True)
def store_rows(
    rows: Annotated[Tensor, ROWS],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    cache: Annotated[Tensor, CACHE, Writes(at="loc")],
) -> None:
    """Store rows (token, head, dim) of any element type at slots ``loc`` of ``cache`` (slot, head, dim).

    Slot 0 and negative slots are skipped. Raises as :func:`store_scales`.
    """
    _move_rows(rows, loc, cache, load=False)


@contract(
    "dtype(k_cache) == dtype(v_cache)",
    together("k_scale", "v_scale"),
    no_overlap("k_cache", "v_cache"),
    same_device=True,
)
def move_slots(
    src: Annotated[Tensor, LOC(token="move"), Index("slot", skip="<= 0")],
    dst: Annotated[Tensor, LOC(token="move"), Index("slot", skip="<= 0", unique=True)],
    k_cache: Annotated[Tensor, CACHE, Writes(at="dst")],
    v_cache: Annotated[Tensor, CACHE(dim="v_dim"), Writes(at="dst")],
    k_scale: Annotated[Tensor, SCALES(head_dim="dim"), Writes(at="dst")] | None = None,
    v_scale: Annotated[Tensor, SCALES(head_dim="v_dim"), Writes(at="dst")] | None = None,
    *,
    page_size: int = 128,
    scale_layout: Literal["interleaved", "flat"] = "interleaved",
) -> None:
    """Copy K and V, and their scales, from slots ``src`` to slots ``dst`` (move,) int64.

    All sources are read before anything is written, so the two may overlap: a swap is ``src=[a, b], dst=[b, a]``. A
    pair is skipped where either slot is 0 or negative. ``dst`` must not name a slot twice. Raises as
    :func:`store_scales`.
    """
    if k_cache.shape[0] == 0:
        return  # every pair is skipped, and a slot 0 that is not there must not be read
    dst = torch.where(src > 0, dst, 0)
    for cache in (k_cache, v_cache):
        rows = torch.empty((src.shape[0], *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        _move_rows(rows, src, cache, load=True)
        _move_rows(rows, dst, cache, load=False)
    for scales in (k_scale, v_scale):
        if scales is not None:
            shape = (src.shape[0], scales.shape[1], scales.shape[-1])
            rows = torch.empty(shape, dtype=torch.uint8, device=scales.device)
            _move_scales(rows, src, scales, page_size, scale_layout, load=True)
            _move_scales(rows, dst, scales, page_size, scale_layout, load=False)


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constants) of typical launches, for a compiler without a GPU."""
    strides = dict.fromkeys(("tokens", "token_stride", "head_stride", "loc_stride"), "i32")
    cases: list[tuple[str, Any, dict[str, str], dict[str, Any]]] = []
    for load in (False, True):
        verb = "load" if load else "store"
        for interleaved in (False, True):
            name = f"{verb}-scales-{'interleaved' if interleaved else 'flat'}"
            signature = dict(rows="*u8", loc="*i64", cache="*u8") | strides
            constants = dict(
                HEAD=8, GROUP=4, HEAD_DIM=128, PAGE_SIZE=128, BLOCK_G=4, TILE=256, INTERLEAVED=interleaved, LOAD=load
            )
            cases.append((name, _scales_kernel, signature, constants))
        signature = dict(rows="*i16", loc="*i64", cache="*i16", slot_stride="i32", cache_head_stride="i32") | strides
        cases.append((f"{verb}-rows", _rows_kernel, signature, dict(HEAD=8, DIM=96, BLOCK_D=128, TILE=32, LOAD=load)))
    return cases
