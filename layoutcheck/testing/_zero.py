"""Which sizes of a contract may be 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from layoutcheck._contract import Contract
from layoutcheck._dims import Expr, Name, Op, divisions, names
from layoutcheck._rules import Condition
from layoutcheck._specs import Form


def may_be_zero(contract: Contract, forms: Mapping[str, Form]) -> Iterator[str]:
    """Sizes that may be 0: outermost in every tensor that shows them, and no divisor of anything."""
    inner: set[str] = set()
    outer: set[str] = set()
    for form in forms.values():
        for i, size in enumerate(form.sizes):
            if size is None:
                continue
            (outer if i == 0 and isinstance(size, Name) else inner).update(names(size))
    exprs = [e for s in contract.steps if s.expr is not None for e in (s.expr,)]
    exprs += [side for c in contract.checks for side in (c.equation.left, c.equation.right)]
    exprs += [r.expr for _, r in contract.conditions if isinstance(r, Condition)]
    divisors = {n for e in exprs for d in divisions(e) for n in names(d.args[1])}
    divisors |= {n for e in exprs for n in _remainders(e)}
    yield from outer - inner - divisors
    for form in forms.values():  # the whole of an outermost part is zero with it
        for part, whole in form.parts.items():
            if part in outer - inner - divisors and whole not in inner | divisors:
                yield whole


def _remainders(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("%" | "//" | "cdiv" | "align", (a, b)):
            yield from names(b)
            yield from _remainders(a)
        case Op(_, args):
            for a in args:
                yield from _remainders(a)
