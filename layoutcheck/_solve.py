"""Where each dim of a contract is bound, decided at decoration from structure alone.

In this order: a scalar argument with the dim's name; a plain sighting in a required argument, in signature order; an
equation with one unknown; an inverted sighting; a default; a sighting in an optional argument, for dims that only that
argument speaks of. A part of a composite axis (the page of a slot) binds only where nobody else has bound the whole, so
scales never bind the page size that they are checked against. What no step uses is a check.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutcheck._dims import Equation, Expr, Name, brief, isolate, names, plan
from layoutcheck._rules import Condition, Each
from layoutcheck._specs import Form, TensorSpec

if TYPE_CHECKING:
    from layoutcheck._contract import Contract


@dataclass(frozen=True)
class Step:
    """How one dim becomes known.

    ``kind``: ``scalar`` (an argument's value), ``shape`` (dimension ``index`` of ``argument``), ``variadic`` (all that
    the named variadic covers), ``derive`` (``expr``, from ``equation``), ``default`` (a number). ``optional``: only
    where the argument is given; ``case``: only in that case of the argument's ``Choose``.
    """

    kind: str
    name: str
    argument: str = ""
    index: int = 0
    expr: Expr | None = None
    equation: Equation | None = None
    optional: bool = False
    case: int | None = None

    @property
    def where(self) -> str:
        """Where the number comes from, for a message."""
        match self.kind:
            case "scalar":
                return "an argument"
            case "shape" | "variadic":
                return self.argument
            case "default":
                return "its default"
        return f"{brief(self.expr)}" if self.expr is not None else ""


@dataclass(frozen=True)
class Check:
    """An equation that must hold, and whose argument speaks of it."""

    equation: Equation
    argument: str


def solve(contract: Contract) -> tuple[list[Step], list[Check]]:
    """Every step of a contract in an order in which it can be computed, and the equations that no step uses.

    Raises ``TypeError`` for a dim that nothing determines.
    """
    tensors = contract.tensors.values()
    required = [(s, s.form) for s in tensors if not s.optional and s.form is not None]
    pending = {e: Check(e, s.name) for s, form in reversed(required) for e in form.equations}
    solver = _Solver(set(), list(pending.values()))
    _scalars(contract, solver)
    solver.derive()
    for spec, form in required:
        alone = not any(_shows_whole(form, other) for _, other in required if other is not form)
        solver.sight(spec, form, _visible(alone))
    for spec, form in required:  # parts that no other argument determines
        solver.sight(spec, form, _visible(True))
    for spec, form in required:
        solver.invert(spec, form)
    for spec, form in required:
        solver.defaults(spec, form)
    for spec, form in required:  # a private size that nothing determines is what the tensor says
        solver.sight(spec, form, _any if contract.lone else solver.harmless(form), even_parts=True)

    steps, checks = solver.steps, list(solver.pending)
    for spec, form in [(s, s.form) for s in tensors if s.optional and s.form is not None]:
        elsewhere = {n for s in tensors if s is not spec for _, f in s.forms for n in names_of(f)}
        own = _Solver(solver.known, _own(spec, form, pending), optional=True)
        own.defaults(spec, form)
        own.derive()
        own.sight(spec, form, _not_in(elsewhere), even_parts=True)
        steps += own.steps
        checks += own.pending
    for spec in tensors:
        if spec.form is not None:
            continue
        cases = []
        for i, (_, case) in enumerate(spec.forms):
            own = _Solver(solver.known, _own(spec, case, pending), optional=True, case=i)
            own.derive()
            own.defaults(spec, case)
            own.sight(spec, case, _visible(True))
            own.sight(spec, case, own.harmless(case), even_parts=True)
            cases.append(own)
            steps += own.steps
            checks += own.pending
        if not spec.optional:
            solver.known |= set.intersection(*(c.known for c in cases))
    _must_be_known(contract, {s.name for s in steps})
    return steps, checks


def _own(spec: TensorSpec, form: Form, settled: Container[Equation]) -> list[Check]:
    """The equations of one argument that the required arguments do not settle already."""
    return [Check(e, spec.name) for e in form.equations if e not in settled]


def _any(name: str, whole: str | None) -> bool:
    return True


def _visible(alone: bool) -> Callable[[str, str | None], bool]:
    """Names that other arguments may see; parts only where no other argument shows the whole."""
    return lambda name, whole: "." not in name and (whole is None or alone)


def _not_in(names_: set[str]) -> Callable[[str, str | None], bool]:
    return lambda name, whole: name not in names_


class _Solver:
    """What is known so far, the equations not yet used, and the steps taken."""

    def __init__(
        self, known: set[str], pending: list[Check], *, optional: bool = False, case: int | None = None
    ) -> None:
        self.known, self.pending = set(known), pending
        self.steps: list[Step] = []
        self.optional, self.case = optional, case

    def add(
        self,
        kind: str,
        name: str,
        argument: str,
        index: int = 0,
        expr: Expr | None = None,
        equation: Equation | None = None,
    ) -> None:
        self.steps.append(Step(kind, name, argument, index, expr, equation, self.optional, self.case))
        self.known.add(name)

    def derive(self) -> None:
        """Take every equation that has one unknown left."""
        for name, expr, equation in plan(self.known, [c.equation for c in self.pending]):
            check = next(c for c in self.pending if c.equation is equation)
            self.pending.remove(check)
            self.add("derive", name, check.argument, expr=expr, equation=equation)

    def sight(
        self, spec: TensorSpec, form: Form, allowed: Callable[[str, str | None], bool], *, even_parts: bool = False
    ) -> None:
        """Bind dims that the argument shows plainly, where ``allowed(name, whole)``; then derive what follows.

        A part whose whole is known already is not bound, unless ``even_parts``.
        """
        if form.variadic and form.variadic[1] not in ("...", *self.known):
            self.add("variadic", form.variadic[1], spec.name, form.variadic[0])
        for index, size in _positions(form):
            if not isinstance(size, Name) or size.name in self.known:
                continue
            whole = form.parts.get(size.name)
            if (even_parts or whole not in self.known) and allowed(size.name, whole):
                self.add("shape", size.name, spec.name, index)
        self.derive()

    def harmless(self, form: Form) -> Callable[[str, str | None], bool]:
        """Names that may bind themselves: not a part that would bind a size which others are checked by."""

        def allowed(name: str, whole: str | None) -> bool:
            together = {n for c in self.pending for n in names(c.equation.left) if name in names(c.equation.right)}
            together |= {n for c in self.pending for n in names(c.equation.right) if name in names(c.equation.left)}
            return whole is None or not any("." not in n and n not in self.known for n in together)

        return allowed

    def invert(self, spec: TensorSpec, form: Form) -> None:
        """Solve a shown expression for its only unknown: ``head_dim / 32`` binds head_dim."""
        for index, size in _positions(form):
            if size is None or isinstance(size, Name):
                continue
            unknown = set(names(size)) - self.known
            if len(unknown) != 1:
                continue
            (name,) = unknown
            seen = f"{spec.name}.shape[{index}]"
            if (expr := isolate(size, Name(seen), name)) is not None:
                self.add("shape", seen, spec.name, index)
                self.add("derive", name, spec.name, expr=expr, equation=Equation(size, Name(seen)))
                self.derive()

    def defaults(self, spec: TensorSpec, form: Form) -> None:
        """Sizes with a default that nothing else has determined."""
        for name, value in form.defaults:
            if name not in self.known:
                self.add("default", name, spec.name, value)
        self.derive()


def _scalars(contract: Contract, solver: _Solver) -> None:
    """Arguments and derived values that are dims: plain integers whose name some size or condition uses."""
    needed = {n for s in contract.tensors.values() for _, f in s.forms for n in names_of(f)}
    for under, rule in contract.conditions:
        needed |= {n for c in (*under, rule) if isinstance(c, Condition | Each) for n in names(c.expr)}
    for name in (*contract.signature.parameters, *contract.derive):
        spec = contract.scalars.get(name)
        is_size = spec.type is int and not spec.optional if spec is not None else name in contract.derive
        if name in needed and is_size and name not in contract.tensors:
            solver.add("scalar", name, name)


def names_of(form: Form) -> Iterator[str]:
    """Every name in the sizes, equations and strides of a form."""
    for size in form.sizes:
        if size is not None:
            yield from names(size)
    for equation in form.equations:
        yield from names(equation.left)
        yield from names(equation.right)
    for stride in (*(form.strides or ()), *(e for _, e in form.align)):
        if stride is not None:
            yield from names(stride)
    if form.variadic and form.variadic[1] != "...":
        yield form.variadic[1]


def _positions(form: Form) -> Iterator[tuple[int, Expr | None]]:
    """(index, size) of each dimension; those behind a variadic count from the end."""
    for i, size in enumerate(form.sizes):
        if form.variadic and i >= form.variadic[0]:
            yield i - len(form.sizes), size
        else:
            yield i, size


def _shows_whole(form: Form, other: Form) -> bool:
    """Whether ``other`` shows, as one dimension, a whole of which ``form`` shows the parts."""
    wholes = {form.parts[s.name] for s in form.sizes if isinstance(s, Name) and s.name in form.parts}
    return any(isinstance(s, Name) and s.name in wholes for s in other.sizes)


def _must_be_known(contract: Contract, known: set[str]) -> None:
    for spec in contract.tensors.values():
        for _, form in spec.forms:
            missing = sorted({n for n in names_of(form) if n not in known})
            if not missing:
                continue
            shown = ", ".join(n.rpartition(".")[2] for n in missing)
            first = [d for d in form.layout.dims if d in missing] if form.layout else []
            name = (first or missing)[-1].rpartition(".")[2]
            raise TypeError(
                f"{contract.name}: nothing determines {shown} of {spec.name} ({form.text}). Bind {name} by a "
                f"scalar argument {name}: int, by a required tensor that shows it as a dimension of its own, or by a "
                f"number in the layout ({name}=...)"
            )
