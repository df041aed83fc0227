"""Rules that read data: index ranges, prefix sums, the padding of padded layouts. Checked in ``values`` mode only.

Reading data synchronises with the device, so nothing here runs in the other modes. While a CUDA graph is captured the
rules are skipped: a captured stream may not be synchronised. Meta and fake tensors have no data and are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from layoutcheck import _dtypes, _index
from layoutcheck._call import solve
from layoutcheck._contract import Contract
from layoutcheck._dims import evaluate, parse_condition
from layoutcheck._errors import Violation
from layoutcheck._rules import Index, Indptr
from layoutcheck._specs import Form, TensorSpec


def check(contract: Contract, arguments: Mapping[str, Any]) -> list[Violation]:
    """Every broken value rule of a call whose shapes have been found right."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []
    return list(_check(contract, arguments))


def _check(contract: Contract, arguments: Mapping[str, Any]) -> Iterator[Violation]:
    values, _ = solve(contract, arguments)
    for spec in contract.tensors.values():
        tensor = arguments.get(spec.name)
        if not _has_data(tensor):
            continue
        for rule in spec.values:
            if isinstance(rule, Index):
                yield from _out_of_range(spec.name, rule, tensor, values)
            else:
                yield from _indptr(spec.name, rule, tensor, values)
        for condition, form in spec.forms:
            if condition is None or evaluate(condition, values, arguments):
                yield from _padding(spec, form, tensor, values)
                break


def _has_data(tensor: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type != "meta"
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


def _out_of_range(name: str, rule: Index, tensor: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Violation]:
    flat = tensor.reshape(-1)
    start, stop = evaluate(rule.start, values), evaluate(rule.stop, values)
    kept = torch.ones_like(flat, dtype=torch.bool)
    if rule.skip is not None:
        kept = ~evaluate(parse_condition(f"index {rule.skip}"), {"index": flat})
    skipped = f"; skipped are {rule.skip}" if rule.skip else ""
    wanted = f"{start} <= {name} < {stop}{skipped}"
    outside = (kept & ((flat < start) | (flat >= stop))).nonzero()
    if len(outside):
        at = int(outside[0])
        bad = int(flat[at])
        yield Violation(
            name, "value", wanted, f"{name}[{at}] = {bad}", None, f"pass indices below {stop}",
            headline=f"{name} has {len(outside)} of {len(flat)} values out of range",
            body=(f"expected {wanted}", f"got      {name}[{at}] = {bad}"),
        )  # fmt: skip
    if rule.unique:
        live = flat[kept]
        found, counts = torch.unique(live, return_counts=True)
        if len(twice := found[counts > 1]):
            value = int(twice[0])
            where = (kept & (flat == value)).nonzero().reshape(-1)[:2].tolist()
            yield Violation(
                name, "value", "every value once", f"{value} at {where[0]} and {where[1]}", None,
                f"give each row a slot of its own in {name}: of two writes to one slot either may win",
                headline=f"{name} has {len(twice)} values more than once",
            )  # fmt: skip


def _indptr(name: str, rule: Indptr, tensor: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Violation]:
    stop = evaluate(rule.stop, values)
    flat = tensor.reshape(-1)
    fix = f"compute {name} as the prefix sum of the lengths, with a 0 in front"
    if not len(flat) or int(flat[0]) != 0:
        got = f"{name}[0] = {int(flat[0])}" if len(flat) else "no entries"
        yield Violation(name, "value", f"{name}[0] = 0", got, None, fix, headline=f"{name} does not start at 0")
        return
    falls = (flat[1:] < flat[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        got = f"{name}[{at}] = {int(flat[at])}, {name}[{at + 1}] = {int(flat[at + 1])}"
        yield Violation(name, "value", f"{name} never decreases", got, None, fix, headline=f"{name} decreases")
    last = int(flat[-1])
    if last > stop or (last != stop and not rule.capacity):
        wanted = f"{name}[-1] {'<=' if rule.capacity else '='} {stop}"
        yield Violation(
            name, "value", wanted, f"{name}[-1] = {last}", None, fix, headline=f"{name} ends at {last}, not {stop}"
        )


def _padding(spec: TensorSpec, form: Form, tensor: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Padding of a padded layout must hold the layout's fill: a reader takes it for data."""
    layout = form.layout
    if layout is None or not layout.rules.pad or layout.rules.fill is None or tensor.numel() == 0:
        return
    if any(not isinstance(values.get(n), int) for n in layout.dims):
        return  # the logical sizes are the argument's own secret: nothing says what is padding
    concrete = layout(**{n: values[n] for n in layout.dims})
    where, code = _index.wrong_padding(concrete, tensor)
    if where is None:
        return
    element = _dtypes.of(tensor.dtype)
    nan = ", which is NaN" if element.nan and code in element.nan else ""
    at = ", ".join(f"{n} {i}" for n, i in where.items())
    sizes = ", ".join(f"{a.name} < {concrete.values_of(a.name)}" for a in concrete.axes)
    shown = f"{code:#04x}" if tensor.element_size() == 1 else str(code)
    yield Violation(
        spec.name, "value", f"padding of {layout.rules.fill} (data is {sizes})", f"{shown} at {at}{nan}", None,
        f"fill the padding of {spec.name} when it is allocated or written: layout({layout.name!r})(...).empty() does",
        headline=f"{spec.name} has padding that is not {layout.rules.fill}",
        body=(f"expected {layout.rules.fill} wherever it is not {sizes}", f"got      {shown} at {at}{nan}"),
    )  # fmt: skip
