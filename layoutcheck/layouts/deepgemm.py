"""Scale factors as DeepGEMM reads them: MN-major, every column at a 16-byte boundary for TMA.

Sources: DeepGEMM @54e2261 ``csrc/utils/layout.hpp``, ``csrc/jit_kernels/impls/smxx_layout.hpp``; sglang 0.5.23
``kernels/ops/quantization/fp8_kernel.py``. ``k`` counts groups along K. DeepGEMM compares strides for equality. Its own
tensors end with the last row, so the padding of the last column may lie outside their storage; nothing fills the
padding of mn, and rows of it reach only rows of the result that do not exist.
"""

from __future__ import annotations

from layoutcheck._dtypes import E8M0, FP32
from layoutcheck._layout import Layout

DEEPGEMM_FP32_MN_MAJOR = Layout(
    "deepgemm.fp32_mn_major",
    "mn k -> k mn",
    dtype=FP32,
    pad={"mn": 4},
    view="mn k",
    strict="k",
)
"""``[mn, k]`` fp32 with strides ``(1, align(mn, 4))``.

Users: DeepGEMM on Hopper (SM90), sglang and vLLM through it.
Source: DeepGEMM @54e2261 csrc/utils/layout.hpp (strides, read); sglang 0.5.23 fp8_kernel.py
create_per_token_group_quant_fp8_output_scale, run.
"""

DEEPGEMM_FP32_MN_MAJOR_BATCHED = Layout(
    "deepgemm.fp32_mn_major.batched",
    "batch mn k -> batch k mn",
    dtype=FP32,
    pad={"mn": 4},
    view="batch mn k",
    strict="k",
)
"""``[batch, mn, k]`` fp32 with strides ``(k * align(mn, 4), 1, align(mn, 4))``.

Users: DeepGEMM's batched and masked GEMMs on Hopper (SM90).
Source: DeepGEMM @54e2261 csrc/utils/layout.hpp (strides, read); sglang 0.5.23 fp8_kernel.py, run.
"""

DEEPGEMM_UE8M0_PACKED = Layout(
    "deepgemm.ue8m0_packed",
    "mn k(kp b) -> kp mn b",
    dtype=E8M0,
    b=4,
    pad={"mn": 4, "k": 4},
    carrier="int32",
    view="mn kp",
    strict="kp",
)
"""``[mn, cdiv(k, 4)]`` int32 with strides ``(1, align(mn, 4))``: four exponent bytes a word, little-endian along k.

Users: DeepGEMM on Blackwell (SM100), sglang and vLLM through it.
Source: sglang 0.5.23 srt/layers/quantization/fp8_utils.py, run; DeepGEMM @54e2261 smxx_layout.cuh (read).
Rules: the writer of the words fills the bytes past k with zero.
"""

DEEPGEMM_UE8M0_PACKED_BATCHED = Layout(
    "deepgemm.ue8m0_packed.batched",
    "batch mn k(kp b) -> batch kp mn b",
    dtype=E8M0,
    b=4,
    pad={"mn": 4, "k": 4},
    carrier="int32",
    view="batch mn kp",
    strict="kp",
)
"""``[batch, mn, cdiv(k, 4)]`` int32, each batch as ``deepgemm.ue8m0_packed``.

Users: DeepGEMM's batched and masked GEMMs on Blackwell (SM100).
Source: sglang 0.5.23 srt/layers/quantization/fp8_utils.py, run; DeepGEMM @54e2261 smxx_layout.cuh (read).
Rules: the writer of the words fills the bytes past k with zero.
Not checked: the K-grouped form, whose padding depends on each group's k at run time.
"""

DEEPGEMM_UTCCP = Layout(
    "deepgemm.utccp",
    "batch mn(rt rc rl) k(kp b) -> batch kp rt rl rc b",
    dtype=E8M0,
    rc=4,
    rl=32,
    b=4,
    pad={"k": 4},
    carrier="int32",
    view="batch (rt rl rc) kp",
)
"""The words of ``deepgemm.ue8m0_packed.batched`` with each 128 rows transposed as 4 x 32, so that UTCCP can copy them.

Users: sglang's and DeepGEMM's Mega-MoE.
Source: sglang 0.5.23 srt/layers/moe/mega_moe.py (_transpose_mega_moe_sf_for_utccp).
"""

SGLANG_GROUP_MAJOR_UE8M0 = Layout(
    "sglang.group_major_ue8m0",
    "token group k(kp b) -> group kp token b",
    dtype=E8M0,
    b=4,
    pad={"token": 4, "k": 4},
    carrier="int32",
    view="token group kp",
)
"""``[token, group, cdiv(k, 4)]`` int32 over ``[group, cdiv(k, 4), align(token, 4)]``.

Users: sglang's DeepSeek-V4 output projection (DeepGEMM fp8_einsum).
Source: sglang 0.5.23 kernels/ops/quantization/fp8_group_major_quant_ue8m0.py.
"""
