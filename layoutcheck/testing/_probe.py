"""Which layout a kernel really writes: sentinels go in, and each logical element is looked for in the bytes.

Every element that should be written has a number; run b writes one of two values to it, as bit b of that number says.
From about log2(n) runs each place in memory then spells the number of the element that landed there, whatever the
kernel makes of the values. What the places follow is compared with the declared layout, then with the catalogue; then a
pattern is searched for: one stride for each part of an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample, Unsatisfiable

from layoutcheck import _dtypes, _entries
from layoutcheck._call import layout_dims
from layoutcheck._dims import Name
from layoutcheck._errors import LayoutError
from layoutcheck._layout import Layout
from layoutcheck._rules import Index
from layoutcheck.layouts import entries
from layoutcheck.testing._call import Call
from layoutcheck.testing._calls import calls
from layoutcheck.testing._child import in_child
from layoutcheck.testing._guard import contract_of
from layoutcheck.testing._memory import tensor
from layoutcheck.testing._redzones import Zone, _size

Coordinates = tuple[int, ...]
Places = dict[Coordinates, list[int]]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """What was found. ``declared``: every element is where the declared layout puts it.

    ``name`` is the layout of the catalogue that the bytes follow (the declared one's name if they follow that),
    ``pattern`` an einops-like pattern with its sizes, where one was found; both are None where the places follow none.
    ``example`` says of one element where it was found and where it was expected.
    """

    argument: str
    declared: bool
    name: str | None
    pattern: str | None
    example: str

    def __str__(self) -> str:
        if self.declared:
            return f"{self.argument} is written as {self.name}, as declared"
        follows = f"as {self.name}" if self.name else f"as {self.pattern}" if self.pattern else "in no layout"
        return f"{self.argument} is written {follows}, which is not what is declared: {self.example}"


def probe(
    fn: Callable[..., Any], argument: str, *, call: Call | None = None, isolated: bool = False, **bounds: Any
) -> Probe:
    """The layout in which a function really writes an argument that has one and is declared as written.

    ``call`` is the valid call to use; without it one is looked for in which every axis is larger than 1, within
    ``bounds``, which are those of :func:`layoutcheck.testing.calls`. ``isolated`` runs the kernel in a child process.
    Raises ``TypeError`` for an argument that is not written or has no layout, ``AssertionError`` where nothing that
    goes in is seen in it, or the kernel crashes.
    """
    spec = contract_of(fn).tensors.get(argument)
    if spec is None or spec.writes is None or any(f.layout is None for _, f in spec.forms):
        raise TypeError(f"{argument} is no argument that is declared as written in some layout")
    call = _call(fn, argument, bounds) if call is None else call
    if not isolated:
        return _probe(call, argument)
    done = in_child(lambda: _probe(call, argument))
    if done.value is None:
        raise AssertionError(f"the kernel did not survive the probe of {argument}: {done.crash or done.error}")
    return done.value  # type: ignore[no-any-return]


def _call(fn: Callable[..., Any], argument: str, bounds: Mapping[str, Any]) -> Call:
    """A call that tells axes apart: each larger than 1 and, better, no two of one size."""

    def rows(c: Call) -> int:
        at = c.contract.tensors[argument].writes.at  # type: ignore[union-attr]
        return len(_live(c, at)) if at and argument in c.forms else 2

    def shape(c: Call) -> tuple[int, ...]:
        return tuple(c.arguments[argument].shape) if argument in c.forms else (0,)

    tests: list[Callable[[Call], bool]] = [
        lambda c: rows(c) > 3 and min(shape(c)) > 1 and len(set(shape(c))) == len(shape(c)),
        lambda c: rows(c) > 1 and min(shape(c)) > 1,
        lambda c: rows(c) > 0 and min(shape(c)) > 0,
    ]  # fmt: skip
    strategy = calls(fn, **bounds)
    quick = settings(
        max_examples=100, phases=[Phase.generate], database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for test in tests:
        try:
            return find(strategy, test, settings=quick)
        except (NoSuchExample, Unsatisfiable):
            continue
    raise TypeError(f"no call was found in which {argument} is written")


def _probe(call: Call, argument: str) -> Probe:
    form, value = call.forms[argument], call.arguments[argument]
    dims = layout_dims(form, call.sizes)
    assert form.layout is not None
    assert dims is not None
    layout = form.layout(**dims)
    packed = tensor(layout.shape, layout.strides, value.dtype, data=0, holds=_holds(layout, value.dtype))
    call = call.with_arguments(**{argument: packed})
    for source in _sources(call, argument):
        reached = _coordinates(call, argument, source, layout)
        if reached is None:
            continue
        holds = call.recipes[source].holds if source in call.recipes else None
        for pair in _sentinels(call.arguments[source].dtype, holds):
            places = _places(call, argument, source, reached, pair)
            if any(places.values()):
                return _named(argument, layout, places, call.sizes)
    raise AssertionError(f"nothing that was passed to {call.contract.name} is seen in {argument}")


def _holds(layout: Layout, dtype: torch.dtype) -> _dtypes.Element | None:
    return None if dtype in {e.torch for e in layout.elements} else layout.elements[0]


# --- what should land where -------------------------------------------------------------------------------------------


def _sources(call: Call, argument: str) -> list[str]:
    """The arguments from which the elements may come, those first that share most sizes with the target."""
    contract = call.contract
    target = {n for s in contract.tensors[argument].forms for e in s[1].sizes if isinstance(e, Name) for n in (e.name,)}
    found = [
        n for n, s in contract.tensors.items()
        if n in call.arguments and isinstance(v := call.arguments[n], torch.Tensor) and v.numel()
        and not s.values and not (s.writes and s.writes.at)
    ]  # fmt: skip
    shared = {n: len(target & {e.name for e in call.forms[n].sizes if isinstance(e, Name)}) for n in found}
    related = {n: sum(a == b for a, b in zip(n, argument, strict=False)) for n in found}
    return sorted(found, key=lambda n: (-shared[n], -related[n]))


def _coordinates(call: Call, argument: str, source: str, layout: Layout) -> torch.Tensor | None:
    """For each element of the source, the coordinates of the element that it should become; -1 where none.

    None where an axis of the target is nothing that the source has.
    """
    form, spec = call.forms[argument], call.contract.tensors[argument]
    value, given = call.arguments[source], call.forms[source]
    grids = torch.meshgrid(*(torch.arange(n) for n in value.shape), indexing="ij")
    at = spec.writes.at if spec.writes else None
    rule = _rule(call, at) if at else None
    free = list(range(value.dim()))
    columns: dict[int, torch.Tensor] = {}
    selected = torch.ones(tuple(value.shape), dtype=torch.bool)
    for k, axis in enumerate(layout.axes):
        nodes = [a for a in axis.walk() if rule is not None and _size(form, a.name) == rule.stop]
        if not nodes or at is None or rule is None:
            continue
        index = call.arguments[at].reshape(-1)
        own, node = call.forms[at].sizes[0], nodes[0]
        i = next((i for i in free if given.sizes[i] == own), None)
        if i is None:  # several rows of the source for each index, as the tokens of a page
            i = next((i for i in free if value.shape[i] % len(index) == 0), None)
        if i is None or (node is not axis and node is not axis.parts[0]):
            return None
        free.remove(i)
        rows = value.shape[i] // len(index)
        entry = grids[i] // rows
        chosen = index[entry]
        counts = _entries.counts(at, call.contract.tensors, call.sizes, call.everything)
        selected &= counts.reshape(-1)[entry]
        inner = layout.values_of(axis.name) // max(1, layout.values_of(node.name))
        columns[k] = chosen if inner == 1 else chosen * inner + grids[i] % rows
    for k, axis in enumerate(layout.axes):
        if k in columns:
            continue
        size, count = _size(form, axis.name), layout.values_of(axis.name)
        same = next((i for i in free if given.sizes[i] == size), None)
        if same is None:  # one element for each group of the source's
            same = next((i for i in reversed(free) if value.shape[i] and value.shape[i] % max(count, 1) == 0), None)
        if same is None or not count:
            return None
        free.remove(same)
        columns[k] = grids[same] // (value.shape[same] // count)
    found = torch.stack([columns[k] for k in range(len(layout.axes))], dim=-1)
    found[~selected] = -1
    return found


def _rule(call: Call, at: str) -> Index | None:
    return next((r for r in call.contract.tensors[at].values if isinstance(r, Index)), None)


def _live(call: Call, at: str) -> list[int]:
    if _rule(call, at) is None:
        return []
    counts = _entries.counts(at, call.contract.tensors, call.sizes, call.everything)
    return call.arguments[at][counts].tolist()  # type: ignore[no-any-return]


# --- where it landed --------------------------------------------------------------------------------------------------


def _places(call: Call, argument: str, source: str, reached: torch.Tensor, pair: Pair) -> Places:
    """Where each element was found, in elements from the start of the buffer, by its coordinates."""
    flat = reached.reshape(-1, reached.shape[-1])
    unique, number = torch.unique(flat, dim=0, return_inverse=True)
    number = number.reshape(reached.shape[:-1])

    def memory(second: torch.Tensor) -> torch.Tensor:
        return _written(call, argument, source, second, pair)

    first, second = (
        memory(torch.zeros_like(number, dtype=torch.bool)),
        memory(torch.ones_like(number, dtype=torch.bool)),
    )
    data = first != second
    if not bool(data.any()):
        return {}
    spelled = torch.zeros(data.shape, dtype=torch.int64)
    for bit in range(max(1, math.ceil(math.log2(max(2, len(unique)))))):
        spelled |= (memory((number >> bit) & 1 == 1) == second).long() << bit
    places: Places = {tuple(c): [] for c in unique.tolist() if c[0] >= 0}
    before = _before(call, argument)
    for at in data.nonzero().flatten().tolist():
        which = int(spelled[at])
        if which < len(unique) and (key := tuple(unique[which].tolist())) in places:
            places[key].append(at - before)
    return places


def _written(call: Call, argument: str, source: str, second: torch.Tensor, pair: Pair) -> torch.Tensor:
    """The memory around the target, as integers, after a run with one of two values in each element of the source."""
    value = call.arguments[source]
    low, high = pair
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    fed = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    width = raw[value.element_size()]
    fed.view(width).copy_(torch.where(second, high.view(width), low.view(width)))
    zone = Zone(argument, call.arguments[argument], 0, keep=True)
    others = {n: v.clone() for n, v in call.arguments.items() if _is_written(call, n) and n != argument}
    call.with_arguments(**others, **{source: fed, argument: zone.tensor})()
    size = zone.tensor.element_size()
    skip = zone.start % size
    whole = zone.slab[skip : skip + (len(zone.slab) - skip) // size * size]
    return whole.clone().view(raw[size]).long()


def _before(call: Call, argument: str) -> int:
    zone = Zone(argument, call.arguments[argument], 0, keep=False)
    return zone.start // zone.tensor.element_size()


def _is_written(call: Call, name: str) -> bool:
    spec = call.contract.tensors.get(name)
    return spec is not None and spec.writes is not None and isinstance(call.arguments[name], torch.Tensor)


def _sentinels(dtype: torch.dtype, holds: _dtypes.Element | None) -> list[Pair]:
    """Pairs of values of which no rounding makes one the other, those first of which no scaling does."""
    if dtype is torch.float8_e8m0fnu or (holds is not None and holds.name == "e8m0"):
        codes = torch.tensor([[126], [131]], dtype=torch.uint8)
        return [(codes[0].view(dtype), codes[1].view(dtype))]
    if not dtype.is_floating_point:
        return [(torch.tensor([1]).to(dtype), torch.tensor([0 if dtype is torch.bool else 6]).to(dtype))]
    one = torch.tensor([1.0])
    # Signs for what a block's scale normalises, magnitudes for the scales.
    return [(one.to(dtype), (-one).to(dtype)), (one.to(dtype), (48.0 * one).to(dtype))]


# --- what that is called ----------------------------------------------------------------------------------------------


def _named(argument: str, layout: Layout, places: Places, sizes: Mapping[str, Any]) -> Probe:
    names = [a.name for a in layout.axes]
    wanted = {c: layout.offset(**dict(zip(names, c, strict=True))) for c in places}
    wrong = next((c for c in places if places[c] != [wanted[c]]), None)
    if wrong is None:
        return Probe(argument, True, layout.name, str(layout), "")
    where = ", ".join(f"{n} {i}" for n, i in zip(names, wrong, strict=True))
    seen = f"at element {', '.join(map(str, places[wrong][:3]))}" if places[wrong] else "nowhere"
    example = f"({where}) was found {seen}, not at element {wanted[wrong]}"
    once = {c: p[0] for c, p in places.items() if len(p) == 1}
    if len(once) < len(places):
        return Probe(argument, False, None, None, example)
    name = next((e.name for e in _others(layout, sizes) if _follows(e, names, once)), None)
    return Probe(argument, False, name, _pattern(layout, once), example)


def _others(layout: Layout, sizes: Mapping[str, Any]) -> Iterator[Layout]:
    """Layouts of the catalogue with the same axes, for the same sizes."""
    axes = {a.name for a in layout.axes}
    for entry in entries().values():
        if not isinstance(entry, Layout) or {a.name for a in entry.axes} != axes:
            continue
        known = {e.name: layout.values_of(a.name) for a in entry.axes if isinstance(e := entry.size_of(a.name), Name)}
        try:
            solved = entry._solve({n: v for n, v in sizes.items() if n in entry.dims and type(v) is int} | known)
            made = entry(**{d: solved[d] for d in entry.dims})
            if made.concrete and made.numel >= 0:
                yield made
        except (LayoutError, TypeError, KeyError):
            continue


def _follows(layout: Layout, names: Sequence[str], once: Mapping[Coordinates, int]) -> bool:
    return all(layout.offset(**dict(zip(names, c, strict=True))) == at for c, at in once.items())


Part = tuple[int, int]  # size, stride


def _pattern(layout: Layout, once: Mapping[Coordinates, int]) -> str | None:
    """The pattern with which each axis is split into parts of one stride each; None if there is none."""
    origin = min(once)
    parts: dict[str, list[Part]] = {}
    steps: list[dict[int, int]] = []
    for k, axis in enumerate(layout.axes):
        line = {c[k]: at for c, at in once.items() if c[:k] + c[k + 1 :] == origin[:k] + origin[k + 1 :]}
        split = _split(line, layout.values_of(axis.name))
        if split is None:
            return None
        parts[axis.name] = split
        steps.append({i: at - once[origin] for i, at in line.items()})
    for c, at in once.items():
        if any(i not in steps[k] for k, i in enumerate(c)):
            return None
        if at != once[origin] + sum(steps[k][i] for k, i in enumerate(c)):
            return None
    named = {
        axis: [(axis if len(split) == 1 else f"{axis}{i}", size, stride) for i, (size, stride) in enumerate(split)]
        for axis, split in parts.items()
    }
    left = " ".join(a if len(p) == 1 else f"{a}({' '.join(n for n, _, _ in p)})" for a, p in named.items())
    every = sorted(itertools.chain(*named.values()), key=lambda p: (-p[2], p[1]))
    sizes = ", ".join(f"{n}={size}" for n, size, _ in every if n not in named)
    start = min(layout.values_of(a.name) for a in layout.axes) and once[origin] - sum(
        _place(split, i) for split, i in zip(parts.values(), origin, strict=True)
    )
    shift = f" from element {start}" if start else ""
    return f"{left} -> {' '.join(n for n, _, _ in every)}" + (f" ({sizes})" if sizes else "") + shift


def _split(line: Mapping[int, int], size: int) -> list[Part] | None:
    """(size, stride) of the parts of an axis, outermost first, from where its coordinates were found."""
    if size == 1 or len(line) < 2:
        return [(size, 0)]
    for inner in (d for d in range(size, 1, -1) if size % d == 0):
        pairs = [(i, i + 1) for i in line if i + 1 in line and (i + 1) % inner]
        if not pairs:
            continue
        stride = line[pairs[0][1]] - line[pairs[0][0]]
        outer: dict[int, set[int]] = {}
        for i, at in line.items():
            outer.setdefault(i // inner, set()).add(at - i % inner * stride)
        if any(len(found) > 1 for found in outer.values()):
            continue
        rest = _split({i: found.pop() for i, found in outer.items()}, size // inner) if size > inner else []
        return None if rest is None else [*rest, (inner, stride)]
    return None


def _place(split: Sequence[Part], i: int) -> int:
    at = 0
    for size, stride in reversed(split):
        i, inner = divmod(i, size)
        at += inner * stride
    return at
