"""Scale factors of block-scaled matrices: linear, and the tiles that tensor cores read.

Sources: cuBLASLt 32_4_4 swizzle as in torchao 0.18.0 ``prototype/mx_formats/utils.py`` (to_blocked) and FlashInfer
0.7.4 layout_128x4. Padding is read by the hardware, so it must be finite: it is filled with zero, and checked in
``values`` mode. 0x7F and 0xFF in e4m3, 0xFF in e8m0 are NaN.
"""

from __future__ import annotations

from layoutcheck._dtypes import E4M3, E8M0, FP32
from layoutcheck._layout import Layout

SCALE_LINEAR = Layout("scale.linear", "row col -> row col", dtype=(E8M0, E4M3), fill=0)
"""``[row, col]``: one scale a block, row-major, no padding.

Users: Triton kernels, Transformer Engine before it swizzles, the input of every swizzle.
Source: torchao 0.18.0 prototype/mx_formats/mx_tensor.py.
"""

SCALE_128X4 = Layout(
    "scale.128x4",
    "row(rt rc rl) col(ct c) -> rt ct rl rc c",
    dtype=(E8M0, E4M3),
    rc=4,
    rl=32,
    c=4,
    pad={"row": 128, "col": 4},
    fill=0,
)
"""``[row tile, col tile, 32, 4, 4]``: rows padded to 128 and columns to 4, then 512-byte tiles.

Users: cuBLASLt, torch scaled_mm, torchao, Transformer Engine, FlashInfer, vLLM, quack, TensorRT-LLM, Triton's
dot_scaled tutorial.
Source: torchao 0.18.0 prototype/mx_formats/utils.py (to_blocked), run; FlashInfer 0.7.4 layout_128x4.
Not checked: one expert's tiles begin where the one before ends, rounded up by its own rows; give each expert a view.
"""

SCALE_8X4 = Layout(
    "scale.8x4",
    "row(rt r) col(ct c) -> rt ct r c",
    dtype=(E8M0, E4M3),
    r=8,
    c=4,
    pad={"row": 8, "col": 4},
    fill=0,
)
"""``[row tile, col tile, 8, 4]``: the tiles for few rows, padded to 8 and 4.

Users: FlashInfer's TensorRT-LLM GEMMs with use_8x4_sf_layout (operand A only).
Source: FlashInfer 0.7.4 layout_8x4.
"""

SCALE_BLOCK_128X128 = Layout(
    "scale.block_128x128",
    "row col -> row col",
    dtype=FP32,
    row="cdiv(n, 128)",
    col="cdiv(k, 128)",
)
"""``[cdiv(n, 128), cdiv(k, 128)]`` fp32: one scale for each 128x128 block of a weight ``[n, k]``.

Users: DeepSeek-V3 FP8 weights; DeepGEMM on Hopper, sglang, vLLM.
Source: sglang 0.5.23 srt/layers/quantization/fp8_utils.py.
"""
