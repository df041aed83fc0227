"""Triton kernels with contracts. Importing this package imports triton; on a CPU set ``TRITON_INTERPRET=1`` before."""

from layoutcheck.kernels._interpreter import correct_interpreter

correct_interpreter()

from layoutcheck.kernels.fused_prologue import (  # noqa: E402
    fused_prologue_decode,
    fused_prologue_extend,
    fused_prologue_verify,
)
from layoutcheck.kernels.move import load_scales, move_slots, store_rows, store_scales  # noqa: E402
from layoutcheck.kernels.paged import paged_attention  # noqa: E402
from layoutcheck.kernels.quantize import quantize_mxfp8, quantize_store_kv_mxfp8  # noqa: E402
from layoutcheck.kernels.unified_kv import quantize_store_unified_kv, sparse_attention_unified_kv  # noqa: E402

__all__ = [
    "fused_prologue_decode",
    "fused_prologue_extend",
    "fused_prologue_verify",
    "load_scales",
    "move_slots",
    "paged_attention",
    "quantize_mxfp8",
    "quantize_store_kv_mxfp8",
    "quantize_store_unified_kv",
    "sparse_attention_unified_kv",
    "store_rows",
    "store_scales",
]
