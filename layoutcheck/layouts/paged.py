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
"""Token-major pages, ``[page, page_size, head, head_dim]``; ``page_gap`` elements may lie between two pages."""

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
"""Head-major pages, ``[page, head, page_size, head_dim]``. ``view="page token head head_dim"`` shows them as NHD."""

MLA_LATENT = Layout(
    "mla.latent",
    "slot head dim -> slot head dim",
    dtype=KV_ELEMENTS,
    head=1,
    dim="latent + rope",
    fill=0,
)
"""One latent row a slot, ``[slot, 1, latent + rope]``, latent first; V is the first ``latent`` elements of K."""
