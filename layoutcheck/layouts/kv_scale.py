"""Scales of FP8 KV caches that are kept per head, or inline per token and head.

Sources: FlashAttention's descale arguments; vLLM 0.33.0 fp8_per_token_head caches.
"""

from __future__ import annotations

from layoutcheck._dtypes import FP32
from layoutcheck._layout import Layout

KV_SCALE_PER_HEAD = Layout("kv_scale.per_head", "seq head -> seq head", dtype=FP32, dense="")
"""``[seq, head]`` fp32 with free strides, one scale for each sequence and KV head.

Users: FlashAttention's q_descale, k_descale and v_descale in vLLM and sglang.
Source: vLLM 0.33.0 v1/attention/backends/flash_attn.py.
"""

KV_SCALE_PER_TOKEN_HEAD = Layout(
    "kv_scale.per_token_head",
    "slot(page token) head -> page token head",
    dtype=FP32,
    token="page_size",
    dense="",
    public="page",
)
"""``[page, page_size, head]`` fp32 with free strides: a view of the scales inside the cache's own cells.

Users: vLLM's fp8, int8 and int4 per_token_head caches, FlashInfer's per-token scales.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: where in a cell the scale stands; the view's base and strides say it.
"""
