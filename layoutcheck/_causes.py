"""Which wrong assumption explains a broken rule: a search over what the numbers allow, not a table of cases.

What is known for certain comes first (where the memory came from), then what fits, in this order: rows counted in
another unit; one size different, each in turn; the axes in another order; an axis missing, extra, merged, split, or all
of them flat; the shape without, or with, padding; another case of the same choice; another argument's tensor; another
layout of the catalogue; two values to a byte. A cause is printed only where the numbers prove it possible; where
several do, the most specific come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from layoutcheck import _axes, _dtypes, _fits, _origin
from layoutcheck._axes import Found
from layoutcheck._call import Call
from layoutcheck._dims import Const, Expr, Name, Op, brief, names
from layoutcheck._errors import numbers
from layoutcheck._specs import Form, TensorSpec

_MOST_CAUSES = 3
_COUNTS = ("slot", "page", "token", "row", "block")


def shape(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any]
) -> tuple[str | None, str | None]:
    """Cause and fix of a wrong shape; None where no explanation fits."""
    return _joined(_shape_causes(call, spec, form, value, expected))


def _shape_causes(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any]
) -> Iterator[Found]:
    name, labels, actual = spec.name, form.labels, [int(s) for s in value.shape]
    found = list(_origin.of(call, spec, form, value))
    yield from found
    found += (counted := list(_counted(call, spec, form, actual, expected)))
    yield from counted
    found += (cases := list(_fits.another_case(call, spec, form, value)))
    yield from cases
    sizes = list(_fits.one_size(call, spec, form, actual))
    if not found:  # each of these is the reason for the different size
        found += sizes
        yield from sizes
    if form.variadic or any(not isinstance(e, int) for e in expected):
        return
    wanted = [int(e) for e in expected]
    yield from _axes.permuted(name, labels, actual, wanted)
    yield from _axes.regrouped(name, labels, actual, wanted)
    yield from _unpadded(call, spec, form, actual)
    yield from _fits.another_argument(call, spec, value)
    yield from _fits.another_layout(call, spec, form, value)
    if value.dtype in (torch.uint8, torch.int8):
        yield from _axes.packed(name, labels, actual, wanted)
    if not found:
        yield from _axes.rounded(name, labels, actual, wanted)


def _joined(found: Iterator[Found]) -> tuple[str | None, str | None]:
    causes: dict[str, str | None] = {}
    for text, fix in found:
        causes.setdefault(text, fix)
        if len(causes) == _MOST_CAUSES:
            break
    if not causes:
        return None, None
    return "\nor: ".join(causes), next((f for f in causes.values() if f), None)


def _counted(call: Call, spec: TensorSpec, form: Form, actual: list[int], expected: Sequence[Any]) -> Iterator[Found]:
    """Rows counted in slots where pages are needed, or the like."""
    if len(actual) != len(expected) or form.variadic:
        return
    different = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if e is not None and a != e]
    if len(different) != 1:
        return
    (i,) = different
    size = form.sizes[i]
    if not isinstance(size, Name) or not isinstance(expected[i], int):
        return
    part = size.name.rpartition(".")[2]
    for whole in _units(call, form, size.name):
        if call.values.get(whole) == actual[i]:
            label = whole.rpartition(".")[2]
            yield (
                f"{form.labels[i]} counts {part}s ({expected[i]}); {actual[i]} is the number of {label}s: one entry "
                f"per {label} instead of one per {part}",
                f"allocate one entry per {part}: {call.wanted(spec, form)}",
            )


def _units(call: Call, form: Form, name: str) -> list[str]:
    """Names that count the same things in another unit: the whole of a part, the parts of a whole, what counts rows."""
    found = {form.parts.get(name, "")}
    for step in call.contract.steps:
        if step.equation is None:
            continue
        left, right = set(names(step.equation.left)), set(names(step.equation.right))
        found |= right if name in left else left if name in right else set()
    if name in _COUNTS:
        found |= {n for n in call.values if n in _COUNTS}
    return sorted(n for n in found if n and n != name and call.values.get(n) != call.values.get(name))


def _unpadded(call: Call, spec: TensorSpec, form: Form, actual: list[int]) -> Iterator[Found]:
    """The logical shape, where the layout rounds sizes up."""
    sizes = [None if s is None else _without_padding(s) for s in form.sizes]
    pads = dict(form.layout.rules.pad) if form.layout is not None and form.layout.concrete else {}
    sizes = [form.layout.size_of(n) if n in pads else s for n, s in zip(form.labels, sizes, strict=True)]  # type: ignore[union-attr]
    rounded = ", ".join(
        f"{label} to a multiple of {brief(pads[label])}" if label in pads else brief(old)
        for label, old, new in zip(form.labels, form.sizes, sizes, strict=True)
        if old is not None and old != new
    )
    if rounded and [call.number(s) for s in sizes] == actual:
        yield f"{spec.name} has the logical, unpadded shape; needed is the padded one: {rounded}", None


def _without_padding(expr: Expr) -> Expr:
    match expr:
        case Op("align", (inner, _)):
            return _without_padding(inner)
        case Op("/" | "*" as op, (a, b)):
            return Op(op, (_without_padding(a), _without_padding(b)))
    return expr


# --- numbers ----------------------------------------------------------------------------------------------------------


def number(call: Call, name: str, value: Any) -> str | None:
    """Where else in the call a wrong number stands: the padded size of an axis, or another argument's size."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) < 4:
        return None  # small numbers are everywhere
    plain = None
    for spec in call.contract.tensors.values():
        form, tensor = call.form_of(spec), call.arguments.get(spec.name)
        if form is None or not isinstance(tensor, torch.Tensor):
            continue
        for label, size in zip(form.labels, form.sizes, strict=True):
            if size is None or isinstance(size, Const) or call.number(size) != value or name in names(size):
                continue
            if _without_padding(size) != size:
                return f"{value} is the padded size of {label} in {spec.name}: {brief(size)}"
            plain = plain or f"{value} is the size of {label} in {spec.name}"
    return plain


