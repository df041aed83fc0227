"""Rows and scales between buffers and slots: scatter, gather, relocate. Bytes are moved, nothing is computed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import E8M0, Index, Layout, Writes, contract, no_overlap, together
from layoutcheck._dtypes import ELEMENTS
from layoutcheck.kernels._launch import cdiv, launch, next_power_of_2, raw
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


# --- on a tile of rows [row], each of its own token and head ----------------------------------------------------------


@triton.jit
def _scale_addresses(
    rows, cache, token, head, slot, token_stride, head_stride,
    HEAD: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Where the scales [row, group] of a tile lie among the rows and in the cache, and which of them there are."""
    group = tl.arange(0, BLOCK_G)[None, :]
    token, head, slot = token[:, None], head[:, None], tl.maximum(slot, 0)[:, None]
    row_at = scale_row_offset(token, head, group, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    if INTERLEAVED:
        at = interleaved_offset(slot, head, group, HEAD=HEAD, HEAD_DIM=GROUP * 32, PAGE_SIZE=PAGE_SIZE)
    else:
        at = flat_offset(slot, head, group, HEAD=HEAD, HEAD_DIM=GROUP * 32)
    return rows + row_at, cache + at, group < GROUP


@triton.jit
def _row_addresses(
    rows, cache, token, head, slot, token_stride, head_stride, slot_stride, cache_head_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The same of rows [row, dim]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    token, head, slot = token[:, None], head[:, None], tl.maximum(slot, 0)[:, None]
    row_at = moved_row_offset(token, head, d, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride)
    at = moved_cache_offset(slot, head, d, SLOT_STRIDE=slot_stride, HEAD_STRIDE=cache_head_stride)
    return rows + row_at, cache + at, d < DIM


# --- rows and slots ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def _scales_kernel(
    rows, loc, cache, tokens, token_stride, head_stride, loc_stride,
    HEAD: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr,
    TILE: tl.constexpr, INTERLEAVED: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """``UNIT`` divides the strides of rows, which are given in it: so many bytes can be moved at once."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = row // HEAD, row % HEAD
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=-1)
    row_at, at, inside = _scale_addresses(
        rows, cache, token, head, slot, token_stride * UNIT, head_stride * UNIT,
        HEAD, GROUP, BLOCK_G, PAGE_SIZE, INTERLEAVED,
    )  # fmt: skip
    # A store skips slot 0, the sink of padded tokens, as well as negative slots; a load skips negative ones.
    live = inside & (slot >= (0 if LOAD else 1))[:, None]
    if LOAD:
        tl.store(row_at, tl.load(at, live, other=0), inside & (token < tokens)[:, None])
    else:
        tl.store(at, tl.load(row_at, live, other=0), live, eviction_policy="evict_last")


def _move_scales(rows: Tensor, loc: Tensor, cache: Tensor, page_size: int, scale_layout: str, load: bool) -> None:
    tokens, heads, groups = rows.shape
    if rows.numel() == 0:
        return
    block = next_power_of_2(groups)
    tile = max(1024 // block, 1)
    unit = math.gcd(rows.stride(0), rows.stride(1), 16)
    launch(
        _scales_kernel, (cdiv(tokens * heads, tile),), cache,
        raw(rows), loc, raw(cache), tokens, rows.stride(0) // unit, rows.stride(1) // unit, loc.stride(0),
        HEAD=heads, GROUP=groups, PAGE_SIZE=page_size, UNIT=unit, BLOCK_G=block, TILE=tile,
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
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = row // HEAD, row % HEAD
    slot = tl.load(loc + token.to(tl.int64) * loc_stride, token < tokens, other=0)
    row_at, at, inside = _row_addresses(
        rows, cache, token, head, slot, token_stride, head_stride, slot_stride, cache_head_stride, DIM, BLOCK_D
    )
    live = inside & (slot > 0)[:, None]
    tl.store(at, tl.load(row_at, live, other=0), live)


@contract("dtype(rows) == dtype(cache)", same_device=True)
def store_rows(
    rows: Annotated[Tensor, ROWS],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    cache: Annotated[Tensor, CACHE, Writes(at="loc")],
) -> None:
    """Store rows (token, head, dim) of any element type at slots ``loc`` of ``cache`` (slot, head, dim).

    Slot 0 and negative slots are skipped. Raises as :func:`store_scales`.
    """
    tokens, heads, dim = rows.shape
    if rows.numel() == 0:
        return
    block = next_power_of_2(dim)
    tile = max(8192 // (block * rows.element_size()), 1)
    launch(
        _rows_kernel, (cdiv(tokens * heads, tile),), cache,
        _integers(rows), loc, _integers(cache), tokens, *rows.stride()[:2], *cache.stride()[:2], loc.stride(0),
        HEAD=heads, DIM=dim, BLOCK_D=block, TILE=tile,
    )  # fmt: skip


def _integers(tensor: Tensor) -> Tensor:
    """The same bits as numbers that Triton has a type for."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# --- from slot to slot ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["moves"])
def _slots_kernel(
    src, dst, k_cache, v_cache, k_scale, v_scale, k_rows, v_rows, k_scale_rows, v_scale_rows, moves,
    src_stride, dst_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride,
    HEAD: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, K_BLOCK_G: tl.constexpr, V_BLOCK_G: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, INTERLEAVED: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """``LOAD``: slots ``src`` to rows; else rows to slots ``dst``. Rows are dense, (move, head, dim or group)."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    move, head = row // HEAD, row % HEAD
    come_from = tl.load(src + move.to(tl.int64) * src_stride, move < moves, other=0)
    go_to = tl.load(dst + move.to(tl.int64) * dst_stride, move < moves, other=0)
    live = ((come_from > 0) & (go_to > 0))[:, None]
    slot = come_from if LOAD else go_to
    k_row_at, k_at, k_inside = _row_addresses(
        k_rows, k_cache, move, head, slot, HEAD * K_DIM, K_DIM, k_slot_stride, k_head_stride, K_DIM, K_BLOCK
    )
    v_row_at, v_at, v_inside = _row_addresses(
        v_rows, v_cache, move, head, slot, HEAD * V_DIM, V_DIM, v_slot_stride, v_head_stride, V_DIM, V_BLOCK
    )
    # All loads before the first store, which the compiler cannot move them across.
    k = tl.load(k_at if LOAD else k_row_at, live & k_inside, other=0)
    v = tl.load(v_at if LOAD else v_row_at, live & v_inside, other=0)
    if k_scale is not None:
        ks_row_at, ks_at, ks_inside = _scale_addresses(
            k_scale_rows, k_scale, move, head, slot, HEAD * K_GROUP, K_GROUP,
            HEAD, K_GROUP, K_BLOCK_G, PAGE_SIZE, INTERLEAVED,
        )  # fmt: skip
        vs_row_at, vs_at, vs_inside = _scale_addresses(
            v_scale_rows, v_scale, move, head, slot, HEAD * V_GROUP, V_GROUP,
            HEAD, V_GROUP, V_BLOCK_G, PAGE_SIZE, INTERLEAVED,
        )  # fmt: skip
        ks = tl.load(ks_at if LOAD else ks_row_at, live & ks_inside, other=0)
        vs = tl.load(vs_at if LOAD else vs_row_at, live & vs_inside, other=0)
        # Neighbouring slots share a sector of scales: kept in the cache, it can be written to memory once.
        tl.store(ks_row_at if LOAD else ks_at, ks, live & ks_inside, eviction_policy="evict_last")
        tl.store(vs_row_at if LOAD else vs_at, vs, live & vs_inside, eviction_policy="evict_last")
    tl.store(k_row_at if LOAD else k_at, k, live & k_inside)
    tl.store(v_row_at if LOAD else v_at, v, live & v_inside)


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
    moves, (heads, k_dim), v_dim = src.shape[0], k_cache.shape[1:], v_cache.shape[2]
    if moves * heads == 0:
        return
    k_group, v_group = (0 if s is None else s.shape[-1] for s in (k_scale, v_scale))
    widest = max(k_dim, v_dim) * k_cache.element_size()
    tile = max(1, 2048 // next_power_of_2(widest))
    data = [_integers(c) for c in (k_cache, v_cache)] + [None if s is None else raw(s) for s in (k_scale, v_scale)]
    rows = [
        None if c is None else torch.empty((moves, heads, c.shape[-1]), dtype=c.dtype, device=c.device) for c in data
    ]
    for load in (True, False):
        launch(
            _slots_kernel, (cdiv(moves * heads, tile),), k_cache,
            src, dst, *data, *rows, moves, src.stride(0), dst.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
            HEAD=heads, K_DIM=k_dim, V_DIM=v_dim, K_BLOCK=next_power_of_2(k_dim), V_BLOCK=next_power_of_2(v_dim),
            K_GROUP=k_group, V_GROUP=v_group, K_BLOCK_G=next_power_of_2(k_group), V_BLOCK_G=next_power_of_2(v_group),
            PAGE_SIZE=page_size, TILE=tile, INTERLEAVED=scale_layout == "interleaved", LOAD=load,
        )  # fmt: skip


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constants) of typical launches, for a compiler without a GPU."""
    strides = dict.fromkeys(("tokens", "token_stride", "head_stride", "loc_stride"), "i32")
    cases: list[tuple[str, Any, dict[str, str], dict[str, Any]]] = []
    for load in (False, True):
        for interleaved in (False, True):
            name = f"{'load' if load else 'store'}-scales-{'interleaved' if interleaved else 'flat'}"
            signature = dict(rows="*u8", loc="*i64", cache="*u8") | strides
            constants = dict(
                HEAD=8, GROUP=4, PAGE_SIZE=128, UNIT=4, BLOCK_G=4, TILE=256, INTERLEAVED=interleaved, LOAD=load
            )
            cases.append((name, _scales_kernel, signature, constants))
        for scales in (None, "*u8"):
            buffers = ("k_cache", "v_cache", "k_rows", "v_rows")
            signature = dict(src="*i64", dst="*i64") | dict.fromkeys(buffers, "*u8" if scales else "*i16")
            constants = dict(
                HEAD=8, K_DIM=128, V_DIM=96, K_BLOCK=128, V_BLOCK=128, K_GROUP=4, V_GROUP=3, K_BLOCK_G=4, V_BLOCK_G=4,
                PAGE_SIZE=128, TILE=32, INTERLEAVED=True, LOAD=load,
            )  # fmt: skip
            for n in ("k_scale", "v_scale", "k_scale_rows", "v_scale_rows"):
                (signature if scales else constants)[n] = scales
            signature |= {n: "i32" for n in _slots_kernel.arg_names if n not in signature and n not in constants}
            name = f"{'load' if load else 'store'}-slots-{'mxfp8' if scales else 'bf16'}"
            cases.append((name, _slots_kernel, signature, constants))
    signature = dict(rows="*i16", loc="*i64", cache="*i16", slot_stride="i32", cache_head_stride="i32") | strides
    cases.append(("store-rows", _rows_kernel, signature, dict(HEAD=8, DIM=96, BLOCK_D=128, TILE=32)))
    return cases
