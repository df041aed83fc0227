"""The vectorised 5-D cache of AITER on ROCm: 16-byte vectors along head_dim for K, along the tokens for V.

Source: sglang 0.5.23 ``srt/mem_cache/memory_pool.py``, ``kernels/ops/kvcache/shuffle_5d_cache.py``. K and V have the
same number of elements, and K's order is that of ``x_packed.k``. Slot = page * page_size + token; a negative slot is
skipped by the writer.
"""

from __future__ import annotations

from layoutcheck._layout import Layout
from layoutcheck.layouts.paged import KV_ELEMENTS

VECTORIZED_5D_K = Layout(
    "vectorized_5d.k",
    "slot(page token) head head_dim(dx x) -> page head dx token x",
    dtype=KV_ELEMENTS,
    token="page_size",
    public=("page", "x"),
    fill=0,
)
"""``[page, head, head_dim / x, page_size, x]``, x = 16 bytes / element.

Users: AITER attention on ROCm (sglang, vLLM's SHUFFLE layout).
Source: sglang 0.5.23 kernels/ops/kvcache/shuffle_5d_cache.py; vLLM 0.33.0 v1/attention/backends/rocm_aiter_fa.py.
Not checked: that x is 16 bytes of the stored type; the tensor's last dimension says what x is.
"""

VECTORIZED_5D_V = Layout(
    "vectorized_5d.v",
    "slot(page token(tx x)) head head_dim -> page head tx head_dim x",
    dtype=KV_ELEMENTS,
    token="page_size",
    public=("page", "x"),
    fill=0,
)
"""``[page, head, page_size / x, head_dim, x]``: x neighbouring tokens are innermost.

Users: AITER attention on ROCm (sglang, vLLM's SHUFFLE layout).
Source: sglang 0.5.23 kernels/ops/kvcache/shuffle_5d_cache.py; vLLM 0.33.0 v1/attention/backends/rocm_aiter_fa.py.
Not checked: that x is 16 bytes of the stored type; the tensor's last dimension says what x is.
"""
