"""Layouts that the shape cannot tell apart: same shape and dtype, other bytes. For these a guard compares the tag.

NHD and HND where page_size equals the number of heads; scales swizzled and linear; scale orders of K and V. Which
arguments have a twin in the catalogue is decided once, when the contract is compiled, and only those pay for a look-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache

import torch

from layoutcheck import _tags
from layoutcheck._dims import Equation, Expr, Inexact, evaluate, plan
from layoutcheck._errors import LayoutError
from layoutcheck._layout import Layout

Runs = tuple[tuple[int, int], ...]
_THEIRS = "other."
# Sizes to try where nothing else fixes them: equal ones and different ones, those of tiles, and 1.
_SAMPLES = ((4,), (128,), (3, 5, 7, 2, 11, 13), (32, 4, 4, 2, 1, 3), (2, 8, 8, 128, 4, 4))


def twins(layout: Layout) -> tuple[str, ...]:
    """Names of the layouts of the catalogue that may have the same shape and dtype as ``layout``, and another map."""
    from layoutcheck.layouts import entries

    return tuple(n for n, e in entries().items() if isinstance(e, Layout) and n != layout.name and _is_twin(layout, e))


@lru_cache(maxsize=4096)
def _is_twin(layout: Layout, other: Layout) -> bool:
    a, b = layout.tensor_dims, other.tensor_dims
    if len(a) != len(b) or not set(layout.accepted) & set(other.accepted):
        return False
    if [x.name for x in layout.axes] != [x.name for x in other.axes]:
        return False  # nothing says which coordinate of one is which of the other
    apart = other.with_names({n: f"{_THEIRS}{n}" for n in other._names})
    for sample in _SAMPLES:
        if (solved := _solved(layout, apart, sample)) is None:
            continue
        mine = {n: solved[n] for n in layout.dims}
        theirs = {n: solved[_THEIRS + n] for n in other.dims}
        if not _same(runs_of(layout(**mine)), runs_of(other(**theirs))):
            return True
    return False


def _solved(a: Layout, b: Layout, sample: tuple[int, ...]) -> dict[str, int] | None:
    """Sizes of both layouts that give them one shape, the free ones taken from the sample."""
    shapes = zip(a.tensor_dims, b.tensor_dims, strict=True)
    equations = [*a.equations, *b.equations, *(Equation(x.size, y.size) for x, y in shapes if x.size != y.size)]
    values: dict[str, int] = {**dict(a.rules.default), **dict(b.rules.default)}
    guesses = itertools.cycle(sample)
    try:
        for name in (*a.dims, *b.dims):
            if name not in values:
                values[name] = next(guesses)
            for found, expr, _ in plan(values, equations):
                values[found] = int(evaluate(expr, values))
        if any(evaluate(q.left, values) != evaluate(q.right, values) for q in equations):
            return None
    except (Inexact, KeyError):  # it does not divide, or something stays unknown
        return None
    return values


def runs_of(layout: Layout, numel: int | None = None) -> dict[str, Runs] | None:
    """For each logical axis of a concrete layout its (size, stride) runs, outermost first, merged as far as they go.

    With ``numel`` the outermost part in memory is as long as that many elements need; None where they are no whole
    number of it.
    """
    sizes = {leaf: int(evaluate(layout.memory_size(leaf), layout.values)) for leaf in layout.order}
    strides = {leaf: int(evaluate(layout.leaf_strides[leaf], layout.values)) for leaf in layout.order}
    if numel is not None and layout.order:
        outer = layout.order[0]
        if not strides[outer] or numel % strides[outer]:
            return None
        sizes[outer] = numel // strides[outer]
    result = {}
    for axis in layout.axes:
        runs: list[tuple[int, int]] = []
        for leaf in axis.leaves():
            if sizes[leaf] == 1:
                continue
            if runs and runs[-1][1] == strides[leaf] * sizes[leaf]:
                runs[-1] = (runs[-1][0] * sizes[leaf], strides[leaf])
            else:
                runs.append((sizes[leaf], strides[leaf]))
        result[axis.name] = tuple(runs)
    return result


def _same(a: Mapping[str, Runs] | None, b: Mapping[str, Runs] | None) -> bool:
    return a is None or b is None or list(a.values()) == list(b.values())


class Reader:
    """How one argument reads its memory: called by the guard with the tensor and the layout's open dims."""

    def __init__(self, layout: Layout, names_: tuple[str, ...], others: tuple[str, ...]) -> None:
        self.layout, self.names, self.twins = layout, names_, frozenset(others)

    def __call__(self, tensor: torch.Tensor, *sizes: int) -> bool:
        """Whether nothing is known that says the memory was laid out otherwise."""
        entry = _tags._known.get(id(_tags.storage_of(tensor)))
        if entry is None:
            return True
        key = (self, sizes, tensor.storage_offset(), tensor.is_contiguous())
        last = entry[1][-1]
        agrees = last.read_as.get(key)
        if agrees is None:
            agrees = self.conflict(tensor, sizes) is None
            if len(last.read_as) >= _MOST_REMEMBERED:
                last.read_as.clear()
            last.read_as[key] = agrees
        return agrees

    def conflict(self, tensor: torch.Tensor, sizes: tuple[int, ...]) -> _tags.Tag | None:
        """The tag that says so; None where the maps agree, or where they cannot be compared."""
        tag = _tags.find(tensor)
        if tag is None or tag.layout is None:
            return tag if tag is not None and tag.name in self.twins else None
        if not isinstance(tag.layout, Layout) or not self._comparable(tag.layout, tensor, tag.start):
            return None
        try:
            read = self.layout(**dict(zip(self.names, sizes, strict=True)))
        except LayoutError:
            return None
        return None if _same(runs_of(tag.layout, read.numel), runs_of(read)) else tag

    def _comparable(self, written: Layout, tensor: torch.Tensor, start: int) -> bool:
        """Whether the axes are the same, and the tensor is dense from where an outermost part begins."""
        if not written.order or not tensor.is_contiguous():
            return False
        if [a.name for a in written.axes] != [a.name for a in self.layout.axes]:
            return False
        outer = int(evaluate(written.leaf_strides[written.order[0]], written.values)) // written.word
        return (_tags.extent(tensor)[0] - start) % (outer * written.dtype.itemsize) == 0


_MOST_REMEMBERED = 256


@lru_cache(maxsize=4096)
def reader(layout: Layout | None, dims: tuple[tuple[str, Expr], ...]) -> Reader | None:
    """The reader of an argument whose layout has a twin; None where the shape says it all."""
    if layout is None or not (found := twins(layout)):
        return None
    return Reader(layout, tuple(n for n, _ in dims), found)
