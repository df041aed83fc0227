"""What a call touches: canary bytes around every buffer and in its gaps, and two runs that differ in what they hold.

A byte is written if two runs that began with different bytes there end with equal ones. So nothing that was written by
chance with what stood there before escapes, and an allocated output needs no value that no kernel ever writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layoutcheck import _entries, _index
from layoutcheck._call import layout_dims
from layoutcheck._dims import evaluate
from layoutcheck._layout import Layout
from layoutcheck._rules import Index
from layoutcheck._specs import Form
from layoutcheck.testing._call import Call

ZONE = 4096
_ALIGNED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty_strided.default,
)


class Zone:
    """One tensor in the middle of a slab of canary bytes, its gaps filled with them too.

    ``run`` 0 and 1 have different canaries everywhere.
    """

    def __init__(self, name: str, like: torch.Tensor, run: int, *, keep: bool) -> None:
        self.name = name
        size = like.element_size()
        reach = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
        shift = like.storage_offset() * size % _ALIGNED  # as far from an aligned address as the caller's
        self.start = ZONE + shift
        total = -(-(self.start + reach * size + ZONE) // _ALIGNED) * _ALIGNED
        self.slab = torch.empty(total, dtype=torch.uint8, device=like.device)
        self.slab.copy_((torch.arange(total, device=like.device) * 37 + 11 + run * 128) % 256)
        self.tensor = self._over(self.slab, like)
        owned = torch.zeros_like(self.slab)
        self._over(owned, like).view(_INTEGERS[size]).fill_(-1 if size > 1 else 255)
        self.owned = owned.bool()
        if keep:
            self.tensor.view(_INTEGERS[size]).copy_(like.view(_INTEGERS[size]))
        self.before = self.slab.clone()

    def _over(self, slab: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=like.dtype, device=like.device)
        return made.set_(slab.untyped_storage(), self.start // like.element_size(), like.shape, like.stride())

    def poison(self, where: torch.Tensor) -> None:
        """Replace every bit of the elements for which ``where``, a tensor of the same shape, is true."""
        raw = self.tensor.view(_INTEGERS[self.tensor.element_size()])
        raw.copy_(torch.where(where, ~raw, raw))
        self.before = self.slab.clone()

    def outside(self) -> str | None:
        """Where a byte that is no element's has changed, in words."""
        bad = ((self.slab != self.before) & ~self.owned).nonzero()
        if not len(bad):
            return None
        at = int(bad[0]) - self.start
        end = int(self.owned.nonzero()[-1]) + 1 - self.start if bool(self.owned.any()) else 0
        place = f"{-at} bytes before {self.name}" if at < 0 else f"{at - end} bytes behind {self.name}"
        if 0 <= at < end:
            place = f"the gap at byte {at} of {self.name}"
        return f"{len(bad)} bytes outside of every element were changed, the first {place}"

    def changed(self, but: torch.Tensor | None) -> str | None:
        """Which element has changed although ``but`` does not allow it."""
        was = self._over(self.before, self.tensor).view(_INTEGERS[self.tensor.element_size()])
        bad = self.tensor.view(_INTEGERS[self.tensor.element_size()]) != was
        if but is not None:
            bad &= ~but
        where = bad.nonzero()
        return f"{self.name}{where[0].tolist()} was changed, and {len(where) - 1} more" if len(where) else None


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts whatever is allocated uninitialised into a red zone of its own, poisoned."""

    def __init__(self, run: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.zones = run, list[Zone]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _EMPTY or out.device.type == "meta" or not out.is_contiguous():
            return out
        zone = Zone(f"memory allocated for {tuple(out.shape)}", out, self.run, keep=False)
        self.zones.append(zone)
        return zone.tensor


@dataclass(frozen=True)
class Run:
    """What two runs of a call did: ``findings`` in words, the result, and the arguments as they were left."""

    findings: tuple[str, ...]
    result: Any
    arguments: dict[str, Any]


def redzones(call: Call, *, partial: Iterable[str] = ()) -> Run:
    """Run a call over red zones. Raises ``AssertionError`` with the call as code where it touched what it must not.

    At least a page of canary bytes surrounds every tensor and everything that the callable allocates, and fills the
    gaps between strided rows. No byte outside of the elements may change, no element that the contract does not declare
    as written (``Writes``), and all that it does declare must be written: the rows that an index selects, or the whole
    buffer, but for the arguments in ``partial``, of which any part may stay. Results must be written as a whole.
    """
    done = observe(call, partial=partial)
    if done.findings:
        raise AssertionError("\n".join([f"{call.contract.name} touched what it must not:", *done.findings, repr(call)]))
    return done


def observe(call: Call, *, partial: Iterable[str] = ()) -> Run:
    """As :func:`redzones`, but nothing is raised."""
    contract, partial = call.contract, tuple(partial)
    promised = {n: written(call, n) for n, s in contract.tensors.items() if s.writes and n in call.arguments}
    runs = []
    findings: list[str] = []
    for run in (0, 1):
        zones = {
            n: Zone(n, v, run, keep=True)
            for n, v in call.arguments.items()
            if isinstance(v, torch.Tensor) and v.device.type != "meta"
        }
        if run:
            for n, where in promised.items():
                if where is not None and n not in partial:
                    zones[n].poison(where)
        with _Allocations(run) as allocated:
            arguments = call.arguments | {n: z.tensor for n, z in zones.items()}
            result = call.with_arguments(**{n: z.tensor for n, z in zones.items()})()
        runs.append((zones, result, arguments))
        findings += [f for z in (*zones.values(), *allocated.zones) if (f := z.outside())]
        for n, zone in zones.items():
            spec = contract.tensors.get(n)
            free = promised.get(n) if spec is not None and spec.writes else None
            if spec is None or not spec.writes or spec.writes.at is not None:
                findings += [f"{f}: no rule says that it is written" for f in (zone.changed(free),) if f]
    (zones, result, arguments), (others, again, _) = runs
    for n, where in promised.items():
        if where is not None and n not in partial:
            findings += _unwritten(n, zones[n].tensor, others[n].tensor, where)
    for name, first, second in _pairs("result", result, again):
        findings += _unwritten(name, first, second, None)
    return Run(tuple(dict.fromkeys(findings)), result, arguments)


def _unwritten(name: str, first: torch.Tensor, second: torch.Tensor, where: torch.Tensor | None) -> Iterator[str]:
    if first.shape != second.shape:
        yield f"{name} has the shape {tuple(first.shape)} once and {tuple(second.shape)} another time"
        return
    raw = _INTEGERS[first.element_size()]
    different = first.view(raw) != second.view(raw)
    if where is not None:
        different &= where
    bad = different.nonzero()
    if len(bad):
        yield f"{name}{bad[0].tolist()} was left unwritten, and {len(bad) - 1} more of {different.numel()}"


def _pairs(name: str, first: Any, second: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        yield name, first, second
    elif isinstance(first, tuple | list) and isinstance(second, tuple | list):
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _pairs(f"{name}[{i}]", a, b)


# --- what a contract promises to write --------------------------------------------------------------------------------


def written(call: Call, name: str) -> torch.Tensor | None:
    """Which elements of an argument are written: true for each of the rows selected, or everywhere; None if absent."""
    value, spec = call.arguments.get(name), call.contract.tensors[name]
    if not isinstance(value, torch.Tensor) or spec.writes is None:
        return None
    where = torch.zeros(value.shape, dtype=torch.uint8)
    if spec.writes.at is None:
        return where.bool() | True
    index = call.arguments[spec.writes.at]
    rule = next((r for r in call.contract.tensors[spec.writes.at].values if isinstance(r, Index)), None)
    form = call.forms[name]
    if rule is None or not isinstance(index, torch.Tensor):
        raise TypeError(f"Writes(at={spec.writes.at!r}) of {name} needs an Index rule that says what it selects")
    live = index[_entries.counts(spec.writes.at, call.contract.tensors, call.sizes, call.everything)].tolist()
    if form.layout is None:
        at = next(i for i, size in enumerate(form.sizes) if size == rule.stop)
        where.index_fill_(at, torch.tensor(live, dtype=torch.int64), 1)
        return where.bool()
    select(form, call.sizes, where, rule, live)
    return where.bool()


def select(form: Form, sizes: Any, where: torch.Tensor, rule: Index, live: Sequence[int]) -> None:
    """Set the elements of a buffer whose coordinate along the axis that ``rule`` indexes is one of ``live``."""
    dims = layout_dims(form, sizes)
    assert form.layout is not None
    assert dims is not None
    concrete = form.layout(**dims)
    node = next((a for axis in form.layout.axes for a in axis.walk() if _size(form, a.name) == rule.stop), None)
    if node is None:
        count = int(evaluate(rule.stop, sizes))
        node = next(a for axis in concrete.axes for a in axis.walk() if concrete.values_of(a.name) == count)
    leaves = [leaf for axis in concrete.axes for leaf in axis.leaves()]
    view = _index.leaf_view(_as_stored(concrete, where), where)
    own = node.leaves()
    chosen = torch.zeros(_product(concrete, own), dtype=torch.bool)
    chosen[torch.tensor(list(live), dtype=torch.int64)] = True
    shape = [concrete.values_of(leaf) if leaf in own else 1 for leaf in leaves]
    view |= chosen.reshape(shape)


def _size(form: Form, axis: str) -> Any:
    assert form.layout is not None
    names = dict(form.dims)
    size = form.layout.size_of(axis)
    return names.get(getattr(size, "name", ""), size)


def _product(concrete: Layout, leaves: Iterable[str]) -> int:
    result = 1
    for leaf in leaves:
        result *= concrete.values_of(leaf)
    return result


def _as_stored(concrete: Layout, where: torch.Tensor) -> Layout:
    """The layout without its pitches: the mask is packed whatever the buffer is."""
    return concrete(pitch={}, dtype="uint8", accept=(), carrier=None) if concrete.word == 1 else concrete