# --- dtypes -----------------------------------------------------------------------------------------------------------


def dtype(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> tuple[str | None, str | None]:
    """Cause and fix of a wrong dtype."""
    assert form.dtypes is not None
    name = spec.name
    swapped = next(_fits.another_argument(call, spec, value), None)
    if swapped is not None:
        return swapped
    wanted, got, short = form.dtypes[0], value.dtype, _dtypes.short
    if {got, wanted} == {torch.float8_e4m3fn, torch.float8_e4m3fnuz}:
        return (
            "e4m3fn and e4m3fnuz are different codes: the same bits mean half the value in fnuz",
            f"quantise {name} to {short(wanted)}",
        )
    several = packed_into(call, form, value)
    if several is not None:
        return several, f"if its bytes are {short(wanted)}, pass {name}.view(torch.{short(wanted)})"
    bytes_ = (torch.uint8, torch.int8)
    if wanted.is_floating_point and got in bytes_ and wanted.itemsize == 1:
        return None, f"if its bytes are {short(wanted)}, pass {name}.view(torch.{short(wanted)})"
    if not wanted.is_floating_point and not got.is_floating_point:
        ratio = got.itemsize // wanted.itemsize
        entries = f"read as {short(wanted)}, each {short(got)} is {ratio} entries"
        return entries if ratio > 1 else None, f"pass {name}.to(torch.{short(wanted)})"
    if wanted.is_floating_point and wanted.itemsize > 1 == got.itemsize and got.is_floating_point:
        return f"{name} is quantised already: {short(got)} has 8 bits", f"pass {name} before it is quantised"
    if got.is_floating_point and wanted.itemsize == 1 < got.itemsize:
        return f"{name} is not encoded as {short(wanted)} yet", f"quantise {name} to {short(wanted)}"
    if got.itemsize == wanted.itemsize:
        return f"{short(got)} has the same width as {short(wanted)}: the shape cannot tell them apart", (
            f"pass {name} as {short(wanted)}"
        )
    return None, f"pass {name} as {short(wanted)}"


def packed_into(call: Call, form: Form, value: torch.Tensor) -> str | None:
    """Several elements in one wider integer: as many bytes as needed, fewer elements."""
    assert form.dtypes is not None
    wanted, got = form.dtypes[0], value.dtype
    expected, _ = call.expected_shape(form, value)
    if got.is_floating_point or got.itemsize <= wanted.itemsize or not expected or not isinstance(expected[-1], int):
        return None
    ratio = got.itemsize // wanted.itemsize
    if [*value.shape[:-1], value.shape[-1] * ratio] != expected:
        return None
    counted = f"{value.shape[-1]} * {ratio} = {expected[-1]}"
    return f"{ratio} {_dtypes.short(wanted)} are packed into each {_dtypes.short(got)}: {counted}"


def _with_pitch(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any]) -> str:
    """A tensor with these very strides: one of the catalogue, or ``torch.empty_strided`` where a pitch is declared."""
    wanted = call.wanted(spec, form)
    if wanted.startswith("layout(") or not all(isinstance(e, int) for e in expected):
        return wanted
    return f"torch.empty_strided({tuple(value.shape)}, {tuple(expected)}, dtype=torch.{_dtypes.short(value.dtype)})"


