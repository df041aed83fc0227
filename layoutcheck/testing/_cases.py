"""Everything of a call that is not a number: what is given, of which dtype, which words, which case of a choice.

Variables that share a rule are solved together, once for each contract; each solution is then one value to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from layoutcheck import _dtypes
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Expr, Name, Op, arguments, calls, evaluate, names
from layoutcheck._rules import Condition, Forbids, Needs, Together
from layoutcheck._specs import ScalarSpec, TensorSpec

Variable = tuple[str, str]  # ("given" | "dtype" | "value" | "case", name)
Solution = dict[Variable, Any]
_MOST = 512
_CASTABLE = {e.torch for e in _dtypes.ELEMENTS}


@dataclass(frozen=True)
class Case:
    """One solution of every variable."""

    given: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    words: Mapping[str, Any]
    decided: Mapping[Expr, bool]
    solution: Mapping[Variable, Any]

    def facts(self, contract: Contract) -> Facts:
        """What this case says of any expression."""
        return Facts(contract, dict(self.solution))


class Cases:
    """The variables of a contract, in groups that share no rule, and the solutions of each group."""

    def __init__(self, contract: Contract, fixed: Mapping[Variable, Any] | None = None) -> None:
        self.contract = contract
        self.undecided = _undecided(contract)  # such as page_size == 128
        self.domains = dict(_domains(contract)) | {v: (value,) for v, value in (fixed or {}).items()}
        touched: list[tuple[set[Variable], Any]] = [
            (set(_variables(under, rule)) & set(self.domains), (under, rule)) for under, rule in contract.conditions
        ]
        for spec in contract.tensors.values():
            if spec.form is None:
                used = {("value", n) for c, _ in spec.forms if c is not None for n in names(c)} & set(self.domains)
                mine = {("case", str(i)) for i, c in enumerate(self.undecided) if c in dict(spec.forms)}
                touched.append((used | mine | {("dtype", spec.name)}, ((), spec)))
        self.groups = [self._solutions(*group) for group in _joined(set(self.domains), touched)]

    def case(self, solutions: Iterable[Solution]) -> Case:
        """The solutions of all groups as one."""
        every = {v: value for s in solutions for v, value in s.items()}
        given = {n for (kind, n), value in every.items() if kind == "given" and value}
        given |= {n for n, s in self.contract.specs.items() if ("given", n) not in every}
        dtypes = {n: value for (kind, n), value in every.items() if kind == "dtype"}
        words = {n: value for (kind, n), value in every.items() if kind == "value"}
        decided = {self.undecided[int(n)]: value for (kind, n), value in every.items() if kind == "case"}
        return Case(frozenset(given), dtypes, words, decided, every)

    def _solutions(self, variables: list[Variable], rules: list[Any]) -> list[Solution]:
        found: list[Solution] = []

        def extend(chosen: Solution, rest: list[Variable]) -> None:
            if len(found) >= _MOST or not all(self._may_hold(r, chosen) for r in rules):
                return
            if not rest:
                found.append(dict(chosen))
                return
            first, *others = rest
            for value in self.domains[first]:
                extend(chosen | {first: value}, others)

        extend({}, variables)
        if not found:
            shown = ", ".join(sorted({n for _, n in variables}))
            raise TypeError(f"{self.contract.name}: no call can keep the rules about {shown}")
        return found

    def _may_hold(self, rule: tuple[tuple[Condition, ...], Any], chosen: Solution) -> bool:
        under, what = rule
        facts = Facts(self.contract, chosen)
        if isinstance(what, TensorSpec):
            return self._has_case(what, chosen, facts)
        if not all(facts.decide(u.expr) is True for u in under):
            return True
        match what:
            case Condition(expr):
                return facts.decide(expr) is not False
            case Needs(args):
                return all(facts.given(a) is not False for a in args)
            case Forbids(args):
                return all(facts.given(a) is not True for a in args)
            case Together(args):
                return len({g for a in args if (g := facts.given(a)) is not None}) < 2
        return True

    def _has_case(self, spec: TensorSpec, chosen: Solution, facts: Facts) -> bool:
        """Whether some case of a choice is left, and the dtype chosen is one of its own."""
        dtype = chosen.get(("dtype", spec.name))
        decided = {c: chosen.get(("case", str(i))) for i, c in enumerate(self.undecided)}
        for condition, form in spec.forms:
            held = True if condition is None else decided.get(condition, facts.decide(condition))
            fits = dtype is None or form.dtypes is None or dtype in form.dtypes
            if held is not False and fits:
                return True
            if held is True:
                return False
        return False


def pick_form(spec: TensorSpec, case: Case) -> tuple[int, list[Expr]]:
    """Which form of an argument a case means, and the conditions on numbers that this asserts."""
    asserted: list[Expr] = []
    for i, (condition, _) in enumerate(spec.forms):
        if condition is None:
            return i, asserted
        held = case.decided.get(condition)
        if held is None:
            held = bool(evaluate(condition, case.words))
        elif condition in case.decided:
            asserted.append(condition if held else Op("not", (condition,)))
        if held:
            return i, asserted
    raise AssertionError(f"{spec.name} has no form in this case")


class Facts:
    """What the variables chosen so far say of an expression: True, False, or None while it is open."""

    def __init__(self, contract: Contract, chosen: Solution) -> None:
        self.contract, self.chosen = contract, chosen
        self.words = {n: value for (kind, n), value in chosen.items() if kind == "value"}
        self.arguments = _Chosen(self)

    def given(self, name: str) -> bool | None:
        spec = self.contract.specs.get(name)
        if spec is not None and not spec.optional:
            return True
        return self.chosen.get(("given", name))

    def decide(self, expr: Expr) -> bool | None:
        match expr:
            case Op("and" | "or" as op, parts):
                found = [self.decide(p) for p in parts]
                decisive = op == "or"
                if decisive in found:
                    return decisive
                return None if None in found else not decisive
            case Op("not", (part,)):
                inner = self.decide(part)
                return None if inner is None else not inner
        if any(c.op not in ("given", "dtype") for c in calls(expr)):
            return None  # the argument itself decides
        try:
            return bool(evaluate(expr, self.words, self.arguments))
        except (KeyError, ArithmeticError):
            return None


class _Chosen(Mapping[str, Any]):
    """The arguments as far as they are chosen: stand-ins with a dtype; ``KeyError`` while it is open."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __getitem__(self, name: str) -> Any:
        given = self.facts.given(name)
        if given is None:
            raise KeyError(name)
        if not given:
            return None
        return SimpleNamespace(dtype=self.facts.chosen[("dtype", name)]) if name in self.facts.contract.tensors else 0

    def get(self, name: str, default: Any = None) -> Any:
        spec = self.facts.contract.tensors.get(name)
        given = self.facts.given(name)
        if spec is not None and given and ("dtype", name) not in self.facts.chosen:
            return _Open()  # given, though its dtype is open
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts.contract.specs)

    def __len__(self) -> int:
        return len(self.facts.contract.specs)


