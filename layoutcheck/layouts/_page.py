"""The catalogue as a page: ``python -m layoutcheck.layouts._page > docs/catalogue.md``.

Everything on it is read from the declarations: the pattern and the rules from the layout itself, the words from the
text below its declaration (what it is, then ``Users:``, ``Source:``, ``Rules:`` and ``Not checked:``), and the picture
from the map, at the smallest sizes that the layout allows.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from layoutcheck import _dtypes, _index, layouts
from layoutcheck._dims import Const, Name, brief, evaluate
from layoutcheck._errors import LayoutError
from layoutcheck._layout import Layout
from layoutcheck._record import Record

HEADINGS = ("Users", "Source", "Rules", "Not checked")
SIZES = (2, 4, 8, 16, 32, 64, 128)
DRAWN = 8
HEAD = """# Catalogue

Generated from the declarations in `layoutcheck/layouts`; do not edit. `make catalogue` writes it again.

A layout reads `logical axes -> order in memory`; a record is several layouts in one byte buffer. Open sizes are what
`layout(name)(...)` asks for. A picture shows which element stands where, in elements from the start of the buffer (in
bytes for a record), for small sizes.
"""


@dataclass
class Words:
    """What the text below a declaration says: what the entry is, then one text for each heading."""

    what: str
    under: dict[str, str] = field(default_factory=dict)


@cache
def words() -> dict[str, Words]:
    """The words of every entry by name."""
    found: dict[str, Words] = {}
    for info in pkgutil.iter_modules(layouts.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{layouts.__name__}.{info.name}")
        for variable, text in _texts(module):
            value = getattr(module, variable)
            if isinstance(value, Layout | Record):
                found[value.name] = _read(text)
    return found


def _texts(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Variables assigned at the top of a module, with the string that stands below each."""
    body = ast.parse(Path(inspect.getfile(module)).read_text()).body
    for node, below in itertools.pairwise(body):
        match node, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def _read(text: str) -> Words:
    result = Words("")
    current: str | None = None
    for line in text.splitlines():
        heading, colon, rest = line.partition(": ")
        if colon and heading in HEADINGS:
            current, line = heading, rest
            result.under[current] = ""
        if current is None:
            result.what = f"{result.what} {line}".strip()
        else:
            result.under[current] = f"{result.under[current]} {line}".strip()
    return result


# --- rules ------------------------------------------------------------------------------------------------------------


def rules(layout: Layout) -> Iterator[str]:
    """What a tensor must keep beyond its shape, in words."""
    own, nodes = layout.rules, [a for axis in layout.axes for a in axis.walk()]
    if isinstance(own.view, tuple):
        yield f"shown as `[{', '.join(map(brief, own.view))}]`"
    elif own.view is not None:
        yield f"shown as `[{', '.join(own.view.split())}]`" if "(" not in own.view else f"shown as `{own.view}`"
    if own.carrier is not None:
        yield f"{layout.word} elements share one {_dtypes.short(own.carrier)}, the first in its lowest bits"
    if own.dense is not None:
        free = [leaf for leaf in layout.order if leaf not in own.dense.split()]
        yield f"the strides of {_listed(free)} are free"
    for axis, size, in_bytes in own.pitch:
        yield f"stride of {axis} is `{brief(size)}`" + (" bytes" if in_bytes else "")
    for target, size in own.align:
        what = "the base pointer" if target == "base" else f"the stride of {target}"
        yield f"{what} is a multiple of {brief(size)} bytes"
    for axis, size in own.pad:
        yield f"{axis} is rounded up to a multiple of {brief(size)}"
    if own.strict is not None:
        yield f"the stride of {_listed(own.strict.split())} counts even where it has size 1"
    if own.offsets != "int64":
        yield "offsets are computed in 32 bits"
    for name, number in own.default:
        yield f"{name} is {number} unless given"
    for equation in layout.equations:
        if isinstance(equation.left, Name) and equation.left.name not in {a.name for a in nodes if a.parts}:
            yield f"`{equation}`"
    if own.fill is not None:
        yield f"new memory is filled with {own.fill}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# --- the picture ------------------------------------------------------------------------------------------------------


def example(entry: Layout | Record) -> dict[str, int]:
    """Sizes for a picture: the smallest that show every part, a whole multiple where an axis is padded."""
    many = {"slot": 256, "page": 2}  # enough for any page size
    dims = {d: many.get(d, 128) for d in entry.dims}
    if isinstance(entry, Record) and "slot" in dims and "page" in dims:
        del dims["page"]
    pads = {} if isinstance(entry, Record) else dict(entry.rules.pad)
    for shows_more in (False, True):
        dims |= {d: n for d, n in many.items() if d in dims}
        for name in sorted(dims, key=lambda d: d in ("slot", "page")):  # the page size first, then how many pages
            sizes = [(s, made) for s, made in _made(entry, dims, name) if s % _pad(pads, name, dims) == 0]
            if sizes:
                dims[name] = min(sizes, key=lambda s: (_single(entry, s[1]) if shows_more else 0, s[0]))[0]
    return dims


def _made(entry: Layout | Record, dims: dict[str, int], name: str) -> Iterator[tuple[int, Layout | Record]]:
    """What each size of one dim makes of an entry, where it makes something."""
    for size in SIZES:
        try:
            made = entry(**dims | {name: size})
            if math.prod(made.shape) * made.nbytes:
                yield size, made
        except (LayoutError, TypeError, KeyError):
            continue


