"""Which wrong assumption explains a broken rule: a search over what the numbers allow, not a table of cases.

In this order, each only where the numbers prove it possible: rows counted in wholes instead of parts (slots for pages);
one dim different (the layout solved for each dim of the call in turn); the axes in another order; an axis missing,
extra, merged, split, or all of them flat. Several that fit are all given, the most specific first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from layoutcheck import _dtypes
from layoutcheck._dims import Const, Equation, Inexact, Name, evaluate, names, plan
from layoutcheck._specs import Form, TensorSpec

if TYPE_CHECKING:
    from layoutcheck._call import Call

Found = tuple[str, str | None]  # cause, fix
_GROWS = ("slot", "page", "row", "token")


def shape(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any], unknown: set[str]
) -> tuple[str | None, str | None]:
    """Cause and fix of a wrong shape; None where no explanation fits."""
    actual = [int(s) for s in value.shape]
    searches: list[Callable[..., Iterator[Found]]] = [_one_dim, _permuted, _missing_or_flat]
    found: list[Found] = list(_counted_in_wholes(call, spec, form, actual, expected))
    for search in searches:
        if found and search is _one_dim:
            continue  # counting in slots is the reason for the different number
        found += search(call, spec, form, actual, expected)
    return _joined(found)


def _joined(found: list[Found]) -> tuple[str | None, str | None]:
    texts = list(dict.fromkeys(text for text, _ in found))[:3]
    if not texts:
        return None, None
    return "\nor: ".join(texts), found[0][1]


def _counted_in_wholes(
    call: Call, spec: TensorSpec, form: Form, actual: list[int], expected: Sequence[Any]
) -> Iterator[Found]:
    if len(actual) != len(expected):
        return
    different = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if b is not None and a != b]
    if len(different) != 1 or form.variadic:
        return
    (i,) = different
    size = form.sizes[i]
    if not isinstance(size, Name) or not isinstance(expected[i], int):
        return
    step = call.origin.get(size.name)
    wholes = {form.parts.get(size.name, "")} | set(
        names(step.expr) if step is not None and step.expr is not None else ()
    )
    for whole in sorted(wholes):
        if call.values.get(whole) == actual[i] and whole != size.name:
            part, label = size.name.rpartition(".")[2], whole.rpartition(".")[2]
            yield (
                f"{form.labels[i]} counts {part}s ({expected[i]}); {actual[i]} is the number of {label}s: one entry "
                f"per {label} instead of one per {part}",
                f"allocate one entry per {part}: {call.wanted(spec, form)}",
            )


def _one_dim(call: Call, spec: TensorSpec, form: Form, actual: list[int], expected: Sequence[Any]) -> Iterator[Found]:
    """Solve the argument's form for each dim of the call in turn, all others kept."""
    if len(actual) != len(form.sizes) or form.variadic or form.layout is None:
        return
    seen = [Equation(s, Const(a)) for s, a in zip(form.sizes, actual, strict=True) if s is not None]
    equations = [*(s.equation for s in call.contract.steps if s.equation is not None), *form.equations]
    equations = [
        q for q in dict.fromkeys(equations) if not any(".shape[" in n for n in (*names(q.left), *names(q.right)))
    ]
    roots = [s for s in call.contract.steps if s.kind in ("scalar", "shape", "default") and s.name in call.values]
    for root in roots:
        if root.argument == spec.name or "." in root.name:
            continue
        known = {
            s.name: call.values[s.name]
            for s in roots
            if s is not root and s.argument != spec.name and "." not in s.name
        }
        solved = _consistent(known, [*seen, *equations])
        now = call.values[root.name]
        if solved is None or root.name not in solved or solved[root.name] == now:
            continue
        fits = solved[root.name]
        if fits < 1:
            continue
        where = f" ({call.source_of(root.name)})" if call.source_of(root.name) else ""
        text = f"{spec.name} fits {root.name} = {fits}; this call has {root.name} = {now}{where}"
        if root.name in _GROWS and fits < now:
            holder = call.source_of(root.name) or "the cache"
            text += f". It was allocated before {holder} grew, or for another one"
        yield text, f"allocate {spec.name} for {root.name} = {now}: {call.wanted(spec, form)}"


def _consistent(known: Mapping[str, int], equations: list[Equation]) -> dict[str, int] | None:
    """Every name that follows, or None where the equations contradict each other."""
    values = dict(known)
    for name, expr, _ in plan(values, equations):
        try:
            values[name] = evaluate(expr, values)
        except Inexact:
            return None
    for equation in equations:
        needed = {n for side in (equation.left, equation.right) for n in names(side)}
        if not needed <= set(values):
            continue
        try:
            if evaluate(equation.left, values) != evaluate(equation.right, values):
                return None
        except Inexact:
            return None
    return values


