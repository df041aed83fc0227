"""Record: several typed sections in one byte buffer, such as a packed row (values, scales, rope) or a packed page.

A record is a byte buffer's layout and, inside its innermost dimension, sections that follow each other. Each section is
an ordinary layout over the same outer axes; its strides in them are the buffer's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layoutcheck._dims import Const, Expr, Inexact, evaluate, names, op_, parse, plan, product, substitute
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._index import in_dims
from layoutcheck._layout import Layout


@dataclass(frozen=True, init=False, repr=False)
class Record:
    """Typed sections packed into the innermost dimension of a byte buffer.

    ``buffer`` is the layout of the bytes; its last axis in memory is the record. ``sections`` are layouts, in the order
    in which they stand in a record, each starting where the one before ends, or at its own ``base``: sections that take
    turns, token by token, say their ``base`` and the ``pitch`` of the token. The memory order of each begins with the
    buffer's outer axes. Bytes of a record that no section covers are padding.

    ``Record("dsa.index_132", buffer=Layout(..., "page byte -> page byte", byte="page_size * 132"), data=Layout(...),
    scale=Layout(...))``.

    Raises ``TypeError`` for sections that do not begin with the buffer's outer axes, :class:`LayoutError` for sections
    that do not fit into a record.
    """

    name: str
    buffer: Layout
    parts: tuple[tuple[str, Layout], ...]
    used: Expr

    def __init__(self, name: str, *, buffer: Layout, **sections: Layout) -> None:
        if any(e.bits != 8 for e in buffer.elements):
            raise TypeError(f"{name}: the buffer of a record holds bytes, not {buffer.elements[0]}")
        outer = buffer.order[:-1]
        bases: dict[str, Expr] = {}
        base: Expr = Const(0)
        used: Expr = Const(0)
        for section, layout in sections.items():
            if layout.order[: len(outer)] != outer:
                raise TypeError(f"{name}: section {section} must begin with {' '.join(outer)} in memory")
            if layout.rules.base != Const(0):
                base = layout.rules.base
            bases[section] = base
            inner = _extent(layout, layout.order[len(outer) :])
            inner = substitute(inner, in_dims(layout))  # another section may use the names of its parts otherwise
            base = op_("+", base, product([inner, Const(layout.elements[0].bits)], [Const(8)]))
            used = base if used == Const(0) or layout.rules.base == Const(0) else op_("max", used, base)
        _check_room(name, buffer, used, sections)
        placed = {n: _placed(s, f"{name}.{n}", buffer, outer, bases[n]) for n, s in sections.items()}
        self._set(name, buffer(name=name), placed, used)

    def _set(self, name: str, buffer: Layout, sections: Mapping[str, Layout], used: Expr) -> None:
        fields = {"name": name, "buffer": buffer, "parts": tuple(sections.items()), "used": used}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @property
    def sections(self) -> Mapping[str, Layout]:
        """The sections by name, in the order in which they stand in a record."""
        return dict(self.parts)

    def section(self, name: str) -> Layout:
        """The layout of one section: a typed, strided view of the buffer, with offsets in elements of its type."""
        if name not in self.sections:
            raise TypeError(f"{self.name} has no section {name!r}; it has {', '.join(self.sections)}")
        return self.sections[name]

    def __call__(self, **keywords: Any) -> Record:
        """The record with dims replaced, in the buffer and in every section."""
        layouts = [self.buffer, *self.sections.values()]
        known = {n for layout in layouts for n in layout._names}
        for keyword in keywords:
            if keyword not in known:
                raise TypeError(f"{self.name}: {keyword!r} is no size of this record ({', '.join(sorted(known))})")
        values = self._solved({k: parse(v) for k, v in keywords.items()})

        def of(layout: Layout) -> Layout:
            return layout(**{k: v for k, v in values.items() if k in layout._names})

        new = object.__new__(Record)
        buffer, used = of(self.buffer), substitute(self.used, values)
        _check_room(self.name, buffer, used, self.sections)
        new._set(self.name, buffer, {n: of(s) for n, s in self.sections.items()}, used)
        return new

    def _solved(self, values: dict[str, Expr]) -> dict[str, Expr]:
        """The values given, and the open dims of any part that follow from their numbers in another."""
        found: Mapping[str, Expr] = values
        while found:
            numbers = {n: e.value for n, e in values.items() if isinstance(e, Const)}
            found = {}
            for layout in (self.buffer, *self.sections.values()):
                local = dict(numbers)
                try:
                    for name, expr, _ in plan(local, layout.equations):
                        local[name] = evaluate(expr, local)
                except Inexact:
                    continue  # the layout itself will say so
                found |= {n: Const(local[n]) for n in self.dims if n in local and n not in values}
            values = values | found
        return values

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names that are still open."""
        return tuple(dict.fromkeys([*self.buffer.dims, *(d for s in self.sections.values() for d in s.dims)]))

    @property
    def concrete(self) -> bool:
        """Whether every size is known."""
        return not self.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the byte buffer."""
        return self.buffer.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the byte buffer."""
        return self.buffer.strides

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    def empty(self, *, device: Any = None, dtype: Any = None) -> torch.Tensor:
        """A new byte buffer, filled by its own rule."""
        return self.buffer.empty(device=device, dtype=dtype)

    def view(self, raw: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
        """The byte buffer over memory that somebody else allocated."""
        return self.buffer.view(raw, offset=offset)

    def split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each section of a buffer as a typed, strided view that shares its memory."""
        self.buffer.check(buffer)
        start = buffer.storage_offset()
        room = buffer.untyped_storage().nbytes() - start  # the last page may come without its gap
        flat = buffer.view(torch.uint8).as_strided((min(self.nbytes, room),), (1,), start)
        return {name: _strided(layout, flat) for name, layout in self.sections.items()}

    def check(self, tensor: torch.Tensor, **known: int) -> dict[str, int]:
        """Raise :class:`LayoutError` unless ``tensor`` is such a buffer; return the sizes that it was solved for."""
        return self.buffer.check(tensor, **known)

    def offset(self, section: str, **coordinates: Any) -> Any:
        """Offset in bytes of the first byte of an element of a section."""
        layout = self.section(section)
        return layout.offset(**coordinates) * layout.elements[0].bits // 8

    def offset_fn(self, section: str, *coordinates: str, name: str, strides: Sequence[str] = ()) -> Any:
        """A ``@triton.jit`` function for a section; offsets count elements of its type from the buffer's start."""
        return self.section(section).offset_fn(*coordinates, name=name, strides=strides)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the declaration."""
        parts = [self.buffer.fingerprint, *(f"{n}:{s.fingerprint}" for n, s in self.sections.items())]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def map_fingerprint(self) -> str:
        """Digest of a concrete record's bytes: the buffer's map, and that of every section."""
        parts = [self.buffer.map_fingerprint, *(f"{n}:{s.map_fingerprint}" for n, s in self.sections.items())]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        inside = " | ".join(f"{n}: {s.elements[0]}" for n, s in self.sections.items())
        return f"<record {self.name}: {self.buffer}; {inside}>"


def _check_room(name: str, buffer: Layout, used: Expr, sections: Iterable[str]) -> None:
    """Refuse a record that is smaller than its sections, as soon as both sizes are known."""
    last = buffer.order[-1]
    size = buffer.size_of(last)
    if any(names(size)) or any(names(used)):
        return
    try:
        needed, room = evaluate(used, {}), evaluate(size, {})
    except Inexact:
        return  # a section whose size is broken says so itself
    if needed > room:
        headline = f"{last} has no room for the sections"
        wanted = f"at least {needed} bytes for {', '.join(sections)}"
        raise LayoutError(name, [Violation(last, "shape", wanted, f"{room}", headline=headline)])


def _placed(layout: Layout, name: str, buffer: Layout, outer: tuple[str, ...], base: Expr) -> Layout:
    """A section's layout with the buffer's strides in the outer axes, starting at ``base`` bytes."""
    private = in_dims(buffer)
    pitch = tuple((leaf, substitute(buffer.leaf_strides[leaf], private), True) for leaf in outer)
    placed = layout(name=name)
    pitch += tuple(p for p in placed.rules.pitch if p[0] not in outer)
    rules = dataclasses.replace(placed.rules, pitch=pitch, base=base, default=buffer.rules.default)
    placed._set(name, placed.axes, placed.memory, placed.elements, dict(placed.sizes), placed.equations, rules)
    _ = placed.dims, placed.tensor_dims
    return placed


def _extent(layout: Layout, inner: tuple[str, ...]) -> Expr:
    """Elements from the first to the end of the last of one record's part of a section."""
    extent: Expr = Const(1)
    for leaf in reversed(inner):
        size, stride = layout.memory_size(leaf), layout.leaf_strides[leaf]
        if stride == extent:
            extent = product([extent, size])
        else:
            extent = op_("+", product([op_("-", size, Const(1)), stride]), extent)
    return extent


def _strided(layout: Layout, flat: torch.Tensor) -> torch.Tensor:
    width = layout.dtype.itemsize
    return layout._show(flat[: len(flat) // width * width].view(layout.dtype))
