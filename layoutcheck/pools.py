"""The pools that serving engines keep, with the operations that need a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from torch import Tensor

from layoutcheck._choose import Choose
from layoutcheck._contract import contract
from layoutcheck._dtypes import BF16, E4M3, E8M0, FP16, FP32, INT64
from layoutcheck._layout import Layout
from layoutcheck._pool import Pool
from layoutcheck._rules import Index, Writes, needs, together, when
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import PAGED_NHD
from layoutcheck.layouts.unified_kv import UNIFIED_KV_ROWS, UNIFIED_KV_SCALE

_CACHE = PAGED_NHD(view="slot head head_dim", pitch={})
_SCALE = Choose({"page_size == 128": MXFP8_SCALE_INTERLEAVED}, default=MXFP8_SCALE_FLAT)
_LATENT = Choose({"kv_dtype == 'fp8'": UNIFIED_KV_ROWS(dtype=E4M3), "kv_dtype == 'bf16'": UNIFIED_KV_ROWS(dtype=BF16)})
_ROWS = Layout("rows", "token head head_dim -> token head head_dim", dtype=(BF16, FP16, FP32, E4M3), dense="head_dim")
_LOC = Layout("loc", "token -> token", dtype=INT64, dense="")
_ROW_SCALES = Layout(
    "row scales", "token head group -> token head group", dtype=E8M0, head_dim="group * 32", dense="group"
)


class PagedKVPool(Pool):
    """bf16 K and V, ``[slot, head, head_dim]`` each (sglang 0.5.23 MHATokenToKVPool); V's head_dim may differ."""

    default: ClassVar = {"v_head_dim": "head_dim"}
    k: Annotated[Tensor, _CACHE(dtype=BF16)]
    v: Annotated[Tensor, _CACHE(dtype=BF16, head_dim="v_head_dim")]


def _buffer(name: str) -> Callable[..., Tensor]:
    """How the contract of ``store`` reaches a buffer of the pool."""

    def derive(self: MXFP8KVPool, layer: int | None, **_: object) -> Tensor:
        value = getattr(self, name)
        if (layer is None) != (self.layers is None):
            raise TypeError(f"this pool has {self.layers or 'no'} layers, got layer={layer}")
        return value if layer is None else value[layer]  # type: ignore[no-any-return]

    return derive


def _size(name: str) -> Callable[..., int]:
    """How the contract of ``store`` reaches a size of the pool: the pool decides, and what does not fit is the rows."""

    def derive(self: MXFP8KVPool, layer: int | None, **_: object) -> int:
        value = self.dims[name]
        return int(value[layer] if isinstance(value, tuple) and layer is not None else value)

    return derive


class MXFP8KVPool(Pool):
    """K, V and their scale factors: allocated, resized, moved and stored as one.

    Scales are ``mxfp8.interleaved`` at page_size 128 and ``mxfp8.flat`` otherwise, as in sglang 0.5.23
    ``srt/mem_cache/memory_pool.py`` (MHATokenToKVPoolMXFP8). Dims: page (or slot), page_size, head, head_dim,
    v_head_dim.
    """

    default: ClassVar = {"v_head_dim": "head_dim"}
    k: Annotated[Tensor, _CACHE(dtype=E4M3)]
    v: Annotated[Tensor, _CACHE(dtype=E4M3, head_dim="v_head_dim")]
    k_scale: Annotated[Tensor, _SCALE]
    v_scale: Annotated[Tensor, _SCALE(head_dim="v_head_dim")]

    @contract(
        together("k_scale", "v_scale"),
        when("dtype(k) == e4m3 or dtype(v) == e4m3", needs("k_scale", "v_scale")),
        when("given(k_scale)", "dtype(k) == e4m3", "dtype(v) == e4m3"),
        same_device=True,
        derive={
            "k_cache": _buffer("k"),
            "v_cache": _buffer("v"),
            "k_scales": _buffer("k_scale"),
            "v_scales": _buffer("v_scale"),
            **{name: _size(name) for name in ("page_size", "head", "head_dim", "v_head_dim")},
        },
        k_cache=Annotated[Tensor, _CACHE(dtype=E4M3), Writes(at="loc")],
        v_cache=Annotated[Tensor, _CACHE(dtype=E4M3, head_dim="v_head_dim"), Writes(at="loc")],
        k_scales=Annotated[Tensor, _SCALE, Writes(at="loc")],
        v_scales=Annotated[Tensor, _SCALE(head_dim="v_head_dim"), Writes(at="loc")],
    )
    def store(
        self,
        k: Annotated[Tensor, _ROWS],
        v: Annotated[Tensor, _ROWS(head_dim="v_head_dim")],
        loc: Annotated[Tensor, _LOC, Index("slot", skip="<= 0")],
        k_scale: Annotated[Tensor, _ROW_SCALES] | None = None,
        v_scale: Annotated[Tensor, _ROW_SCALES(head_dim="v_head_dim")] | None = None,
        *,
        layer: int | None = None,
    ) -> None:
        """Store new rows at slots ``loc`` (token,) int64; slot 0 and negative slots are skipped.

        ``k`` (token, head, head_dim) and ``v`` (token, head, v_head_dim) are bf16, fp16 or fp32, and are quantised
        here; or they are e4m3, and then ``k_scale`` and ``v_scale`` (token, head, head_dim / 32) E8M0 are both
        required. ``layer`` picks the layer of a pool that has several. Raises :class:`LayoutError`; nothing is written
        then.
        """
        import layoutcheck.kernels as kernels

        caches = [_buffer(n)(self, layer) for n in ("k", "v", "k_scale", "v_scale")]
        page_size = _size("page_size")(self, layer)
        scale_layout = "interleaved" if page_size == 128 else "flat"
        if k_scale is None or v_scale is None:
            kernels.quantize_store_kv_mxfp8(k, v, loc, *caches, page_size=page_size, scale_layout=scale_layout)
            return
        for rows, scales, cache, scale_cache in (
            (k, k_scale, caches[0], caches[2]),
            (v, v_scale, caches[1], caches[3]),
        ):
            kernels.store_rows(rows, loc, cache)
            kernels.store_scales(scales, loc, scale_cache, page_size=page_size, scale_layout=scale_layout)


class UnifiedKVPool(Pool):
    """One latent row a slot, in bf16 or fp8 with group scales per page of the pool (``kv_dtype="bf16"`` or ``"fp8"``).

    DeepSeek-V4's unified pool is the case page_size = 1. Dims: page (or slot), page_size, dim.
    """

    kv: Annotated[Tensor, _LATENT]
    kv_scale: Annotated[Tensor, Choose({"kv_dtype == 'fp8'": UNIFIED_KV_SCALE})] | None
