"""What may be changed about a valid call, and the pieces that every kind of change needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from layoutcheck._dims import Expr, Name, Op
from layoutcheck._rules import Condition
from layoutcheck._specs import Form
from layoutcheck.testing._call import Call
from layoutcheck.testing._memory import depth

ANY = frozenset({"shape", "relation"})
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Candidate:
    """A change that may be a fault: what to replace, what to expect; ``sure`` where no equation must be followed."""

    name: str
    argument: str
    change: Callable[[], dict[str, Any]]
    rules: frozenset[str]
    blamed: frozenset[str]
    sure: bool = False
    launchable: bool = True


def replaced(name: str, make: Callable[..., torch.Tensor], *args: Any) -> Callable[[], dict[str, Any]]:
    """The change of one argument to what ``make(*args)`` gives."""
    return lambda: {name: make(*args)}


def value_of(name: str, value: Any) -> Callable[[], dict[str, Any]]:
    """The change of one argument to a value."""
    return lambda: {name: value}


def like(form: Form, value: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """A packed tensor of zeros with another shape, its axes in the form's order in memory."""
    shape = list(shape)
    order = list(range(len(shape)))
    if form.layout is not None and len(shape) == len(form.layout.view_leaves):
        order.sort(key=lambda i: depth(form, i))
    back = [order.index(i) for i in range(len(order))]
    made = torch.zeros([shape[i] for i in order], dtype=torch.uint8 if value.dtype.itemsize == 1 else value.dtype)
    return made.view(value.dtype).permute(back)


def binding(valid: Call, name: str) -> bool:
    """Whether dims of the call are bound by this argument, so that others are blamed for what is wrong with it."""
    return any(
        s.argument == name and s.kind in ("shape", "variadic") and not (s.optional and "." in s.name)
        for s in valid.contract.steps
    )


def blamed_for(valid: Call, name: str) -> frozenset[str]:
    return frozenset(valid.contract.specs) if binding(valid, name) else frozenset({name})


def concerned(valid: Call, name: str) -> frozenset[str]:
    """The argument and those that are named in a rule about its presence or its dtype."""
    found = {name}
    for under, rule in valid.contract.conditions:
        exprs = [r.expr for r in (*under, rule) if isinstance(r, Condition)]
        mentioned = {n for e in exprs for n in named(e)}
        if name in mentioned:
            found |= mentioned | set(getattr(rule, "arguments", ()))
    return frozenset(found)


def named(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("dtype" | "given" | "numel", (Name(n),)):
            yield n
        case Op(_, args):
            for a in args:
                yield from named(a)
