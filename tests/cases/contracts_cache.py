"""Contracts of the cases about KV caches: pools, pages, and what reads and writes them."""

from __future__ import annotations

from typing import Annotated, Any

from cases.harness import op
from jaxtyping import BFloat16, Float8e4m3fn, Float16, Float32, Int32, Int64, Shaped
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    E8M0,
    FP16,
    UINT8,
    Choose,
    Index,
    Layout,
    Writes,
    agree,
    contract,
    forbids,
    layout,
    needs,
    no_overlap,
    when,
)

NHD, HND = layout("paged.nhd"), layout("paged.hnd")
INTERLEAVED, FLAT = layout("mxfp8.interleaved"), layout("mxfp8.flat")

_NVFP4_CELL = dict(dtype=UINT8, token="page_size", cell="D/2 + D/16")


@op
@contract
def nvfp4_cache_write(
    key: BFloat16[Tensor, "T H D"],
    kv_cache: Annotated[
        Tensor,
        Choose(
            {
                "kv_layout == 'NHD'": Layout("NHD", "page token H cell -> page token H cell", **_NVFP4_CELL),
                "kv_layout == 'HND'": Layout("HND", "page token H cell -> page H token cell", **_NVFP4_CELL),
            }
        ),
    ],
    kv_layout: str,
    page_size: int,
) -> None: ...


@op
@contract("tag(k_sf, 'version') == tag(k_cache, 'version')", "tag(v_sf, 'version') == tag(v_cache, 'version')")
def kv_pages_moved(
    k_cache: Float8e4m3fn[Tensor, "slot head head_dim"],
    k_sf: Annotated[Tensor, FLAT],
    v_cache: Float8e4m3fn[Tensor, "slot head head_dim"],
    v_sf: Annotated[Tensor, FLAT],
) -> None: ...


@op
@contract("slot % page_size == 0")
def mxfp8_kv_pool(
    k_cache: Float8e4m3fn[Tensor, "slot head head_dim"],
    k_sf: Annotated[Tensor, Choose({"page_size == 128": INTERLEAVED}, default=FLAT)],
    page_size: int,
) -> None: ...


@op
@contract("True not in tags(k_sf_sharer, 'written')")
def init_scales(
    k_sf_owner: Float32[Tensor, "slot head"],
    k_sf_sharer: Annotated[Float32[Tensor, "slot head"], Writes()],
    fill: float,
) -> None: ...


@op
@contract("tag(tgt_loc, 'index_space') == 'page'", "tag(src_loc, 'index_space') == 'page'")
def move_index_scales(
    index_k_sf: Annotated[Tensor, layout("dsa.index_132")],
    tgt_loc: Annotated[Int64[Tensor, "n"], Index("page")],
    src_loc: Annotated[Int64[Tensor, "n"], Index("page")],
    page_size: int,
) -> None: ...


@op
@contract
def tma_paged_decode(
    k_cache: Annotated[
        Tensor,
        NHD(
            dtype=BF16,
            pitch={},
            dense="head_dim",
            align={"page": 16, "token": 16, "head": 16},
            strict="page token head",
        ),
    ],
) -> None: ...


@op
@contract
def paged_decode_blockstride(k_cache: Annotated[Tensor, NHD(dtype=BF16, pitch={})]) -> None: ...


_DENSE_HND = HND(dtype=E4M3, pitch={})


@op
@contract
def fp8_dequant_pages(
    k_cache: Annotated[Tensor, Choose({"stride_aware": _DENSE_HND(dense="head token head_dim")}, default=_DENSE_HND)],
    stride_aware: bool,
) -> None: ...


_FLAT_ROWS = Layout(
    "rows", "page token row -> page token row", dtype=UINT8, row=584, dense="token row", align={"page": 584}
)


@op
@contract
def sparse_mla_read(
    kv: Annotated[Tensor, _FLAT_ROWS],
) -> None: ...


_NEW_NHD, _NEW_HND = (
    Layout(name, f"token head dim -> {order}", dtype=BF16)(head="num_kv_heads", dim="head_dim")
    for name, order in (("NHD", "token head dim"), ("HND", "head token dim"))
)


@op
@contract
def ragged_prefill(
    k: Annotated[
        Tensor,
        Choose({"kv_layout == 'NHD'": _NEW_NHD, "kv_layout == 'HND'": _NEW_HND}),
    ],
    kv_layout: str,
    num_kv_heads: int,
    head_dim: int,
) -> None: ...


@op
@contract
def write_kv_python_index(
    key: BFloat16[Tensor, "T 1 D"],
    slot_mapping: Annotated[Int64[Tensor, "T"], Index("P * page", skip="== -1 and skip_negative")],
    kv_cache: Annotated[BFloat16[Tensor, "P page D"], Writes(at="slot_mapping")],
    skip_negative: bool,
) -> None: ...


