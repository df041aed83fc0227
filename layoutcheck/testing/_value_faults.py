"""Faults of what a tensor holds: indices, prefix sums, padding. Only ``values`` mode can see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from layoutcheck import _entries, _index
from layoutcheck._call import layout_dims
from layoutcheck._dims import evaluate
from layoutcheck._rules import Finite, Index, Indptr
from layoutcheck._specs import Form
from layoutcheck.testing._call import Call, clone
from layoutcheck.testing._candidate import Candidate
from layoutcheck.testing._contents import live_values


def contents(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    """Changes of what one tensor holds that break a rule about it."""

    def fault(kind: str, change: Callable[[torch.Tensor], Any]) -> Candidate:
        def build() -> dict[str, Any]:
            made = _own(valid.arguments[name])
            change(made)
            return {name: made}

        return Candidate(kind, name, build, frozenset({"value", "relation"}), frozenset({name}), sure=True)

    value = valid.arguments[name]
    for rule in valid.contract.tensors[name].values:
        if value.numel() and isinstance(rule, Index):
            for kind, change in _index_faults(rule, value, valid):
                yield fault(kind, change)
        elif value.numel() and isinstance(rule, Indptr):
            longest = _entries.longest(rule, valid.sizes, valid.everything, valid.contract.tensors)
            for kind, change in _indptr_faults(rule, value, valid.sizes, longest):
                yield fault(kind, change)
        elif value.numel() and isinstance(rule, Finite) and not rule.at and value.dtype.is_floating_point:
            yield fault("not_finite", lambda made: _raw(made).fill_(-1))  # all bits set: NaN in every float
    layout = form.layout
    if layout is not None and layout.rules.pad and layout.rules.fill is not None and value.element_size() == 1:
        dims = layout_dims(form, valid.sizes)
        ranges = [] if dims is None else _index.padding_ranges(layout(**dims))
        if ranges and value.numel():
            at = ranges[0][0]
            yield fault("nan_in_the_padding", lambda made: _flat(made)[at : at + 1].fill_(0xFF))


Change = tuple[str, Callable[[torch.Tensor], Any]]


def _index_faults(rule: Index, value: torch.Tensor, valid: Call) -> Iterator[Change]:
    """Changes of entries that are read: no other can be wrong."""
    sizes = valid.sizes
    read = _entries.live(rule, value.shape, valid.contract.tensors, sizes, valid.everything).reshape(-1)
    places = read.nonzero().reshape(-1).tolist()
    if not places:
        return
    last = places[-1]
    stop, start = int(evaluate(rule.stop, sizes)), int(evaluate(rule.start, sizes))
    wrong = {"index_out_of_range": stop, "index_far_out_of_range": stop + 2**30, "index_below_range": start - 1}
    for kind, number in wrong.items():
        if not _entries.skipped(rule, torch.tensor([number]), sizes).any():
            yield kind, partial(_set, at=last, number=number)
    live = live_values(rule, sizes)
    flat = value.reshape(-1).tolist()
    if rule.segment_of is not None and valid.everything.get(rule.segment_of) is not None:
        near = next((n for n in (flat[last] + 1, flat[last] - 1) if n in live), None)
        if near is not None:
            yield "index_of_a_neighbouring_segment", partial(_set, at=last, number=near)
    other = rule.apart_from
    if other is not None and valid.everything.get(other) is not None:
        counts = _entries.counts(other, valid.contract.tensors, sizes, valid.everything)
        taken = next((v for v in valid.everything[other][counts].tolist() if v in live), None)
        if taken is not None:
            yield "index_of_another_argument", partial(_set, at=last, number=taken)
    first = next((i for i in places if flat[i] in set(live)), None)
    if rule.unique and first is not None and len(places) > 1:
        next_ = places[(places.index(first) + 1) % len(places)]
        yield "duplicate_index", lambda made: _set(made, next_, flat[first])


def _indptr_faults(rule: Indptr, value: torch.Tensor, sizes: Any, longest: Any) -> Iterator[Change]:
    stop = int(evaluate(rule.stop, sizes))
    yield "indptr_ends_too_late", lambda made: _set(made, -1, stop + 1)
    yield "indptr_does_not_start_at_0", lambda made: _set(made, 0, 1)
    if value.numel() > 2:
        after = int(value.reshape(-1)[2])
        yield "indptr_decreases", lambda made: _set(made, 1, after + 1)
    first = longest.tolist()[:1] if isinstance(longest, torch.Tensor) else [longest]
    if value.numel() > 1 and first[0] is not None and first[0] < stop:
        yield "indptr_step_too_long", lambda made: _steep(made, first[0] + 1)
    if not rule.capacity and stop:
        yield "indptr_ends_too_early", lambda made: _set(made, -1, stop - 1)


def _steep(made: torch.Tensor, step: int) -> None:
    """A first step that is too long, and then no decrease."""
    flat = made.reshape(-1)
    made.copy_(torch.cat([flat[:1], flat[1:].clamp(min=step)]).reshape(made.shape))


def _set(made: torch.Tensor, at: int, number: int) -> None:
    """One entry, counted in row-major order."""
    where = torch.unravel_index(torch.tensor(at % made.numel()), made.shape)
    made[tuple(where)] = number


def _own(value: torch.Tensor) -> torch.Tensor:
    return clone(value)


def _raw(value: torch.Tensor) -> torch.Tensor:
    return value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8).as_strided((value.numel(),), (1,), value.storage_offset())
