"""Causes that only the whole call shows: what all the others were measured by may itself be the wrong one.

Two arguments exchanged, one with two axes exchanged, a scalar with another value: each is tried out, and is a cause
only if every rule of the contract holds with it. One argument whose size alone disagrees with the rest is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from layoutcheck._call import Call
from layoutcheck._dims import names
from layoutcheck._errors import Violation
from layoutcheck._fits import GROWS

_MOST_TRIES = 6
Trial = tuple[dict[str, Any], str, str]  # what to replace, cause, fix


def explained(call: Call, found: list[Violation], holds: Callable[[dict[str, Any]], bool]) -> list[Violation]:
    """The violations, with the cause that explains all of them where there is one."""
    if not any(v.rule in ("shape", "dtype") for v in found):
        return found
    broken = {v.argument for v in found}
    trials = itertools.chain(
        _exchanged(call, broken), *([_other_scalar(call), _other_axes(call, broken)] if len(broken) > 1 else [])
    )
    for changes, cause, fix in itertools.islice(trials, _MOST_TRIES):
        if holds({**call.arguments, **changes}):
            return [replace(v, cause=cause, fix=fix) for v in found]
    if len(broken) > 1 and (odd := _odd_one(call, broken)) is not None:
        return [replace(v, cause=odd[0], fix=odd[1]) for v in found]
    return found


def _exchanged(call: Call, broken: set[str]) -> Iterator[Trial]:
    for a, b in _pairs(call, broken):
        cause = f"{a} and {b} are swapped: exchanged, every rule of this call holds"
        yield {a: call.arguments[b], b: call.arguments[a]}, cause, f"swap {a} and {b}"


def _other_scalar(call: Call) -> Iterator[Trial]:
    """A scalar with the value that more than one argument fits."""
    for (name, value), fitting in call.fits.items():
        if len(fitting) > 1 and name in call.contract.scalars:
            now = call.values[name]
            cause = f"{name} = {now} does not fit the rest: with {name} = {value} every rule of this call holds"
            yield {name: value}, cause, f"pass {name} = {value}"


def _other_axes(call: Call, broken: set[str]) -> Iterator[Trial]:
    """Two axes exchanged in the argument by which the others were measured."""
    for name in sorted(_measures(call, broken) - {""}):
        value, spec = call.arguments.get(name), call.contract.tensors.get(name)
        form = call.form_of(spec) if spec else None
        if form is None or form.variadic or not isinstance(value, torch.Tensor) or not value.is_contiguous():
            continue
        if value.dim() != len(form.sizes):
            continue
        for i, j in itertools.combinations(range(value.dim()), 2):
            shape = list(value.shape)
            shape[i], shape[j] = shape[j], shape[i]
            if shape[i] == shape[j]:
                continue
            cause = (
                f"{form.labels[i]} and {form.labels[j]} are swapped in {name}, {tuple(value.shape)}: "
                "exchanged, every rule of this call holds"
            )
            yield {name: value.view(shape)}, cause, f"pass {name}.transpose({i}, {j}), or build it so"


def _pairs(call: Call, broken: set[str]) -> Iterator[tuple[str, str]]:
    """Tensors that each may stand in the other's place; those that determine a size of a broken one as well."""
    concerned = broken | _measures(call, broken)
    for first, second in itertools.combinations(call.contract.tensors.values(), 2):
        if not {first.name, second.name} & concerned:
            continue
        x, y = call.arguments.get(first.name), call.arguments.get(second.name)
        a, b = call.form_of(first), call.form_of(second)
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or a is None or b is None:
            continue
        if (x.shape, x.dtype) == (y.shape, y.dtype) or (a.dtypes and y.dtype not in a.dtypes):
            continue
        if (b.dtypes and x.dtype not in b.dtypes) or a.variadic or b.variadic:
            continue
        if len(a.sizes) == y.dim() and len(b.sizes) == x.dim():
            yield first.name, second.name


def _measures(call: Call, broken: set[str]) -> set[str]:
    """The arguments that determine a size of a broken one."""
    found = set()
    for name in broken:
        spec = call.contract.tensors.get(name)
        form = call.form_of(spec) if spec else None
        sizes = form.sizes if form else ()
        found |= {call.source_of(n) for s in sizes if s is not None for n in names(s)}
    return found


def _odd_one(call: Call, broken: set[str]) -> tuple[str, str] | None:
    """One argument by whose size all broken ones were measured, where they agree on another."""
    for (name, value), fitting in call.fits.items():
        origin = call.origin.get(name)
        if len(fitting) < 2 or not broken <= fitting or origin is None or origin.kind != "shape":
            continue
        if name in GROWS and value < call.values[name]:
            continue  # more likely it has grown, and the others have not
        odd = origin.argument
        for spec in call.contract.tensors.values():
            form = call.form_of(spec)
            sizes = form.sizes if form else ()
            speaks = any(s is not None and name in names(s) for s in sizes)
            if spec.name not in fitting and spec.name != odd and speaks and call.arguments.get(spec.name) is not None:
                return None
        others = ", ".join(n for n in call.contract.tensors if n in fitting)
        return (
            f"{odd} alone has {name} = {call.values[name]}; {others} agree on {name} = {value}",
            f"pass {odd} with {name} = {value}, or allocate the others for {name} = {call.values[name]}",
        )
    return None
