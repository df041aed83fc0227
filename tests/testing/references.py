"""What the kernels do, in torch: plain indexing of the memory order that the layouts' sources describe."""

from __future__ import annotations

import mxfp8_reference
import torch
from torch import Tensor

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_scales(cache: Tensor, slots: Tensor, rows: Tensor, page_size: int, scale_layout: str) -> None:
    """Scale bytes (token, head, group) at their slots."""
    raw, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    if scale_layout == "flat":
        raw[slots] = rows
    else:
        token = slots % page_size
        raw[slots // page_size, :, token % 32, token // 32] = rows


def store_scales(scale: Tensor, loc: Tensor, cache: Tensor, *, page_size: int, scale_layout: str) -> None:
    live = loc > 0
    put_scales(cache, loc[live], scale.view(torch.uint8)[live], page_size, scale_layout)


def load_scales(cache: Tensor, loc: Tensor, *, page_size: int, scale_layout: str) -> Tensor:
    raw, slots = cache.view(torch.uint8), loc.clamp(min=0)
    if not len(raw):  # every slot is negative
        return torch.zeros(len(loc), raw.shape[1], raw.shape[-1], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    if scale_layout == "flat":
        rows = raw[slots]
    else:
        token = slots % page_size
        rows = raw[slots // page_size, :, token % 32, token // 32]
    return torch.where((loc >= 0)[:, None, None], rows, 0).to(torch.uint8).view(torch.float8_e8m0fnu)


def store_rows(rows: Tensor, loc: Tensor, cache: Tensor) -> None:
    raw, live = _WIDTHS[rows.element_size()], loc > 0
    cache.view(raw)[loc[live]] = rows.view(raw)[live]


def move_slots(
    src: Tensor, dst: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    *, page_size: int, scale_layout: str,
) -> None:  # fmt: skip
    live = (src > 0) & (dst > 0)
    for cache in (k_cache, v_cache):
        raw = cache.view(_WIDTHS[cache.element_size()])
        raw[dst[live]] = raw[src[live]]
    for cache in (k_scale, v_scale):
        if cache is not None:
            rows = load_scales(cache, src[live], page_size=page_size, scale_layout=scale_layout)
            put_scales(cache, dst[live], rows, page_size, scale_layout)


def quantize_store_kv_mxfp8(
    k: Tensor, v: Tensor, loc: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor,
    *, page_size: int, scale_layout: str,
) -> None:  # fmt: skip
    live = loc > 0
    for rows, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        payload, bytes_ = mxfp8_reference.quantize(rows[live])
        cache.view(torch.uint8)[loc[live]] = payload
        put_scales(scales, loc[live], bytes_, page_size, scale_layout)
