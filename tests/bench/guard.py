"""What a guard costs: calls with 1, 3, 7 and 16 tensors, in every mode, in one run; CUDA tensors where there is a GPU.

    python tests/bench/guard.py

Seven tensors are those of ``quantize_store_kv_mxfp8``; one is a cache, three are rows, slots and a cache, sixteen are
nine rows more. The functions do nothing, so their bare time is the cost of the call. With ``LAYOUTCHECK=off`` that is
what a guarded call costs, as decoration returns the function itself. "hand-written" is the shortest check of the
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

from layoutcheck import E4M3, Index, Writes, _layout, _specs, contract, layout, mode

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


# --- one, three, sixteen ----------------------------------------------------------------------------------------------

Rows = BFloat16[Tensor, "token head head_dim"]


def bare_1(k_cache: Annotated[Tensor, CACHE], *, page_size: int = 128) -> None:
    """One buffer."""


def hand_written_1(k_cache: Tensor, *, page_size: int = 128) -> None:
    """The same rules, as short as they go."""
    slot, _, _ = k_cache.shape
    if k_cache.dtype is not torch.float8_e4m3fn or slot % page_size or not k_cache.is_contiguous():
        raise ValueError("wrong cache")
    return bare_1(k_cache, page_size=page_size)


@jaxtyped(typechecker=beartype)
def jaxtyping_beartype_1(k_cache: Float8e4m3fn[Tensor, "slot head head_dim"], *, page_size: int = 128) -> None:
    """Shapes and dtypes only."""


def bare_3(
    k: Rows,
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    *,
    page_size: int = 128,
) -> None:
    """Rows, slots and a buffer."""


def hand_written_3(k: Tensor, loc: Tensor, k_cache: Tensor, *, page_size: int = 128) -> None:
    """The same rules, as short as they go."""
    token, head, head_dim = k.shape
    slot = k_cache.shape[0]
    if k.dtype is not torch.bfloat16 or loc.dtype is not torch.int64 or k_cache.dtype is not torch.float8_e4m3fn:
        raise ValueError("wrong dtype")
    if loc.shape != (token,) or k_cache.shape != (slot, head, head_dim) or slot % page_size:
        raise ValueError("wrong shape")
    if not k_cache.is_contiguous() or not (k.device == loc.device == k_cache.device):
        raise ValueError("not dense, or not on one device")
    return bare_3(k, loc, k_cache, page_size=page_size)


@jaxtyped(typechecker=beartype)
def jaxtyping_beartype_3(
    k: Rows, loc: Int64[Tensor, "token"], k_cache: Float8e4m3fn[Tensor, "slot head head_dim"], *, page_size: int = 128
) -> None:
    """Shapes and dtypes only."""


def bare_16(
    k: Rows,
    v: BFloat16[Tensor, "token head v_head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim"), Writes(at="loc")],
    a: Rows, b: Rows, c: Rows, d: Rows, e: Rows, f: Rows, g: Rows, h: Rows, i: Rows,
    *,
    page_size: int = 128,
) -> None:  # fmt: skip
    """The seven, and nine rows more."""


def hand_written_16(
    k: Tensor, v: Tensor, loc: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor,
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor, i: Tensor,
    *, page_size: int = 128,
) -> None:  # fmt: skip
    """The same rules, as short as they go."""
    hand_written(k, v, loc, k_cache, v_cache, k_scale, v_scale, page_size=page_size)
    rows, bf16 = k.shape, torch.bfloat16
    if not (
        a.dtype is b.dtype is c.dtype is d.dtype is e.dtype is f.dtype is g.dtype is h.dtype is i.dtype is bf16
        and a.shape == b.shape == c.shape == d.shape == e.shape == f.shape == g.shape == h.shape == i.shape == rows
    ):
        raise ValueError("wrong rows")
    if not (
        k.device == a.device == b.device == c.device == d.device == e.device == f.device == g.device == h.device
        == i.device
    ):  # fmt: skip
        raise ValueError("not on one device")


@jaxtyped(typechecker=beartype)
def jaxtyping_beartype_16(
    k: Rows,
    v: BFloat16[Tensor, "token head v_head_dim"],
    loc: Int64[Tensor, "token"],
    k_cache: Float8e4m3fn[Tensor, "slot head head_dim"],
    v_cache: Float8e4m3fn[Tensor, "slot head v_head_dim"],
    k_scale: UInt8[Tensor, "page head 32 chunk group"],
    v_scale: UInt8[Tensor, "page head 32 chunk v_group"],
    a: Rows, b: Rows, c: Rows, d: Rows, e: Rows, f: Rows, g: Rows, h: Rows, i: Rows,
    *,
    page_size: int = 128,
) -> None:  # fmt: skip
    """Shapes and dtypes only."""


WAYS: dict[int, tuple[Callable[..., None], Callable[..., None], Callable[..., None]]] = {
    1: (bare_1, hand_written_1, jaxtyping_beartype_1),
    3: (bare_3, hand_written_3, jaxtyping_beartype_3),
    7: (bare, hand_written, jaxtyping_beartype),
    16: (bare_16, hand_written_16, jaxtyping_beartype_16),
}


def arguments(count: int, device: str, tagged: bool, page: int = 64, page_size: int = 128) -> tuple[Tensor, ...]:
    """A valid call with K and V of different head_dim; buffers whose layout is known, or is not."""
    dims: dict[str, Any] = dict(page=page, page_size=page_size, head=8)
    scales = [SCALE(head_dim=d, **dims).empty(dtype=torch.uint8, device=device) for d in (128, 64)]
    caches = [CACHE(head_dim=d, **dims).empty(device=device) for d in (128, 64)]
    if not tagged:
        scales, caches = [s.clone() for s in scales], [c.clone() for c in caches]
    k, v = (torch.zeros(16, 8, d, dtype=torch.bfloat16, device=device) for d in (128, 64))
    loc = torch.arange(16, device=device)
    if count < 7:
        return (caches[0],) if count == 1 else (k, loc, caches[0])
    return (k, v, loc, *caches, *scales, *(k.clone() for _ in range(count - 7)))


def microseconds(call: Callable[[], object], number: int = 500, repeat: int = 60) -> float:
    """The least of many means, each over a few milliseconds: what the machine does when nothing disturbs it."""
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


def stream(count: int, device: str) -> list[tuple[Tensor, ...]]:
    """Calls of different shapes: other numbers of tokens; of a cache alone, of slots."""
    first = arguments(count, device, False, page=1)
    if count == 1:
        return [(torch.empty(128 * n, 1, 1, dtype=first[0].dtype, device=device),) for n in range(1, 201)]
    rows = [x.shape[0] == 16 for x in first]
    return [
        tuple(x[:1].repeat(n, *[1] * (x.ndim - 1)) if row else x for x, row in zip(first, rows, strict=True))
        for n in range(1, 201)
    ]


def each(fn: Callable[..., object], calls: list[tuple[Tensor, ...]]) -> float:
    """Microseconds for each of several calls, made one after the other."""

    def run() -> None:
        for call in calls:
            fn(*call, page_size=128)

    return microseconds(run, max(1, 500 // len(calls))) / len(calls)


def table(count: int, device: str) -> None:
    """One table: every way to check a call of so many tensors."""
    plain, by_hand, other = WAYS[count]
    fn = contract("page_size % 32 == 0", same_device=True)(plain)
    tensors, foreign = arguments(count, device, True), arguments(count, device, False)
    calls: dict[str, Callable[[], object]] = {
        "bare call, or mode off": lambda: plain(*tensors, page_size=128),
        "hand-written": lambda: by_hand(*tensors, page_size=128),
        "known metadata": lambda: fn(*tensors, page_size=128),
        "   untagged buffers": lambda: fn(*foreign, page_size=128),
    }
    times = {name: microseconds(call) for name, call in calls.items()}
    shapes = stream(count, device)
    times["   shapes in turn"] = each(fn, shapes[:2])
    times["new shapes"] = each(fn, shapes)
    with mode("warn"):
        times["known metadata, warn"] = microseconds(calls["known metadata"])
    with mode("values"):
        times["known metadata, values"] = microseconds(calls["known metadata"], 10)
    times["jaxtyping + beartype"] = microseconds(lambda: other(*tensors, page_size=128), 10)
    floor = times["bare call, or mode off"]
    base = times["hand-written"] - floor
    print(f"{count} tensors on {device}")
    for name, time in times.items():
        print(f"   {name:<24}{time:9.2f} µs   {(time - floor) / base:8.2f} x hand-written")


def decoration(*, first: bool) -> float:
    """Milliseconds to decorate the function of seven tensors: the least of several.

    The ``first`` time its layouts have to be computed; other functions with the same arguments find them.
    """
    made = contract("page_size % 32 == 0", same_device=True)

    def forget() -> None:
        if first:
            _layout._replaced.cache_clear()
            _specs.layout_form.cache_clear()

    return min(timeit.repeat(lambda: made(bare), forget, number=1, repeat=40)) * 1e3


def after_many() -> list[float]:
    """Microseconds per call of seven tensors: the first ones, and after a million."""
    fn = contract("page_size % 32 == 0", same_device=True)(bare)
    tensors = arguments(7, "cpu", False)

    def call() -> None:
        fn(*tensors, page_size=128)

    times = [microseconds(call)]
    timeit.timeit(call, number=1_000_000)
    return [*times, microseconds(call)]


def main() -> None:
    """Print the tables."""
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for count in WAYS:
            table(count, device)
    print("guard of one buffer, by what is compared with its tag")
    for name, call in look_ups().items():
        print(f"   {name:<24}{microseconds(call):9.2f} µs")
    print("seven tensors, at first {:.2f} µs, after a million calls {:.2f} µs".format(*after_many()))
    for text, first in (("with layouts that were used before", False), ("with new layouts", True)):
        print(f"decoration {text}: {decoration(first=first):.2f} ms per contract of seven tensors")


if __name__ == "__main__":
    main()
