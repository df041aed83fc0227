"""vLLM's paged KV caches: the x-packed one of PagedAttention, and the six byte orders of its logical model.

Sources: vLLM 0.33.0 ``v1/kv_cache_layout.py`` (the six orders), ``v1/attention/ops/paged_attn.py`` (split_kv_cache).
Slot = page * page_size + token. In the logical model every (head, token) cell holds its K, then its V: ``content`` is
head_dim + v_head_dim elements. All six show the same tensor, ``[layer, page, head, token, content]``, with other
strides: a shape check tells none from another.
"""

from __future__ import annotations

from layoutcheck._layout import Layout
from layoutcheck.layouts.paged import KV_ELEMENTS

X_PACKED_K = Layout(
    "x_packed.k",
    "slot(page token) head head_dim(dx x) -> page head dx token x",
    dtype=KV_ELEMENTS,
    token="page_size",
    public=("page", "x"),
    fill=0,
)
"""``[page, head, head_dim / x, page_size, x]``, x = 16 bytes / element.

Users: vLLM PagedAttention v1 and v2, the native ROCm attention.
Source: vLLM 0.33.0 v1/attention/ops/paged_attn.py; csrc/cache_kernels.cu of an older vLLM (693083a), compiled.
Not checked: that x is 16 bytes, since it depends on the element type; the tensor's last dimension says what x is.
"""

X_PACKED_V = Layout(
    "x_packed.v",
    "slot(page token) head head_dim -> page head head_dim token",
    dtype=KV_ELEMENTS,
    token="page_size",
    public="page",
    fill=0,
)
"""``[page, head, head_dim, page_size]``: tokens are innermost.

Users: vLLM PagedAttention v1 and v2, the native ROCm attention.
Source: vLLM 0.33.0 v1/attention/ops/paged_attn.py; csrc/cache_kernels.cu of an older vLLM (693083a), compiled.
"""


def _order(name: str, memory: str, page: str | None) -> Layout:
    """One order of the logical model; ``page`` is what a page takes, if the page may be followed by a gap."""
    gap = dict(pitch={"page": f"{page} + page_gap"}, default={"page_gap": 0}) if page else {}
    return Layout(
        name,
        f"layer slot(page token) head content -> {memory}",
        dtype=KV_ELEMENTS,
        token="page_size",
        view="layer page head token content",
        public="page",
        fill=0,
        **gap,
    )


_LAYER_PAGE = "page_size * head * content"
_ALL_LAYERS = "layer * page_size * head * content"

VLLM_LBHNC = _order("vllm.lbhnc", "layer page head token content", _LAYER_PAGE)
"""One buffer a layer, pages head-major (HND).

Users: vLLM CPU and ROCm attention.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""

VLLM_LBNHC = _order("vllm.lbnhc", "layer page token head content", _LAYER_PAGE)
"""One buffer a layer, pages token-major (NHD).

Users: vLLM FlexAttention, TurboQuant, most backends.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""

VLLM_LHBNC = _order("vllm.lhbnc", "layer head page token content", None)
"""One buffer a layer, all pages of a head together.

Users: vLLM ROCm attention.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""

VLLM_BLHNC = _order("vllm.blhnc", "page layer head token content", _ALL_LAYERS)
"""A page holds every layer, head-major: the page stride is that of all layers.

Users: vLLM sparse-attention indexer, KV connectors.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""

VLLM_BLNHC = _order("vllm.blnhc", "page layer token head content", _ALL_LAYERS)
"""A page holds every layer, token-major: the page stride is that of all layers.

Users: vLLM DeepSeek-V4 indexer, KV connectors.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""

VLLM_BHLNC = _order("vllm.bhlnc", "page head layer token content", _ALL_LAYERS)
"""A page holds every head with all its layers, so that heads can be sent alone.

Users: vLLM KV connectors between unequal tensor-parallel sizes.
Source: vLLM 0.33.0 v1/kv_cache_layout.py.
Not checked: what ``content`` is made of, and which backend allows which order.
"""
