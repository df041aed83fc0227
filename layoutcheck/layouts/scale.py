"""Scale factors of block-scaled matrices: linear, and the 128x4 tiles that tensor cores read.

Sources: cuBLASLt 32_4_4 swizzle as in torchao 0.18.0 ``prototype/mx_formats/utils.py`` (to_blocked) and FlashInfer
0.7.4 layout_128x4. Padding is read by the hardware, so it must be finite: it is filled with zero, and checked in
``values`` mode. 0x7F and 0xFF in e4m3, 0xFF in e8m0 are NaN.
"""

from __future__ import annotations

from layoutcheck._dtypes import E4M3, E8M0
from layoutcheck._layout import Layout

SCALE_LINEAR = Layout("scale.linear", "row col -> row col", dtype=(E8M0, E4M3), fill=0)
"""``[row, col]``: one scale a block, row-major, no padding."""

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
"""``[row tile, col tile, 32, 4, 4]``: rows padded to 128 and columns to 4, then 512-byte tiles."""
