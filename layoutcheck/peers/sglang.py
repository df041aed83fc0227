"""sglang 0.5.23: the MXFP8 KV cache, its fused prologues, and DeepSeek-V4's unified KV decoding.

What sglang's own checks say, in Python and in C++, and what its kernels take for granted: that a scale buffer is
written in place and not through a copy (``reshape`` of a strided one), that ``loc`` has an entry for every row, that
caches and scales were made for one number of slots, heads and one page size. Slots themselves are checked in ``values``
mode. Left unchecked: the conv caches and weights beyond what is named here, and everything below the attention call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from layoutcheck._choose import Choose
from layoutcheck._dtypes import BF16, E4M3, E4M3FNUZ, E8M0, FP16, FP32, INT32, INT64
from layoutcheck._layout import Layout
from layoutcheck._rules import Index, Indptr, Writes, needs, when
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import KV_ELEMENTS, PAGED_NHD
from layoutcheck.peers._install import Peer

PEER = Peer("sglang", "sglang", since="0.5.23", before="0.5.24")

# A cache as sglang keeps it: one dense [slot, head, head_dim] tensor.
CACHE = PAGED_NHD(view="slot head head_dim", pitch={}, dtype=KV_ELEMENTS)
FP8_CACHE = CACHE(dtype=E4M3)
ROWS = Layout("rows", "token head head_dim -> token head head_dim", dtype=(BF16, FP16, FP32), dense="head_dim")
LOC = Layout("loc", "entry -> entry", dtype=(INT64, INT32))
SCALE_ROWS = Layout("scale rows", "token head group -> token head group", dtype=E8M0, dense="")
V_SCALE = MXFP8_SCALE_INTERLEAVED(head_dim="v_head_dim")

# --- quantisation -----------------------------------------------------------------------------------------------------

PEER.guard(
    "sglang.kernels.ops.quantization.mxfp8_quant:to_mxfp8",
    "head_dim > 0",
    "head_dim % 32 == 0",
    x=Float[Tensor, "*row head_dim"],
)

PEER.guard(
    "sglang.kernels.ops.kvcache.mxfp8_quant_store_kv:quant_store_kv_mxfp8",
    "page_size % 32 == 0",
    "entry >= token",
    same_device=True,
    k=ROWS,
    v=ROWS,
    loc=Annotated[Tensor, LOC, Index("slot", skip="== 0", live="token")],
    k_cache=Annotated[Tensor, FP8_CACHE, Writes(at="loc")],
    v_cache=Annotated[Tensor, FP8_CACHE, Writes(at="loc")],
    sfk=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED, Writes(at="loc")],
    sfv=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED, Writes(at="loc")],
    page_size=int,
)

PEER.guard(
    "sglang.kernels.ops.kvcache.mxfp8_interleave_sf:store_sf_interleaved",
    "page_size == 128",
    "entry >= token",
    same_device=True,
    sf_in=SCALE_ROWS(group=4),
    sf_out=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED(head_dim=128), Writes(at="loc")],
    loc=Annotated[Tensor, LOC, Index("slot", skip="== 0", live="token")],
    page_size=int,
)

# --- the fused prologues ----------------------------------------------------------------------------------------------

# The kernel reads the rows in vectors of 16 bytes and takes head_dim 128 for granted.
_QKVR = Layout("qkvr", "token width -> token width", dtype=(BF16, FP16), dense="width", align={"token": 16})
_CONV = Layout("conv cache", "sequence window channel -> sequence window channel", dtype=(BF16, FP16), dense="channel")
_TAPS = Float[Tensor, "weight_row tap"]
_PROLOGUE: dict[str, Any] = dict(
    same_device=True,
    qkvr=_QKVR,
    k_cache=_CONV,
    v_cache=_CONV,
    k_weight=_TAPS,
    v_weight=_TAPS,
    loc=Annotated[Tensor, Layout("loc", "entry -> entry", dtype=INT64), Index("slot", skip="< 0", live="token")],
    k_buf=Annotated[Tensor, CACHE(head_dim=128), Writes(at="loc")],
    v_buf=Annotated[Tensor, CACHE(head_dim=128), Writes(at="loc")],
    sfk=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED(head_dim=128), Writes(at="loc")] | None,
    sfv=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED(head_dim=128), Writes(at="loc")] | None,
    page_size=int,
    q_off=int,
    k_off=int,
    v_off=int,
    dq=int,
    dkv=int,
    mxfp8_quant=bool,
    do_store=bool,
)
_PROLOGUE_RULES = (
    when(
        "mxfp8_quant",
        "dq % 128 == 0",
        "dkv % 128 == 0",
        "page_size % 32 == 0",
        "page_size > 0",
        "do_store",
        "dtype(k_buf) == e4m3",
        "dtype(v_buf) == e4m3",
        needs("sfk", "sfv"),
    ),
    when("not mxfp8_quant", "dtype(k_buf) == dtype(qkvr)", "dtype(v_buf) == dtype(qkvr)"),
    "dkv == head * 128",
    "channel >= dkv",
    "weight_row >= dkv",
    "window == tap - 1",
    "entry >= token",
    "q_off % 8 == 0",
    "k_off % 8 == 0",
    "v_off % 8 == 0",
    "q_off + dq <= width",
    "k_off + dkv <= width",
    "v_off + dkv <= width",
)
for _mode in ("decode", "verify", "extend"):
    PEER.guard(
        f"sglang.kernels.ops.attention.inkling_attn_prologue:inkling_attn_prologue_{_mode}",
        *_PROLOGUE_RULES,
        **_PROLOGUE,
    )

# --- DeepSeek-V4 ------------------------------------------------------------------------------------------------------


def _fnuz(**_: Any) -> bool:
    """Whether this platform's FP8 is e4m3fnuz (gfx942), as sglang decides it."""
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import paged_decode

    return bool(torch.float8_e4m3fnuz == paged_decode._FP8_DTYPE)


