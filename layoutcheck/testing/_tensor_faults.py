"""Faults of one tensor: its shape, its element, its strides, its device, and another layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from layoutcheck._call import layout_dims
from layoutcheck._dims import evaluate
from layoutcheck._layout import Layout
from layoutcheck._specs import Form
from layoutcheck.layouts import entries
from layoutcheck.testing._call import Call
from layoutcheck.testing._candidate import ANY, INTEGERS, Candidate, blamed_for, concerned, like, replaced

_GROW = ("slot", "page", "row", "token", "pool", "seq")
_SAME_WIDTH = {
    1: (torch.int8, torch.float8_e5m2, torch.uint8),
    2: (torch.float16, torch.bfloat16, torch.int16),
    4: (torch.int32, torch.float32),
    8: (torch.float64, torch.int64),
}


def one_tensor(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    """Every change of one tensor of a call but that of what it holds."""
    yield from _shape(valid, name, form)
    yield from _dtype(valid, name, form)
    yield from _stride(valid, name, form)
    yield from _device(valid, name)


def _shape(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    shape, blamed = list(value.shape), blamed_for(valid, name)
    # Another size may as well be right where another pitch is not.
    rules = ANY | {"stride"} if form.layout is not None and form.layout.rules.pitch else ANY

    def resized(i: int, size: int) -> Callable[[], dict[str, Any]]:
        return lambda: {name: like(form, value, [*shape[:i], size, *shape[i + 1 :]])}

    for i, n in enumerate(shape):
        yield Candidate("one_too_many_of_an_axis", name, resized(i, n + 1), rules, blamed)
        if n:
            yield Candidate("one_too_few_of_an_axis", name, resized(i, n - 1), rules, blamed)
    page_size = valid.sizes.get("page_size", 1)
    for i, label in enumerate(form.labels if not form.variadic else ()):
        n = shape[i]
        if label.startswith(("slot", "(page")) and page_size > 1:
            yield Candidate("one_page_too_many", name, resized(i, n + page_size), rules, blamed)
        if label in _GROW and n > 1:
            yield Candidate("stale_after_resize", name, resized(i, n // 2), rules, blamed)
    for i, j in itertools.combinations(range(len(shape)), 2):
        if shape[i] != shape[j]:
            yield Candidate("transposed", name, replaced(name, value.transpose, i, j), ANY | {"stride"}, blamed)
        elif shape[i] > 1 and form.strides is not None:
            yield Candidate(
                "transposed", name, replaced(name, value.transpose, i, j), frozenset({"stride"}),
                frozenset({name}),
            )  # fmt: skip
    if not form.variadic:
        if len(shape) > 1:
            yield Candidate("flat", name, replaced(name, like, form, value, [value.numel()]), ANY, blamed)
            yield Candidate("axis_missing", name, replaced(name, like, form, value, shape[:-1]), ANY, blamed)
        yield Candidate("axis_too_many", name, replaced(name, value.unsqueeze, 0), ANY, blamed)
    if form.layout is not None:
        yield from _other_layouts(valid, name, form, blamed)


def _other_layouts(valid: Call, name: str, form: Form, blamed: frozenset[str]) -> Iterator[Candidate]:
    layout, value = form.layout, valid.arguments[name]
    assert layout is not None
    dims = layout_dims(form, valid.sizes) or {}

    def other_page_size(page_size: int) -> dict[str, Any]:
        return {name: like(form, value, layout(**dims | {"page_size": page_size}).shape)}

    if dims.get("page_size", 1) > 1:
        for size in (dims["page_size"] * 2, dims["page_size"] // 2):
            yield Candidate("other_page_size", name, partial(other_page_size, size), ANY, blamed)
    axes = {a.name for a in layout.axes}
    for entry in entries().values():
        if not isinstance(entry, Layout) or entry.name == layout.name or {a.name for a in entry.axes} != axes:
            continue
        if value.dtype not in entry.accepted:
            continue
        yield Candidate("other_layout", name, replaced(name, _laid, entry, dims, value), ANY | {"stride"}, blamed)


def _laid(entry: Layout, dims: Mapping[str, int], value: torch.Tensor) -> torch.Tensor:
    concrete = entry(**{d: n for d, n in dims.items() if d in entry.dims})
    if value.element_size() != concrete.dtype.itemsize:
        raise TypeError(f"{entry.name} has elements of another width than {value.dtype}")
    return (
        torch.zeros(concrete.nbytes, dtype=torch.uint8).view(value.dtype).as_strided(concrete.shape, concrete.strides)
    )


def _dtype(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    if form.dtypes is None:
        return
    others = [("same_width", d) for d in _SAME_WIDTH[value.element_size()]]
    if value.dtype is torch.float8_e4m3fn:
        others.append(("fnuz_for_fn", torch.float8_e4m3fnuz))
    elif value.dtype in (torch.int32, torch.int64):
        narrow = value.dtype is torch.int64
        others.append(("int64_as_int32", torch.int32) if narrow else ("int32_as_int64", torch.int64))
    for kind, dtype in others:
        if dtype not in form.dtypes:
            yield Candidate(
                kind, name, replaced(name, _as, value, dtype), frozenset({"dtype"}),
                concerned(valid, name), sure=True,
            )  # fmt: skip


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers where both are integers, the same bits otherwise."""
    if value.element_size() == dtype.itemsize:
        return value.view(dtype)
    made = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
    return made.copy_(value)


