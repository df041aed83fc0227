"""Paged KV caches: token-major (NHD), head-major (HND), and the latent row of MLA.

Sources: sglang 0.5.23 ``srt/mem_cache/memory_pool.py`` (MHATokenToKVPool, MLATokenToKVPool); FlashInfer 0.7.4
``data/include/flashinfer/page.cuh``; vLLM ``v1/attention/backends``. Slot = page * page_size + token. Page 0, or slot
0, is the sink of padded tokens and belongs to no request. New memory is zero, as sglang's ``torch.zeros``.
"""

from __future__ import annotations

from layoutcheck._dtypes import BF16, E4M3, E4M3FNUZ, E5M2, FP16
from layoutcheck._layout import Layout

KV_ELEMENTS = (BF16, FP16, E4M3, E4M3FNUZ, E5M2)

PAGED_NHD = Layout(
    "paged.nhd",
    "slot(page token) head head_dim -> page token head head_dim",
    dtype=KV_ELEMENTS,
    token="page_size",
    pitch={"page": "page_size * head * head_dim + page_gap"},
    default={"page_gap": 0},
    public="page",
    fill=0,
)
"""Token-major pages, ``[page, page_size, head, head_dim]``; ``page_gap`` elements may lie between two pages.

Users: sglang (its default), vLLM FlashAttention, FlashInfer, FlashAttention.
Source: sglang 0.5.23 srt/mem_cache/memory_pool.py; FlashInfer 0.7.4 data/include/flashinfer/page.cuh.
"""

PAGED_HND = Layout(
    "paged.hnd",
    "slot(page token) head head_dim -> page head token head_dim",
    dtype=KV_ELEMENTS,
    token="page_size",
    pitch={"page": "page_size * head * head_dim + page_gap"},
    default={"page_gap": 0},
    public="page",
    fill=0,
)
"""Head-major pages, ``[page, head, page_size, head_dim]``. ``view="page token head head_dim"`` shows them as NHD.

Users: FlashInfer and TensorRT-LLM kernels on Blackwell, vLLM with VLLM_KV_CACHE_LAYOUT=HND, sglang with
SGLANG_USE_HND_KVCACHE.
Source: sglang 0.5.23 srt/mem_cache/memory_pool.py; FlashInfer 0.7.4 data/include/flashinfer/page.cuh.
"""

PAGED_NHD_KV = Layout(
    "paged.nhd.kv",
    "kv slot(page token) head head_dim -> page kv token head head_dim",
    dtype=KV_ELEMENTS,
    kv=2,
    token="page_size",
    pitch={"page": "2 * page_size * head * head_dim + page_gap"},
    default={"page_gap": 0},
    public="page",
    fill=0,
)
"""K and V of a page side by side, ``[page, 2, page_size, head, head_dim]``.

Users: vLLM FlashInfer and Triton backends, FlashInfer's combined cache.
Source: FlashInfer 0.7.4 utils.py (_unpack_paged_kv_cache), data/include/flashinfer/page.cuh.
"""

PAGED_HND_KV = Layout(
    "paged.hnd.kv",
    "kv slot(page token) head head_dim -> page kv head token head_dim",
    dtype=KV_ELEMENTS,
    kv=2,
    token="page_size",
    pitch={"page": "2 * page_size * head * head_dim + page_gap"},
    default={"page_gap": 0},
    public="page",
    fill=0,
)
"""K and V of a page side by side, head-major: ``[page, 2, head, page_size, head_dim]``.

Users: FlashInfer's combined cache with kv_layout="HND", vLLM FlashInfer backend on Blackwell.
Source: FlashInfer 0.7.4 utils.py (_unpack_paged_kv_cache), data/include/flashinfer/page.cuh.
"""

FLASHINFER_NHD = Layout(
    "flashinfer.nhd",
    "slot(page token) head head_dim -> page token head head_dim",
    dtype=KV_ELEMENTS,
    token="page_size",
    dense="head_dim",
    public="page",
)
"""One half of FlashInfer's paged cache, ``[page, page_size, head, head_dim]``, with free strides.

Users: FlashInfer's paged decode, prefill and append.
Source: FlashInfer 0.7.4 data/include/flashinfer/page.cuh (paged_kv_t).
Not checked: strides are stored in 32 bits there, so one of 4 Gi elements or more is cut off.
"""

FLASHINFER_HND = Layout(
    "flashinfer.hnd",
    "slot(page token) head head_dim -> page head token head_dim",
    dtype=KV_ELEMENTS,
    token="page_size",
    dense="head_dim",
    public="page",
)
"""One half of FlashInfer's paged cache, head-major, ``[page, head, page_size, head_dim]``, with free strides.

Users: FlashInfer's paged decode, prefill and append with kv_layout="HND", its TensorRT-LLM kernels.
Source: FlashInfer 0.7.4 data/include/flashinfer/page.cuh (paged_kv_t).
Not checked: strides are stored in 32 bits there, so one of 4 Gi elements or more is cut off.
"""

TRTLLM_BLOCK = Layout(
    "trtllm.block",
    "slot(page token) head head_dim -> page head token head_dim",
    dtype=KV_ELEMENTS,
    token="page_size",
    public="page",
)
"""A pool of K blocks or of V blocks, ``[block, head, tokens_per_block, head_dim]``.

Users: TensorRT-LLM's attention kernels.
Source: TensorRT-LLM cpp/tensorrt_llm/kernels/kvCacheUtils.h.
Not checked: tokens_per_block must be a power of two (a contract says ``pow2(page_size)``); the offset table's entries
carry a pool flag beside the index, and with a cyclic window the map of positions is no bijection.
"""

MLA_LATENT = Layout(
    "mla.latent",
    "slot head dim -> slot head dim",
    dtype=KV_ELEMENTS,
    head=1,
    dim="latent + rope",
    fill=0,
)
"""One latent row a slot, ``[slot, 1, latent + rope]``, latent first; V is the first ``latent`` elements of K.

Users: sglang's MLA pool, FlashInfer MLA, FlashMLA's dense decoding (pages of 64 tokens).
Source: sglang 0.5.23 srt/mem_cache/memory_pool.py (MLATokenToKVPool).
"""
