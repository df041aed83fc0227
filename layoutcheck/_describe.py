"""A catalogue entry as text: pattern, shape, strides, bytes, rules and the order in memory, as a terminal shows them.

Decides only what is said in which order: the rules' words and the drawing are those of ``docs/catalogue.md``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from layoutcheck import _dtypes
from layoutcheck._dims import Const, brief, product
from layoutcheck._errors import LayoutError, table
from layoutcheck._layout import Layout
from layoutcheck._record import Record

DRAWABLE = 2**20  # elements: drawing maps every one of them


def describe(entry: Layout | Record, sizes: Mapping[str, int]) -> Iterator[str]:
    """An entry of the catalogue with some or all of its sizes given; open ones are shown as expressions.

    Raises :class:`LayoutError` for sizes that contradict each other.
    """
    from layoutcheck.layouts import _page

    made = entry(**sizes)
    buffer = made if isinstance(made, Layout) else made.buffer
    yield f"{entry.name}: {pattern(made)}"
    yield ""
    yield textwrap.fill(_page.words()[entry.name].what.replace("`", ""), 100)
    yield ""
    yield f"elements   {', '.join(map(str, buffer.elements))}, allocated as {_dtypes.short(buffer.dtype)}"
    if not made.concrete:
        yield f"open       {', '.join(made.dims)}"
    for rule in _page.rules(buffer):
        yield f"rule       {rule.replace('`', '')}"
    width = product([buffer.span, Const(buffer.dtype.itemsize)], [Const(buffer.word)])
    yield f"bytes      {amount(made.nbytes) if made.concrete else brief(width)}"
    yield ""
    yield from _shape(buffer)
    for name, section in made.sections.items() if isinstance(made, Record) else ():
        start = section._number(section.rules.base) if section.concrete else brief(section.rules.base)
        yield ""
        yield f"section {name}: {section.elements[0]}, from byte {start}: {section}"
        yield from _shape(section)
    yield ""
    yield from _memory(entry, sizes)


def pattern(entry: Layout | Record) -> str:
    """``slot(page token) head -> page token head``; of a record the buffer's, and what is in it."""
    if isinstance(entry, Layout):
        return str(entry)
    return f"{entry.buffer}; sections {', '.join(entry.sections)}"


def amount(count: int) -> str:
    """``262144 bytes (256.00 KiB)``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count} bytes ({count / size:.2f} {unit})"
    return f"{count} bytes"


def _shape(layout: Layout) -> Iterator[str]:
    """Shape and strides, in elements, under the names of the dimensions."""
    dims = layout.tensor_dims
    if layout.concrete:
        shape, strides = (list(map(str, values)) for values in (layout.shape, layout.strides))
    else:
        shape = [brief(d.size) for d in dims]
        strides = [brief(d.stride or d.inner or Const(1)) for d in dims]
    yield from table([d.label for d in dims], [("shape", shape, ""), ("strides", strides, "")])


def _memory(entry: Layout | Record, sizes: Mapping[str, int]) -> Iterator[str]:
    """The drawing: of the whole, of its beginning where it is large, of an example where sizes are open."""
    from layoutcheck.layouts import _page

    made = entry(**sizes)
    chosen = {} if made.concrete else _page.example(made)
    try:
        made = made(**chosen)
    except LayoutError:
        yield "memory order: drawn when all sizes are given"
        return
    known = {**sizes, **chosen}
    made, cut = _beginning(entry, made, known)
    if _many(made) > DRAWABLE:
        yield "memory order: too large to draw; give smaller sizes"
        return
    told = f", with {_listed(chosen)}" if chosen else ""
    told += f", as far as {_listed(cut)}" if cut else ""
    yield f"memory order, in {'bytes' if isinstance(made, Record) else 'elements'}{told}:"
    yield from _page.picture(made, {}) if _many(made) else ("     no elements",)


def _beginning(
    entry: Layout | Record, made: Layout | Record, known: Mapping[str, int]
) -> tuple[Layout | Record, dict[str, int]]:
    """The same memory, shorter, if it is too large to draw, and what was cut.

    A size may shrink as long as no stride changes with it: then what is left is the beginning of the whole.
    """
    cut: dict[str, int] = {}
    for name, size in known.items():
        while _many(made) > DRAWABLE and size > 1:
            size = -(-size // 2)
            try:
                less = entry(**{**known, **cut, name: size})
            except LayoutError:
                continue
            if _strides(less) != _strides(made):
                break
            made, cut = less, cut | {name: size}
    return made, cut


def _many(entry: Layout | Record) -> int:
    return entry.nbytes if isinstance(entry, Record) else entry.numel


def _strides(entry: Layout | Record) -> list[tuple[int, ...]]:
    layouts = [entry] if isinstance(entry, Layout) else [entry.buffer, *entry.sections.values()]
    return [layout.strides for layout in layouts]


def _listed(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())
