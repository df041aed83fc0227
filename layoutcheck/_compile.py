"""A contract as one Python function with the callable's own signature: straight-line comparisons.

The function answers only whether every rule is kept. Where one is not, or where an argument is not even a tensor and an
attribute is missing, ``Contract.broken`` recomputes everything slowly and says what is wrong. Dims are local variables
``_d_name``; what cannot be traced by ``torch.compile`` stands behind ``is_compiling()``. A guard of several tensors
first asks its memo (``_memo``, ``_recall``) whether it has made these comparisons before.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from layoutcheck import _recall, _trace, _twins
from layoutcheck._contract import GUARD_FILE, Contract
from layoutcheck._dims import Expr, Op, calls, divisions, names, plan
from layoutcheck._rules import VALUE, Agree, Condition, Each, Forbids, Needs, NoOverlap, Together
from layoutcheck._specs import Form, ScalarSpec, TensorSpec
from layoutcheck._write import Writer, of_required

_counter = itertools.count()


def compile_guard(fn: Callable[..., Any], contract: Contract) -> Any:
    """The guarded callable. Its text is ``contract.source``, and is known to debuggers through ``linecache``."""
    w = Writer(contract)
    _body(w)
    signature, call, packed = _signature(w, contract)
    kind, wait = ("async def", "await ") if inspect.iscoroutinefunction(fn) else ("def", "")
    name = fn.__name__ if getattr(fn, "__name__", "").isidentifier() else "guarded"
    out = [f"{kind} {name}({signature}):"]
    out += [f"    {n} = {w.constant(f)}({packed_args})" for n, f, packed_args in _derived(w, contract)]
    everything = ", ".join(packed + [f"{n!r}: {n if n in contract.tensors else w.local(n)}" for n in contract.derive])
    each = any(isinstance(r, Each) and r.arguments[0] in contract.tensors for _, r in contract.conditions)
    reads = each or any(s.values or _padded(s) for s in contract.tensors.values())
    if w.remembers or reads:  # Dynamo would guard on the memo and on the mode, and compile again when they change
        out += ["    _eager = not _dynamo()"]
    lines = []
    if contract.tensors:
        lines += [f"if _dtensor in _modules and not _compiling() and _any_sharded({', '.join(contract.tensors)}):"]
        lines += [f"    _check_shards(_contract, {{{everything}}})", f"    return {wait}_fn({call})"]
    always = f"_ok = _ok and {' and '.join(dict.fromkeys(w.always))}"
    lines += _tried([*w.lines, always] if w.always and not w.remembers else w.lines)
    returned = _result_lines(w, contract) if contract.results else []
    if w.remembers:
        lines = _recall.guarded(w, lines, returned)
        lines += ["if _ok:", *(f"    {line}" for line in _tried([always]))] if w.always else []
    out += [f"    {line}" for line in lines]
    traced = _for_trace(w, contract)
    out += ["    if not _ok:", "        if _compiling():", f"            _end_graph(_reason({traced}))"]
    out += [f"        _broken({{{everything}}})"]
    if reads:
        out += ["    if _eager and (_live.watch or _contract.mode and _contract.mode == 'values'):"]
        out += [f"        _values({{{everything}}})"]
    w.globals["_fn"] = fn
    if contract.results:
        w.globals["_result"] = _result_checker(contract)
        w.globals["_reason_of_result"] = _trace.reason_of_result(contract)
        out += [f"    _r = {wait}_fn({call})", *returned]
        out += ["    if not _ok:", "        if _compiling():"]
        out += [
            f"            _end_graph(_reason_of_result(_described(_r), {traced}))",
            f"        _result(_r, {{{everything}}})",
            "    return _r",
        ]
    else:
        out += [f"    return {wait}_fn({call})"]
    text = "\n".join(out) + "\n"
    filename = f"{GUARD_FILE}{contract.name} {next(_counter)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), w.globals)
    contract.source = text
    return w.globals[name]


def _tried(lines: list[str]) -> list[str]:
    """The lines, where whatever a comparison raises is a rule that is not kept."""
    return ["try:", *(f"    {line}" for line in lines), "except _caught:", "    _ok = False"]


def _for_trace(w: Writer, contract: Contract) -> str:
    """The arguments as keywords whose values are constants of the trace."""
    parts = []
    for name in (*contract.signature.parameters, *contract.derive):
        parameter = contract.signature.parameters.get(name)
        if parameter is not None and parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # not checked, and of any kind
        value = name if name in contract.tensors or parameter is not None else w.local(name)
        parts.append(f"{name}=_described({value})")
    return ", ".join(parts)


def _padded(spec: TensorSpec) -> bool:
    return any(f.layout is not None and f.layout.rules.pad and f.layout.rules.fill is not None for _, f in spec.forms)


def _derived(w: Writer, contract: Contract) -> list[tuple[str, Any, str]]:
    arguments = ", ".join(
        f"{p.name}={p.name}" for p in contract.signature.parameters.values() if p.kind is not p.VAR_KEYWORD
    )
    return [(n if n in contract.tensors else w.local(n), f, arguments) for n, f in contract.derive.items()]


def _signature(w: Writer, contract: Contract) -> tuple[str, str, list[str]]:
    parts, call = [], []
    previous = None
    parameters = list(contract.signature.parameters.values())
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and previous not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            parts.append("*")
        text = p.name
        if p.kind is p.VAR_POSITIONAL:
            text = f"*{p.name}"
        elif p.kind is p.VAR_KEYWORD:
            text = f"**{p.name}"
        elif p.default is not p.empty:
            text += f"={w.constant(p.default)}"
        parts.append(text)
        if p.kind is p.POSITIONAL_ONLY and (
            i + 1 == len(parameters) or parameters[i + 1].kind is not p.POSITIONAL_ONLY
        ):
            parts.append("/")
        call.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else text.partition("=")[0])
        previous = p.kind
    packed = [f"{p.name!r}: {p.name}" for p in parameters]
    return ", ".join(parts), ", ".join(call), packed


def _body(w: Writer) -> None:
    c = w.contract
    emitted: set[str] = set()
    tests: list[str] = []
    bound = {f"{s.argument}:{s.index}" for s in c.steps if s.kind == "shape" and s.case is None}
    bound |= {f"{s.argument}:{s.name}" for s in c.steps if s.kind == "variadic"}
    used = _used(c)
    for step in (s for s in c.steps if not s.optional):
        if step.kind in ("shape", "variadic") and step.argument not in emitted:
            spec = c.tensors[step.argument]
            assert spec.form is not None
            w.bind(spec, spec.form, c.steps)
            emitted.add(step.argument)
        elif step.kind == "derive":
            assert step.expr is not None
            if used(step.name):
                w.lines.append(f"{w.local(step.name)} = {w.size(step.expr)}")
            tests += [w.exact(d) for d in divisions(step.expr)]
            if _may_be_negative(step.expr):
                tests.append(f"{w.size(step.expr)} >= 0")
        elif step.kind == "default":
            w.lines.append(f"{w.local(step.name)} = {step.index}")
    for name, scalar in c.scalars.items():
        if test := _scalar(w, w.local(name), scalar):
            text = f"({w.local(name)} is None or {test})" if scalar.optional else test
            (w.always if scalar.test else tests).append(text)
    required = [s for s in c.tensors.values() if not s.optional]
    for spec in required:
        if spec.form is not None:
            tests += w.metadata(spec, spec.form, bound)
            w.always += w.memory(spec, spec.form)
    tests += [t for check in c.checks if of_required(c, check.argument) for t in _equation(w, check.equation)]
    tests += _same_device(w, required)
    late: list[str] = []
    sure = {s.name for s in c.steps if not s.optional} | set(c.signature.parameters) | set(c.derive)
    for under, rule in c.conditions:
        speaks = {n for r in (*under, rule) if isinstance(r, Condition | Each) for n in names(r.expr)} - {VALUE}
        where = w.always if _recall.asks_more(under, rule) else tests if speaks <= sure else late
        where.append(_rule(w, under, rule))
    first = len(w.lines)
    w.done |= set(tests)
    for spec in c.tensors.values():
        if spec.form is None:
            _choice(w, spec)
        elif spec.optional:
            _optional(w, spec, spec.form, bound)
    if late:
        w.lines.append(f"_ok = _ok and {w.fresh(late)}")
    _recall.settle(w, tests, first)


def _used(c: Contract) -> Callable[[str], bool]:
    """Whether a derived dim is needed by anything but its own equation."""
    exprs: list[Expr | None] = []
    for spec in c.tensors.values():
        for case, form in spec.forms:
            exprs += [case, *form.sizes, *(form.strides or ()), *form.inner, *(e for _, e in form.align)]
            if _twins.reader(form.layout, form.dims) is not None:
                exprs += [e for _, e in form.dims]
    exprs += [side for check in c.checks for side in (check.equation.left, check.equation.right)]
    exprs += [r.expr for under, rule in c.conditions for r in (*under, rule) if isinstance(r, Condition | Each)]
    needed = {n for e in exprs if e is not None for n in names(e)}
    steps = [(s.name, set(names(s.expr))) for s in c.steps if s.expr is not None]
    return lambda name: name in needed or any(name in speaks for by, speaks in steps if by != name)


def _may_be_negative(expr: Expr) -> bool:
    return isinstance(expr, Op) and (expr.op == "-" or any(_may_be_negative(a) for a in expr.args))


def _equation(w: Writer, equation: Any) -> list[str]:
    exact = [w.exact(d) for side in (equation.left, equation.right) for d in divisions(side)]
    return [*exact, f"{w.size(equation.left)} == {w.size(equation.right)}"]


def _scalar(w: Writer, name: str, spec: ScalarSpec) -> str | None:
    if spec.choices is not None:
        return f"{name} in {w.constant(spec.choices)}"
    if spec.classes is not None:
        if spec.type is int:  # the exact type first: isinstance with a tuple costs three times as much
            return f"(type({name}) is int or isinstance({name}, {w.constant(spec.classes)}))"
        return f"isinstance({name}, {w.constant(spec.classes if len(spec.classes) > 1 else spec.classes[0])})"
    return f"(_compiling() or {w.constant(spec.test)}({name}))" if spec.test else None  # beartype takes a lock


def _same_device(w: Writer, required: list[TensorSpec]) -> list[str]:
    if not w.contract.same_device or len(required) < 2:
        return []
    first, *rest = required
    return [" == ".join(f"{s.name}.device" for s in (first, *rest))]


def _rule(w: Writer, under: tuple[Condition, ...], rule: Any) -> str:
    match rule:
        case Condition(expr):
            text = w.test(expr)
            text = f"({text})" if isinstance(expr, Op) and expr.op == "or" else text
            if any(call.op in ("tag", "tags") for call in calls(expr)):  # a traced tensor has no memory to know of
                text = f"(_compiling() or ({text}))"
        case Each((argument,), expr):
            values = "()" if argument in w.contract.tensors else argument
            text = f"all({w.test(expr)} for {w.local(VALUE)} in {values})"
        case Agree((first, second), fields):
            text = f"(_compiling() or _agree({first}, {second}, {w.constant(fields)}))"
        case Needs(args):
            text = " and ".join(f"{a} is not None" for a in args)
        case Forbids(args):
            text = " and ".join(f"{a} is None" for a in args)
        case Together(args):
            first, *rest = args
            text = " and ".join(f"({first} is None) is ({a} is None)" for a in rest)
        case NoOverlap(args):
            pairs = itertools.combinations(args, 2)
            text = "(_compiling() or not (" + " or ".join(f"_overlap({a}, {b})" for a, b in pairs) + "))"
        case _:
            raise AssertionError(f"no such rule: {rule!r}")
    if under:
        return f"(not ({' and '.join(f'({w.test(u.expr)})' for u in under)}) or ({text}))"
    return text


def _optional(w: Writer, spec: TensorSpec, form: Form, bound: set[str]) -> None:
    start = len(w.lines)
    mine = [s for s in w.contract.steps if s.argument == spec.name and s.optional]
    w.bind(spec, form, mine)
    tests = []
    for step in mine:
        if step.kind == "derive" and step.expr is not None:
            w.lines.append(f"{w.local(step.name)} = {w.size(step.expr)}")
            tests += [w.exact(d) for d in divisions(step.expr)]
    tests += w.metadata(spec, form, bound)
    if memory := w.memory(spec, form):
        w.always.append(f"({spec.name} is None or {' and '.join(memory)})")
    tests += [t for check in w.contract.checks if check.argument == spec.name for t in _equation(w, check.equation)]
    tests += _device_of(w, spec)
    inner = [*w.lines[start:], f"_ok = _ok and {w.fresh(tests)}"]
    del w.lines[start:]
    w.lines += [f"if {spec.name} is not None:", *(f"    {line}" for line in inner)]


def _device_of(w: Writer, spec: TensorSpec) -> list[str]:
    if not w.contract.same_device:
        return []
    first = next((s for s in w.contract.tensors.values() if not s.optional and s is not spec), None)
    return [f"{spec.name}.device == {first.name}.device"] if first else []


def _choice(w: Writer, spec: TensorSpec) -> None:
    """One branch per case; the dims that only a case needs are computed inside it."""
    lines: list[str] = []
    for case, (condition, form) in enumerate(spec.forms):
        steps = [s for s in w.contract.steps if s.argument == spec.name and s.case == case]
        bound = {f"{spec.name}:{s.index}" for s in steps if s.kind == "shape"}
        start = len(w.lines)
        tests = []
        w.bind(spec, form, steps)
        for step in steps:
            if step.kind == "derive":
                assert step.expr is not None
                w.lines.append(f"{w.local(step.name)} = {w.size(step.expr)}")
                tests += [w.exact(d) for d in divisions(step.expr)]
            elif step.kind == "default":
                w.lines.append(f"{w.local(step.name)} = {step.index}")
        tests += w.form(spec, form, bound)
        done = {s.equation for s in steps} | w.settled
        tests += [t for e in form.equations if e not in done for t in _equation(w, e)]
        if spec.optional:
            tests += _device_of(w, spec)
        branch = [*w.lines[start:], f"_ok = _ok and {w.fresh(tests)}"]
        del w.lines[start:]
        head = "else:" if condition is None else f"{'elif' if case else 'if'} {w.test(condition)}:"
        lines += [head, *(f"    {line}" for line in branch)]
    if spec.forms[-1][0] is not None:
        lines += ["else:", "    _ok = False"]
    if spec.optional:
        lines = [f"if {spec.name} is not None:", *(f"    {line}" for line in lines)]
    w.lines += lines


def _result_lines(w: Writer, contract: Contract) -> list[str]:
    """The comparisons of what comes back; a size that no argument binds may be anything."""
    many = len(contract.results) > 1
    lines = [f"{', '.join(f'_r{i}' for i in range(len(contract.results)))} = _r"] if many else []
    tests = [f"type(_r) is {w.constant(tuple)}"] if many else []
    sure = {s.name for s in contract.steps if not s.optional} | set(contract.scalars)
    for i, spec in enumerate(contract.results):
        if spec is None:
            continue
        if spec.form is None:
            return ["    _ok = False"]  # a choice: left to the slow path
        name = f"_r{i}" if many else "_r"
        form, known = spec.form, set(sure)
        done = []
        for n, expr, equation in plan(known, form.equations):
            lines.append(f"{w.local(n)} = {w.size(expr)}")
            tests += [w.exact(d) for d in divisions(expr)]
            known.add(n)
            done.append(equation)
        tests += [
            t
            for e in form.equations
            if e not in done and {*names(e.left), *names(e.right)} <= known
            for t in _equation(w, e)
        ]

        def settled(expr: Expr | None, known: set[str] = known) -> Expr | None:
            return expr if expr is not None and set(names(expr)) <= known else None

        strides = form.strides
        if strides is not None and any(s is not None and settled(s) is None for s in (*strides, *form.inner)):
            strides = None
        variadic = form.variadic if form.variadic is None or form.variadic[1] in known else (form.variadic[0], "...")
        form = replace(form, sizes=tuple(map(settled, form.sizes)), strides=strides, variadic=variadic)
        found = " and ".join(w.form(replace(spec, name=name), form, set()))
        tests.append(f"({name} is None or {found})" if spec.optional else found)
    body = [*lines, f"_ok = {' and '.join(tests)}"]
    return ["    if _ok:", "        try:", *(f"            {b}" for b in body), *_RESULT_CAUGHT]


_RESULT_CAUGHT = ("        except _caught:", "            _ok = False")


def _result_checker(contract: Contract) -> Callable[[Any, dict[str, Any]], None]:
    def check(result: Any, values: dict[str, Any]) -> None:
        from layoutcheck import _explain

        if found := _explain.explain_result(contract, result, values):
            contract.report(found)

    return lambda result, values: _trace.untraced(check)(result, values)
