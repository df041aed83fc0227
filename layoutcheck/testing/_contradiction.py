"""Whether a changed call breaks its contract: the equations are followed from every number, in any direction.

Not by the order in which the guard binds them, which is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from layoutcheck._dims import Const, Equation, Expr, Inexact, Name, Op, evaluate, names
from layoutcheck._rules import Condition
from layoutcheck._specs import Form
from layoutcheck.testing._call import Call
from layoutcheck.testing._sizes import Impossible, follow


def contradicts(valid: Call, changed: Mapping[str, Any]) -> bool:
    """Whether the changed call breaks an equation or a condition, or shows a form that is not the argument's."""
    contract, arguments = valid.contract, valid.everything | dict(changed)
    known: dict[str, Any] = {}
    for n, v in arguments.items():
        if n not in contract.tensors and isinstance(v, int | float | str | bool):
            known[n] = v
    equations: list[Equation] = [Equation(Name(s.name), Const(s.index)) for s in contract.steps if s.kind == "default"]
    for name, form in valid.forms.items():
        value = arguments.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        shape = list(value.shape)
        if form.variadic:
            at, variadic = form.variadic
            behind = len(form.sizes) - at
            if len(shape) < len(form.sizes):
                return True
            covered = tuple(shape[at : len(shape) - behind])
            if variadic != "..." and known.setdefault(variadic, covered) != covered:
                return True
            del shape[at : len(shape) - behind]
        elif len(shape) != len(form.sizes):
            return True
        equations += form.equations
        equations += [Equation(s, Const(n)) for s, n in zip(form.sizes, shape, strict=True) if s is not None]
    integers = {n: v for n, v in known.items() if type(v) is int or isinstance(v, tuple)}
    conditions = [(under, r.expr) for under, r in contract.conditions if isinstance(r, Condition)]
    equations += [
        Equation(e.args[0], e.args[1]) for under, e in conditions
        if not under and isinstance(e, Op) and e.op == "==" and all(_plain(a) for a in e.args)
    ]  # fmt: skip
    try:
        values = {**known, **follow(equations, integers)}
        for name, form in valid.forms.items():
            value = arguments.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            if any(values.get(n, 0) < 0 for size in form.sizes if size is not None for n in names(size)):
                return True
            if value.numel() and _wrong_strides(form, value, values):
                return True
        return any(breaks(under, expr, values, arguments) for under, expr in conditions)
    except Impossible:
        return True


def _plain(expr: Expr) -> bool:
    return isinstance(expr, Name | Const) or (
        isinstance(expr, Op) and expr.op in "+-*/" and all(map(_plain, expr.args))
    )


def breaks(under: Iterable[Condition], expr: Expr, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a condition is in force and does not hold, as far as that is known."""
    try:
        if not all(evaluate(u.expr, values, arguments) for u in under):
            return False
        return not evaluate(expr, values, arguments)
    except Inexact:
        return True
    except (KeyError, AttributeError, TypeError):
        return False


def _wrong_strides(form: Form, value: torch.Tensor, sizes: Mapping[str, Any]) -> bool:
    for i, stride in enumerate(form.strides or ()):
        if value.shape[i] <= 1:
            continue
        if value.stride(i) == 0 and stride is None:
            return True
        try:
            if stride is not None and value.stride(i) != evaluate(stride, sizes):
                return True
        except (KeyError, Inexact):
            continue
    return False
