"""What a tensor would fit: the same layout with one size different, another case, another argument, another layout.

Each is solved, not guessed: all other sizes of the call stay as they are, and every equation must hold.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from layoutcheck import _tags
from layoutcheck._axes import Found
from layoutcheck._call import Call, is_int
from layoutcheck._dims import Const, Equation, Expr, Inexact, brief, evaluate, isolate, names
from layoutcheck._layout import Layout
from layoutcheck._solve import Step
from layoutcheck._specs import Form, TensorSpec

GROWS = ("slot", "page", "row", "token", "block")


def one_size(call: Call, spec: TensorSpec, form: Form, actual: list[int]) -> Iterator[Found]:
    """Solve the argument's form for each size of the call in turn, all others kept."""
    if len(actual) != len(form.sizes) or form.variadic:
        return
    seen = _seen(form, actual)
    roots = [s for s in _roots(call) if s.argument != spec.name]
    equations = _with_names([*seen, *_equations(call, form)])
    for root in roots:
        known = {s.name: call.values[s.name] for s in roots if s is not root}
        solved = consistent(known, equations)
        now = call.values[root.name]
        if solved is None or root.name not in solved or solved[root.name] in (now, 0):
            continue
        fits = solved[root.name]
        if fits < 0:
            continue
        call.fits.setdefault((root.name, fits), set()).add(spec.name)
        where = f" ({call.source_of(root.name)})" if call.source_of(root.name) else ""
        text = f"{spec.name} fits {root.name} = {fits}; this call has {root.name} = {now}{where}"
        if root.name in GROWS and fits < now:
            holder = call.source_of(root.name) or "the cache"
            text += f". It was allocated before {holder} grew, or for another one"
        yield text, f"allocate {spec.name} for {root.name} = {now}: {call.wanted(spec, form)}"


def another_case(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Found]:
    """Another case of the same choice fits, with the sizes that its condition asks for."""
    deciding = dict.fromkeys(n for c, _ in spec.forms if c is not None for n in names(c))
    for condition, other in spec.forms:
        if other is form or (solved := _fitted(call, spec, other, value, deciding)) is None:
            continue
        if condition is not None and not _may_hold(condition, {**call.values, **solved}, call.arguments):
            continue
        with_ = ", ".join(f"{n} = {solved[n]}" for n in deciding if n in solved and solved[n] != call.values.get(n))
        which = f" with {with_}" if with_ else f", for {brief(condition)}" if condition is not None and deciding else ""
        now = ", ".join(f"{n} = {call.values[n]!r}" for n in deciding if n in call.values)
        text = f"{spec.name} fits {other.text}{which}; this call " + (f"has {now}" if now else f"asks for {form.text}")
        yield text, f"pass {call.wanted(spec, form)}"


