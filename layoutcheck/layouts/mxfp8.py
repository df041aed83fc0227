"""Scale factors of MXFP8 KV caches: one E8M0 byte per 32 elements along head_dim (OCP MX v1.0).

Sources: sglang 0.5.23 ``kernels/ops/kvcache/mxfp8_interleave_sf.py``, ``mxfp8_quant_store_kv.py``,
``srt/mem_cache/memory_pool.py`` (MHATokenToKVPoolMXFP8). Both layouts have the same number of bytes for the same pool:
only the declaration tells them apart. Byte 0xFF is NaN, so new memory is zero.
"""

from __future__ import annotations

from layoutcheck._dtypes import E8M0
from layoutcheck._layout import Layout

MXFP8_SCALE_INTERLEAVED = Layout(
    "mxfp8.interleaved",
    "slot(page token(chunk lane)) head group -> page head lane chunk group",
    dtype=E8M0,
    token="page_size",
    lane=32,
    head_dim="group * 32",
    public="page",
    fill=0,
)
"""``[page, head, 32, page_size / 32, head_dim / 32]``, as FA4's block-scaled attention reads it.

Users: sglang's MXFP8 KV pool at page size 128 (FA4 on Blackwell).
Source: sglang 0.5.23 kernels/ops/kvcache/mxfp8_interleave_sf.py, mxfp8_quant_store_kv.py, run.
Not checked: slot 0 is reserved, so writers skip it; sglang's own stand-alone writer takes only head_dim 128.
"""

MXFP8_SCALE_FLAT = Layout(
    "mxfp8.flat",
    "slot head group -> slot head group",
    dtype=E8M0,
    head_dim="group * 32",
    fill=0,
)
"""``[slot, head, head_dim / 32]``: one row of scales a slot.

Users: sglang's MXFP8 KV pool at other page sizes.
Source: sglang 0.5.23 srt/mem_cache/memory_pool.py (MHATokenToKVPoolMXFP8).
"""
