"""FlashInfer 0.7.4: the page tables of its paged decode and prefill wrappers, and appending to a paged cache.

``plan`` hands the page table to kernels as raw 32-bit pointers, so another integer type is read as garbage; ``append``
converts it first. Left unchecked: page numbers in ``plan``, which does not see the cache; whether a position that is
appended to lies in pages of its own sequence; the custom masks; what the TensorRT-LLM and cuDNN paths take besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from torch import Tensor

from layoutcheck._choose import Choose
from layoutcheck._dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32, INT64, UINT8
from layoutcheck._layout import Layout
from layoutcheck._rules import Index, Indptr, Writes, when
from layoutcheck.layouts.paged import FLASHINFER_HND, FLASHINFER_NHD, KV_ELEMENTS
from layoutcheck.peers._install import Peer

PEER = Peer("flashinfer", "flashinfer-python", since="0.7.4", before="0.7.5")

_QUERY = (BF16, FP16, E4M3, E5M2, FP32)
_CACHE = Choose(
    {"kv_layout == 'NHD'": FLASHINFER_NHD, "kv_layout == 'HND'": FLASHINFER_HND},
)(dtype=(*KV_ELEMENTS, FP32, UINT8))  # uint8: two e2m1, so head_dim counts bytes


def _table(name: str, size: str, *dtypes: Any) -> Layout:
    """A 1-D tensor with any stride: FlashInfer makes it contiguous itself."""
    return Layout(name, f"{name} -> {name}", dtype=dtypes or INT32, dense="", **({} if size == name else {name: size}))


def _page_table(prefix: str, *dtypes: Any) -> dict[str, Any]:
    """Which pages each sequence has: ``indptr``, ``indices`` and ``last_page_len`` under the names of a signature."""
    return {
        f"{prefix}indptr": Annotated[Tensor, _table("bound", "batch + 1", *dtypes), Indptr("entry", capacity=True)],
        f"{prefix}indices": Annotated[Tensor, _table("entry", "entry", *dtypes)],
        f"{prefix}last_page_len": Annotated[Tensor, _table("batch", "batch", *dtypes), Index("page_size + 1")],
    }


def _halves(which: int, layout: Callable[[dict[str, Any]], str]) -> Callable[..., Any]:
    """K or V of a cache that is a tuple of two, or one tensor with both in its second dimension."""

    def read(**arguments: Any) -> Any:
        from flashinfer.utils import _unpack_paged_kv_cache

        return _unpack_paged_kv_cache(arguments["paged_kv_cache"], layout(arguments))[which]

    return read


# --- plan -------------------------------------------------------------------------------------------------------------

_HEADS = ("num_kv_heads > 0", "num_qo_heads % num_kv_heads == 0", "page_size > 0")

# The tables may be on the host, or on the device, or some here and some there: plan moves them itself.
PEER.guard(
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan",
    *_HEADS,
    **_page_table(""),
    num_qo_heads=int,
    num_kv_heads=int,
    head_dim=int,
    page_size=int,
)

PEER.guard(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
    *_HEADS,
    when("backend != 'cudnn'", "dtype(qo_indptr) == int32"),
    derive=dict(backend=lambda self, **_: self._backend),
    backend=str,
    qo_indptr=Annotated[Tensor, _table("bound", "batch + 1", INT32, INT64), Indptr("2147483647", capacity=True)],
    **_page_table("paged_kv_"),
    num_qo_heads=int,
    num_kv_heads=int,
    head_dim_qk=int,
    page_size=int,
)

# --- run --------------------------------------------------------------------------------------------------------------

for _wrapper in ("decode:BatchDecodeWithPagedKVCacheWrapper", "prefill:BatchPrefillWithPagedKVCacheWrapper"):
    PEER.guard(
        f"flashinfer.{_wrapper}.run",
        "head == num_kv_heads",
        "q_head == num_qo_heads",
        when("dtype(k_cache) != uint8", "q_dim == head_dim"),
        same_device=True,
        derive=dict(
            kv_layout=lambda self, **_: self._kv_layout,
            num_kv_heads=lambda self, **_: self._num_kv_heads,
            num_qo_heads=lambda self, **_: self._num_qo_heads,
            k_cache=_halves(0, lambda arguments: arguments["self"]._kv_layout),
            v_cache=_halves(1, lambda arguments: arguments["self"]._kv_layout),
        ),
        kv_layout=str,
        q=Layout("q", "token q_head q_dim -> token q_head q_dim", dtype=_QUERY, dense="q_dim"),
        k_cache=_CACHE,
        v_cache=_CACHE(head_dim="v_head_dim"),
    )

# --- append -----------------------------------------------------------------------------------------------------------

_HALF = [_halves(which, lambda arguments: arguments["kv_layout"]) for which in (0, 1)]

PEER.guard(
    "flashinfer.page:append_paged_kv_cache",
    "kv_layout in ('NHD', 'HND')",
    "equal_strides",
    same_device=True,
    derive=dict(
        equal_strides=lambda **a: _HALF[0](**a).stride() == _HALF[1](**a).stride(),
        k_cache=_HALF[0],
        v_cache=_HALF[1],
    ),
    equal_strides=bool,
    kv_layout=str,
    append_key=Layout("append_key", "token head head_dim -> token head head_dim", dtype=_QUERY, dense="head_dim"),
    append_value=Layout("append_value", "token head head_dim -> token head head_dim", dtype=_QUERY, dense="head_dim"),
    batch_indices=Annotated[Tensor, _table("token", "token", INT32, INT64), Index("batch")],
    positions=Annotated[Tensor, _table("token", "token", INT32, INT64), Index("entry * page_size")],
    k_cache=Annotated[Tensor, _CACHE, Writes()],
    v_cache=Annotated[Tensor, _CACHE, Writes()],
    **_page_table("kv_", INT32, INT64)
    | dict(kv_indices=Annotated[Tensor, _table("entry", "entry", INT32, INT64), Index("page", live="kv_indptr")]),
)
