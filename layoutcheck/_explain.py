"""The slow path: recompute a call from its contract, collect every broken rule, and say what was expected and why.

Reached only when something broke. What was wrongly assumed is ``_causes``' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from layoutcheck import _causes, _compile, _dtypes
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Equation, Expr, Inexact, Name, Op, brief, evaluate, names
from layoutcheck._errors import Violation, numbers, table
from layoutcheck._layout import Layout
from layoutcheck._rules import Condition, Forbids, Needs, NoOverlap, Together
from layoutcheck._solve import Check, Step
from layoutcheck._specs import Form, ScalarSpec, TensorSpec, size_text, type_text

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
                if not _is_int(arguments.get(step.name)):
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


def explain(contract: Contract, arguments: Mapping[str, Any]) -> list[Violation]:
    """Every rule that the call breaks, in the order of the arguments."""
    return list(_Explanation(contract, arguments).violations())


def explain_result(contract: Contract, result: Any, arguments: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with a return value."""
    results = result if len(contract.results) > 1 else (result,)
    if len(contract.results) > 1 and (not isinstance(result, tuple) or len(result) != len(contract.results)):
        wanted = f"a tuple of {len(contract.results)}"
        return [Violation("return", "presence", wanted, type(result).__name__)]
    e = _Explanation(contract, arguments)
    found: list[Violation] = []
    for spec, value in zip(contract.results, results, strict=True):
        if spec is not None:
            found += e.tensor(spec, value)
    return found


