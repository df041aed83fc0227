"""The keywords of a layout: which there are, and how what a caller writes becomes what is stored.

What a rule means for a tensor is decided in ``_layout``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from layoutcheck import _dtypes
from layoutcheck._dims import Const, Expr, parse
from layoutcheck._pattern import Axis

BYTES = " bytes"
ZERO = Const(0)


@dataclass(frozen=True)
class Rules:
    """What a tensor must keep beyond its shape; every field is one keyword of :class:`Layout`."""

    view: str | tuple[Expr, ...] | None = None
    dense: str | None = None
    pitch: tuple[tuple[str, Expr, bool], ...] = ()  # axis, size, whether it counts bytes
    base: Expr = ZERO  # bytes from the start of the buffer to the first element
    align: tuple[tuple[str, Expr], ...] = ()  # axis or "base", bytes
    pad: tuple[tuple[str, Expr], ...] = ()
    offsets: Literal["int64", "int32"] | tuple[str, ...] = "int64"  # or the axes whose own term is 32-bit
    strict: str | None = None
    fill: int | None = None
    accept: tuple[torch.dtype, ...] = ()
    carrier: torch.dtype | None = None
    public: tuple[str, ...] = ()
    default: tuple[tuple[str, int], ...] = ()


RULES = tuple(f.name for f in dataclasses.fields(Rules))


def read_rules(old: Rules, new: Mapping[str, Any], axes: tuple[Axis, ...], context: str) -> Rules:
    known = {a.name for axis in axes for a in axis.walk()}
    changes: dict[str, Any] = {}
    for keyword, value in new.items():
        match keyword:
            case "view":
                changes[keyword] = tuple(parse(v) for v in value) if isinstance(value, tuple) else value
            case "pitch":
                changes[keyword] = tuple((a, *_pitch(v)) for a, v in (value or {}).items())
            case "base":
                changes[keyword] = _pitch(value)[0]
            case "align":
                aligned = value if isinstance(value, Mapping) else {"base": value}
                changes[keyword] = tuple((a, parse(v)) for a, v in aligned.items())
            case "pad":
                changes[keyword] = tuple((a, parse(v)) for a, v in value.items())
            case "default":
                changes[keyword] = tuple(value.items())
            case "public":
                changes[keyword] = (value,) if isinstance(value, str) else tuple(value)
            case "accept":
                items = value if isinstance(value, tuple | list) else (value,)
                changes[keyword] = tuple(_dtypes.element(v).torch for v in items)
            case "carrier":
                changes[keyword] = None if value is None else _dtypes.element(value).torch
            case "offsets":
                changes[keyword] = _offsets(value, known, context)
            case _:
                changes[keyword] = value
    for keyword in ("pitch", "pad", "align"):
        for axis, *_ in changes.get(keyword, ()):
            if axis not in known and (keyword, axis) != ("align", "base"):
                raise TypeError(f"{context}: {keyword} names {axis!r}; the axes are {', '.join(sorted(known))}")
    return dataclasses.replace(old, **changes)


def _offsets(value: Any, known: set[str], context: str) -> Any:
    widths = list(value.values()) if isinstance(value, Mapping) else [value]
    for width in widths:
        if width not in ("int32", "int64"):
            raise TypeError(f"{context}: offsets={value!r} is neither 'int32' nor 'int64'")
    if not isinstance(value, Mapping):
        return value
    for axis in value:
        if axis not in known:
            raise TypeError(f"{context}: offsets names {axis!r}; the axes are {', '.join(sorted(known))}")
    return tuple(axis for axis, width in value.items() if width == "int32") or "int64"


def _pitch(value: Any) -> tuple[Expr, bool]:
    if isinstance(value, str) and value.endswith(BYTES):
        return parse(value.removesuffix(BYTES)), True
    return parse(value), False


def read_elements(dtype: Any) -> tuple[_dtypes.Element, ...]:
    items = dtype if isinstance(dtype, tuple | list) else (dtype,)
    return tuple(_dtypes.element(d) for d in items)


def unknown(keyword: str, known: frozenset[str] | set[str]) -> str:
    close = difflib.get_close_matches(keyword, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{keyword!r} is neither a rule nor a size of this layout ({', '.join(sorted(known - set(RULES)))}){hint}"