# --- strides ----------------------------------------------------------------------------------------------------------


def stride(
    call: Call, spec: TensorSpec, form: Form, value: torch.Tensor, expected: Sequence[Any], wrong: list[int]
) -> tuple[str | None, str | None]:
    """Cause and fix of wrong strides."""
    name, labels = spec.name, form.labels
    sizes, strides = list(value.shape), list(value.stride())
    if spec.writes is not None:
        fix = f"allocate {name} in this layout; a .contiguous() copy would take the writes and be lost"
    elif form.plain:
        fix = f"pass {name}.contiguous(), which copies it"
    else:
        fix = f"copy {name} into {_with_pitch(call, spec, form, value, expected)}"
    single = [i for i in wrong if sizes[i] == 1]
    if single == wrong:
        return one_stride(name, form, value, wrong, expected)
    if 0 in [strides[i] for i in wrong if sizes[i] > 1]:
        return f"{name} is an expanded view: elements share memory", fix
    large = [i for i in range(len(sizes)) if sizes[i] > 1]
    order = sorted(large, key=lambda i: -strides[i])
    running, dense = 1, True
    for i in reversed(order):
        dense = dense and strides[i] == running
        running *= sizes[i]
    if dense and order != large:
        memory = " ".join(labels[i] for i in order)
        return f"{name} is a transposed view: in memory its axes are ({memory})", fix
    known = list(_origin.of(call, spec, form, value))
    if known:
        return known[0][0], fix
    if order == large and all(isinstance(expected[i], int) for i in wrong):
        first = wrong[-1]
        if strides[first] > expected[first]:
            within = f", starting at element {start}" if (start := value.storage_offset()) else ""
            return (
                f"{name} is a slice of a wider tensor: {labels[first]} steps over {strides[first]} elements "
                f"where {expected[first]} are its own{within}",
                fix,
            )
    return None, fix


def one_stride(
    name: str, form: Form, value: torch.Tensor, wrong: Sequence[int], expected: Sequence[Any]
) -> tuple[str, str]:
    """A stride that counts although its axis has size 1: torch lets it be anything, and .contiguous() keeps it."""
    strides = list(value.stride())
    for i in wrong:
        inner = range(i + 1, value.dim())
        strides[i] = expected[i] if i < len(expected) and isinstance(expected[i], int) else _extent(value, inner)
    which = ", ".join(form.labels[i] for i in wrong)
    return (
        f"{which} has size 1, so torch lets its stride be anything, and .contiguous() keeps it",
        f"pass {name}.as_strided({numbers(value.shape)}, {numbers(strides)})",
    )


def _extent(value: torch.Tensor, dims: Sequence[int]) -> int:
    return max((value.stride(j) * value.shape[j] for j in dims), default=1)
