"""The slow path: collect every rule that a call breaks, and say for each argument what was expected and what came.

Reached only when something broke. Numbers and where they came from are ``_call``'s business, broken relations
``_relations``', and which wrong assumption explains it all ``_causes``'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from layoutcheck import _causes, _dtypes, _relations, _strides, _suspects, _tags, _twins
from layoutcheck._call import Call
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Equation, Inexact, brief, evaluate, names, plan
from layoutcheck._dims import arguments as mentioned
from layoutcheck._errors import Violation, numbers, table
from layoutcheck._rules import Condition
from layoutcheck._solve import Step
from layoutcheck._specs import Form, ScalarSpec, TensorSpec, type_text


def explain(contract: Contract, arguments: Mapping[str, Any], *, memory: bool = True) -> list[Violation]:
    """Every rule that the call breaks, in the order of the arguments.

    Without ``memory``, what is known of the tensors' memory is not asked.
    """
    call = Call(contract, arguments, memory=memory)
    found = list(_violations(call))
    return _suspects.explained(call, found, lambda given: _holds(contract, given)) if found else found


def _holds(contract: Contract, arguments: Mapping[str, Any]) -> bool:
    """Whether a call breaks no rule; nothing is explained."""
    return next(_violations(Call(contract, arguments, words=False, memory=False)), None) is None


def explain_result(contract: Contract, result: Any, arguments: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with a return value."""
    results = result if len(contract.results) > 1 else (result,)
    if len(contract.results) > 1 and (not isinstance(result, tuple) or len(result) != len(contract.results)):
        wanted = f"a tuple of {len(contract.results)}"
        return [Violation("return", "presence", wanted, type(result).__name__)]
    call = Call(contract, arguments)
    found: list[Violation] = []
    for spec, value in zip(contract.results, results, strict=True):
        if spec is None:
            continue
        for form in (form for _, form in spec.forms):
            for name, expr, _ in plan(call.values, form.equations):
                with suppress(Inexact, TypeError):  # a size that the arguments leave open: nothing to compare
                    call.values[name] = evaluate(expr, call.values)
        found += _tensor(call, spec, value)
    return found


def _violations(call: Call) -> Iterator[Violation]:
    broken: set[str] = set()
    collected: list[Violation] = []
    for name, spec in call.contract.specs.items():
        found = (
            _tensor(call, spec, call.arguments.get(name))
            if isinstance(spec, TensorSpec)
            else _scalar(call, spec, call.arguments.get(name))
        )
        collected += found
        broken |= {name for v in found if v.rule in ("shape", "presence")}
    for step, error in call.inexact:
        if step.argument not in broken and _live(call, step.argument):
            collected.append(_relations.remainder(call, step, error))
            broken.add(step.argument)
    for check in call.contract.checks:
        if check.argument not in broken and _live(call, check.argument) and (v := _relations.equation(call, check)):
            collected.append(v)
    yield from collected
    yield from _relations.device(call)
    absent = {v.argument for v in collected if v.rule == "presence"}
    for under, rule in call.contract.conditions:
        if absent & {n for r in (*under, rule) if isinstance(r, Condition) for n in mentioned(r.expr)}:
            continue  # what is missing has no element type that could be wrong
        if all(call.holds(u) for u in under):
            for v in _relations.rule(call, under, rule, broken):
                if v.rule != "presence" or v.argument not in absent:  # once is enough
                    absent |= {v.argument} if v.rule == "presence" else set()
                    yield v


def _live(call: Call, argument: str) -> bool:
    return isinstance(call.arguments.get(argument), torch.Tensor)


def _scalar(call: Call, spec: ScalarSpec, value: Any) -> list[Violation]:
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
    fix = f"pass {spec.name} as {text}"
    return [Violation(spec.name, rule, text, got, None, fix, headline=f"{spec.name} must be {text}")]


