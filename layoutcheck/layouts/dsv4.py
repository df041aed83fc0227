"""DeepSeek-V4's main KV cache: packed pages and rows.

Sources: sglang 0.5.23 ``kernels/ops/attention/dsv4/kv_layout.py``, ``kernels/ops/kvcache/dsv4_main_kv_store.py``;
FlashMLA @9241ae3 ``tests/quant.py``, ``csrc/api/sparse_decode.h``. In the split forms a page is the values of all its
tokens, then their scales, rounded up; FlashMLA is handed such a page as ``[page, page_size, 1, 584]``, a shape that
does not describe the bytes. What no section covers (the eighth scale byte of a token, the end of a page) is written by
nobody: only the zeros of its allocation are there.
"""

from __future__ import annotations

from layoutcheck._dtypes import BF16, E2M1, E4M3, E8M0, INT8, UINT8, Element
from layoutcheck._layout import Layout
from layoutcheck._record import Record


def _pages(name: str, token: int, align: int) -> Layout:
    return Layout(
        name, "page byte -> page byte", dtype=(UINT8, E4M3, INT8), byte=f"align(page_size * {token}, {align})", fill=0
    )


def _rows(name: str, token: int) -> Layout:
    return Layout(
        name,
        "slot(page token) byte -> page token byte",
        dtype=(UINT8, E4M3, INT8),
        token="page_size",
        byte=token,
        public="page",
        fill=0,
    )


def _section(name: str, dtype: Element, size: int, axis: str = "dim", **rules: object) -> Layout:
    more: dict[str, object] = {"carrier": "uint8"} if dtype is E2M1 else {}
    pattern = f"slot(page token) {axis} -> page token {axis}"
    return Layout(name, pattern, dtype=dtype, token="page_size", public="page", **{axis: size}, **more, **rules)


DSV4_V4_584 = Record(
    "dsv4.v4_584",
    buffer=_pages("dsv4.v4_584", 584, 576),
    nope=_section("nope", E4M3, 448, pitch={"token": "576 bytes"}),
    rope=_section("rope", BF16, 64, base=448, pitch={"token": "576 bytes"}),
    scale=_section("scale", E8M0, 7, "group", base="page_size * 576", pitch={"token": "8 bytes"}),
)
"""A page of rows of 448 e4m3 and 64 bf16 of rope, then 8 bytes of scales a token, of which 7 are used.

Users: FlashMLA's sparse decoding (MODEL1), sglang for DeepSeek-V4.
Source: sglang 0.5.23 kernels/ops/kvcache/dsv4_main_kv_store.py, run; FlashMLA @9241ae3 tests/quant.py, run.
Rules: FlashMLA needs a page stride that is a multiple of 576 bytes and a base at 16.
"""

DSV4_V41 = Record(
    "dsv4.v41",
    buffer=_pages("dsv4.v41", 528, 512),
    data=_section("data", E4M3, 512),
    scale=_section("scale", E8M0, 16, "group"),
)
"""A page of rows of 512 e4m3, then 16 E8M0 scales a token.

Users: sglang for DeepSeek-V4.1 on SM100, SM103 and gfx950.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py.
"""

DSV4_V41_FP4 = Record(
    "dsv4.v41_fp4",
    buffer=_pages("dsv4.v41_fp4", 288, 256),
    data=_section("data", E2M1, 512),
    scale=_section("scale", E4M3, 32, "group"),
)
"""A page of rows of 512 e2m1, two a byte, then 32 e4m3 scales a token.

Users: sglang for DeepSeek-V4.1 on SM100, SM103 and gfx950.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py.
"""

DSV4_UNIFORM_FP8 = Layout(
    "dsv4.uniform_fp8",
    "slot(page token) dim -> page token dim",
    dtype=E4M3,
    accept=UINT8,
    token="page_size",
    dim=512,
    view="page (token dim)",
    public="page",
    fill=0,
)
"""``[page, page_size * 512]`` e4m3 whose one scale is kept elsewhere.

Users: TensorRT-LLM attention through sglang for DeepSeek-V4.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py.
"""

DSV4_V41_NEW = Record(
    "dsv4.v41_new",
    buffer=_rows("dsv4.v41_new", 528),
    data=_section("data", E4M3, 512),
    scale=_section("scale", E8M0, 16, "group"),
)
"""A row of 512 e4m3 and its 16 E8M0 scales a token.

Users: sglang for DeepSeek-V4.1 on SM100 and SM103.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py.
"""

DSV4_V41_FP4_NEW = Record(
    "dsv4.v41_fp4_new",
    buffer=_rows("dsv4.v41_fp4_new", 288),
    data=_section("data", E2M1, 512),
    scale=_section("scale", E4M3, 32, "group"),
)
"""A row of 512 e2m1, two a byte, and its 32 e4m3 scales a token.

Users: sglang for DeepSeek-V4.1 on SM100 and SM103.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py.
"""

DSV4_TWO_POOL_NOPE = Record(
    "dsv4.two_pool_nope",
    buffer=Layout("dsv4.two_pool_nope", "slot byte -> slot byte", dtype=(E4M3, UINT8, INT8), byte=512, fill=0),
    latent=Layout("latent", "slot dim -> slot dim", dtype=E4M3, dim=448),
    scale=Layout("scale", "slot group copy -> slot group copy", dtype=E8M0, group=7, copy=2),
)
"""A row of 448 e4m3 and 7 E8M0 scales, each stored twice; the last 50 bytes belong to nobody.

Users: sglang's and AITER's FP8 decoding of DeepSeek-V4 on ROCm, next to ``dsv4.two_pool_rope`` with as many rows.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/unified_kv_kernels/layout.py.
Not checked: that both copies of a scale are equal; which rows are ring and which are compressed.
"""

DSV4_TWO_POOL_ROPE = Layout("dsv4.two_pool_rope", "slot dim -> slot dim", dtype=BF16, dim=64, fill=0)
"""``[slot, 64]`` bf16 of rope.

Users: sglang's and AITER's FP8 decoding of DeepSeek-V4 on ROCm.
Source: sglang 0.5.23 kernels/ops/attention/dsv4/unified_kv_kernels/layout.py.
"""