class _Open:
    @property
    def dtype(self) -> torch.dtype:
        raise KeyError("dtype")


def _domains(contract: Contract) -> Iterator[tuple[Variable, tuple[Any, ...]]]:
    spoken = _spoken_words(contract)
    for name, spec in contract.specs.items():
        if spec.optional:
            yield ("given", name), (False, True)
        if isinstance(spec, TensorSpec):
            yield ("dtype", name), _dtypes_of(contract, spec)
        elif spec.choices is not None:
            yield ("value", name), _default_first(contract, name, spec.choices)
        elif spec.type is bool:
            yield ("value", name), _default_first(contract, name, (False, True))
        elif spec.type is str:
            yield ("value", name), _default_first(contract, name, (*spoken.get(name, ()), "other"))
    for i, _ in enumerate(_undecided(contract)):
        yield ("case", str(i)), (True, False)


def _dtypes_of(contract: Contract, spec: TensorSpec) -> tuple[torch.dtype, ...]:
    found: dict[torch.dtype, None] = {}
    for _, form in spec.forms:
        own = form.dtypes
        if own is None:
            spoken = (n for under, r in contract.conditions for n in _elements(r, spec.name))
            own = tuple(spoken) or (torch.float32,)
        preferred = sorted(own, key=lambda d: d.itemsize > 4) if form.layout is None else own
        found |= dict.fromkeys(d for d in preferred if d in _CASTABLE)
    if not found:
        raise TypeError(f"{contract.name}: no dtype of {spec.name} is one that can be allocated here")
    return tuple(found)


