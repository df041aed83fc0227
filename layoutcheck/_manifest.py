"""Manifests: what a pool says of itself to another process, and in which fields two of them differ.

A manifest is plain JSON. One that comes from outside is untrusted: it is compared, never interpreted, so nothing in it
can choose what is read, allocated or run here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layoutcheck import _dtypes

if TYPE_CHECKING:
    from layoutcheck._pool import Pool

FORMAT = "layoutcheck.manifest/1"
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 32
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """One field that differs: its path (``buffers.k_scale.shape``) and both values, as they are printed."""

    field: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.field}: {self.first} and {self.second}"


def manifest(pool: Pool) -> dict[str, Any]:
    """A pool as JSON: sizes, and for every buffer its layout, dtype, shape, strides (elements), bytes, fingerprints.

    ``fingerprint`` digests the concrete layout as declared, ``map_fingerprint`` the bytes that it describes: where only
    the first differs, two processes declare the same memory in different words.
    """
    buffers: dict[str, list[Any]] = {}
    for name, layout, tensor in pool.buffers():
        entry = {
            "layout": layout.name,
            "dtype": _dtypes.short(tensor.dtype),
            "shape": list(layout.shape),
            "strides": list(layout.strides),
            "nbytes": layout.nbytes,
            "fingerprint": layout.fingerprint,
            "map_fingerprint": layout.map_fingerprint,
        }
        buffers.setdefault(name, []).append(entry)
    return {
        "format": FORMAT,
        "pool": type(pool).__name__,
        "dims": {n: list(v) if isinstance(v, tuple) else v for n, v in sorted(pool.dims.items())},
        "layers": pool.layers,
        "buffers": buffers if pool.layers is not None else {n: b[0] for n, b in buffers.items()},
    }


def load(text: str | bytes) -> dict[str, Any]:
    """A manifest from JSON text. Raises ``ValueError`` for text that is no manifest."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"a manifest of {len(text)} bytes: more than {MAX_BYTES} is refused")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no manifest: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = _shown(value.get("format", ABSENT)) if isinstance(value, dict) else _shown(value)
        raise ValueError(f"no manifest: its format is {found}, not {FORMAT!r}")
    return value


def diff(first: Any, second: Any, fields: Sequence[str] = ()) -> list[Difference]:
    """Every field in which two manifests, or other JSON values, differ; with ``fields``, of these top-level ones."""
    if not fields:
        return list(_differences("", first, second, 0))
    found: list[Difference] = []
    for name in fields:
        a, b = (x.get(name, ABSENT) if isinstance(x, Mapping) else ABSENT for x in (first, second))
        found += [Difference(name, ABSENT, ABSENT)] if a is b is ABSENT else _differences(name, a, b, 1)
    return found


def agree(first: Any, second: Any, fields: Sequence[str] = ()) -> bool:
    """Whether two manifests say the same."""
    return not diff(first, second, fields)


def _differences(path: str, a: Any, b: Any, depth: int) -> Iterator[Difference]:
    if depth < MAX_DEPTH and isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(
                f"{path}.{key}"[:200] if path else f"{key}"[:200], a.get(key, ABSENT), b.get(key, ABSENT), depth + 1
            )
    elif depth < MAX_DEPTH and _entries(a) and _entries(b):
        for i in range(max(len(a), len(b))):
            yield from _differences(f"{path}[{i}]", _at(a, i), _at(b, i), depth + 1)
    elif depth >= MAX_DEPTH:
        yield Difference(path, "nested too deep", "to compare")
    elif not _same(a, b):
        yield Difference(path, _shown(a), _shown(b))


def _entries(value: Any) -> bool:
    """Whether a value is a list of objects; a list of numbers, such as a shape, differs as a whole."""
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)


def _at(values: Any, index: int) -> Any:
    return values[index] if index < len(values) else ABSENT


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        flat = not any(isinstance(x, list | tuple | Mapping) for x in (*a, *b))
        return flat and len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _shown(value: Any) -> str:
    match value:
        case str() if value.isprintable() and 0 < len(value) <= 60:
            return value
        case Mapping():
            return f"an object of {len(value)} fields"
        case list() | tuple() if any(isinstance(x, list | tuple | Mapping) for x in value):
            return f"a nested list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
