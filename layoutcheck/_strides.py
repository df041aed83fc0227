"""What the strides and addresses of tensors say: whether elements may share memory, and how far offsets reach."""

from __future__ import annotations

import torch

from layoutcheck import _tags
from layoutcheck._dims import Expr
from layoutcheck._specs import Form

INT32_MAX = 2**31 - 1


def free_dims(form: Form) -> tuple[tuple[int, ...], Expr]:
    """The dimensions whose stride is free, and the extent of what is packed inside them."""
    assert form.strides is not None
    assert form.layout is not None
    free = tuple(i for i, stride in enumerate(form.strides) if stride is None)
    order = [g[-1] for g in form.layout.view_leaves]
    inner = form.inner[max(free, key=lambda i: form.layout.order.index(order[i]))]  # type: ignore[union-attr]
    assert inner is not None
    return free, inner


def packed(x: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether these are the strides of a tensor, where it has more than one element to count."""
    return all(x.stride(i) == n or x.shape[i] <= 1 for i, n in enumerate(strides))


def apart(x: torch.Tensor, free: tuple[int, ...], inner: int) -> bool:
    """Whether the free dimensions, in whatever order, leave room for ``inner`` elements and for each other."""
    return colliding(x, free, inner) is None


def colliding(x: torch.Tensor, free: tuple[int, ...], inner: int) -> tuple[int, int] | None:
    """The first free dimension whose stride is smaller than what lies inside it, and that extent."""
    extent = inner
    for stride, size, i in sorted((x.stride(i), x.shape[i], i) for i in free if x.shape[i] > 1):
        if stride < extent:
            return i, extent
        extent += stride * (size - 1)
    return None


def free_inner(form: Form, index: int) -> int | None:
    """The dimension next inside a free one, where its stride is free as well; None where the declared extent holds."""
    assert form.layout is not None
    order = form.layout.order
    leaves = [g[0] for g in form.layout.view_leaves], [g[-1] for g in form.layout.view_leaves]
    at = order.index(leaves[1][index]) + 1
    if at >= len(order):
        return None
    inside = next((i for i, first in enumerate(leaves[0]) if first == order[at]), None)
    if inside is None or form.strides is None or form.strides[inside] is not None:
        return None
    return inside


def overlap(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors share memory, by the range of addresses that each spans."""
    if a is None or b is None or a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    first, second = _tags.address(a), _tags.address(b)
    if first == 0 or second == 0:
        return False
    return second < first + _span(a) if first <= second else first < second + _span(b)


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, of a tensor that has some."""
    if t.is_contiguous():
        return t.nbytes
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()
