"""Scale factors of MXFP4 weights as triton_kernels swizzles them, one order for each generation of tensor cores.

Source: triton-lang/triton ``python/triton_kernels/triton_kernels/tensor_details/layout_details``, and the copy in vLLM
0.33.0 ``third_party/triton_kernels``. ``k`` counts groups of 32 along K. The files change between versions: the entry
says which was compared. Padding is zero.
"""

from __future__ import annotations

from layoutcheck._dtypes import E8M0
from layoutcheck._layout import Layout

TRITON_KERNELS_BLACKWELL = Layout(
    "triton_kernels.blackwell",
    "batch k(kt c) n(rt rc rl) -> batch rt kt rl rc c",
    dtype=E8M0,
    c=4,
    rc=4,
    rl=32,
    pad={"k": 8, "n": 128},
    view=("1", "batch * align(n, 128) / 128", "align(k, 8) / 4", "2", "256"),
    fill=0,
)
"""512-byte tiles as in ``scale.128x4``, shown as ``[1, batch * n / 128, k / 4, 2, 256]``; k is padded to 8, not 4.

Users: triton_kernels on Blackwell (gpt-oss in vLLM and sglang).
Source: vLLM 0.33.0 third_party/triton_kernels, blackwell_scale.py, run; triton @264a627, read.
Not checked: the activation form with ragged rows, where each expert is padded to 128 by its own count.
"""

TRITON_KERNELS_HOPPER = Layout(
    "triton_kernels.hopper",
    "m(mt a w b c) k(kt e) -> (mt w) (kt a c e b)",
    dtype=E8M0,
    a=2,
    w="num_warps",
    b=2,
    c=8,
    e=2,
    pad={"m": "32 * num_warps", "k": 2},
    fill=0,
)
"""``[align(m, 32 * num_warps) / 32, 32 * align(k, 2)]``.

Users: triton_kernels on Hopper (gpt-oss in vLLM and sglang).
Source: vLLM 0.33.0 third_party/triton_kernels, hopper_scale.py, run; triton @57af0d6, read.
"""

TRITON_KERNELS_CDNA4 = Layout(
    "triton_kernels.cdna4",
    "k(kt k2 k4) n(nt n2 n16) -> nt (kt k4 n16 k2 n2)",
    dtype=E8M0,
    k2=2,
    k4=4,
    n2=2,
    n16=16,
    pad={"k": 8, "n": 32},
    fill=0,
)
"""``[align(n, 32) / 32, 32 * align(k, 8)]``.

Users: triton_kernels on gfx950.
Source: vLLM 0.33.0 third_party/triton_kernels, cdna4_scale.py, run; triton @5896368, which adds the padding, read.
"""

TRITON_KERNELS_GFX1250 = Layout(
    "triton_kernels.gfx1250",
    "k(kt ki) n(nt n4 n32) -> nt (kt n32 n4 ki)",
    dtype=E8M0,
    ki="min(4, k)",
    n4=4,
    n32=32,
    fill=0,
)
"""``[n / 128, 128 * k]``.

Users: triton_kernels on gfx1250.
Source: triton-lang/triton layout_details for gfx1250, read.
"""