def _permuted(call: Call, spec: TensorSpec, form: Form, actual: list[int], expected: Sequence[Any]) -> Iterator[Found]:
    wanted = list(expected)
    if len(actual) != len(wanted) or any(not isinstance(w, int) for w in wanted) or form.variadic:
        return
    if sorted(actual) != sorted(wanted) or actual == wanted or len(actual) > 8:
        return
    options = [p for p in itertools.permutations(range(len(wanted))) if [wanted[i] for i in p] == actual]
    # Of the orders that give these sizes, the one that moves the fewest axes is the likely mistake.
    best = min(options, key=lambda p: sum(i != j for i, j in enumerate(p)))
    order = " ".join(form.labels[i] for i in best)
    moved = [i for i, j in enumerate(best) if i != j]
    what = (
        f"{form.labels[best[moved[0]]]} and {form.labels[best[moved[1]]]} are swapped"
        if len(moved) == 2
        else "the axes are in another order"
    )
    back = ", ".join(str(best.index(i)) for i in range(len(best)))
    yield (
        f"{what}: {spec.name} has the sizes of ({order}), needed is ({' '.join(form.labels)})",
        f"build {spec.name} as ({' '.join(form.labels)}); a view that only shows it so is {spec.name}.permute({back})",
    )


def _missing_or_flat(
    call: Call, spec: TensorSpec, form: Form, actual: list[int], expected: Sequence[Any]
) -> Iterator[Found]:
    wanted = list(expected)
    if any(not isinstance(w, int) for w in wanted) or form.variadic:
        return
    labels, shape_text = form.labels, "(" + ", ".join(map(str, wanted)) + ")"
    fix = f"pass the shape {shape_text}; if the bytes are in this order, {spec.name}.view{shape_text}"
    n = len(wanted)
    if len(actual) == 1 < n and actual[0] == math.prod(wanted):
        yield f"{spec.name} is flat: {actual[0]} = {' * '.join(map(str, wanted))} elements in one dimension", fix
        return
    if len(actual) == n - 1:
        gone = [labels[i] for i in range(n) if wanted[:i] + wanted[i + 1 :] == actual]
        if gone:
            yield f"the axis {' or '.join(gone)} is missing", f"pass the shape {shape_text}"
        for i in range(n - 1):
            if [*wanted[:i], wanted[i] * wanted[i + 1], *wanted[i + 2 :]] == actual and 1 not in wanted[i : i + 2]:
                merged = f"{wanted[i]} * {wanted[i + 1]} = {actual[i]}"
                yield f"{labels[i]} and {labels[i + 1]} are merged into one dimension: {merged}", fix
    if len(actual) == n + 1:
        for i in range(n + 1):
            if actual[:i] + actual[i + 1 :] == wanted:
                yield f"there is an extra dimension of {actual[i]} at position {i}", f"pass the shape {shape_text}"
                return
        for i in range(n):
            if [*actual[:i], actual[i] * actual[i + 1], *actual[i + 2 :]] == wanted:
                yield f"{labels[i]} is split into two dimensions: {actual[i]} * {actual[i + 1]} = {wanted[i]}", fix


# --- dtype and strides ------------------------------------------------------------------------------------------------


def dtype(name: str, form: Form, value: torch.Tensor) -> tuple[str | None, str | None]:
    """Cause and fix of a wrong dtype."""
    assert form.dtypes is not None
    wanted = form.dtypes[0]
    got, short = value.dtype, _dtypes.short
    pair = {got, wanted}
    if pair == {torch.float8_e4m3fn, torch.float8_e4m3fnuz}:
        return (
            "e4m3fn and e4m3fnuz are different codes: the same bits mean half the value in fnuz",
            f"quantise {name} to {short(wanted)}",
        )
    if wanted.is_floating_point and got in (torch.uint8, torch.int8) and wanted.itemsize == 1:
        return None, f"if its bytes are {short(wanted)}, pass {name}.view(torch.{short(wanted)})"
    if not wanted.is_floating_point and not got.is_floating_point:
        return None, f"pass {name}.to(torch.{short(wanted)})"
    if got.itemsize == wanted.itemsize:
        return f"{short(got)} has the same width as {short(wanted)}: the shape cannot tell them apart", (
            f"pass {name} as {short(wanted)}"
        )
    return None, f"pass {name} as {short(wanted)}"


def stride(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any], wrong: list[int]
) -> tuple[str | None, str | None]:
    """Cause and fix of wrong strides."""
    if spec.writes is not None:
        fix = f"allocate {spec.name} in this layout; a .contiguous() copy would take the writes and be lost"
    else:
        fix = f"pass {spec.name}.contiguous(), which copies it"
    if isinstance(wrong[0], int) and expected[wrong[0]] == f">={0}":
        return None, fix
    sizes, strides = list(value.shape), list(value.stride())
    if 0 in [strides[i] for i in wrong if sizes[i] > 1]:
        return f"{spec.name} is an expanded view: elements share memory", fix
    large = [i for i in range(len(sizes)) if sizes[i] > 1]
    order = sorted(large, key=lambda i: -strides[i])
    running = 1
    dense = True
    for i in reversed(order):
        dense = dense and strides[i] == running
        running *= sizes[i]
    if dense and order != large:
        memory = " ".join(form.labels[i] for i in order)
        return f"{spec.name} is a transposed view: in memory its axes are ({memory})", fix
    if order == large and all(isinstance(expected[i], int) for i in wrong):
        first = wrong[-1]
        if strides[first] > expected[first]:
            return (
                f"{spec.name} is a slice of a wider tensor: {form.labels[first]} steps over {strides[first]} elements "
                f"where {expected[first]} are its own",
                fix,
            )
    return None, fix