def _tensor(call: Call, spec: TensorSpec, value: Any) -> list[Violation]:
    name = spec.name
    form = call.form_of(spec)
    if form is None:
        return [_no_case(call, spec)]
    if value is None:
        if spec.optional:
            return []
        return [
            Violation(
                name, "presence", f"a tensor ({form.text})", "None", headline=f"{name} is required, got None",
                fix=f"pass {name}: {call.wanted(spec, form)}",
            )
        ]  # fmt: skip
    if not isinstance(value, torch.Tensor):
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        headline = f"{name} must be a torch.Tensor, got {what}"
        return [Violation(name, "dtype", "torch.Tensor", what, None, f"pass torch.as_tensor({name})", headline, ())]
    found = []
    if form.dtypes is not None and value.dtype not in form.dtypes:
        found.append(_dtype(call, spec, form, value))
        if _causes.packed_into(call, form, value):  # the same bytes: its shape is not another mistake
            return found
    for size in form.sizes:
        try:
            evaluate(size, call.values) if size is not None else None
        except Inexact as error:
            assert size is not None
            step = Step("derive", "", spec.name, expr=size, equation=Equation(size, size))
            return [*found, _relations.remainder(call, step, error)]
        except (KeyError, TypeError):
            continue
    if shape := _shape(call, spec, form, value):
        found.append(shape)
    elif form.strides is not None:
        found += _wrong_strides(call, spec, form, value)
    if not found and (twin := _twin(call, spec, form, value)) is not None:
        found.append(twin)
    return found