def _elements(rule: Any, name: str) -> Iterator[torch.dtype]:
    """The dtypes that a condition compares ``dtype(name)`` with."""
    if not isinstance(rule, Condition) or name not in set(arguments(rule.expr)):
        return

    def walk(expr: Expr) -> Iterator[torch.dtype]:
        match expr:
            case Const(_dtypes.Element() as e):
                yield e.torch
            case Op(_, args):
                for a in args:
                    yield from walk(a)

    yield from walk(rule.expr)


def _spoken_words(contract: Contract) -> dict[str, tuple[str, ...]]:
    """The texts that rules and choices compare a scalar with."""
    found: dict[str, dict[str, None]] = {}
    exprs = [r.expr for under, rule in contract.conditions for r in (*under, rule) if isinstance(r, Condition)]
    exprs += [c for s in contract.tensors.values() for c, _ in s.forms if c is not None]

    def walk(expr: Expr) -> None:
        match expr:
            case Op("==" | "!=" | "in" | "not in", (Name(n), other)):
                items = other.args if isinstance(other, Op) and other.op == "tuple" else (other,)
                texts = [i.value for i in items if isinstance(i, Const) and isinstance(i.value, str)]
                found.setdefault(n, {}).update(dict.fromkeys(texts))
            case Op(_, args):
                for a in args:
                    walk(a)

    for expr in exprs:
        walk(expr)
    return {n: tuple(v) for n, v in found.items()}


def _default_first(contract: Contract, name: str, options: tuple[Any, ...]) -> tuple[Any, ...]:
    parameter = contract.signature.parameters.get(name)
    default = parameter.default if parameter else None
    return tuple(sorted(options, key=lambda o: o != default))


def _undecided(contract: Contract) -> list[Expr]:
    """Conditions of choices that speak of a number."""
    words = {n for n, s in contract.scalars.items() if _is_word(s)}
    conditions = [c for s in contract.tensors.values() for c, _ in s.forms if c is not None]
    return list(dict.fromkeys(c for c in conditions if set(names(c)) - words))


def _is_word(spec: ScalarSpec) -> bool:
    return spec.choices is not None or spec.type in (bool, str)


def _variables(under: tuple[Condition, ...], rule: Any) -> Iterator[Variable]:
    for r in (*under, rule):
        if isinstance(r, Condition):
            yield from (("value", n) for n in names(r.expr))
            yield from (("dtype", n) for n in arguments(r.expr))
            yield from (("given", n) for n in arguments(r.expr))
    if not isinstance(rule, Condition):
        yield from (("given", n) for n in rule.arguments)


def _joined(
    variables: set[Variable], touched: list[tuple[set[Variable], Any]]
) -> list[tuple[list[Variable], list[Any]]]:
    """Groups of variables that share no rule, each with its rules."""
    groups: list[tuple[set[Variable], list[Any]]] = [({v}, []) for v in sorted(variables)]
    for used, rule in touched:
        if not used:
            continue
        mine = [g for g in groups if g[0] & used]
        groups = [g for g in groups if not g[0] & used]
        groups.append((set().union(*(g[0] for g in mine)), [*(r for g in mine for r in g[1]), rule]))
    order = {"value": 0, "case": 1, "given": 2, "dtype": 3}
    return [(sorted(g, key=lambda v: (order[v[0]], v[1])), rules) for g, rules in groups]