@op
@contract(
    when("backend == 'fa3' and model == 'llama4'", "page_size in (1,)"),
    when("backend == 'fa3' and model != 'llama4'", "page_size in (1, 16, 32, 64, 128)"),
    "S % page_size == 0",
)
def attention_backend_init(k_cache: BFloat16[Tensor, "S H D"], page_size: int, backend: str, model: str) -> None: ...


@op
@contract("page_size == rows * packing", "packing == 2")
def packed_page_cache(kv_cache: BFloat16[Tensor, "P rows packing HD"], page_size: int) -> None: ...


@op
@contract("page_size in (16, 32, 64, 128)")
def trtllm_paged_decode(k_cache: Annotated[Tensor, HND(dtype=E4M3, pitch={})]) -> None: ...


@op
@contract(same_device=True)
def triton_decode(q: Float16[Tensor, "T H D"], k_cache: Float16[Tensor, "P page H D"]) -> None: ...


@op
@contract("len(extra) == n_extra_declared", when("dtype(paged_kv_cache) == e4m3", needs("k_scale", "v_scale")))
def prefill_run(
    q: Float16[Tensor, "T H D"],
    paged_kv_cache: Shaped[Tensor, "P 2 page H_kv D"],
    *extra: Any,
    n_extra_declared: int,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None: ...


_Q = Annotated[Tensor, Layout("q", "T H D -> T H D", dtype=(BF16, E4M3))]


@op
@contract(when("dtype(q) == e4m3", needs("q_scale")), when("dtype(q) == bf16", forbids("q_scale")))
def fp8_decode(
    q: _Q, k_cache: Float8e4m3fn[Tensor, "P page H_kv D"], q_scale: float | None, k_scale: float
) -> None: ...


@op
@contract(when("dtype(q) == e4m3 and kv_quant_mode == 1", "k_descale in (None, 1)"))
def triton_unified_attention(
    q: _Q, k_cache: Float8e4m3fn[Tensor, "P page H_kv D"], k_descale: float | None, kv_quant_mode: int
) -> None: ...


@op
@contract(no_overlap("k_cache", "v_cache"))
def page_loader(
    k_cache: Annotated[Tensor, NHD(dtype=BF16, pitch={})], v_cache: Annotated[Tensor, NHD(dtype=BF16, pitch={})]
) -> None: ...


@op
@contract
def mla_decode(
    k_cache: Annotated[
        Tensor, Layout("mla pages", "page token dim -> page token dim", dtype=E4M3, dim=576, offsets={"page": "int32"})
    ],
    block_table: Annotated[Int32[Tensor, "B W"], Index("page")],
) -> None: ...


@op
@contract
def flex_attention_paged(
    kv_cache: Annotated[
        Tensor,
        Layout(
            "K and V", "num_blocks kv token head dim -> num_blocks kv token head dim", dtype=BF16, kv=2, offsets="int32"
        ),
    ],
) -> None: ...


_PAGES = Layout("byte pages", "page byte -> page byte", dtype=UINT8)
_NARROW_PAGES = _PAGES(offsets={"page": "int32"})


@op
@contract
def dsv4_page_store(
    pool: Annotated[Tensor, Choose({"offset_bits == 32": _NARROW_PAGES}, default=_PAGES)], offset_bits: int
) -> None: ...


@op
@contract
def dsa_index_get(
    buf: Annotated[Tensor, Choose({"dtype(page_index) == int32": _NARROW_PAGES}, default=_PAGES)(byte=8448)],
    page_index: Shaped[Tensor, "B W"],
) -> None: ...


@op
@contract(
    agree("local", "peer", "kv_dtype", "page_size", "num_kv_heads", "head_dim", "item_len"),
    "head == num_kv_heads",
    "dim == head_dim",
    "item_len == page_size * head * dim * 2",
    "kv_dtype == 'bfloat16'",
    derive={
        name: (lambda local, name=name, **_: local[name])
        for name in ("kv_dtype", "page_size", "num_kv_heads", "head_dim", "item_len")
    },
)
def kv_transfer_handshake(k_cache: BFloat16[Tensor, "slot head dim"], local: dict[str, Any], peer: Any) -> None: ...


@op
@contract(agree("local", "peer", "num_blocks", "block_len"))
def kv_transfer_reconnect(local: dict[str, Any], peer: Any) -> None: ...


@op
@contract(
    derive={
        "head0": lambda spec_layer0, **_: spec_layer0[0],
        "dim0": lambda spec_layer0, **_: spec_layer0[1],
        "head5": lambda spec_layer5, **_: spec_layer5[0],
        "dim5": lambda spec_layer5, **_: spec_layer5[1],
    }
)
def register_kv_layers(
    kv_layer0: BFloat16[Tensor, "P page head0 dim0"],
    kv_layer5: BFloat16[Tensor, "P page head5 dim5"],
    spec_layer0: list[int],
    spec_layer5: list[int],
) -> None: ...


@op
@contract
def kv_cache_alloc(
    kv_cache: BFloat16[Tensor, "P page H head_dim_k+head_dim_v"], head_dim_k: int, head_dim_v: int
) -> None: ...


@op
@contract("pow2(page_size)", "page_size >= 16")
def paged_config(k_cache: Annotated[Tensor, NHD(dtype=FP16, pitch={})]) -> None: ...


_SCALES = INTERLEAVED(head="dkv/128", head_dim=128)


@op
@contract(
    when("mxfp8_quant", needs("sfk", "sfv"), "dq % 128 == 0"),
    when("not mxfp8_quant", forbids("sfk", "sfv")),
)
def mxfp8_prologue(
    qkvr: BFloat16[Tensor, "T dq+2*dkv"],
    k_buf: Float8e4m3fn[Tensor, "slot dkv/128 128"],
    v_buf: Float8e4m3fn[Tensor, "slot dkv/128 128"],
    loc: Annotated[Int64[Tensor, "T"], Index("slot")],
    sfk: Annotated[Tensor, _SCALES] | None,
    sfv: Annotated[Tensor, _SCALES] | None,
    dq: int,
    dkv: int,
    page_size: int,
    mxfp8_quant: bool,
) -> None: ...


@op
@contract(
    when("given(kv_scales)", "dtype(unified_kv) == e4m3"),
    when("not given(kv_scales)", "dtype(unified_kv) == dtype(q)"),
)
def unified_kv_decode(
    q: Annotated[Tensor, Layout("q", "T H D -> T H D", dtype=(BF16, FP16))],
    unified_kv: Shaped[Tensor, "rows D"],
    kv_scales: Annotated[Tensor, layout("unified_kv.kv_scale")(page="rows", dim="D", pitch={}, dense="group")] | None,
) -> None: ...


_ROWS = Layout("rows", "token head head_dim -> token head head_dim", dtype=(BF16, E4M3))
_ROW_SCALES = Layout("row scales", "token head group -> token head group", dtype=E8M0, head_dim="group * 32")
_POOL_SCALES = Choose({"page_size == 128": INTERLEAVED}, default=FLAT)


@op
@contract(
    "dtype(cache_k) == dtype(cache_v)",
    when("page_size != 128 or dtype(cache_k) == e4m3", needs("k_scale", "v_scale")),
)
def mxfp8_set_kv_buffer(
    cache_k: Annotated[Tensor, _ROWS],
    cache_v: Annotated[Tensor, _ROWS],
    loc: Annotated[Int64[Tensor, "token"], Index("slot")],
    k_buffer: Annotated[Float8e4m3fn[Tensor, "slot head head_dim"], Writes(at="loc")],
    v_buffer: Annotated[Float8e4m3fn[Tensor, "slot head head_dim"], Writes(at="loc")],
    k_scale_buffer: Annotated[Tensor, _POOL_SCALES, Writes(at="loc")],
    v_scale_buffer: Annotated[Tensor, _POOL_SCALES, Writes(at="loc")],
    k_scale: Annotated[Tensor, _ROW_SCALES] | None,
    v_scale: Annotated[Tensor, _ROW_SCALES] | None,
    page_size: int,
) -> None: ...


_PAGE_SCALES = INTERLEAVED(page_size=128, head="H", head_dim="D", page="pages")
_SHARED = Annotated[Tensor, Layout("paged", "pages token H D -> pages token H D", dtype=(E4M3, BF16, FP16), token=128)]


@op
@contract(
    when(
        "kv_is_mxfp8",
        "fa_version == 4",
        "dtype(q) == e4m3",
        "dtype(k_cache) == e4m3",
        "dtype(v_cache) == e4m3",
        needs("q_descale", "sfk", "sfv"),
        "dtype(q_descale) == e8m0",
        "dtype(sfk) == e8m0",
        "dtype(sfv) == e8m0",
    ),
    when(
        "not kv_is_mxfp8",
        "dtype(q) in (bf16, fp16)",
        "dtype(k_cache) == dtype(q)",
        "dtype(v_cache) == dtype(q)",
        forbids("q_descale", "sfk", "sfv"),
    ),
)
def fa4_mxfp8_attention(
    q: Annotated[Tensor, Layout("q", "T Hq D -> T Hq D", dtype=(E4M3, BF16, FP16))],
    k_cache: _SHARED,
    v_cache: _SHARED,
    page_table: Int32[Tensor, "B W"],
    q_descale: Annotated[Tensor, Layout("q scales", "T Hq group -> T Hq group", dtype=E8M0, D="group * 32")] | None,
    sfk: Annotated[Tensor, _PAGE_SCALES] | None,
    sfv: Annotated[Tensor, _PAGE_SCALES] | None,
    kv_is_mxfp8: bool,
    fa_version: int,
) -> None: ...
