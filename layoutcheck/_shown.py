"""How a tensor shows a layout: the size and stride of each of its dimensions.

By default a tensor shows the memory order. A view shows other axes, where a single stride can: parts that are joined in
one dimension must be adjacent in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from layoutcheck._dims import Const, Expr, brief, product
from layoutcheck._pattern import expand, parse_groups

if TYPE_CHECKING:
    from layoutcheck._layout import Layout


@dataclass(frozen=True)
class Dim:
    """One dimension of the tensor that shows a layout: its label, size, and stride (None where it is free)."""

    label: str
    size: Expr
    stride: Expr | None
    inner: Expr | None = None  # for a free stride: the extent it must not be smaller than


def tensor_dims(layout: Layout) -> tuple[Dim, ...]:
    """The dimensions of a tensor that shows ``layout``. Raises ``TypeError`` where no strides can show it so."""
    view = layout.rules.view
    if isinstance(view, tuple):
        return _declared(view)
    if view is None:
        groups = leaves = layout.memory
    else:
        groups = parse_groups(view)
        leaves = expand(groups, layout.axes, view)
        shown = sorted(leaf for g in leaves for leaf in g)
        if shown != sorted(layout.order) and not (in_one_word(layout) and shown == sorted(layout.order[:-1])):
            raise TypeError(f"{layout.name}: view {view!r} must show every part of the memory once")
    size_of = layout.memory_size if view is None else layout.size_of
    padded = {axis for axis, _ in layout.rules.pad}
    dims = []
    hidden = (layout.order[-1],) if in_one_word(layout) else ()
    for group, parts in zip(groups, leaves, strict=True):
        if parts == hidden:
            continue
        label = group[0] if len(group) == 1 else f"({' '.join(group)})"
        for outer, inner in pairwise(parts):
            if not layout.adjacent(outer, inner):
                raise TypeError(
                    f"{layout.name}: {label} cannot be shown as one dimension: {outer} and {inner} are not adjacent "
                    f"in memory ({' '.join(layout.order)})"
                )
        if view is not None and len(parts) > 1 and padded & set(group):
            raise TypeError(f"{layout.name}: {label} is padded and split, so no stride shows it as one dimension")
        last = parts[-1]
        size = layout.in_words(last, product(size_of(n) for n in group))
        stride = layout.in_words(last, layout.leaf_strides[last], stride=True)
        dims.append(Dim(label, size, stride) if layout.packed(last) else Dim(label, size, None, stride))
    return tuple(dims)


def in_one_word(layout: Layout) -> bool:
    """Whether the innermost axis fills one carrier exactly: it is no dimension of the tensor then."""
    return layout.word > 1 and layout.memory_size(layout.order[-1]) == Const(layout.word)


def _declared(sizes: tuple[Expr, ...]) -> tuple[Dim, ...]:
    """A declared shape of the same bytes: dense, row-major, whatever the axes are."""
    running: Expr = Const(1)
    dims = []
    for size in reversed(sizes):
        dims.append(Dim(brief(size), size, running))
        running = product([running, size])
    return tuple(reversed(dims))
