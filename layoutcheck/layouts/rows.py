"""Rows that a kernel reads: new K, V or Q tokens, often slices of one fused projection.

Only head_dim must be packed; tokens and heads may have any stride, so a slice of a fused qkv needs no copy.
"""

from __future__ import annotations

from layoutcheck._dtypes import BF16, FP16, FP32
from layoutcheck._layout import Layout

ROWS_THD = Layout(
    "rows.thd",
    "token head head_dim -> token head head_dim",
    dtype=(BF16, FP16, FP32),
    dense="head_dim",
)
"""``[token, head, head_dim]`` with free strides of token and head.

Users: the writers of every paged cache.
Source: sglang 0.5.23 kernels/ops/kvcache/mxfp8_quant_store_kv.py, which takes k and v so.
"""