class _Explanation:
    def __init__(self, contract: Contract, arguments: Mapping[str, Any]) -> None:
        self.contract, self.arguments = contract, dict(arguments)
        self.values, self.inexact = solve(contract, arguments)
        self.origin = {s.name: s for s in reversed(contract.steps)}

    def violations(self) -> Iterator[Violation]:
        broken: set[str] = set()
        collected: list[Violation] = []
        for name, spec in self.contract.specs.items():
            found = (
                self.tensor(spec, self.arguments.get(name))
                if isinstance(spec, TensorSpec)
                else self.scalar(spec, self.arguments.get(name))
            )
            collected += found
            broken |= {name for v in found if v.rule in ("shape", "presence")}
        for step, error in self.inexact:
            if step.argument not in broken and self._live(step.argument):
                collected.append(self.remainder(step, error))
                broken.add(step.argument)
        for check in self.contract.checks:
            if check.argument not in broken and self._live(check.argument) and (v := self.equation(check)):
                collected.append(v)
        yield from collected
        yield from self.device()
        absent = {v.argument for v in collected if v.rule == "presence"}
        for under, rule in self.contract.conditions:
            if all(self.holds(u) for u in under):
                for v in self.rule(under, rule, broken):
                    if v.rule != "presence" or v.argument not in absent:  # once is enough
                        absent |= {v.argument} if v.rule == "presence" else set()
                        yield v

    def _live(self, argument: str) -> bool:
        return isinstance(self.arguments.get(argument), torch.Tensor)

    # --- one argument ------------------------------------------------------------------------------------------------

    def scalar(self, spec: ScalarSpec, value: Any) -> list[Violation]:
        if value is None and spec.optional:
            return []
        if spec.choices is not None:
            good = value in spec.choices
        elif spec.classes is not None:
            good = isinstance(value, spec.classes)
        else:
            good = spec.test is None or spec.test(value)
        if good:
            return []
        text = type_text(spec)
        got = f"{value!r:.60} ({type(value).__name__})"
        rule: Any = "presence" if value is None else "value"
        return [Violation(spec.name, rule, text, got, headline=f"{spec.name} must be {text}")]

    def tensor(self, spec: TensorSpec, value: Any) -> list[Violation]:
        name = spec.name
        form = self.form_of(spec)
        if form is None:
            return [self.no_case(spec)]
        if value is None:
            if spec.optional:
                return []
            return [
                Violation(
                    name, "presence", f"a tensor ({form.text})", "None", headline=f"{name} is required, got None",
                    fix=f"pass {name}: {self.wanted(spec, form)}",
                )
            ]  # fmt: skip
        if not isinstance(value, torch.Tensor):
            what = f"{type(value).__module__}.{type(value).__qualname__}"
            return [
                Violation(name, "dtype", "torch.Tensor", what, headline=f"{name} must be a torch.Tensor, got {what}")
            ]
        found = []
        if form.dtypes is not None and value.dtype not in form.dtypes:
            found.append(self.dtype(spec, form, value))
        for size in form.sizes:
            try:
                evaluate(size, self.values) if size is not None else None
            except Inexact as error:
                equation = Equation(size, size)  # type: ignore[arg-type]
                return [*found, self.remainder(Step("derive", "", spec.name, expr=size, equation=equation), error)]
            except (KeyError, TypeError):
                continue
        if shape := self.shape(spec, form, value):
            found.append(shape)
        elif form.strides is not None:
            found += self.strides(spec, form, value)
        return found

    def form_of(self, spec: TensorSpec) -> Form | None:
        case = _case(spec, self.values, self.arguments)
        return None if case is None else spec.forms[case][1]

    def no_case(self, spec: TensorSpec) -> Violation:
        wanted = " or ".join(brief(c) for c, _ in spec.forms if c is not None)
        used = {n for c, _ in spec.forms if c is not None for n in names(c)}
        got = ", ".join(f"{n} = {self.values.get(n, 'unknown')!r}" for n in sorted(used))
        return Violation(
            spec.name, "relation", wanted, got, headline=f"{spec.name} has no layout for this call: needs {wanted}"
        )

    def dtype(self, spec: TensorSpec, form: Form, value: torch.Tensor) -> Violation:
        assert form.dtypes is not None
        wanted = " or ".join(_dtypes.short(d) for d in form.dtypes)
        got = _dtypes.short(value.dtype)
        cause, fix = _causes.dtype(spec.name, form, value)
        return Violation(
            spec.name, "dtype", wanted, got, cause, fix, headline=f"{spec.name} has the wrong dtype for {form.text}"
        )

    def shape(self, spec: TensorSpec, form: Form, value: torch.Tensor) -> Violation | None:
        expected, unknown = self.expected_shape(form, value)
        actual = tuple(value.shape)
        if len(expected) == len(actual) and all(
            e is None or isinstance(e, str) or e == a for e, a in zip(expected, actual, strict=True)
        ):
            return None
        cells = [str(e) if e is not None else "_" for e in expected]
        labels = list(form.labels)
        if form.variadic:
            at = form.variadic[0]
            extra = len(expected) - len(labels)
            labels[at:at] = [f"*{form.variadic[1]}"] * extra if extra > 0 else []
        remark = self.remark(spec, form, expected, actual)
        if len(actual) == len(expected):
            body = table(labels, [("expected", cells, remark), ("got", [str(a) for a in actual], "")])
        else:
            body = (
                *table(labels, [("expected", cells, remark)]),
                f"{'got':<11}{numbers(actual)}: {len(actual)} dimensions, {len(expected)} are needed",
            )
        cause, fix = _causes.shape(self, spec, form, value, expected, unknown)
        return Violation(
            spec.name,
            "shape",
            numbers([c if e is not None else "_" for c, e in zip(cells, expected, strict=True)]),
            numbers(actual),
            cause,
            fix or f"pass {self.wanted(spec, form)}",
            headline=f"{spec.name} does not match {form.text}",
            body=body,
        )

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

    def remark(self, spec: TensorSpec, form: Form, expected: list[Any], actual: tuple[int, ...]) -> str:
        """Where the first number that differs comes from."""
        if form.variadic:
            return ""
        differing = [
            i for i in range(len(form.sizes)) if len(expected) != len(actual) or (expected[i] not in (None, actual[i]))
        ]
        for i in differing or range(len(form.sizes)):
            size = form.sizes[i]
            if size is None or isinstance(size, Const) or isinstance(expected[i], str):
                continue
            text = self.reason(form.labels[i], size, spec.name)
            if text:
                return text
        return ""

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
        filled = brief(_filled(size, self.values))
        head = f"{label} = " if label != brief(size) and not label.startswith("(") else ""
        return f"{head}{brief(size)} = {filled}{where}"

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
        expected, _ = self.expected_shape(form, None)
        known = self.layout_dims(form)
        if form.layout is not None and known is not None:
            expected = list(form.layout(**known).shape)
        dtype = "" if not form.dtypes else f" of {_dtypes.short(form.dtypes[0])}"
        shape = numbers([size_text(s) if e is None else e for e, s in zip(expected, form.sizes, strict=False)])
        if form.variadic:
            return f"a tensor {form.text}{dtype}"
        if known is not None and form.layout is not None and (code := _catalogue_call(form.layout(**known))):
            return f"{code}.empty(), shape {shape}"
        return f"a tensor {shape}{dtype}"

    def layout_dims(self, form: Form) -> dict[str, int] | None:
        """The open dims of a form's layout in this call, by the layout's own names; None if one is unknown."""
        if form.layout is None:
            return None
        result = {}
        for name in form.layout.dims:
            value = self.values.get(name)
            if value is None:
                value = next((v for n, v in self.values.items() if n.endswith(f".{name}")), None)
            if value is None or not _is_int(value):
                return None
            result[name] = int(value)
        return result

    def strides(self, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
        assert form.strides is not None
        expected: list[Any] = []
        wrong = []
        floors: dict[int, int] = {}
        for i, stride in enumerate(form.strides):
            wanted = self.number(stride) if stride is not None else None
            expected.append(wanted if stride is not None else "any")
            if value.shape[i] <= 1:
                continue
            if wanted is not None and value.stride(i) != wanted:
                wrong.append(i)
            elif stride is None and form.inner:
                inside = _compile.free_inner(form, i)
                floor = self.number(form.inner[i]) if inside is None else value.stride(inside) * value.shape[inside]
                if floor is not None and value.stride(i) < floor:
                    wrong.append(i)
                    floors[i] = floor
                    expected[i] = f">={floor}"
        if wrong and value.numel():
            shown = [str(e) for e in expected]
            cause, fix = _causes.stride(self, spec, form, value, expected, wrong)
            first = wrong[0]
            text = f" of {form.labels[first]}" if len(wrong) == 1 else ""
            body: tuple[str, ...]
            if first in floors:
                body = (
                    f"expected   stride of {form.labels[first]} >= {floors[first]}, or elements would share memory",
                    f"got        {value.stride(first)}",
                )
            else:
                rows = [
                    ("expected", shown, self.pitch_remark(form, first)),
                    ("got", [str(s) for s in value.stride()], ""),
                ]
                body = table(form.labels, rows)
            yield Violation(
                spec.name, "stride", numbers(shown), numbers(value.stride()), cause, fix,
                headline=f"{spec.name} has the wrong strides{text} for {form.text}", body=body,
            )  # fmt: skip
        yield from self.alignment(spec, form, value)
        yield from self.overflow(spec, form, value)

    def pitch_remark(self, form: Form, index: int) -> str:
        stride = form.strides[index] if form.strides else None
        if stride is None or isinstance(stride, Const):
            return "strides, in elements"
        return self.reason(f"stride of {form.labels[index]}", stride) or "strides, in elements"

    def alignment(self, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
        for index, size in form.align:
            wanted = self.number(size)
            if wanted is None:
                continue
            if index is None:
                if value.device.type == "meta" or torch.compiler.is_compiling():
                    continue
                got, what = value.data_ptr(), "base address"
            elif value.shape[index] > 1:
                got, what = value.stride(index) * value.element_size(), f"stride of {form.labels[index]} in bytes"
            else:
                continue
            if got % wanted:
                offset = value.storage_offset() * value.element_size()
                cause = (
                    f"{spec.name} starts {offset} bytes into its storage" if index is None and offset % wanted else None
                )
                yield Violation(
                    spec.name, "alignment", f"{what} % {wanted} == 0", f"{got} % {wanted} = {got % wanted}", cause,
                    f"allocate {spec.name} so that its {what} is a multiple of {wanted}",
                    headline=f"{spec.name} is not aligned for {form.text}",
                )  # fmt: skip

    def overflow(self, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
        if not form.int32 or value.numel() == 0:
            return
        reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        if reach <= _compile.INT32_MAX:
            return
        outer = max(range(value.dim()), key=value.stride)
        fits = (_compile.INT32_MAX - (reach - (value.shape[outer] - 1) * value.stride(outer))) // value.stride(
            outer
        ) + 1
        yield Violation(
            spec.name, "overflow", f"largest offset <= {_compile.INT32_MAX}", str(reach),
            f"the offsets of {spec.name} are computed in 32 bits: {value.shape[outer]} x stride {value.stride(outer)} "
            f"of {form.labels[outer]} passes 2**31",
            f"use at most {fits} {form.labels[outer]}s, or a layout with offsets='int64'",
            headline=f"{spec.name} is too large for 32-bit offsets",
        )  # fmt: skip

    def number(self, expr: Expr | None) -> int | None:
        if expr is None:
            return None
        try:
            return int(evaluate(expr, self.values))
        except (KeyError, Inexact, TypeError):
            return None

    # --- relations ---------------------------------------------------------------------------------------------------

    def remainder(self, step: Step, error: Inexact) -> Violation:
        expr = step.expr
        assert expr is not None
        assert step.equation is not None
        division = error.division
        left, right = (brief(a) for a in division.args)
        if error.denominator == 0:
            wanted, got = f"{right} != 0", f"{right} = 0"
        else:
            rest = error.numerator % error.denominator
            wanted, got = f"{left} % {right} == 0", f"{error.numerator} % {error.denominator} = {rest}"
        sources = [
            f"{n.rpartition('.')[2]} from {w}" for n in dict.fromkeys(names(division)) if (w := self.source_of(n))
        ]
        where = f" ({', '.join(sources)})" if sources else ""
        spec = self.contract.tensors.get(step.argument)
        text = self.form_of(spec).text if spec and self.form_of(spec) else ""  # type: ignore[union-attr]
        return Violation(
            step.argument, "relation", wanted, got + where,
            f"{text} needs {step.equation}" if text and step.equation.left != step.equation.right else None,
            f"choose {left} as a multiple of {error.denominator}" if error.denominator else f"pass a {right} above 0",
            headline=f"{step.argument}: {wanted} is needed",
        )  # fmt: skip

    def equation(self, check: Check) -> Violation | None:
        equation = check.equation
        try:
            left, right = (evaluate(side, self.values) for side in (equation.left, equation.right))
        except Inexact as error:
            return self.remainder(Step("derive", "", check.argument, expr=equation.left, equation=equation), error)
        except (KeyError, TypeError):
            return None
        if left == right:
            return None
        used = dict.fromkeys(n for side in (equation.left, equation.right) for n in names(side))
        sources = [f"{n.rpartition('.')[2]} = {self.values[n]}{self._from(n)}" for n in used if n in self.values]
        return Violation(
            check.argument, "relation", str(equation), f"{left} and {right}", None,
            f"make {brief(equation.left)} equal to {brief(equation.right)}",
            headline=f"{check.argument}: {equation} does not hold",
            body=(f"expected {equation}", f"got      {left} and {right}: {', '.join(sources)}"),
        )  # fmt: skip

    def _from(self, name: str) -> str:
        where = self.source_of(name)
        return f" from {where}" if where else ""

    def device(self) -> Iterator[Violation]:
        if not self.contract.same_device:
            return
        given = [(n, v) for n in self.contract.tensors if isinstance(v := self.arguments.get(n), torch.Tensor)]
        required = [(n, v) for n, v in given if not self.contract.tensors[n].optional]
        for name, value in given:
            first, reference = (required or given)[0]
            if value.device != reference.device:
                yield Violation(
                    name, "device", f"{reference.device}, as {first}", str(value.device), None,
                    f"move {name} to {reference.device}", headline=f"{name} is on another device than {first}",
                )  # fmt: skip

    # --- rules -------------------------------------------------------------------------------------------------------

    def holds(self, condition: Condition) -> bool:
        try:
            return bool(evaluate(condition.expr, self.values, self.arguments))
        except (KeyError, Inexact, TypeError, AttributeError):
            return False

    def rule(self, under: tuple[Condition, ...], rule: Any, broken: set[str]) -> Iterator[Violation]:
        because = self.because(under)
        match rule:
            case Condition(expr):
                if (v := self.condition(expr, because)) is not None and v.argument not in broken:
                    yield v
            case Needs(args):
                for name in args:
                    if self.arguments.get(name) is None:
                        yield self.presence(name, given=False, because=because)
            case Forbids(args):
                for name in args:
                    if self.arguments.get(name) is not None:
                        yield self.presence(name, given=True, because=because)
            case Together(args):
                present = [a for a in args if self.arguments.get(a) is not None]
                for name in args if present else ():
                    if name not in present:
                        yield self.presence(name, given=False, because=f"{' and '.join(present)} {_is(present)} given")
            case NoOverlap(args):
                yield from self.no_overlap(args)

    def because(self, under: tuple[Condition, ...]) -> str:
        parts = []
        for condition in under:
            facts = [
                f"{n} = {_shown(self.values[n])}" for n in dict.fromkeys(names(condition.expr)) if n in self.values
            ]
            facts += [
                f"{n} is {_dtypes.short(v.dtype)}"
                for n in _dtype_arguments(condition.expr)
                if isinstance(v := self.arguments.get(n), torch.Tensor)
            ]
            parts.append(f"{condition}" + (f" ({', '.join(facts)})" if facts else ""))
        return " and ".join(parts)

    def presence(self, name: str, *, given: bool, because: str) -> Violation:
        spec = self.contract.tensors.get(name)
        form = self.form_of(spec) if spec else None
        tail = f" when {because}" if because else ""
        if given:
            got = "a tensor" if isinstance(self.arguments[name], torch.Tensor) else repr(self.arguments[name])
            return Violation(
                name, "presence", f"None{tail}", got, None, f"pass {name}=None",
                headline=f"{name} must be None{tail}",
            )  # fmt: skip
        what = self.wanted(spec, form) if spec and form else f"a value for {name}"
        return Violation(
            name, "presence", f"{name} given{tail}", "None (missing)", None, f"pass {name}: {what}",
            headline=f"{name} is required{tail}, got None",
        )  # fmt: skip

    def condition(self, expr: Expr, because: str) -> Violation | None:
        try:
            good = evaluate(expr, self.values, self.arguments)
            detail = ""
        except Inexact as error:
            good, detail = False, str(error)
        except (KeyError, TypeError, AttributeError):
            return None
        if good:
            return None
        if isinstance(expr, Op) and expr.op == "and":
            for part in expr.args:
                if (v := self.condition(part, because)) is not None:
                    return v
        used = list(dict.fromkeys(names(expr)))
        facts = [f"{n} = {_shown(self.values[n])}{self._from(n)}" for n in used if n in self.values]
        facts += [f"dtype({n}) = {_dtype_of(self.arguments.get(n))}" for n in _dtype_arguments(expr)]
        argument = self.owner(expr, used)
        got = detail or self.sides(expr) or ", ".join(facts)
        tail = f" when {because}" if because else ""
        rule: Literal["relation", "dtype"] = "dtype" if any(True for _ in _dtype_arguments(expr)) else "relation"
        return Violation(
            argument, rule, brief(expr), got, None, self.fix(expr, argument),
            headline=f"{argument}: {brief(expr)} is needed{tail}",
            body=(f"expected {brief(expr)}", f"got      {got}" + (f": {', '.join(facts)}" if got not in facts else "")),
        )  # fmt: skip

    def owner(self, expr: Expr, used: list[str]) -> str:
        """The argument that a condition speaks of: one that it names, or the one that bound its dims."""
        for name in _dtype_arguments(expr):
            return name
        for name in used:
            if name in self.contract.signature.parameters:
                return name
        for name in used:
            if where := self.source_of(name):
                return where
        return used[0] if used else next(iter(self.contract.specs), "")

    def sides(self, expr: Expr) -> str:
        """``100 % 32 = 4`` for ``page_size % 32 == 0``."""
        if not (isinstance(expr, Op) and len(expr.args) == 2 and expr.op in ("==", "!=", "<", "<=", ">", ">=")):
            return ""
        left, right = expr.args
        if any(True for _ in _dtype_arguments(expr)):
            return f"{_dtype_of_expr(left, self.arguments)} and {_dtype_of_expr(right, self.arguments)}"
        try:
            a, b = evaluate(left, self.values, self.arguments), evaluate(right, self.values, self.arguments)
        except (KeyError, Inexact, TypeError):
            return ""
        filled = brief(_filled(left, self.values))
        text = f"{filled} = {a}" if isinstance(left, Op) else _shown(a)
        return text if isinstance(right, Const) else f"{text} and {brief(_filled(right, self.values))} = {b}"

    def fix(self, expr: Expr, argument: str) -> str | None:
        match expr:
            case Op("==", (Op("%", (a, Const(n))), Const(0))):
                return f"choose {brief(a)} as a multiple of {n}"
            case Op("==", (Op("dtype", (Name(n),)), Const(_dtypes.Element() as e))):
                return f"pass {n} as {_dtypes.short(e.torch)}"
            case Op("==", (Name(n), Const(v))):
                return f"pass {n} = {_shown(v)}"
        return f"change {argument} so that {brief(expr)}"

    def no_overlap(self, args: tuple[str, ...]) -> Iterator[Violation]:
        for i, first in enumerate(args):
            for second in args[i + 1 :]:
                a, b = self.arguments.get(first), self.arguments.get(second)
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _compile.overlap(a, b):
                    yield Violation(
                        second, "relation", f"memory apart from {first}", f"shares memory with {first}", None,
                        f"pass a {second} with memory of its own", headline=f"{second} overlaps {first}",
                    )  # fmt: skip


# --- helpers ----------------------------------------------------------------------------------------------------------


def _applies(contract: Contract, step: Step, arguments: Mapping[str, Any], values: Values) -> bool:
    """Whether a step is taken in this call: not where its argument is absent, or its case is not the one chosen."""
    spec = contract.tensors.get(step.argument)
    if spec is None or not step.optional:
        return True
    if not isinstance(arguments.get(step.argument), torch.Tensor):
        return not spec.optional
    return step.case is None or step.case == _case(spec, values, arguments)


def _case(spec: TensorSpec, values: Values, arguments: Mapping[str, Any]) -> int | None:
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
    nodes = [a.name for axis in entry.axes for a in axis.walk()]
    known = {e.name: concrete.values_of(n) for n in nodes if isinstance(e := entry.size_of(n), Name)}
    solved = entry._solve(known)
    sizes = {d: solved[d] for d in entry.dims if d in solved}
    if entry(**sizes).shape != concrete.shape:
        return None
    return f"layout({entry.name!r})({', '.join(f'{n}={v}' for n, v in sizes.items())})"


def _rank_fits(form: Form, tensor: torch.Tensor) -> bool:
    return tensor.dim() >= len(form.sizes) if form.variadic else tensor.dim() == len(form.sizes)


def _covered(form: Form, tensor: torch.Tensor) -> tuple[int, ...]:
    assert form.variadic is not None
    at = form.variadic[0]
    return tuple(tensor.shape[at : tensor.dim() - (len(form.sizes) - at)])


def _is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _is(names_: list[str]) -> str:
    return "is" if len(names_) == 1 else "are"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and not value else repr(value) if isinstance(value, str) else str(value)


def _filled(expr: Expr, values: Mapping[str, Any]) -> Expr:
    """The expression with numbers for names, not simplified."""
    match expr:
        case Name(n):
            return Const(values[n]) if n in values else expr
        case Op(op, args):
            return Op(op, tuple(_filled(a, values) for a in args))
    return expr


def _dtype_arguments(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("dtype", (Name(n),)):
            yield n
        case Op(_, args):
            for a in args:
                yield from _dtype_arguments(a)


def _dtype_of(value: Any) -> str:
    return _dtypes.short(value.dtype) if isinstance(value, torch.Tensor) else repr(value)


def _dtype_of_expr(expr: Expr, arguments: Mapping[str, Any]) -> str:
    match expr:
        case Op("dtype", (Name(n),)):
            return _dtype_of(arguments.get(n))
        case Const(_dtypes.Element() as e):
            return _dtypes.short(e.torch)
    return brief(expr)