def _pad(pads: dict[str, Any], name: str, dims: dict[str, int]) -> int:
    return int(evaluate(pads.get(name, Const(1)), dims))


def _single(entry: Layout | Record, made: Layout | Record) -> int:
    """How many parts have size 1 and would not have to: how many of the outermost there are shows nothing."""
    opened, known = [x.sections.values() if isinstance(x, Record) else (x,) for x in (entry, made)]
    return sum(
        layout.values_of(part.name) == 1
        for open_, layout in zip(opened, known, strict=True)
        for axis in layout.axes
        for part in ([p for inner in axis.parts[1:] for p in inner.walk()] or [axis])
        if open_.size_of(part.name) != Const(1)
    )


def picture(entry: Layout | Record, sizes: dict[str, int]) -> Iterator[str]:
    """The first runs of memory: from which element to which, and what stands there."""
    made = entry(**sizes)
    parts = made.sections if isinstance(made, Record) else {"": made}
    cells: list[tuple[int, int, str, tuple[int, ...], tuple[str, ...]]] = []
    for section, layout in parts.items():
        axes = tuple(a.name for a in layout.axes)
        shape = [layout.values_of(a) for a in axes]
        grids = torch.meshgrid(*(torch.arange(s) for s in shape), indexing="ij")
        offsets = _index.offset(layout, dict(zip(axes, grids, strict=True))).reshape(-1)
        width, unit = (layout.elements[0].bits, 8) if isinstance(made, Record) else (1, 1)
        order = offsets.argsort()[:4096]
        where = torch.stack([g.reshape(-1) for g in grids], 1)[order].tolist()
        for at, coordinates in zip(offsets[order].tolist(), where, strict=True):
            cells.append((at * width // unit, (at + 1) * width // unit, section, tuple(coordinates), axes))
    cells.sort(key=lambda c: c[0])
    yield from _runs(cells, made.nbytes if isinstance(made, Record) else made.numel)


def _runs(cells: list[tuple[int, int, str, tuple[int, ...], tuple[str, ...]]], end: int) -> Iterator[str]:
    at, drawn, i = 0, 0, 0
    while i < len(cells) and drawn < DRAWN:
        start, stop, section, first, axes = cells[i]
        if start > at:
            yield f"{_span(at, start)}  nothing"
            drawn += 1
        j, step = i, None
        while j + 1 < len(cells) and cells[j + 1][0] <= max(stop, cells[j][0]) and cells[j + 1][2] == section:
            delta = tuple(b - a for a, b in zip(cells[j][3], cells[j + 1][3], strict=True))
            if step is None and sum(d != 0 for d in delta) == 1:
                step = delta
            if delta != step:
                break
            j += 1
            stop = cells[j][1]
        yield f"{_span(start, max(stop, start + 1))}  {_coordinates(section, axes, first, cells[j][3], step)}"
        at, i, drawn = max(stop, start + 1), j + 1, drawn + 1
    if at < end:
        yield f"{'...':>15}  to {end}"


def _span(start: int, stop: int) -> str:
    return f"{start:>6} .. {stop - 1:<5}" if stop > start + 1 else f"{start:>6}         "


def _coordinates(section: str, axes: tuple[str, ...], first: tuple[int, ...], last: tuple[int, ...], step: Any) -> str:
    texts = []
    for i, axis in enumerate(axes):
        text = f"{axis} {first[i]}"
        if first[i] != last[i]:
            by = f" by {step[i]}" if step[i] != 1 else ""
            text += f" to {last[i]}{by}"
        texts.append(text)
    return f"{section}: {', '.join(texts)}" if section else ", ".join(texts)


# --- the page ---------------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole page, as it is in ``docs/catalogue.md``."""
    found, text = layouts.entries(), words()
    lines = [HEAD, "| layout | users |", "|---|---|"]
    lines += [f"| [`{n}`](#{_anchor(n)}) | {text[n].under['Users'].rstrip('.')} |" for n in found]
    for name, entry in found.items():
        lines += ["", *_entry(entry, text[name])]
    return "\n".join(lines) + "\n"


def _entry(entry: Layout | Record, said: Words) -> Iterator[str]:
    yield f"## {entry.name}"
    yield ""
    yield said.what.replace("``", "`")
    yield ""
    yield "```"
    if isinstance(entry, Record):
        yield f"{'buffer':<8} {entry.buffer}"
        for name, section in entry.sections.items():
            yield f"{name:<8} {section}    {section.elements[0]}, from byte {brief(section.rules.base)}"
    else:
        yield str(entry)
    yield "```"
    yield ""
    buffer = entry.buffer if isinstance(entry, Record) else entry
    yield f"- elements: {', '.join(map(str, buffer.elements))}; open sizes: {', '.join(f'`{d}`' for d in entry.dims)}"
    for rule in rules(buffer):
        yield f"- {rule}"
    for heading in HEADINGS:
        if heading in said.under:
            yield f"- {heading.lower()}: {said.under[heading].replace('``', '`')}"
    sizes = example(entry)
    yield ""
    yield f"With {', '.join(f'{n}={s}' for n, s in sizes.items())}:"
    yield ""
    yield "```"
    yield from picture(entry, sizes)
    yield "```"


def _anchor(name: str) -> str:
    return name.replace(".", "")


if __name__ == "__main__":
    print(page(), end="")