_UNIFIED_RULES = (
    when("given(kv_scales) and fnuz", "dtype(unified_kv) == e4m3fnuz"),
    when("given(kv_scales) and not fnuz", "dtype(unified_kv) == e4m3"),
    when("not given(kv_scales)", "dtype(unified_kv) == dtype(q)"),
)
_UNIFIED: dict[str, Any] = dict(
    same_device=True,
    derive=dict(fnuz=_fnuz),
    fnuz=bool,
    q=Layout("q", "token head dim -> token head dim", dtype=(BF16, FP16), dense=""),
    unified_kv=Layout("unified_kv.rows", "row dim -> row dim", dtype=(BF16, FP16, E4M3, E4M3FNUZ), dense=""),
    kv_indices=Annotated[
        Tensor, Layout("kv_indices", "entry -> entry", dtype=(INT32, INT64)), Index("row", live="kv_indptr")
    ],
    kv_indptr=Annotated[
        Tensor,
        Layout("kv_indptr", "bound -> bound", dtype=(INT32, INT64), bound="token + 1"),
        Indptr("entry", capacity=True),
    ],
    attn_sink=Layout("attn_sink", "head -> head", dtype=(FP32, BF16, FP16)),
    kv_scales=Float32[Tensor, "row dim/64"] | None,
)
for _function in ("sparse_attn_v4_paged_decode", "_sparse_attn_v4_paged_decode_triton"):
    PEER.guard(
        f"sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_decode:{_function}", *_UNIFIED_RULES, **_UNIFIED
    )

# --- the KV pool and the attention backend ----------------------------------------------------------------------------

_SCALES = Choose({"page_size == 128": MXFP8_SCALE_INTERLEAVED}, default=MXFP8_SCALE_FLAT)


def _of_layer(name: str) -> Callable[..., Any]:
    """What a pool keeps for the layer that a call is about."""

    def read(self: Any, layer: Any = None, layer_id_override: int | None = None, **_: Any) -> Any:
        index = layer.layer_id if layer_id_override is None else layer_id_override
        return getattr(self, name)[index - self.start_layer]

    return read