def _may_hold(condition: Expr, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a case's condition holds for the solved sizes; one that speaks of no number may always."""
    try:
        numeric = [n for n in names(condition) if is_int(values.get(n))]
        return not numeric or bool(evaluate(condition, values, arguments))
    except (KeyError, Inexact, TypeError):
        return False


def another_argument(call: Call, spec: TensorSpec, value: torch.Tensor) -> Iterator[Found]:
    """The tensor is what another argument should be; both may be swapped."""
    mine = call.form_of(spec)
    for other in call.contract.tensors.values():
        form = call.form_of(other)
        theirs = call.arguments.get(other.name)
        if other is spec or form is None or mine is None or not _is(call, form, value):
            continue
        if isinstance(theirs, torch.Tensor) and not _is(call, form, theirs) and _is(call, mine, theirs):
            text = f"{spec.name} and {other.name} are swapped: each has the shape and dtype of the other"
            yield text, f"swap {spec.name} and {other.name}"
        elif spec.name in call.arguments and _tags.shared(value, theirs):
            yield f"{spec.name} is the memory of {other.name}", f"pass {call.wanted(spec, mine)}"


def another_layout(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Found]:
    """A layout of the catalogue, all of whose sizes this call knows by name, has exactly this shape."""
    from layoutcheck.layouts import entries

    known = {n: int(v) for n, v in call.values.items() if is_int(v) and ".shape[" not in n}
    known = {**{n.rpartition(".")[2]: v for n, v in known.items()}, **known, **(call.layout_dims(form) or {})}
    for entry in entries().values():
        if not isinstance(entry, Layout) or (form.layout is not None and entry.name == form.layout.name):
            continue
        if value.dtype not in entry.accepted or not set(entry.dims) <= set(known):
            continue
        if len(entry.tensor_dims) != value.dim():
            continue
        sizes = consistent({n: known[n] for n in entry.dims} | dict(entry.rules.default), _with_names(entry.equations))
        if sizes is None:
            continue
        try:
            shape = [evaluate(d.size, sizes) for d in entry.tensor_dims]
        except (KeyError, Inexact):
            continue
        if shape == list(value.shape):
            yield f"{spec.name} has the shape of {entry.name} ({entry})", None


def _is(call: Call, form: Form, value: torch.Tensor) -> bool:
    """Whether a tensor has the dtype and shape that a form needs in this call; forms of any size prove nothing."""
    expected, unknown = call.expected_shape(form, value)
    exact = not unknown and bool(expected) and all(isinstance(e, int) for e in expected)
    fits = exact and expected == list(value.shape)
    return fits and form.dtypes is not None and value.dtype in form.dtypes


def _fitted(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, free: Container[str]
) -> dict[str, int] | None:
    """The sizes with which a form that this call does not use fits a tensor: all but ``free`` are the call's own."""
    if form.variadic or len(form.sizes) != value.dim():
        return None
    if form.dtypes is not None and value.dtype not in form.dtypes:
        return None
    known = {s.name: call.values[s.name] for s in _roots(call) if s.argument != spec.name and s.name not in free}
    solved = consistent(known, _with_names([*_seen(form, list(value.shape)), *_equations(call, form)]))
    sizes = [s for s in form.sizes if s is not None]
    return solved if solved is not None and all(set(names(s)) <= set(solved) for s in sizes) else None


def _seen(form: Form, actual: list[int]) -> list[Equation]:
    return [Equation(s, Const(a)) for s, a in zip(form.sizes, actual, strict=True) if s is not None]


def _roots(call: Call) -> list[Step]:
    """The steps that bring a number into the call, for names that every argument may see."""
    kinds = ("scalar", "shape", "default")
    return [s for s in call.contract.steps if s.kind in kinds and is_int(call.values.get(s.name)) and "." not in s.name]


def _equations(call: Call, form: Form) -> list[Equation]:
    every = [*(s.equation for s in call.contract.steps if s.equation is not None), *form.equations]
    return [q for q in dict.fromkeys(every) if not any(".shape[" in n for n in (*names(q.left), *names(q.right)))]


def _with_names(equations: Iterable[Equation]) -> list[tuple[Equation, frozenset[str]]]:
    return [(q, frozenset((*names(q.left), *names(q.right)))) for q in equations]


def consistent(known: Mapping[str, Any], equations: list[tuple[Equation, frozenset[str]]]) -> dict[str, Any] | None:
    """Every name that follows, or None at the first contradiction."""
    values = dict(known)
    waiting, progress = equations, True
    try:
        while progress:
            progress, rest = False, []
            for equation, about in waiting:
                unknown = about - values.keys()
                if not unknown:
                    if evaluate(equation.left, values) != evaluate(equation.right, values):
                        return None
                    continue
                expr = isolate(equation.left, equation.right, *unknown) if len(unknown) == 1 else None
                if expr is None:
                    rest.append((equation, about))
                    continue
                values[next(iter(unknown))] = evaluate(expr, values)
                progress = True
            waiting = rest
    except (Inexact, TypeError):
        return None
    return values
