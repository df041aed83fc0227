"""Cases from public bug reports: the arguments of ``cases.json`` as tensors, and what an error must name.

``cases.json`` is a list; an entry has ``args`` (shape, dtype, stride and storage_offset in elements, device, values,
tag, storage), ``scalars``, ``context``, and its neighbours. The contract of each ``op`` is in the modules beside this.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from layoutcheck import mode, tag

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases.json").read_text())
OPS: dict[str, Callable[..., Any]] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a guarded function as the contract of the cases with its name."""
    OPS[function.__name__] = function
    return function


def neighbour(case: dict[str, Any], kind: str) -> dict[str, Any]:
    """A case with the entries that its good or bad neighbour replaces."""
    changes = case[kind]
    new = dict(case)
    for part in ("args", "scalars", "storages", "context"):
        new[part] = {**(case.get(part) or {}), **(changes.get(part) or {})}
    return new | {"message_must_name": changes.get("message_must_name", [])}


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    storages = {
        name: torch.zeros(s["bytes"], dtype=torch.uint8, device=s.get("device", "cpu"))
        for name, s in (case.get("storages") or {}).items()
    }
    made = {name: _argument(spec, storages) for name, spec in case["args"].items()}
    return made | dict(case["scalars"])


def _argument(spec: dict[str, Any] | None, storages: dict[str, torch.Tensor]) -> Any:
    if spec is None or "py" in spec:
        return None if spec is None else spec["py"]
    dtype, shape = getattr(torch, spec["dtype"]), tuple(spec["shape"])
    strides = tuple(spec.get("stride") or _rowmajor(shape))
    offset = spec.get("storage_offset") or 0
    if spec.get("storage"):
        flat = storages[spec["storage"]].view(dtype)
    else:
        extent = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        flat = torch.empty(extent * dtype.itemsize, dtype=torch.uint8, device=spec["device"]).zero_().view(dtype)
    tensor = flat.as_strided(shape, strides, offset)
    if "values" in spec:
        _write(tensor, spec["values"])
    if "tag" in spec:
        facts = dict(spec["tag"])
        tag(tensor, facts.pop("layout", None), **facts)
    return tensor


def _rowmajor(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _write(tensor: torch.Tensor, values: Any) -> None:
    if isinstance(values, list):
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        return
    raw = tensor.view(torch.uint8) if values.get("as") == "bytes" else tensor
    if "fill" in values:
        raw.fill_(float(values["fill"]) if raw.dtype.is_floating_point else values["fill"])
    if "arange" in values:
        raw.copy_(torch.arange(*values["arange"], dtype=raw.dtype))
    if "runs" in values:
        raw.copy_(torch.cat([torch.full((n,), v, dtype=raw.dtype) for v, n in values["runs"]]).reshape(raw.shape))
    for index, value in values.get("set", {}).items():
        target = raw[_slices(index)]
        if isinstance(value, dict):
            target.copy_(torch.arange(*value["arange"], dtype=raw.dtype))
        else:
            target.fill_(float(value) if isinstance(value, str) else value)


def _slices(text: str) -> tuple[Any, ...]:
    def part(item: str) -> Any:
        bounds = [int(b) if b else None for b in item.split(":")]
        return bounds[0] if len(bounds) == 1 else slice(*bounds)

    return tuple(part(item.strip()) for item in text.split(","))


def call(case: dict[str, Any]) -> Any:
    """Call the case's function with its arguments, as its context says, with value rules on."""
    given = arguments(case)
    extra = given.pop("extra", ())
    function = OPS[case["op"]]
    positional = [given.pop(name) for name in list(case["args"])] if extra else []
    with _context(case.get("context") or {}), mode("values"):
        return function(*positional, *extra, **given)


@contextlib.contextmanager
def _context(context: dict[str, Any]) -> Iterator[None]:
    capturing = bool(context.get("capturing"))
    with (
        mock.patch("torch.cuda.is_available", return_value=capturing),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing),
    ):
        yield


# --- what a message must name -----------------------------------------------------------------------------------------


def norm(text: str) -> str:
    """Lower case, one space for any white space, none around ``=``."""
    return re.sub(r"\s*=\s*", "=", re.sub(r"\s+", " ", text.lower()))


def missing(message: str, items: list[str], case: dict[str, Any]) -> list[str]:
    """The items that a message does not contain; ``a|b`` needs either."""
    whole = {k.lower() for k in [*case["args"], *case["scalars"]]}
    text = norm(message)
    return [i for i in items if not any(_hit(norm(a), text, whole) for a in i.split("|"))]


def _hit(item: str, text: str, whole: set[str]) -> bool:
    if re.fullmatch(r"\([-\d, ]+\)", item):
        item = r"[\s,;x*|]+".join(re.findall(r"-?\d+", item))
    elif item in whole or re.fullmatch(r"-?\d+(\.\d+)?", item):
        item = re.escape(item)
    else:
        return item in text
    return re.search(r"(?<![\w.])" + item + r"(?!\w|\.\d)", text) is not None