def _slots(loc_info: Any, **_: Any) -> Tensor:
    """The slots of ``loc_info``, which is a tensor of them or says them in its first field."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    loc: Tensor = unwrap_write_loc(loc_info)[0]
    return loc


PEER.guard(
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPoolMXFP8.set_kv_buffer",
    when("dtype(cache_k) == e4m3", needs("k_scale", "v_scale")),
    when("page_size != 128", needs("k_scale", "v_scale")),
    when("given(k_scale)", needs("v_scale"), "dtype(cache_k) == e4m3"),
    when("given(v_scale)", needs("k_scale"), "dtype(cache_v) == e4m3"),
    "entry >= token",
    same_device=True,
    derive=dict(
        page_size=lambda self, **_: self.page_size,
        loc=_slots,
        k_buffer=_of_layer("k_buffer"),
        v_buffer=_of_layer("v_buffer"),
        k_scale_buffer=_of_layer("k_scale_buffer"),
        v_scale_buffer=_of_layer("v_scale_buffer"),
    ),
    loc=Annotated[Tensor, LOC, Index("slot", skip="== 0", live="token")],
    cache_k=ROWS(dtype=(BF16, FP16, FP32, E4M3)),
    cache_v=ROWS(dtype=(BF16, FP16, FP32, E4M3), head_dim="v_head_dim"),
    k_scale=Annotated[Tensor, SCALE_ROWS(group="head_dim / 32")] | None,
    v_scale=Annotated[Tensor, SCALE_ROWS(group="v_head_dim / 32")] | None,
    k_buffer=Annotated[Tensor, FP8_CACHE, Writes(at="loc")],
    v_buffer=Annotated[Tensor, FP8_CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    k_scale_buffer=Annotated[Tensor, _SCALES, Writes(at="loc")],
    v_scale_buffer=Annotated[Tensor, _SCALES(head_dim="v_head_dim"), Writes(at="loc")],
)


def _in_pool(read: Callable[[Any], Any], otherwise: Any = 0) -> Callable[..., Any]:
    """What the backend's pool says; ``otherwise`` where its cache is not MXFP8 and nothing is asked of it."""
    return lambda self, **_: read(self.token_to_kv_pool) if self.kv_cache_is_mxfp8 else otherwise


def _scale_buffer(which: int) -> Callable[..., Any]:
    def read(self: Any, layer: Any, **_: Any) -> Any:
        return self.token_to_kv_pool.get_kv_scale_buffer(layer.layer_id)[which] if self.kv_cache_is_mxfp8 else None

    return read


PEER.guard(
    "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend._mxfp8_sf_kwargs",
    when("kv_cache_is_mxfp8", "fa_impl_ver == 4", "page_size == 128", needs("q_descale", "k_scale", "v_scale")),
    derive=dict(
        kv_cache_is_mxfp8=lambda self, **_: bool(self.kv_cache_is_mxfp8),
        fa_impl_ver=lambda self, **_: self.fa_impl_ver,
        page_size=_in_pool(lambda pool: pool.page_size, 1),
        slot=_in_pool(lambda pool: pool.size + pool.page_size),
        head=_in_pool(lambda pool: pool.head_num),
        head_dim=_in_pool(lambda pool: pool.head_dim),
        v_head_dim=_in_pool(lambda pool: pool.v_head_dim),
        k_scale=_scale_buffer(0),
        v_scale=_scale_buffer(1),
    ),
    kv_cache_is_mxfp8=bool,
    fa_impl_ver=int,
    q_descale=Tensor | None,
    page_size=int,
    slot=int,
    head=int,
    head_dim=int,
    v_head_dim=int,
    k_scale=Annotated[Tensor, MXFP8_SCALE_INTERLEAVED] | None,
    v_scale=Annotated[Tensor, V_SCALE] | None,
)
