"""A call under explanation: its arguments, the dims that follow from them, and where each number came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layoutcheck import _dtypes
from layoutcheck._contract import Contract
from layoutcheck._dims import ARGUMENT_FUNCTIONS, Const, Expr, Inexact, Name, Op, brief, evaluate, names
from layoutcheck._errors import LayoutError, numbers
from layoutcheck._layout import Layout
from layoutcheck._rules import Condition
from layoutcheck._solve import Step
from layoutcheck._specs import Form, TensorSpec, size_text

Values = dict[str, Any]


def solve(contract: Contract, arguments: Mapping[str, Any]) -> tuple[Values, list[tuple[Step, Inexact]]]:
    """The dims of a call, as far as they can be known, and the steps that left a remainder."""
    values: Values = {
        n: v for n, v in arguments.items() if n not in contract.tensors and not isinstance(v, torch.Tensor)
    }
    inexact = []
    for step in contract.steps:
        if not _applies(contract, step, arguments, values):
            continue
        match step.kind:
            case "scalar":
                if not is_int(arguments.get(step.name)):
                    values.pop(step.name, None)
            case "default":
                values[step.name] = step.index
            case "shape" | "variadic":
                tensor, spec = arguments.get(step.argument), contract.tensors[step.argument]
                form = spec.form if step.case is None else spec.forms[step.case][1]
                if form is not None and isinstance(tensor, torch.Tensor) and _rank_fits(form, tensor):
                    if step.kind == "shape":
                        values[step.name] = tensor.shape[step.index]
                    else:
                        values[step.name] = _covered(form, tensor)
            case "derive":
                assert step.expr is not None
                try:
                    values[step.name] = evaluate(step.expr, values)
                except Inexact as error:
                    inexact.append((step, error))
                except (KeyError, TypeError):  # follows from something that is itself unknown
                    continue
    return values, inexact


class Call:
    """One call of a contract's callable, solved as far as it goes.

    ``values`` are the dims and scalars by name, ``inexact`` the steps that left a remainder, ``origin`` the step that
    bound each dim, ``fits`` the arguments that would be right with another value of a dim. Without ``words`` nobody
    will read what is found; without ``memory`` nobody asks what the tensors' memory is known to hold.
    """

    def __init__(
        self, contract: Contract, arguments: Mapping[str, Any], *, words: bool = True, memory: bool = True
    ) -> None:
        self.words, self.memory = words, memory
        self.fits: dict[tuple[str, int], set[str]] = {}
        self._wanted: dict[int, str] = {}  # both by the id of a form, which outlives this call
        self._concrete: dict[int, Layout | None] = {}
        self.contract, self.arguments = contract, dict(arguments)
        self.values, self.inexact = solve(contract, arguments)
        self.origin = {s.name: s for s in reversed(contract.steps)}

    def form_of(self, spec: TensorSpec) -> Form | None:
        case = case_of(spec, self.values, self.arguments)
        return None if case is None else spec.forms[case][1]

    def expected_shape(self, form: Form, value: torch.Tensor | None = None) -> tuple[list[Any], set[str]]:
        """What each dimension must be: a number, None for any, or the expression where it cannot be computed."""
        expected: list[Any] = []
        unknown: set[str] = set()
        for size in form.sizes:
            if size is None:
                expected.append(None)
                continue
            try:
                expected.append(evaluate(size, self.values))
            except (KeyError, Inexact, TypeError):
                unknown |= {n for n in names(size) if n not in self.values}
                expected.append(size_text(size))
        if form.variadic:
            at, name = form.variadic
            covered = self.values.get(name)
            if covered is None or name == "...":
                count = max(0, (value.dim() if value is not None else 0) - len(form.sizes))
                covered = (None,) * count
            expected[at:at] = list(covered)
        return expected, unknown

    def reason(self, label: str, size: Expr, argument: str = "") -> str:
        """``page = slot / page_size = 8192 / 128 (slot from k_cache)``."""
        while isinstance(size, Name):
            step = self.origin.get(size.name)
            if step is None or step.kind != "derive" or step.expr is None:
                break
            size = step.expr
        used = [n for n in dict.fromkeys(names(size)) if n in self.values]
        sources = [f"{n.rpartition('.')[2]} from {w}" for n in used if (w := self.source_of(n)) and w != argument]
        where = f" ({', '.join(sources)})" if sources else ""
        if isinstance(size, Name):
            return f"{brief(size)} = {self.values.get(size.name)}{where}" if sources else ""
        if isinstance(size, Const):
            return ""
        text = brief(filled(size, self.values))
        head = f"{label} = " if label != brief(size) and not label.startswith("(") else ""
        return f"{head}{brief(size)} = {text}{where}"

    def source_of(self, name: str) -> str:
        """The argument that bound a dim, or an empty text for a scalar argument of that name."""
        step = self.origin.get(name)
        if step is None or step.kind == "scalar":
            return ""
        if step.kind == "derive" and step.expr is not None:
            inner = [self.source_of(n) for n in names(step.expr)]
            return next((w for w in inner if w), "")
        return step.argument if step.kind in ("shape", "variadic") else step.where

    def wanted(self, spec: TensorSpec, form: Form) -> str:
        """A tensor that would be right, as words or code."""
        if id(form) not in self._wanted:
            self._wanted[id(form)] = self._wanted_text(form)
        return self._wanted[id(form)]

    def _wanted_text(self, form: Form) -> str:
        expected, _ = self.expected_shape(form, None)
        concrete = self.concrete(form)
        if concrete is not None:
            expected = list(concrete.shape)
        dtype = "" if not form.dtypes else f" of {_dtypes.short(form.dtypes[0])}"
        shape = numbers([size_text(s) if e is None else e for e, s in zip(expected, form.sizes, strict=False)])
        if form.variadic:
            return f"a tensor {form.text}{dtype}"
        if concrete is not None and (code := _catalogue_call(concrete)):
            return f"{code}.empty(), shape {shape}"
        return f"a tensor {shape}{dtype}"

    def concrete(self, form: Form) -> Layout | None:
        """The layout of a form for the dims of this call; None where they are not known, or contradict each other."""
        if id(form) not in self._concrete:
            self._concrete[id(form)] = self._made(form)
        return self._concrete[id(form)]

    def _made(self, form: Form) -> Layout | None:
        known = self.layout_dims(form)
        if form.layout is None or known is None:
            return None
        try:
            made = form.layout(**known)
            return made if made.concrete and made.shape else None
        except LayoutError:
            return None

    def layout_dims(self, form: Form) -> dict[str, int] | None:
        """The open dims of a form's layout in this call, by the layout's own names; None if one is unknown."""
        return layout_dims(form, self.values)

    def number(self, expr: Expr | None) -> int | None:
        if expr is None:
            return None
        try:
            return int(evaluate(expr, self.values))
        except (KeyError, Inexact, TypeError):
            return None

    def holds(self, condition: Condition) -> bool:
        try:
            return bool(evaluate(condition.expr, self.values, self.arguments))
        except (KeyError, Inexact, TypeError, AttributeError):
            return False


def layout_dims(form: Form, values: Mapping[str, Any]) -> dict[str, int] | None:
    """The open dims of a form's layout, by the layout's own names; None if one is unknown."""
    result = {}
    for name, expr in form.dims:
        try:
            value = evaluate(expr, values)
        except (KeyError, Inexact, TypeError):
            return None
        if not is_int(value):
            return None
        result[name] = int(value)
    return result if form.layout is not None else None


def _applies(contract: Contract, step: Step, arguments: Mapping[str, Any], values: Values) -> bool:
    """Whether a step is taken in this call: not where its argument is absent, or its case is not the one chosen."""
    spec = contract.tensors.get(step.argument)
    if spec is None or not step.optional:
        return True
    if not isinstance(arguments.get(step.argument), torch.Tensor):
        return not spec.optional
    return step.case is None or step.case == case_of(spec, values, arguments)


def case_of(spec: TensorSpec, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> int | None:
    """Which case of a choice this call is."""
    for i, (condition, _) in enumerate(spec.forms):
        try:
            if condition is None or evaluate(condition, values, arguments):
                return i
        except (KeyError, Inexact, TypeError):
            continue
    return None


def _catalogue_call(concrete: Layout) -> str | None:
    """``layout("mxfp8.flat")(slot=64, ...)`` where that makes this very layout; its dims may have had other names."""
    from layoutcheck.layouts import entries

    entry = entries().get(concrete.name)
    if not isinstance(entry, Layout) or entry.elements != concrete.elements:
        return None
    sizes = sizes_in(entry, concrete)
    if sizes is None:
        return None
    solved = entry._solve(sizes)
    if tuple(evaluate(d.size, solved) for d in entry.tensor_dims) != concrete.shape:
        return None
    return f"layout({entry.name!r})({', '.join(f'{n}={v}' for n, v in sizes.items())})"


def sizes_in(entry: Layout, concrete: Layout) -> dict[str, int] | None:
    """The open dims of a layout that give a concrete one of the same axes; None where they do not follow."""
    if entry.axes != concrete.axes:
        return None
    nodes = [a.name for axis in entry.axes for a in axis.walk()]
    known = {e.name: concrete.values_of(n) for n in nodes if isinstance(e := entry.size_of(n), Name)}
    solved = entry._solve(known)
    return {d: solved[d] for d in entry.dims} if set(entry.dims) <= set(solved) else None


def _rank_fits(form: Form, tensor: torch.Tensor) -> bool:
    return tensor.dim() >= len(form.sizes) if form.variadic else tensor.dim() == len(form.sizes)


def _covered(form: Form, tensor: torch.Tensor) -> tuple[int, ...]:
    assert form.variadic is not None
    at = form.variadic[0]
    return tuple(tensor.shape[at : tensor.dim() - (len(form.sizes) - at)])


def is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def filled(expr: Expr, values: Mapping[str, Any]) -> Expr:
    """The expression with numbers for names, not simplified."""
    match expr:
        case Name(n):
            return Const(values[n]) if n in values else expr
        case Op(op, args) if op not in ARGUMENT_FUNCTIONS:
            return Op(op, tuple(filled(a, values) for a in args))
    return expr


def shown(value: Any) -> str:
    """A value for a message: text in quotes."""
    return repr(value) if isinstance(value, str) else str(value)
