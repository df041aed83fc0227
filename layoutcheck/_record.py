"""Record: several typed sections in one byte buffer, such as a packed row (values, scales, rope) or a packed page.

A record is a byte buffer's layout and, inside its innermost dimension, sections that follow each other. Each section is
an ordinary layout over the same outer axes; its strides in them are the buffer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from layoutcheck import _dtypes
from layoutcheck._dims import Const, Expr, Inexact, evaluate, names, op_, product
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._layout import Layout


class Record:
    """Typed sections packed into the innermost dimension of a byte buffer.

    ``buffer`` is the layout of the bytes; its last axis in memory is the record. ``sections`` are layouts, in the order
    in which they stand in a record, each starting where the one before ends; the memory order of each begins with the
    buffer's outer axes. Bytes of a record that no section covers are padding.

    ``Record("dsa.index_132", buffer=Layout(..., "page byte -> page byte", byte="page_size * 132"), data=Layout(...),
    scale=Layout(...))``.

    Raises ``TypeError`` for sections that do not begin with the buffer's outer axes.
    """

    def __init__(self, name: str, *, buffer: Layout, **sections: Layout) -> None:
        self.name = name
        self.buffer = buffer(name=name)
        outer = buffer.order[:-1]
        placed: dict[str, Layout] = {}
        base: Expr = Const(0)
        for section, layout in sections.items():
            if layout.order[: len(outer)] != outer:
                raise TypeError(f"{name}: section {section} must begin with {' '.join(outer)} in memory")
            inner = product(layout.memory_size(leaf) for leaf in layout.order[len(outer) :])
            placed[section] = _placed(layout, f"{name}.{section}", buffer, outer, base)
            base = op_("+", base, product([inner, Const(layout.elements[0].itemsize)]))
        self.sections: Mapping[str, Layout] = placed
        self.used = base

    def section(self, name: str) -> Layout:
        """The layout of one section: a typed, strided view of the buffer, with offsets in elements of its type."""
        if name not in self.sections:
            raise TypeError(f"{self.name} has no section {name!r}; it has {', '.join(self.sections)}")
        return self.sections[name]

    def __call__(self, **keywords: Any) -> Record:
        """The record with dims replaced, in the buffer and in every section."""
        new = object.__new__(Record)
        new.name = self.name
        known = self.buffer._names | {n for s in self.sections.values() for n in s._names}
        for keyword in keywords:
            if keyword not in known:
                raise TypeError(f"{self.name}: {keyword!r} is no size of this record ({', '.join(sorted(known))})")

        def of(layout: Layout) -> Layout:
            return layout(**{k: v for k, v in keywords.items() if k in layout._names})

        new.buffer = of(self.buffer)
        new.sections = {n: of(s) for n, s in self.sections.items()}
        new.used = new._used_of(self.used, keywords)
        new._check_room()
        return new

    @staticmethod
    def _used_of(used: Expr, keywords: Mapping[str, Any]) -> Expr:
        from layoutcheck._dims import parse, substitute

        return substitute(used, {k: parse(v) for k, v in keywords.items()})

    def _check_room(self) -> None:
        if self.buffer.concrete and not any(names(self.used)):
            room = self.buffer.values_of(self.buffer.order[-1])
            try:
                used = evaluate(self.used, self.buffer.values)
            except Inexact:
                return
            if used > room:
                raise LayoutError(
                    self.name, [Violation(self.buffer.order[-1], "shape", f"at least {used} bytes a record", str(room))]
                )

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
        flat = buffer.view(torch.uint8).as_strided((self.nbytes,), (1,), start)
        return {name: _strided(layout, flat) for name, layout in self.sections.items()}

    def check(self, tensor: torch.Tensor, **known: int) -> dict[str, int]:
        """Raise :class:`LayoutError` unless ``tensor`` is such a buffer; return the sizes that it was solved for."""
        return self.buffer.check(tensor, **known)

    def offset(self, section: str, **coordinates: Any) -> Any:
        """Offset in bytes of the first byte of an element of a section."""
        layout = self.section(section)
        return layout.offset(**coordinates) * layout.elements[0].itemsize

    def offset_fn(self, section: str, *coordinates: str, name: str, strides: Sequence[str] = ()) -> Any:
        """A ``@triton.jit`` function for a section; offsets count elements of its type from the buffer's start."""
        return self.section(section).offset_fn(*coordinates, name=name, strides=strides)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the declaration."""
        import hashlib

        parts = [self.buffer.fingerprint, *(f"{n}:{s.fingerprint}" for n, s in self.sections.items())]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and (self.name, self.buffer, dict(self.sections)) == (
            other.name, other.buffer, dict(other.sections)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.name, self.buffer, *self.sections.items()))

    def __repr__(self) -> str:
        inside = " | ".join(f"{n}: {s.elements[0]}" for n, s in self.sections.items())
        return f"<record {self.name}: {self.buffer}; {inside}>"


def _placed(layout: Layout, name: str, buffer: Layout, outer: tuple[str, ...], base: Expr) -> Layout:
    """A section's layout with the buffer's strides in the outer axes, starting at ``base`` bytes."""
    pitch = tuple((leaf, buffer.leaf_strides[leaf], True) for leaf in outer)
    placed = layout(name=name)
    rules = dataclasses.replace(placed.rules, pitch=pitch, base=base, default=buffer.rules.default)
    placed._set(name, placed.axes, placed.memory, placed.elements, dict(placed.sizes), placed.equations, rules)
    for cached in ("leaf_strides", "tensor_dims", "span", "dims", "plain", "_names", "fingerprint"):
        placed.__dict__.pop(cached, None)
    _ = placed.dims, placed.tensor_dims
    return placed


def _strided(layout: Layout, flat: torch.Tensor) -> torch.Tensor:
    element = layout.elements[0]
    typed = flat.view(element.torch) if element is not _dtypes.UINT8 else flat
    return layout._show(typed)
