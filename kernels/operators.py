"""Every kernel as an operator of torch, ``torch.ops.layoutcheck``: what is compiled does not look into it.

Named and called as in :mod:`layoutcheck.kernels`. Under ``torch.compile`` such a call is one node of the graph, on any
device, also where the kernel itself is interpreted. :func:`layoutcheck.library.op` says what Inductor cannot take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layoutcheck import kernels
from layoutcheck.kernels.fused_prologue import Prologue
from layoutcheck.library import op

__all__ = [*kernels.__all__]


def _attended(q: Tensor, v_cache: Tensor) -> Tensor:
    dtype = torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[-1]), dtype=dtype)


def _prologue(qkvr: Tensor, k_weight: Tensor, k_cache: Tensor, dq: int) -> Prologue:
    tokens, dkv, mxfp8 = qkvr.shape[0], k_weight.shape[0], k_cache.dtype is torch.float8_e4m3fn
    return Prologue(
        qkvr.new_empty((tokens, dq), dtype=torch.float8_e4m3fn if mxfp8 else torch.bfloat16),
        qkvr.new_empty((tokens, dkv)),
        qkvr.new_empty((tokens, dkv)),
        qkvr.new_empty((tokens, dq // 128, 4), dtype=torch.float8_e8m0fnu) if mxfp8 else None,
    )


def _quantized(x: Tensor, scale_layout: str = "linear", page_size: int = 128, **_: Any) -> tuple[Tensor, Tensor]:
    *batch, head_dim = x.shape
    scale: tuple[int, ...] = (*batch, head_dim // 32)
    if scale_layout == "interleaved":
        slots, heads = batch
        scale = (slots // page_size, heads, 32, page_size // 32, head_dim // 32)
    elif scale_layout == "128x4":
        rows = x.numel() // head_dim if head_dim else 0
        scale = (-(-rows // 128), -(-(head_dim // 32) // 4), 32, 4, 4)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return values, x.new_empty(scale, dtype=torch.float8_e8m0fnu)


_FAKES: dict[str, Any] = {
    "paged_attention": lambda q, k_cache, v_cache, *_, **__: _attended(q, v_cache),
    "sparse_attention_unified_kv": lambda q, *_, **__: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    "quantize_mxfp8": _quantized,
} | {
    f"fused_prologue_{mode}": (lambda qkvr, k_weight, *rest, dq, _at=at, **_: _prologue(qkvr, k_weight, rest[_at], dq))
    for mode, at in (("decode", 8), ("verify", 10), ("extend", 10))
}

for _name in kernels.__all__:
    globals()[_name] = op(f"layoutcheck::{_name}", getattr(kernels, _name), fake=_FAKES.get(_name))
