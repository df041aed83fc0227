"""Contracts of the cases about scale factors and block-scaled matrices."""

from __future__ import annotations

from typing import Annotated, Literal

from cases.harness import op
from jaxtyping import BFloat16, Float8e4m3fn, Float32, Int64, Shaped, UInt8
from torch import Tensor

from layoutcheck import (
    E4M3,
    E8M0,
    FP32,
    UINT8,
    Choose,
    Finite,
    Layout,
    contract,
    each,
    layout,
    when,
)

TILES = layout("scale.128x4")
LINEAR = layout("scale.linear")
"""Scale factors, row-major, without padding."""

PADDED = LINEAR(name="scale.linear, padded", pad={"row": 128, "col": 4})
"""Row-major, rows and columns rounded up to what a 128x4 swizzle needs."""


@op
@contract
def nvfp4_gemm_in(x_sf: Annotated[Tensor, TILES(row="m", col="K/16", dtype=E4M3)], m: int, K: int) -> None: ...


@op
@contract("logical_rows == N", "logical_cols == K")
def mxfp8_swizzle(
    w: Float8e4m3fn[Tensor, "N K"],
    w_sf: Annotated[Tensor, PADDED(row="N", col="K/32", dtype=E8M0)],
    logical_rows: int,
    logical_cols: int,
) -> None: ...


@op
@contract
def blockwise_gemm(
    x: Float8e4m3fn[Tensor, "T K"],
    permuted_scale: Annotated[
        Tensor, LINEAR(name="scale.linear, rows padded to 64", dtype=FP32, pad={"row": 64}, row="T", col="K/128")
    ],
) -> None: ...


@op
@contract
def nvfp4_linear(
    w: UInt8[Tensor, "N K/2"],
    w_sf: Annotated[
        Tensor,
        TILES(name="scale.128x4, two axes", dtype=E4M3, row="N", col="K/16", view=("align(N, 128)", "align(K/16, 4)")),
    ],
) -> None: ...


@op
@contract("pad_rows == align(R, 128) - R", "pad_cols == align(C, 4) - C")
def pad_weight_scales(
    weight: UInt8[Tensor, "R C*8"],
    weight_sf: Annotated[Tensor, LINEAR(dtype=E4M3, row="R", col="C")],
    pad_rows: int,
    pad_cols: int,
) -> None: ...


_MX_PADDED = PADDED(name="mx_linear_padded", row="M", col="K/32", dtype=E8M0)
_MX_COMPACT = LINEAR(name="mx_linear_compact", row="M", col="K/32", dtype=E8M0)


@op
@contract
def mxfp8_gemm_in(
    data: Float8e4m3fn[Tensor, "M K"],
    x_sf: Annotated[
        Tensor,
        Choose({"tag(x_sf, 'layout') == 'mx_linear_padded'": _MX_PADDED}, default=_MX_COMPACT),
    ],
) -> None: ...


_NVFP4_PAGE = Layout("linear", "page token head group -> page token head group", dtype=E4M3, group="D/16")


@op
@contract("tag(k_sf, 'layout') == 'linear'", "tag(v_sf, 'layout') == 'linear'")
def nvfp4_decode(
    k_sf: Annotated[Tensor, _NVFP4_PAGE], v_sf: Annotated[Tensor, _NVFP4_PAGE], arch: str, D: int
) -> None: ...


@op
@contract
def nvfp4_paged_decode(
    k: Annotated[Tensor, Layout("k", "P page H half -> P page H half", dtype=UINT8)],
    k_sf: Annotated[Tensor, Layout("k_sf", "P page H group -> P page H group", dtype=E4M3, half="group * 8")],
) -> None: ...


@op
@contract("H % 128 == 0")
def mxfp8_gemm_rows(
    x_sf: Annotated[Tensor, LINEAR(dtype=UINT8, row="T", col="H/32", pitch={"row": "align(H/32, 16) bytes"})], H: int
) -> None: ...


@op
@contract("n_rows % row_tile == 0", "n_cols % col_tile == 0")
def rearrange_scales(
    scales: Annotated[Tensor, LINEAR(dtype=E8M0, row="n_rows", col="n_cols")],
    out: Annotated[Tensor, LINEAR(dtype=E8M0, row="n_rows", col="n_cols")],
    row_tile: Literal[128, 256, 512],
    col_tile: Literal[128, 256],
) -> None: ...


_MN_MAJOR = Layout("scales, MN-major", "row col -> col row", dtype=FP32)(col="K/128", row="M")
_K_MAJOR = Layout("scales, K-major", "row col -> row col", dtype=FP32)(col="K/128", row="M")


@op
@contract
def gemm_fp8_groupwise(
    a: Float8e4m3fn[Tensor, "M K"],
    a_scale: Annotated[
        Tensor,
        Choose({"scale_major_mode == 'MN'": _MN_MAJOR, "scale_major_mode == 'K'": _K_MAJOR}),
    ],
    scale_major_mode: str,
) -> None: ...


@op
@contract("numel(A_scale) == 1", "numel(B_scale) == 1", same_device=True)
def bmm_fp8(
    A: Float8e4m3fn[Tensor, "batch m k"],
    B: Float8e4m3fn[Tensor, "batch k n"],
    A_scale: Float32[Tensor, "..."],
    B_scale: Float32[Tensor, "..."],
) -> None: ...


@op
@contract
def vec4_scale(w: Annotated[Tensor, Layout("weights", "N -> N", dtype=FP32, align=16)]) -> None: ...


@op
@contract(each("sf", ">= 0"))
def pack_ue8m0(sf: Annotated[Tensor, LINEAR(dtype=FP32, row="mn", col="k/32")], mn: int, k: int) -> None: ...


_SHARD = Layout("row-parallel shard", "N col(block lane) -> N block lane", dtype=E4M3, lane=128, view="N col")


@op
@contract
def fp8_block_linear(
    w: Annotated[Tensor, _SHARD(col="K/tp")],
    w_scale: Float32[Tensor, "cdiv(N,128) cdiv(K/tp,128)"],
    K: int,
    tp: int,
) -> None: ...


@op
@contract("sum(m_splits) == M", each("m_splits", "% 128 == 0"))
def grouped_mxfp8(x: BFloat16[Tensor, "M K"], m_splits: list[int]) -> None: ...


@op
@contract
def load_kv_scales(
    kv_scales: Float32[Tensor, "layers 2 heads_per_rank*world_size"], heads_per_rank: int, world_size: int
) -> None: ...


@op
@contract
def mxfp8_read_pool(
    loc: Int64[Tensor, "T"], k_sf: Annotated[Tensor, layout("mxfp8.interleaved"), Finite(slot=0)], page_size: int
) -> None: ...


@op
@contract("tag(k_cache, 'encoding') == view_dtype")
def rocm_paged_decode(k_cache: UInt8[Tensor, "P page H D"], view_dtype: str) -> None: ...


@op
@contract(
    when("arch == 'gfx942'", "dtype(recv) == e4m3fnuz", "fp8_max == 240"),
    when("arch != 'gfx942'", "dtype(recv) == e4m3", "fp8_max == 448"),
)
def ep_dispatch_recv(recv: Shaped[Tensor, "T hidden"], arch: str, fp8_max: int) -> None: ...