def _twin(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Violation | None:
    """Memory that is known to be laid out otherwise, although shape, dtype and strides are right."""
    reader = None if torch.compiler.is_compiling() or not call.memory else _twins.reader(form.layout, form.dims)
    dims = call.layout_dims(form)
    if reader is None or dims is None or (tag := reader.conflict(value, tuple(dims.values()))) is None:
        return None
    assert form.layout is not None
    source = f" by {tag.source}" if tag.source else ""
    written = f"{tag.name} ({tag.layout})" if tag.layout is not None else str(tag.name)
    return Violation(
        spec.name, "layout", f"{form.text} ({form.layout})", written,
        f"its memory was laid out as {tag.name}{source}; the shape is the same in both",
        f"write {spec.name} as {form.text}, or read it as {tag.name}",
        headline=f"{spec.name} is not laid out as {form.text}",
    )  # fmt: skip


def _no_case(call: Call, spec: TensorSpec) -> Violation:
    wanted = " or ".join(brief(c) for c, _ in spec.forms if c is not None)
    used = {n for c, _ in spec.forms if c is not None for n in names(c)}
    got = ", ".join(f"{n} = {call.values.get(n, 'unknown')!r}" for n in sorted(used))
    return Violation(
        spec.name, "relation", wanted, got, None, f"choose {', '.join(sorted(used))} so that {wanted}",
        headline=f"{spec.name} has no layout for this call: needs {wanted}", body=(f"got      {got}",),
    )  # fmt: skip


def _dtype(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Violation:
    assert form.dtypes is not None
    wanted = " or ".join(_dtypes.short(d) for d in form.dtypes)
    got = _dtypes.short(value.dtype)
    cause, fix = _causes.dtype(call, spec, form, value) if call.words else (None, None)
    return Violation(
        spec.name, "dtype", wanted, got, cause, fix, headline=f"{spec.name} has the wrong dtype for {form.text}"
    )


def _shape(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Violation | None:
    expected, _ = call.expected_shape(form, value)
    actual = tuple(value.shape)
    if len(expected) == len(actual) and all(
        e is None or isinstance(e, str) or e == a for e, a in zip(expected, actual, strict=True)
    ):
        return None
    if not call.words:
        return Violation(spec.name, "shape", "", "")
    cells = [str(e) if e is not None else "_" for e in expected]
    labels = list(form.labels)
    if form.variadic:
        at = form.variadic[0]
        extra = len(expected) - len(labels)
        labels[at:at] = [f"*{form.variadic[1]}"] * extra if extra > 0 else []
    remark = _remark(call, spec, form, expected, actual)
    if len(actual) == len(expected):
        body = table(labels, [("expected", cells, remark), ("got", [str(a) for a in actual], "")])
    else:
        body = (
            *table(labels, [("expected", cells, remark)]),
            f"{'got':<11}{numbers(actual)}: {len(actual)} dimensions, {len(expected)} are needed",
        )
    cause, fix = _causes.shape(call, spec, form, value, expected)
    return Violation(
        spec.name,
        "shape",
        numbers([c if e is not None else "_" for c, e in zip(cells, expected, strict=True)]),
        numbers(actual),
        cause,
        fix or f"pass {call.wanted(spec, form)}",
        headline=f"{spec.name} does not match {form.text}",
        body=body,
    )


def _remark(call: Call, spec: TensorSpec, form: Form, expected: list[Any], actual: tuple[int, ...]) -> str:
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
        text = call.reason(form.labels[i], size, spec.name)
        if text:
            return text
    return ""


def _wrong_strides(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
    assert form.strides is not None
    expected: list[Any] = []
    wrong = []
    floors: dict[int, int] = {}
    for i, stride in enumerate(form.strides):
        wanted = call.number(stride) if stride is not None else None
        expected.append(wanted if stride is not None else "any")
        if wanted is not None and value.stride(i) != wanted and (value.shape[i] > 1 or i in form.strict):
            wrong.append(i)
    if None in form.strides:
        free, inner = _strides.free_dims(form)
        extent = call.number(inner)
        if extent is not None and (found := _strides.colliding(value, free, extent)) is not None:
            at, floors[found[0]] = found
            wrong.append(at)
            expected[at] = f">={found[1]}"
    if wrong and value.numel():
        shown = [str(e) for e in expected]
        cause, fix = _causes.stride(call, spec, form, value, expected, wrong) if call.words else (None, None)
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
                ("expected", shown, _pitch_remark(call, spec, form, first)),
                ("got", [str(s) for s in value.stride()], ""),
            ]
            body = table(form.labels, rows)
        yield Violation(
            spec.name, "stride", numbers(shown), numbers(value.stride()), cause, fix,
            headline=f"{spec.name} has the wrong strides{text} for {form.text}", body=body,
        )  # fmt: skip
    yield from _alignment(call, spec, form, value)
    yield from _overflow(call, spec, form, value)


def _pitch_remark(call: Call, spec: TensorSpec, form: Form, index: int) -> str:
    stride = form.strides[index] if form.strides else None
    if stride is None or isinstance(stride, Const):
        return "strides, in elements"
    return call.reason(f"stride of {form.labels[index]}", stride, spec.name) or "strides, in elements"


def _alignment(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
    name = spec.name
    for index, size in form.align:
        wanted = call.number(size)
        if wanted is None:
            continue
        if index is None:
            if torch.compiler.is_compiling() or _tags.address(value) % wanted == 0:
                continue
            got, what = _tags.address(value) % wanted, "base address"
            offset = value.storage_offset() * value.element_size()
            cause = f"{name} starts {offset} bytes into its storage" if offset % wanted else None
            fix = f"start {name} at a multiple of {wanted} bytes"
            fix += "" if spec.writes is not None else f", or copy it: {name}.clone()"
            yield Violation(
                name, "alignment", f"{what} % {wanted} == 0", f"{what} % {wanted} = {got}", cause, fix,
                headline=f"{name} is not aligned for {form.text}",
            )  # fmt: skip
            continue
        got = value.stride(index) * value.element_size()
        if got % wanted == 0 or (value.shape[index] <= 1 and index not in form.strict):
            continue
        what = f"stride of {form.labels[index]} in bytes"
        cause, fix = None, f"allocate {name} so that its {what} is a multiple of {wanted}"
        if value.shape[index] <= 1:
            cause, fix = _causes.one_stride(name, form, value, [index], [])
        shown = f"{value.stride(index)} * {value.element_size()} = {got}" if value.element_size() > 1 else str(got)
        yield Violation(
            name, "stride", f"{what} % {wanted} == 0", f"{shown}, and {got} % {wanted} = {got % wanted}", cause, fix,
            headline=f"{name} has a stride that is not aligned for {form.text}",
        )  # fmt: skip


def _overflow(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Violation]:
    if not form.int32 or value.numel() == 0:
        return
    reach = sum((value.shape[i] - 1) * value.stride(i) for i in form.int32)
    if reach <= _strides.INT32_MAX:
        return
    outer = max(form.int32, key=value.stride)
    label, count, stride = form.labels[outer], value.shape[outer], value.stride(outer)
    rest = reach - (count - 1) * stride
    last = (_strides.INT32_MAX - rest) // stride
    text = f"{reach} = ({count} - 1) * {stride}" + (f" + {rest}" if rest else "")
    yield Violation(
        spec.name, "overflow", f"offsets <= {_strides.INT32_MAX} (int32)", text,
        f"{label} * {stride} is computed in 32 bits: {label} {last} is the last that is safe",
        f"use at most {last + 1} {label.rstrip('s')}s, or a kernel with 64-bit offsets (offsets='int64' in the layout)",
        headline=f"{spec.name} is too large for 32-bit offsets",
    )  # fmt: skip
