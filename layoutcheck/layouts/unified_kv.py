"""DeepSeek-V4's unified KV pool: one latent row a slot, and FP8 group scales per page of the pool.

Source: sglang 0.5.23 ``srt/mem_cache/deepseek_v4_memory_pool.py``, ``kernels/ops/attention/dsv4/unified_kv_kernels``.
There a page is one slot. Not checked here: which rows belong to the sliding-window ring and which to the compressed
part (a union of two index spaces); give the index arguments an ``Index`` range.
"""

from __future__ import annotations

from layoutcheck._dtypes import BF16, E4M3, E4M3FNUZ, FP16, FP32
from layoutcheck._layout import Layout

UNIFIED_KV_ROWS = Layout(
    "unified_kv.rows",
    "slot(page token) dim -> page token dim",
    dtype=(BF16, FP16, E4M3, E4M3FNUZ),
    token="page_size",
    view="slot dim",
    public="page",
    fill=0,
)
"""``[slot, dim]``; page_size 1 makes every slot a page.

Users: sglang for DeepSeek-V4 on ROCm.
Source: sglang 0.5.23 srt/mem_cache/deepseek_v4_memory_pool.py (DeepSeekV4UnifiedKVPool).
Not checked: which rows are the sliding window's ring, which compressed.
"""

UNIFIED_KV_SCALE = Layout(
    "unified_kv.kv_scale",
    "page group -> page group",
    dtype=FP32,
    dim="group * 64",
    pitch={"page": "group + row_gap"},
    default={"row_gap": 0},
    fill=0,
)
"""``[page, dim / 64]`` fp32: one row of group scales per page of the pool, shared by all its slots.

Users: sglang for DeepSeek-V4 on ROCm.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/unified_kv_kernels, run.
"""
