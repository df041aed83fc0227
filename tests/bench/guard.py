"""What a guard costs: the seven tensors of ``quantize_store_kv_mxfp8``, four ways, in one run on CPU tensors.

    python tests/bench/guard.py

The function itself does nothing, so its bare time is the cost of the call. "hand-written" is the shortest check of the
same rules that we could write: every dtype, shape, composite equation, stride, and device. Times are the least of many
repeats, in microseconds; the ratio is to the hand-written check, each with the bare call's time taken off.
"""

from __future__ import annotations

import platform
import timeit
from collections.abc import Callable
from typing import Annotated, Any

import torch
from beartype import beartype
from jaxtyping import BFloat16, Float8e4m3fn, Int64, UInt8, jaxtyped
from torch import Tensor

from layoutcheck import E4M3, Index, Writes, contract, layout

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")


def bare(
    k: BFloat16[Tensor, "token head head_dim"],
    v: BFloat16[Tensor, "token head v_head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim"), Writes(at="loc")],
    *,
    page_size: int = 128,
) -> None:
    """The call without any check."""


guarded = contract("page_size % 32 == 0", same_device=True)(bare)


def hand_written(
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    page_size: int = 128,
) -> None:
    """The same rules, as short as they go."""
    token, head, head_dim = k.shape
    v_head_dim = v.shape[2]
    slot = k_cache.shape[0]
    page, chunk = slot // page_size, page_size // 32
    if page_size % 32 or slot % page_size or head_dim % 32 or v_head_dim % 32:
        raise ValueError("sizes do not divide")
    if k.dtype is not torch.bfloat16 or v.dtype is not torch.bfloat16 or loc.dtype is not torch.int64:
        raise ValueError("wrong dtype of k, v or loc")
    if k_cache.dtype is not torch.float8_e4m3fn or v_cache.dtype is not torch.float8_e4m3fn:
        raise ValueError("wrong dtype of a cache")
    if k_scale.dtype not in _E8M0 or v_scale.dtype not in _E8M0:
        raise ValueError("wrong dtype of a scale")
    if v.shape != (token, head, v_head_dim) or loc.shape != (token,):
        raise ValueError("wrong shape of v or loc")
    if k_cache.shape != (slot, head, head_dim) or v_cache.shape != (slot, head, v_head_dim):
        raise ValueError("wrong shape of a cache")
    if k_scale.shape != (page, head, 32, chunk, head_dim // 32):
        raise ValueError("wrong shape of k_scale")
    if v_scale.shape != (page, head, 32, chunk, v_head_dim // 32):
        raise ValueError("wrong shape of v_scale")
    if not (
        k_cache.is_contiguous() and v_cache.is_contiguous() and k_scale.is_contiguous() and v_scale.is_contiguous()
    ):
        raise ValueError("a buffer is not dense")
    if not (k.device == v.device == loc.device == k_cache.device == v_cache.device == k_scale.device == v_scale.device):
        raise ValueError("not on one device")
    return bare(k, v, loc, k_cache, v_cache, k_scale, v_scale, page_size=page_size)


_E8M0 = (torch.float8_e8m0fnu, torch.uint8)


@jaxtyped(typechecker=beartype)
def jaxtyping_beartype(
    k: BFloat16[Tensor, "token head head_dim"],
    v: BFloat16[Tensor, "token head v_head_dim"],
    loc: Int64[Tensor, "token"],
    k_cache: Float8e4m3fn[Tensor, "slot head head_dim"],
    v_cache: Float8e4m3fn[Tensor, "slot head v_head_dim"],
    k_scale: UInt8[Tensor, "page head 32 chunk group"],
    v_scale: UInt8[Tensor, "page head 32 chunk v_group"],
    *,
    page_size: int = 128,
) -> None:
    """Shapes and dtypes only: no relation between slots, pages and page_size, no E8M0, no strides, no device."""


def arguments(page: int = 64, page_size: int = 128) -> tuple[Tensor, ...]:
    """A valid call with K and V of different head_dim."""
    dims: dict[str, Any] = dict(page=page, page_size=page_size, head=8)
    scales = (SCALE(head_dim=d, **dims).empty(dtype=torch.uint8) for d in (128, 64))
    caches = (CACHE(head_dim=d, **dims).empty() for d in (128, 64))
    rows = (torch.zeros(16, 8, d, dtype=torch.bfloat16) for d in (128, 64))
    return (*rows, torch.arange(16), *caches, *scales)


def microseconds(call: Callable[[], object], number: int = 20_000, repeat: int = 9) -> float:
    """The least of several means: what the machine does when nothing disturbs it."""
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


@contract
def one_with_a_twin(cache: Annotated[Tensor, layout("paged.nhd")(dtype=E4M3, pitch={})]) -> None:
    """Pages of heads: where page_size is the number of heads, ``paged.hnd`` has the same shape and other bytes."""


@contract
def one_without(cache: Annotated[Tensor, CACHE], page_size: int = 8) -> None:
    """The same memory by slots, which has no twin in the catalogue."""


def look_ups() -> dict[str, Callable[[], object]]:
    """Guards of one buffer: without a twin, with one that is not tagged, and with one that is."""
    tagged = layout("paged.nhd")(dtype=E4M3, page=64, page_size=8, head=8, head_dim=128, pitch={}).empty()
    foreign = tagged.clone()
    slots = foreign.view(512, 8, 128)
    return {
        "no twin": lambda: one_without(slots),
        "a twin, memory unknown": lambda: one_with_a_twin(foreign),
        "a twin, memory tagged": lambda: one_with_a_twin(tagged),
    }


def main() -> None:
    """Print the table."""
    tensors = arguments()
    calls: dict[str, Callable[[], object]] = {
        "bare call": lambda: bare(*tensors, page_size=128),
        "layoutcheck": lambda: guarded(*tensors, page_size=128),
        "hand-written": lambda: hand_written(*tensors, page_size=128),
    }
    times = {name: microseconds(call) for name, call in calls.items()}
    times["jaxtyping + beartype"] = microseconds(lambda: jaxtyping_beartype(*tensors, page_size=128), number=200)
    base = times["hand-written"] - times["bare call"]
    print(
        f"guard of seven tensors; {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    for name, time in times.items():
        ratio = (time - times["bare call"]) / base
        print(f"   {name:<22}{time:8.2f} µs   {ratio:7.2f} x hand-written")
    print("guard of one buffer, by what is compared with its tag")
    for name, call in look_ups().items():
        print(f"   {name:<22}{microseconds(call):8.2f} µs")


if __name__ == "__main__":
    main()
