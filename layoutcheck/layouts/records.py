"""Packed rows and pages of several types in one byte buffer.

``flashmla.v32_656``: FlashMLA @9241ae3 README and ``tests/quant.py``; sglang 0.5.23 ``kernels/ops/quantization/
dsa_quant_k_cache.py``; vLLM 0.33.0 fp8_ds_mla.
"""

from __future__ import annotations

from layoutcheck._dtypes import BF16, E4M3, FP32, INT8, UINT8
from layoutcheck._layout import Layout
from layoutcheck._record import Record

FLASHMLA_V32_656 = Record(
    "flashmla.v32_656",
    buffer=Layout(
        "flashmla.v32_656",
        "slot(page token) byte -> page token byte",
        dtype=(UINT8, INT8, E4M3),
        token="page_size",
        byte=656,
        pitch={"page": "(page_size + page_gap_rows) * 656"},
        default={"page_gap_rows": 0},
        public="page",
        fill=0,
    ),
    nope=Layout(
        "nope", "slot(page token) dim -> page token dim", dtype=E4M3, token="page_size", dim=512, public="page"
    ),
    scale=Layout(
        "scale", "slot(page token) group -> page token group", dtype=FP32, token="page_size", group=4, public="page"
    ),
    rope=Layout("rope", "slot(page token) dim -> page token dim", dtype=BF16, token="page_size", dim=64, public="page"),
)
"""A row of 656 bytes a token: 512 e4m3, their 4 fp32 scales (one per 128), 64 bf16 of rope.

Users: FlashMLA's sparse decoding, vLLM's fp8_ds_mla, sglang for DeepSeek-V3.2, FlashInfer's sparse MLA.
Source: FlashMLA @9241ae3 tests/quant.py, run; sglang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py.
Not checked: on Blackwell the base must be at 16 bytes; whether scales are powers of two.
"""
