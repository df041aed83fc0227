"""NVFP4 KV caches: two e2m1 a byte, one e4m3 scale for 16 of them, and a global fp32 scale a layer.

Sources: sglang 0.5.23 ``srt/layers/quantization/nvfp4_kv_cache.py``, ``srt/mem_cache/minimax_m3_nvfp4_pool.py``; vLLM
0.33.0 nvfp4_ds_mla. Scales of K and of V have the same shape and another order. Not checked: the direction of the
global scale (some store it, some its inverse) and its factor (448, or 448 * 6).
"""

from __future__ import annotations

from layoutcheck._dtypes import E2M1, E4M3, UINT8
from layoutcheck._layout import Layout
from layoutcheck._record import Record

NVFP4_KV_K_SCALE = Layout(
    "nvfp4_kv.k_scale",
    "slot(page token) head group -> page head token group",
    dtype=E4M3,
    accept=UINT8,
    token="page_size",
    head_dim="group * 16",
    public="page",
    fill=0,
)
"""``[page, head, page_size, head_dim / 16]``.

Users: TensorRT-LLM attention through sglang and FlashInfer (nvfp4_quantize_paged_kv_cache).
Source: sglang 0.5.23 srt/layers/quantization/nvfp4_kv_cache.py, run.
"""

NVFP4_KV_V_SCALE = Layout(
    "nvfp4_kv.v_scale",
    "slot(page token(t4 tt)) head group(sq g) -> page head (t4 sq) (g tt)",
    dtype=E4M3,
    accept=UINT8,
    token="page_size",
    tt=4,
    sq=4,
    head_dim="group * 16",
    public="page",
    fill=0,
)
"""The shape of ``nvfp4_kv.k_scale``, with four neighbouring tokens interleaved.

Users: TensorRT-LLM attention through sglang and FlashInfer (nvfp4_quantize_paged_kv_cache).
Source: sglang 0.5.23 srt/layers/quantization/nvfp4_kv_cache.py, run.
"""


def _values(head: str) -> Layout:
    return Layout(
        "values",
        f"slot(page token) {head} head_dim -> page {head} token head_dim",
        dtype=E2M1,
        carrier="uint8",
        token=128,
        public="page",
    )


def _scale(head: str) -> Layout:
    return Layout(
        "scale",
        f"slot(page token) {head} group -> page {head} token group",
        dtype=E4M3,
        token=128,
        head_dim="group * 16",
        public="page",
    )


MINIMAX_M3_MAIN_ROW = Record(
    "minimax_m3.main_row",
    buffer=Layout(
        "minimax_m3.main_row",
        "page byte -> page byte",
        dtype=UINT8,
        byte="head * head_dim * 144",
        fill=0,
    ),
    k=_values("head"),
    k_scale=_scale("head"),
    v=_values("head"),
    v_scale=_scale("head"),
)
"""A page of 128 tokens of one layer: K, its scales, V, its scales, all head-major.

Users: sglang's MiniMax-M3 pool (MSA-v1 kernels).
Source: sglang 0.5.23 srt/mem_cache/minimax_m3_nvfp4_pool.py.
Rules: sections begin at multiples of 128 bytes, which holds for every head_dim that is a multiple of 16.
"""

MINIMAX_M3_INDEX_ROW = Record(
    "minimax_m3.index_row",
    buffer=Layout("minimax_m3.index_row", "page byte -> page byte", dtype=UINT8, byte="head_dim * 72", fill=0),
    k=_values(""),
    k_scale=_scale(""),
)
"""A page of 128 tokens of the sparse indexer's K: values, then scales.

Users: sglang's MiniMax-M3 index pool (MSA-v1 kernels).
Source: sglang 0.5.23 srt/mem_cache/minimax_m3_nvfp4_pool.py.
"""

VLLM_NVFP4_DS_MLA = Record(
    "vllm.nvfp4_ds_mla",
    buffer=Layout(
        "vllm.nvfp4_ds_mla",
        "slot(page token) byte -> page token byte",
        dtype=UINT8,
        token="page_size",
        byte=352,
        public="page",
        fill=0,
    ),
    nope=Layout(
        "nope",
        "slot(page token) dim -> page token dim",
        dtype=E2M1,
        carrier="uint8",
        token="page_size",
        dim=512,
        public="page",
    ),
    rope=Layout("rope", "slot(page token) dim -> page token dim", dtype=E4M3, token="page_size", dim=64, public="page"),
    scale=Layout(
        "scale",
        "slot(page token) group(hi lo) -> page token lo hi",
        dtype=E4M3,
        token="page_size",
        group=32,
        lo=4,
        public="page",
    ),
)
"""A row of 352 bytes a token: 512 e2m1, 64 e4m3 of rope without a scale, 32 e4m3 scales, every fourth together.

Users: vLLM's NVFP4 sparse MLA cache.
Source: vLLM 0.33.0 nvfp4_ds_mla (map run against it).
"""
