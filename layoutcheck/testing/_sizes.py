"""Sizes for which every equation holds: an order in which to choose the free names, so that the others follow exactly.

Parts are chosen before wholes (a page size is a number of chunks times 32), so no division leaves a remainder. What
cannot be chosen so is a filter: the sizes are chosen again. Which values are drawn is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutcheck._dims import Const, Equation, Expr, Inexact, Name, Op, divisions, evaluate, isolate, names, plan

Bound = int | tuple[int, int]
_INVERTED = ("+", "-", "*", "/")
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class Impossible(Exception):
    """No sizes were found for which every rule holds."""


@dataclass(frozen=True)
class Limit:
    """``name op expr``, where op is one of ``< <= > >=``."""

    name: str
    op: str
    expr: Expr


@dataclass(frozen=True)
class Step:
    """One name in the order of a plan: it follows from ``expr``, or is free (None)."""

    name: str
    expr: Expr | None = None


@dataclass
class Plan:
    """The order in which the names of some equations become known."""

    equations: list[Equation]
    limits: list[Limit]
    filters: list[Expr]
    options: dict[str, tuple[int, ...]]
    may_be_zero: set[str]
    bounds: Mapping[str, Bound]
    steps: list[Step] = field(default_factory=list)

    def choose(self, pick: Callable[[str, int, int, int], int], args: Mapping[str, Any]) -> dict[str, int]:
        """Every name's value. ``pick(name, lowest, highest, multiple)`` chooses a free one.

        Raises :class:`Impossible` where the values chosen contradict a rule.
        """
        values: dict[str, int] = {}
        for step in self.steps:
            if step.expr is not None:
                values[step.name] = _exact(step.expr, values)
                continue
            low, high = self._range(step.name, values)
            multiple = self._multiple(step.name, values)
            low = -(-low // multiple) * multiple
            if step.name in self.options:
                allowed = [o for o in self.options[step.name] if o % multiple == 0 and low <= o]
                if not allowed:
                    raise Impossible(f"{step.name} can be none of {self.options[step.name]}")
                values[step.name] = allowed[pick(step.name, 0, len(allowed) - 1, 1)]
            else:
                if step.name not in self.bounds:
                    high = max(high, low + multiple)
                elif high < low:
                    raise Impossible(f"{step.name} has no multiple of {multiple} in {self.bounds[step.name]}")
                values[step.name] = pick(step.name, low, high, multiple)
        self.verify(values, args)
        return values

    def verify(self, values: Mapping[str, int], args: Mapping[str, Any]) -> None:
        """Raise :class:`Impossible` unless every rule holds."""
        for equation in self.equations:
            if _exact(equation.left, values) != _exact(equation.right, values):
                raise Impossible(str(equation))
        for limit in self.limits:
            if not evaluate(Op(limit.op, (Name(limit.name), limit.expr)), values):
                raise Impossible(f"{limit.name} {limit.op} ...")
        for condition in self.filters:
            try:
                if not evaluate(condition, values, args):
                    raise Impossible(str(condition))
            except Inexact as error:
                raise Impossible(str(error)) from None
        for name, value in values.items():
            if value < (0 if name in self.may_be_zero else 1) and name not in self.bounds:
                raise Impossible(f"{name} = {value}")
            if name in self.bounds and not _within(value, self.bounds[name]):
                raise Impossible(f"{name} = {value} is outside of {self.bounds[name]}")
            if name in self.options and value not in self.options[name]:
                raise Impossible(f"{name} = {value} is none of {self.options[name]}")

    def _range(self, name: str, values: Mapping[str, int]) -> tuple[int, int]:
        bound = self.bounds.get(name)
        low, high = (0, 6) if name in self.may_be_zero else (1, 4)
        if isinstance(bound, tuple):
            low, high = bound
        elif bound is not None:
            low = high = bound
        for limit in self.limits:
            if limit.name == name and set(names(limit.expr)) <= set(values):
                edge = _exact(limit.expr, values) + {">": 1, "<": -1}.get(limit.op, 0)
                if limit.op in (">", ">="):
                    low, high = max(low, edge), (high if bound is not None else max(high, edge + 3))
                else:
                    high = min(high, edge)
        return low, high

    def _multiple(self, name: str, values: Mapping[str, int]) -> int:
        """What the name must be a multiple of, so that the wholes of which it is a part divide exactly."""
        result = 1
        for whole, factors in _products(self.equations):
            if whole == name:
                result = math.lcm(result, _constant(factors))
            elif whole not in values and Name(name) in factors:
                rest = math.prod(values.get(f.name, 1) for f in factors if isinstance(f, Name) and f.name != name)
                needed = self._needed(whole)
                result = math.lcm(result, needed // math.gcd(needed, _constant(factors) * rest))
        return result

    def _needed(self, name: str) -> int:
        return math.lcm(1, *(_constant(factors) for whole, factors in _products(self.equations) if whole == name))


def make_plan(
    equations: Iterable[Equation],
    conditions: Iterable[Expr],
    shown: Iterable[Expr],
    wanted: Iterable[str],
    bounds: Mapping[str, Bound],
    may_be_zero: Iterable[str] = (),
) -> Plan:
    """The plan for ``wanted``, every name that the equations and conditions speak of, and whole values of ``shown``."""
    divided = _Divided()
    for expr in shown:
        divided(expr)
    exact = [Equation(divided(q.left), divided(q.right)) for q in equations]
    limits: list[Limit] = []
    filters: list[Expr] = []
    options: dict[str, tuple[int, ...]] = {}
    for condition in conditions:
        for part in _parts(condition):
            _sort(part, divided, exact, limits, filters, options)
    exact += divided.equations
    exact += [Equation(Name(n), Const(b)) for n, b in bounds.items() if isinstance(b, int)]
    every = dict.fromkeys([*wanted, *(n for q in exact for side in (q.left, q.right) for n in names(side))])
    every |= dict.fromkeys(n for limit in limits for n in (limit.name, *names(limit.expr)))
    zero = {*may_be_zero, *divided.fresh}
    result = Plan(list(dict.fromkeys(exact)), limits, filters, options, zero, dict(bounds))
    result.steps = list(_order(result, list(every)))
    return result


def _order(plan_: Plan, every: list[str]) -> Iterator[Step]:
    known: set[str] = set()
    waiting = list(plan_.equations)
    while True:
        for name, expr, equation in plan(known, waiting):
            yield Step(name, expr)
            known.add(name)
            waiting.remove(equation)
        waiting = [q for q in waiting if not _names_of(q) <= known]
        unknown = [n for n in every if n not in known]
        if not unknown:
            return
        name = min(unknown, key=lambda n: (*_reluctance(plan_, n, known, waiting), unknown.index(n)))
        yield Step(name)
        known.add(name)


def _reluctance(plan_: Plan, name: str, known: set[str], waiting: Sequence[Equation]) -> tuple[bool, bool]:
    """Whether a name should be chosen late: it is limited by another, or is the whole of unknown parts."""
    limited = any(x.name == name and not set(names(x.expr)) <= known for x in plan_.limits)
    whole = False
    for q in waiting:
        for side, other in ((q.left, q.right), (q.right, q.left)):
            if side == Name(name) and name not in names(other) and isolate(side, other, name) is not None:
                whole = whole or bool(set(names(other)) - known)
    inside = any(name in _opaque(side) for q in waiting for side in (q.left, q.right))
    return limited, whole and not inside


def _opaque(expr: Expr, below: bool = False) -> Iterator[str]:
    """Names under an operation that is not inverted."""
    match expr:
        case Name(n) if below:
            yield n
        case Op(op, args):
            for a in args:
                yield from _opaque(a, below or op not in _INVERTED)


class _Divided:
    """Replaces each exact division by a new name and the equation that makes it exact."""

    def __init__(self) -> None:
        self.fresh: dict[str, Op] = {}
        self.equations: list[Equation] = []

    def __call__(self, expr: Expr) -> Expr:
        if not isinstance(expr, Op):
            return expr
        args = tuple(self(a) for a in expr.args)
        if expr.op != "/":
            return Op(expr.op, args)
        return self.quotient(args[0], args[1])

    def quotient(self, whole: Expr, part: Expr) -> Name:
        known = next((n for n, op in self.fresh.items() if op == Op("/", (whole, part))), None)
        if known is None:
            known = f"quotient.{len(self.fresh)}"
            self.fresh[known] = Op("/", (whole, part))
            self.equations.append(Equation(whole, Op("*", (part, Name(known)))))
        return Name(known)


def _sort(
    part: Expr,
    divided: _Divided,
    equations: list[Equation],
    limits: list[Limit],
    filters: list[Expr],
    options: dict[str, tuple[int, ...]],
) -> None:
    """Put one condition where it can be used best."""
    if _speaks_of_arguments(part):
        filters.append(part)
        return
    match part:
        case Op("==", (Op("%", (a, b)), Const(0))):
            divided.quotient(divided(a), divided(b))
        case Op("==", (a, b)) if not _has_other_constants(part):
            equations.append(Equation(divided(a), divided(b)))
        case Op("in", (Name(n), Op("tuple", values))) if all(isinstance(v, Const) for v in values):
            options[n] = tuple(v.value for v in values if isinstance(v, Const))
        case Op("pow2", (Name(n),)):
            options[n] = tuple(2**i for i in range(9))
        case Op("<" | "<=" | ">" | ">=" as op, (a, b)):
            # A name is limited by what else is there: the other side is chosen first.
            if isinstance(b, Name) and not isinstance(a, Name | Const):
                limits.append(Limit(b.name, _MIRRORED[op], divided(a)))
            elif isinstance(a, Name):
                limits.append(Limit(a.name, op, divided(b)))
            elif isinstance(b, Name):
                limits.append(Limit(b.name, _MIRRORED[op], divided(a)))
            else:
                filters.append(part)
        case _:
            filters.append(part)


def _parts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, Op) and condition.op == "and":
        for a in condition.args:
            yield from _parts(a)
    else:
        yield condition


def _speaks_of_arguments(expr: Expr) -> bool:
    return isinstance(expr, Op) and (
        expr.op in ("given", "dtype", "numel") or any(_speaks_of_arguments(a) for a in expr.args)
    )


def _has_other_constants(expr: Expr) -> bool:
    match expr:
        case Const(value):
            return type(value) is not int
        case Op(_, args):
            return any(_has_other_constants(a) for a in args)
    return False


def _products(equations: Iterable[Equation]) -> Iterator[tuple[str, list[Expr]]]:
    """(whole, factors) of the equations that say a name is a product."""
    for q in equations:
        for side, other in ((q.left, q.right), (q.right, q.left)):
            if isinstance(side, Name) and (factors := _factors(other)) is not None:
                yield side.name, factors


def _factors(expr: Expr) -> list[Expr] | None:
    match expr:
        case Name() | Const():
            return [expr]
        case Op("*", (a, b)):
            left, right = _factors(a), _factors(b)
            return None if left is None or right is None else [*left, *right]
    return None


def _constant(factors: Iterable[Expr]) -> int:
    return math.prod(f.value for f in factors if isinstance(f, Const)) or 1


def _names_of(q: Equation) -> set[str]:
    return {*names(q.left), *names(q.right)}


def _within(value: int, bound: Bound) -> bool:
    return bound[0] <= value <= bound[1] if isinstance(bound, tuple) else value == bound


def _exact(expr: Expr, values: Mapping[str, int]) -> int:
    try:
        return int(evaluate(expr, values))
    except Inexact as error:
        raise Impossible(str(error)) from None


def follow(equations: Iterable[Equation], known: Mapping[str, Any]) -> dict[str, Any]:
    """Every value that follows. Raises :class:`Impossible` where the equations cannot all hold, and says why."""
    values = dict(known)
    equations = list(dict.fromkeys(equations))
    try:
        for name, expr, _ in plan(values, equations):
            values[name] = evaluate(expr, values)
        for q in equations:
            for division in (*divisions(q.left), *divisions(q.right)):
                if set(names(division)) <= set(values):
                    evaluate(division, values)
            if _names_of(q) <= set(values) and evaluate(q.left, values) != evaluate(q.right, values):
                raise Impossible(f"{q}: {evaluate(q.left, values)} and {evaluate(q.right, values)}")
    except Inexact as error:
        raise Impossible(str(error)) from None
    return values
