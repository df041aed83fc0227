"""The golden vectors of ``tests/golden``: what is there, and what their sizes are called in the catalogue.

``tests/golden/index.json`` says of every vector what it holds and where it comes from. Sizes are plural there
(``pages``) and dims singular (``page``); axes are matched by position, since a few have another name in the catalogue.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from layoutcheck import Layout, Record
from layoutcheck._pattern import Axis
from layoutcheck.layouts import entries

GOLDEN = Path(__file__).parent / "golden"
SINGULAR = {"pages": "page", "slots": "slot", "heads": "head", "rows": "row", "cols": "col"}
RENAMED = {"unified_kv.kv_scale": {"rows": "page", "head_dim": "dim"}}


@cache
def vectors(kind: str | None = None) -> tuple[dict[str, Any], ...]:
    """What ``index.json`` says of every vector of that kind."""
    index = json.loads((GOLDEN / "index.json").read_text())
    return tuple(v for v in index["vectors"] if kind in (None, v["kind"]))


def vector(name: str) -> dict[str, Any]:
    """What ``index.json`` says of one vector."""
    return next(v for v in vectors() if v["id"] == name)


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of one vector, after its checksum was compared."""
    v = vector(name)
    data = (GOLDEN / v["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == v["sha256"], f"{v['file']} is not the file that index.json speaks of"
    with np.load(GOLDEN / v["file"]) as arrays:
        return dict(arrays)


def entry(v: Mapping[str, Any]) -> Layout | Record | None:
    """The catalogue entry of a vector; one with a batch axis may be an entry of its own."""
    batched = entries().get(f"{v['layout']}.batched") if "batch" in v["sizes"] else None
    return batched or entries().get(v["layout"])


def sizes_by(v: Mapping[str, Any], *, given: bool) -> dict[str, int]:
    renamed, found = SINGULAR | RENAMED.get(v["layout"], {}), entry(v)
    layouts = [found.buffer, *found.sections.values()] if isinstance(found, Record) else [found]
    known = {n for e in layouts if e for n in (*e._names, *dict(e.sizes))}
    sizes = {renamed.get(n, n): size for n, size in v["sizes"].items()}
    return {n: size for n, size in sizes.items() if (n in known) == given}


def dims(v: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a vector that its layout has, under the catalogue's names."""
    return sizes_by(v, given=True)


def others(v: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a vector that its layout does not have: it must agree with them all the same."""
    return sizes_by(v, given=False)


@dataclass(frozen=True)
class Map:
    """One stored map: of a layout, or of one section of a record."""

    name: str
    section: str | None = None

    def __str__(self) -> str:
        return self.name.removeprefix("map-") + (f"-{self.section}" if self.section else "")

    @cached_property
    def vector(self) -> dict[str, Any]:
        return vector(self.name)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        return load(self.name)

    @property
    def entry(self) -> Layout | Record:
        """The catalogue entry, its dims open."""
        found = entry(self.vector)
        assert found is not None
        return found

    @cached_property
    def record(self) -> Record:
        """The record of a section, its dims known."""
        entry = self.entry
        assert isinstance(entry, Record)
        return entry(**dims(self.vector))

    @cached_property
    def open(self) -> Layout:
        """The layout, its dims open."""
        entry = self.entry
        return entry.section(self.section) if isinstance(entry, Record) else entry(dtype=self.element["dtype"])

    @cached_property
    def layout(self) -> Layout:
        """The layout, its dims known."""
        return self.record.section(self.section) if self.section else self.open(**dims(self.vector))

    @cached_property
    def element(self) -> dict[str, Any]:
        return self.vector["sections"][self.section] if self.section else self.vector["element"]

    @cached_property
    def offset(self) -> np.ndarray:
        """Offset in elements by logical coordinates."""
        if self.section is None:
            stored, own = self.vector["logical_axes"], [a.name for a in self.layout.axes]
            swapped = stored != own and sorted(stored) == sorted(own)
            return self.arrays["offset"].transpose([stored.index(n) for n in own] if swapped else range(len(own)))
        offset, rest = np.divmod(self.arrays[self.element["array"]], self.element["itemsize"])
        assert not rest.any()
        return offset


def maps() -> list[Map]:
    """Every stored map."""
    return [
        Map(v["id"], section)
        for v in vectors("index_map")
        if entry(v) is not None
        for section in v.get("sections", {None: None})
    ]


def cuts(layout: Layout) -> list[tuple[str, ...]]:
    """Every cut through the tree of axes: the sets of coordinates that name an element."""

    def of(axis: Axis) -> Iterator[tuple[str, ...]]:
        yield (axis.name,)
        if axis.parts:
            for parts in itertools.product(*(tuple(of(p)) for p in axis.parts)):
                yield sum(parts, ())

    return [sum(cut, ()) for cut in itertools.product(*(tuple(of(a)) for a in layout.axes))]


def coordinates(layout: Layout, cut: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The coordinates of every element, in the shape of the logical axes."""
    found: dict[str, np.ndarray] = {}

    def split(axis: Axis, value: np.ndarray) -> None:
        if axis.name in cut:
            found[axis.name] = value
            return
        first, *others = axis.parts
        for part in reversed(others):
            value, inner = np.divmod(value, layout.values_of(part.name))
            split(part, inner)
        split(first, value)

    for axis, grid in zip(layout.axes, np.indices([layout.values_of(a.name) for a in layout.axes]), strict=True):
        split(axis, grid)
    return {name: found[name] for name in cut}
