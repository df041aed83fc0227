"""The catalogue: layouts that production LLM inference uses, one file per family.

Every layout or record declared at the top level of a module of this package is an entry, under its own name. The
text below it says what it is and then, after ``Users:``, ``Source:``, ``Rules:`` and ``Not checked:``, what else
docs/catalogue.md prints of it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

from layoutcheck._layout import Layout
from layoutcheck._record import Record


@cache
def entries() -> dict[str, Layout | Record]:
    """Every entry by name."""
    found: dict[str, Layout | Record] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
        for variable, value in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if isinstance(value, Layout | Record) and not variable.startswith("_"):
                found[value.name] = value
    return dict(sorted(found.items()))


def layout(name: str) -> Layout | Record:
    """The catalogue entry of that name, such as ``"mxfp8.interleaved"``. Raises ``KeyError`` with the closest names."""
    found = entries()
    if name not in found:
        close = difflib.get_close_matches(name, found, 3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; there are {', '.join(found)}"
        raise KeyError(f"no layout {name!r} in the catalogue{hint}")
    return found[name]