def _stride(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    if form.strides is None or value.numel() == 0 or value.dim() == 0:
        return
    mine, rules = frozenset({name}), frozenset({"stride"})
    order = sorted(range(value.dim()), key=lambda i: (-value.stride(i), -value.shape[i]))
    shape = [value.shape[i] for i in order]
    back = [order.index(i) for i in range(len(order))]

    def wider(extra: int, step: int) -> dict[str, Any]:
        whole = torch.zeros([*shape[:-1], shape[-1] * step + extra], dtype=torch.uint8).repeat_interleave(
            value.element_size(), -1
        )  # fmt: skip
        sliced = whole.view(value.dtype)[..., : shape[-1] * step : step]
        sliced.view(INTEGERS[value.element_size()]).copy_(value.permute(order).view(INTEGERS[value.element_size()]))
        return {name: sliced.permute(back)}

    yield Candidate("slice_of_a_wider_tensor", name, partial(wider, 1, 1), rules, mine)
    yield Candidate("every_other_element", name, partial(wider, 0, 2), rules, mine)
    for i in range(value.dim()):
        if value.shape[i] > 1:
            yield Candidate("expanded", name, replaced(name, _expanded, value, i), rules, mine)
    for index, size in form.align:
        if index is None and evaluate(size, valid.sizes) > value.element_size():
            yield Candidate(
                "misaligned_base", name, replaced(name, _shifted, value), frozenset({"alignment"}), mine, sure=True
            )
    if form.int32:
        free = [i for i in form.int32 if form.strides[i] is None and value.shape[i] > 1]
        for i in free[:1]:
            yield Candidate(
                "overflow", name, partial(_huge, valid, name, i), frozenset({"overflow"}), mine,
                sure=True, launchable=False,
            )  # fmt: skip


def _expanded(value: torch.Tensor, i: int) -> torch.Tensor:
    return value.narrow(i, 0, 1).expand(value.shape)


def _shifted(value: torch.Tensor) -> torch.Tensor:
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 2
    moved = torch.zeros(reach * value.element_size(), dtype=torch.uint8).view(value.dtype)
    return moved.as_strided(value.shape, value.stride(), 1)


def _huge(valid: Call, name: str, i: int) -> dict[str, Any]:
    """Every tensor without memory, one of them with a stride that passes 2**31."""
    made = {}
    for n, v in valid.arguments.items():
        if isinstance(v, torch.Tensor):
            strides = list(v.stride())
            if n == name:
                strides[i] = max(strides[i], 2**31 // (v.shape[i] - 1) + 1)
                inner = strides[i] * v.shape[i]
                strides = [inner * 2 if s > v.stride(i) else s for s in strides[:i]] + strides[i:]
            made[n] = torch.empty_strided(v.shape, strides, dtype=v.dtype, device="meta")
    return made


def _elsewhere(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _device(valid: Call, name: str) -> Iterator[Candidate]:
    given = [n for n in valid.forms if isinstance(valid.everything.get(n), torch.Tensor)]
    if valid.contract.same_device and len(given) > 1:
        value = valid.arguments[name]
        required = [n for n in given if not valid.contract.tensors[n].optional]
        blamed = frozenset(given) if name == (required or given)[0] else frozenset({name})
        yield Candidate(
            "other_device", name,
            replaced(name, _elsewhere, value),
            frozenset({"device"}), blamed, sure=True, launchable=False,
        )  # fmt: skip
