"""Broken relations in words: remainders, equations, devices, and the rules of a contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from layoutcheck import _causes, _declared, _dtypes, _strides
from layoutcheck._call import Call, filled, shown
from layoutcheck._dims import Const, Expr, Inexact, Name, Op, arguments, brief, calls, evaluate, names, substitute
from layoutcheck._errors import Rule, Violation
from layoutcheck._rules import VALUE, Agree, Condition, Each, Forbids, Needs, NoOverlap, Together
from layoutcheck._solve import Check, Step


def remainder(call: Call, step: Step, error: Inexact) -> Violation:
    expr = step.expr
    assert expr is not None
    assert step.equation is not None
    division = error.division
    left, right = (brief(a) for a in division.args)
    if error.denominator == 0:
        wanted, got = f"{right} != 0", f"{right} = 0"
    else:
        rest = error.numerator % error.denominator
        wanted = f"{brief(Op('%', division.args))} == 0"
        got = f"{error.numerator} % {error.denominator} = {rest}"
    sources = [f"{n.rpartition('.')[2]} from {w}" for n in dict.fromkeys(names(division)) if (w := call.source_of(n))]
    where = f" ({', '.join(sources)})" if sources else ""
    spec = call.contract.tensors.get(step.argument)
    text = call.form_of(spec).text if spec and call.form_of(spec) else ""  # type: ignore[union-attr]
    return Violation(
        step.argument, "relation", wanted, got + where,
        f"{text} needs {step.equation}{_known_side(call, step)}" if text and step.equation.left != step.equation.right
        else None,
        f"choose {left} as a multiple of {error.denominator}" if error.denominator else f"pass a {right} above 0",
        headline=f"{step.argument}: {wanted} is needed",
    )  # fmt: skip


def _known_side(call: Call, step: Step) -> str:
    """``, and K / tp is 64``: the number that should have divided."""
    assert step.equation is not None
    for side in (step.equation.left, step.equation.right):
        if isinstance(side, Op) and (value := call.number(side)) is not None:
            return f", and {brief(side)} is {brief(filled(side, call.values))} = {value}"
    return ""


def equation(call: Call, check: Check) -> Violation | None:
    equation = check.equation
    try:
        left, right = (evaluate(side, call.values) for side in (equation.left, equation.right))
    except Inexact as error:
        return remainder(call, Step("derive", "", check.argument, expr=equation.left, equation=equation), error)
    except (KeyError, TypeError):
        return None
    if left == right:
        return None
    used = dict.fromkeys(n for side in (equation.left, equation.right) for n in names(side))
    sources = [f"{n.rpartition('.')[2]} = {call.values[n]}{_from(call, n)}" for n in used if n in call.values]
    return Violation(
        check.argument, "relation", str(equation), f"{left} and {right}", None,
        f"make {brief(equation.left)} equal to {brief(equation.right)}",
        headline=f"{check.argument}: {equation} does not hold",
        body=(f"expected {equation}", f"got      {left} and {right}: {', '.join(sources)}"),
    )  # fmt: skip


def device(call: Call) -> Iterator[Violation]:
    if not call.contract.same_device:
        return
    given = [(n, v) for n in call.contract.tensors if isinstance(v := call.arguments.get(n), torch.Tensor)]
    required = [(n, v) for n, v in given if not call.contract.tensors[n].optional]
    for name, value in given:
        first, reference = (required or given)[0]
        if value.device != reference.device:
            yield Violation(
                name, "device", f"{reference.device}, as {first}", str(value.device), None,
                f"move {name} to {reference.device}", headline=f"{name} is on another device than {first}",
            )  # fmt: skip


def rule(call: Call, under: tuple[Condition, ...], rule: Any, broken: set[str]) -> Iterator[Violation]:
    because = _because(call, under)
    match rule:
        case Condition(expr):
            if (v := _condition(call, expr, because)) is not None and v.argument not in broken:
                yield v
        case Needs(args):
            for name in args:
                if call.arguments.get(name) is None:
                    yield _presence(call, name, given=False, because=because)
        case Forbids(args):
            for name in args:
                if call.arguments.get(name) is not None:
                    yield _presence(call, name, given=True, because=because)
        case Together(args):
            present = [a for a in args if call.arguments.get(a) is not None]
            for name in args if present else ():
                if name not in present:
                    yield _presence(call, name, given=False, because=f"{' and '.join(present)} {_is(present)} given")
        case NoOverlap(args):
            yield from _no_overlap(call, args)
        case Each((name,)) if name not in call.contract.tensors:
            yield from _each(call, rule, because)
        case Agree((first, second), fields):
            yield from _declared.disagreement(call, first, second, fields)


def _because(call: Call, under: tuple[Condition, ...]) -> str:
    """Why a rule is in force, with the facts of this call: ``k_cache is float8_e4m3fn``."""
    return " and ".join(_fact(call, condition.expr) for condition in under)


def _fact(call: Call, expr: Expr) -> str:
    """A condition that holds in this call, in words."""
    match expr:
        case Op("given", (Name(n),)):
            return f"{n} is given"
        case Op("not", (Op("given", (Name(n),)),)):
            return f"{n} is None"
        case Op("==" | "!=" | "in" | "not in", (Op("dtype", (Name(n),)), _)):
            return f"{n} is {_dtype_of(call.arguments.get(n))}"
        case Op("or" | "and", parts):
            return " and ".join(_fact(call, p) for p in parts if call.holds(Condition(p)))
        case Name(n):
            return f"{n} is {call.values.get(n)}"
    facts = [f"{n} = {shown(call.values[n])}" for n in dict.fromkeys(names(expr)) if n in call.values]
    return brief(expr) if isinstance(expr, Op) and expr.op == "==" else f"{brief(expr)} ({', '.join(facts)})"


def _presence(call: Call, name: str, *, given: bool, because: str) -> Violation:
    spec = call.contract.tensors.get(name)
    form = call.form_of(spec) if spec else None
    why = f" because {because}" if because else ""
    if given:
        got = "a tensor" if isinstance(call.arguments[name], torch.Tensor) else repr(call.arguments[name])
        return Violation(
            name, "presence", f"None{why}", got, None, f"pass {name}=None: it would be ignored",
            headline=f"{name} must be None{why}, got {got}", body=(),
        )  # fmt: skip
    what = call.wanted(spec, form) if spec and form else f"a value for {name}"
    return Violation(
        name, "presence", f"{name} given{why}", "None (missing)", None, f"pass {name}: {what}",
        headline=f"{name} is required{why}, got None", body=(),
    )  # fmt: skip


def _condition(call: Call, expr: Expr, because: str) -> Violation | None:
    try:
        if evaluate(expr, call.values, call.arguments):
            return None
        detail = ""
    except Inexact as error:
        detail = str(error)
    except (KeyError, TypeError, AttributeError):
        return None
    if isinstance(expr, Op) and expr.op == "and":
        for part in expr.args:
            if (v := _condition(call, part, because)) is not None:
                return v
    why = f" because {because}" if because else ""
    match expr:
        case Op("==" | "in" as op, (Op("dtype", (Name(n),)), other)):
            wanted = _dtype_words(call, other)
            got = _dtype_of(call.arguments.get(n))
            narrower = "float8" in wanted and got in ("bfloat16", "float16", "float32")
            same = f" as {other.args[0].name}" if op == "==" and isinstance(other, Op) and other.op == "dtype" else ""  # type: ignore[union-attr]
            return Violation(
                n, "dtype", wanted, got, None, f"{f'quantise {n} to' if narrower else f'pass {n} as'} {wanted}",
                headline=f"{n} must be {wanted}{same}{why}, got {got}", body=(),
            )  # fmt: skip
        case Op("==" | "!=" | "in" | "not in" as op, operands) if any(_declared.is_tag(o) for o in operands):
            return _declared.tagged(call, expr, op, operands, why)
    used = list(dict.fromkeys(names(expr)))
    facts = [f"{n} = {shown(call.values[n])}{_from(call, n)}" for n in used if n in call.values]
    facts += [f"{n} is {_dtype_of(call.arguments.get(n))}" for n in _dtype_arguments(expr)]
    argument = _owner(call, expr, used)
    got = detail or _sides(call, expr) or ", ".join(facts)
    rule = _kind(call, expr, used)
    more = f": {', '.join(facts)}" if facts and got != ", ".join(facts) and got not in facts else ""
    words = _words(expr)
    return Violation(
        argument, rule, words, got, _wrong_number(call, expr), _fix(call, expr, argument),
        headline=f"{argument}: {words} is needed{why}",
        body=(f"expected {words}", f"got      {got}{more}"),
    )  # fmt: skip


def _words(expr: Expr) -> str:
    match expr:
        case Op("pow2", (a,)):
            return f"a power of two as {brief(a)}"
        case Op("==", (Op("numel", (Name(n),)), Const(1))):
            return f"one element in {n}"
        case Op("==", (Op("len", (Name(n),)), count)):
            return f"len({n}) == {brief(count)}"
    return brief(expr)


def _wrong_number(call: Call, expr: Expr) -> str | None:
    """Where else the number of a scalar argument stands that should equal something."""
    match expr:
        case Op("==", (Name(n), other)) | Op("==", (other, Name(n))) if n in call.contract.scalars:
            return None if isinstance(other, Const) else _causes.number(call, n, call.values.get(n))
    return None


def _kind(call: Call, expr: Expr, used: list[str]) -> Rule:
    """What a condition speaks of: an element type, the sizes of one tensor, or a relation."""
    about = {c.op for c in calls(expr)}
    if about == {"len"}:
        counted = [call.contract.signature.parameters.get(n) for n in arguments(expr)]
        return "presence" if any(p is not None and p.kind is p.VAR_POSITIONAL for p in counted) else "shape"
    if about:
        return "dtype" if "dtype" in about else "shape" if about == {"numel"} and not used else "relation"
    sources = {call.source_of(name) for name in used}
    return "shape" if len(sources) == 1 and sources <= set(call.contract.tensors) else "relation"


def _each(call: Call, rule: Each, because: str) -> Iterator[Violation]:
    """The values of a sequence that do not keep a comparison."""
    (name,) = rule.arguments
    expr = substitute(rule.expr, {VALUE: Name(name)})
    try:
        values = list(call.arguments.get(name) or ())
        bad = [i for i, v in enumerate(values) if not evaluate(rule.expr, {**call.values, VALUE: v})]
    except (KeyError, TypeError, Inexact):
        return
    if not bad:
        return
    at = bad[0]
    computed = brief(filled(rule.expr, {**call.values, VALUE: values[at]})).partition(" == ")[0]
    why = f" because {because}" if because else ""
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    yield Violation(
        name, "value", f"every {brief(expr)}", f"{name}[{at}] = {values[at]} ({computed}){more}", None,
        _fix(call, expr, name), headline=f"{name}: {brief(expr)} is needed for every value{why}",
    )  # fmt: skip


def _dtype_words(call: Call, expr: Expr) -> str:
    """``float8_e4m3fn or bfloat16``, or the dtype of the other argument."""
    match expr:
        case Const(_dtypes.Element() as e):
            return _dtypes.short(e.torch)
        case Op("tuple", parts):
            return " or ".join(_dtype_words(call, p) for p in parts)
        case Op("dtype", (Name(n),)):
            return _dtype_of(call.arguments.get(n))
    return brief(expr)


def _owner(call: Call, expr: Expr, used: list[str]) -> str:
    """The argument that a condition speaks of: one that it names, or the one that bound its dims."""
    for name in arguments(expr):
        return name
    for name in used:
        if name in call.contract.signature.parameters:
            return name
    for name in used:
        if where := call.source_of(name):
            return where
    return used[0] if used else next(iter(call.contract.specs), "")


def _sides(call: Call, expr: Expr) -> str:
    """``100 % 32 = 4`` for ``page_size % 32 == 0``."""
    if not (isinstance(expr, Op) and len(expr.args) == 2 and expr.op in ("==", "!=", "<", "<=", ">", ">=")):
        return ""
    left, right = expr.args
    if any(True for _ in _dtype_arguments(expr)):
        return ""
    try:
        a, b = evaluate(left, call.values, call.arguments), evaluate(right, call.values, call.arguments)
    except (KeyError, Inexact, TypeError):
        return ""
    if not isinstance(left, Op) and not isinstance(right, Op):
        return ""  # the names and their numbers say it all
    sides = [(left, a)] if isinstance(right, Const) else [(left, a), (right, b)]
    return " and ".join(f"{brief(filled(e, call.values))} = {v}" if isinstance(e, Op) else shown(v) for e, v in sides)


def _fix(call: Call, expr: Expr, argument: str) -> str | None:
    match expr:
        case Op("==", (Op("%", (a, Const(n))), Const(0))):
            return f"choose {brief(a)} as a multiple of {n}"
        case Op("==", (Name(n), other)) if n in call.contract.scalars:
            try:
                return f"pass {n} = {shown(evaluate(other, call.values, call.arguments))}"
            except (KeyError, Inexact, TypeError):
                pass
        case Op("==" | "in", (Name(n), Const() | Op("tuple"))) if argument not in call.contract.tensors:
            return f"pass {brief(expr)}"
        case Op("==", (Op("len", (Name(n),)), count)):
            try:
                return f"pass {evaluate(count, call.values, call.arguments)} values in {n}; the others by keyword"
            except (KeyError, Inexact, TypeError):
                pass
    return f"pass {argument} with {_words(expr)}"


def _no_overlap(call: Call, args: tuple[str, ...]) -> Iterator[Violation]:
    for i, first in enumerate(args):
        for second in args[i + 1 :]:
            a, b = call.arguments.get(first), call.arguments.get(second)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _strides.overlap(a, b):
                yield Violation(
                    second, "relation", f"memory apart from {first}", f"shares memory with {first}", None,
                    f"give {second} memory of its own", headline=f"{second} overlaps {first}",
                )  # fmt: skip


def _from(call: Call, name: str) -> str:
    where = call.source_of(name)
    return f" from {where}" if where else ""


def _is(names_: list[str]) -> str:
    return "is" if len(names_) == 1 else "are"


def _dtype_arguments(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("dtype", (Name(n),)):
            yield n
        case Op(_, args):
            for a in args:
                yield from _dtype_arguments(a)


def _dtype_of(value: Any) -> str:
    return _dtypes.short(value.dtype) if isinstance(value, torch.Tensor) else repr(value)
