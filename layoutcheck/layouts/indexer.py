"""Keys of the sparse-attention indexer: FP8 or FP4 keys and their scales, packed page by page.

Sources: sglang 0.5.23 ``kernels/ops/kvcache/dsa_index_k_cache.py``, ``dsv4_fp4_index_k_cache.py``,
``dsv4_fp4_index_k_cache_hip.py``; DeepGEMM @54e2261 ``csrc/apis/attention.hpp``. DeepGEMM is handed the pages of
``dsa.index_132`` as ``[page, page_size, 1, 132]``, a shape that does not describe the bytes. Layouts of one family
have the same shape: only the declaration tells them apart.
"""

from __future__ import annotations

from layoutcheck._dtypes import E2M1, E4M3, E8M0, FP32, UINT8
from layoutcheck._layout import Layout
from layoutcheck._record import Record

_INDEX_BUFFER = Layout("index", "page byte -> page byte", dtype=(UINT8, E4M3), byte="page_size * 132", fill=0)
_INDEX_SCALE = Layout("scale", "slot(page token) -> page token", dtype=FP32, token="page_size", public="page")

DSA_INDEX_132 = Record(
    "dsa.index_132",
    buffer=_INDEX_BUFFER,
    data=Layout(
        "data", "slot(page token) dim -> page token dim", dtype=E4M3, token="page_size", dim=128, public="page"
    ),
    scale=_INDEX_SCALE,
)
"""A page of the indexer: the keys of all its tokens (128 e4m3 each), then their fp32 scales.

Users: sglang, vLLM and LMCache for DeepSeek-V3.2; DeepGEMM's paged MQA logits (pages of 64, on Blackwell also 32).
Source: sglang 0.5.23 kernels/ops/kvcache/dsa_index_k_cache.py, run.
Not checked: pages inside a packed block of several layers, whose stride overflows 32-bit offsets after 2,143 of them.
"""

DSA_INDEX_132_PRESHUFFLE = Record(
    "dsa.index_132_preshuffle",
    buffer=_INDEX_BUFFER,
    data=Layout(
        "data",
        "slot(page token(tt t)) dim(dt d) -> page tt dt t d",
        dtype=E4M3,
        token="page_size",
        dim=128,
        t=16,
        d=16,
        public="page",
    ),
    scale=_INDEX_SCALE,
)
"""``dsa.index_132`` with the keys in 16 x 16 tiles: the same shape and size.

Users: sglang with AITER on ROCm.
Source: sglang 0.5.23 kernels/ops/kvcache/dsa_index_k_cache.py, run.
"""

DSA_INDEX_FP4_68 = Record(
    "dsa.index_fp4_68",
    buffer=Layout("dsa.index_fp4_68", "page byte -> page byte", dtype=UINT8, byte="page_size * 68", fill=0),
    data=Layout(
        "data",
        "slot(page token) dim -> page token dim",
        dtype=E2M1,
        carrier="uint8",
        token="page_size",
        dim=128,
        public="page",
    ),
    scale=Layout(
        "scale",
        "slot(page token) group -> page token group",
        dtype=E8M0,
        carrier="int32",
        token="page_size",
        group=4,
        public="page",
    ),
)
"""A page of FP4 keys: 128 e2m1 a token, then one int32 a token that holds its four E8M0 scales.

Users: sglang for DeepSeek-V4, DeepGEMM on Blackwell.
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_fp4_index_k_cache.py.
"""

FLYDSL_INDEX_PAYLOAD = Layout(
    "flydsl.index_payload",
    "slot(page token) head_dim(chunk e) -> page chunk token e",
    dtype=E2M1,
    carrier="uint8",
    token="page_size",
    head_dim=128,
    e=32,
    view=("page", "1", "4", "page_size", "16"),
    public="page",
    fill=0,
)
"""``[page, 1, 4, page_size, 16]`` bytes of two e2m1.

Users: sglang with FlyDSL on gfx950 (DeepSeek-V4 indexer).
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_fp4_index_k_cache_hip.py.
"""

FLYDSL_INDEX_SCALE = Layout(
    "flydsl.index_scale",
    "slot(page token(a b)) group -> page group b a",
    dtype=E8M0,
    token=64,
    b=16,
    group=4,
    view=("page", "1", "4", "64"),
    public="page",
    fill=0,
)
"""``[page, 1, 4, 64]`` E8M0 bytes, the tokens of a page transposed as 4 x 16.

Users: sglang with FlyDSL on gfx950 (DeepSeek-V4 indexer).
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_fp4_index_k_cache_hip.py.
"""

AITER_PAGE8_PAYLOAD = Layout(
    "aiter.page8_payload",
    "slot(page token(th tl)) head_dim(chunk e) -> page tl chunk th e",
    dtype=E2M1,
    carrier="uint8",
    token=8,
    tl=4,
    head_dim=128,
    e=32,
    view=("slot / 64", "1", "4", "64", "16"),
    public="page",
    fill=0,
)
"""The shape of ``flydsl.index_payload`` at page size 64, over pages of 8 tokens.

Users: sglang with AITER's row-group indexer on gfx950.
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_fp4_index_k_cache_hip.py.
"""

AITER_PAGE8_SCALE = Layout(
    "aiter.page8_scale",
    "slot(page token) group -> page group token",
    dtype=E8M0,
    token=8,
    group=4,
    view=("slot / 64", "1", "4", "64"),
    public="page",
    fill=0,
)
"""The shape of ``flydsl.index_scale``, over pages of 8 tokens: four rows of 8 E8M0 bytes.

Users: sglang with AITER's row-group indexer on gfx950.
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_fp4_index_k_cache_hip.py.
"""
