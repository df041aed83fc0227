"""Tensors as a contract allows them: their strides, where they begin in their storage, and what they hold.

``tensor`` makes one from plain numbers, so that a call which failed can be printed as code and made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from layoutcheck import _dtypes, _index
from layoutcheck._dims import Expr, evaluate
from layoutcheck._layout import Layout
from layoutcheck._specs import Form
from layoutcheck._strides import free_inner

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAGNITUDES = (1.0, 1.0, 2.0**-14, 2.0**9)


def tensor(
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dtype: Any = torch.float32,
    *,
    offset: int = 0,
    data: int | Sequence[int] | None = 0,
    holds: Any = None,
    padding: Layout | None = None,
    device: Any = None,
) -> torch.Tensor:
    """A tensor of that shape with those strides, ``offset`` elements into a storage that is just large enough.

    ``data`` is the seed of its contents, a list of integers in row-major order, or None to leave the memory as it is.
    Floats are finite, of either sign and of many magnitudes, zeros among them; E8M0 is a scale around 1, 2^-14 or 2^9,
    and an integer of more than a byte from a seed is 0. ``holds`` is the element whose bits a carrier such as uint8
    holds; ``padding`` a concrete layout whose padding is filled by its own rule.
    """
    element = _dtypes.element(dtype)
    strides = _packed(shape) if strides is None else strides
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
    storage = torch.empty(offset + reach, dtype=element.torch, device=device)
    made = storage.as_strided(tuple(shape), tuple(strides), offset)
    if data is None or made.device.type == "meta" or made.numel() == 0:
        return made
    kind = element if holds is None else _dtypes.element(holds)
    _raw(made).copy_(_raw(_contents(tuple(shape), element, kind, data)))
    if padding is not None and padding.rules.pad and padding.rules.fill is not None:
        clear_padding(padding, made)
    return made


def clear_padding(layout: Layout, made: torch.Tensor) -> None:
    """Fill what no coordinate of a padded layout maps to, by its rule."""
    ranges = _index.padding_ranges(layout)
    flat = made.as_strided((layout.numel,), (1,), made.storage_offset())
    for start, stop in ranges:
        flat[start:stop].view(_WIDTHS[flat.element_size()]).fill_(layout.rules.fill or 0)


def _contents(shape: tuple[int, ...], element: _dtypes.Element, holds: _dtypes.Element, data: Any) -> torch.Tensor:
    if not isinstance(data, int):
        return torch.tensor(data, dtype=torch.int64).reshape(shape).to(element.torch)
    generator = torch.Generator().manual_seed(data)
    if holds.name == "e8m0":
        middle = (127, 127, 113, 136)[data % 4]
        return torch.randint(middle - 3, middle + 4, shape, generator=generator, dtype=torch.uint8).view(element.torch)
    if holds.torch is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not holds.torch.is_floating_point or holds.bits < 8:
        if element.torch.itemsize > 1:
            return torch.zeros(shape, dtype=element.torch)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(element.torch)
    values = torch.randn(shape, generator=generator) * _MAGNITUDES[data % 4]
    values *= torch.randint(8, shape, generator=generator) > 0  # one in eight is zero
    if holds.bits == 8:  # no cast of torch's is needed to stay finite
        values = values.clamp(-torch.finfo(holds.torch).max, torch.finfo(holds.torch).max)
    return values.to(holds.torch).view(element.torch)


def _raw(value: torch.Tensor) -> torch.Tensor:
    return value.view(_WIDTHS[value.element_size()])


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    strides, running = [], 1
    for n in reversed(shape):
        strides.append(running)
        running *= max(n, 1)
    return tuple(reversed(strides))


def strides_of(
    form: Form, shape: Sequence[int], values: dict[str, Any], itemsize: int, slack: Callable[[int], int]
) -> tuple[int, ...]:
    """Strides that a form allows for a shape. ``slack(i)`` elements are left free behind dimension i, where it may."""
    if form.layout is not None and isinstance(form.layout.rules.view, tuple):
        return _packed(shape)
    if form.layout is None or form.strides is None:
        result, running = [0] * len(shape), 1
        for i in reversed(range(len(shape))):
            result[i] = running + (slack(i) if i < len(shape) - 1 else 0)
            running = result[i] * max(shape[i], 1)
        return tuple(result)
    result = [0] * len(shape)
    for i in sorted(range(len(shape)), key=lambda i: -depth(form, i)):
        exact = form.strides[i]
        if shape[i] <= 1 and i not in form.strict:
            result[i] = _natural(form, i, shape, result, values) + slack(i)
        elif exact is not None:
            result[i] = int(evaluate(exact, values))
        else:
            step = _step(form, i, values, itemsize)
            wanted = _natural(form, i, shape, result, values) + slack(i)
            result[i] = -(-wanted // step) * step
    return tuple(result)


def _natural(form: Form, i: int, shape: Sequence[int], strides: Sequence[int], values: dict[str, Any]) -> int:
    """The smallest stride with which elements do not share memory."""
    assert form.strides is not None
    if (exact := form.strides[i]) is not None:
        return int(evaluate(exact, values))
    inside = free_inner(form, i)
    if inside is not None:
        return strides[inside] * shape[inside]
    extent = form.inner[i]
    return 1 if extent is None else int(evaluate(extent, values))


def _step(form: Form, i: int, values: dict[str, Any], itemsize: int) -> int:
    """What a stride must be a multiple of, in elements."""
    step = 1
    for index, size in form.align:
        if index == i:
            step = math.lcm(step, _elements(size, values, itemsize))
    return step


def offset_step(form: Form, values: dict[str, Any], itemsize: int) -> int:
    """What the offset of the first element must be a multiple of, in elements."""
    steps = [_elements(size, values, itemsize) for index, size in form.align if index is None]
    return math.lcm(1, *steps)


def _elements(size: Expr, values: dict[str, Any], itemsize: int) -> int:
    wanted = int(evaluate(size, values))
    return wanted // math.gcd(wanted, itemsize)


def depth(form: Form, i: int) -> int:
    """How far inside memory a dimension is."""
    assert form.layout is not None
    return form.layout.order.index(form.layout.view_leaves[i][-1])
