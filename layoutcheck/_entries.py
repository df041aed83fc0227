"""Which entries of an index tensor count: those that the callable reads, and the segment in which each of them lies."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from layoutcheck._dims import Expr, Op, brief, evaluate, is_size, names, parse_condition
from layoutcheck._rules import Index, Indptr
from layoutcheck._specs import TensorSpec

Tensors = Mapping[str, TensorSpec]


def truths(expr: Expr, values: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """A condition on tensors, value by value; one truth for all where it speaks of none."""
    match expr:
        case Op("and" | "or" as op, parts):
            found = [truths(p, values, arguments) for p in parts]
            return functools.reduce(operator.and_ if op == "and" else operator.or_, found)
        case Op("not", (part,)):
            inner = truths(part, values, arguments)
            return ~inner if isinstance(inner, torch.Tensor) else not inner
        case Op("in" | "not in" as op, (left, Op("tuple", items))) if isinstance(
            value := evaluate(left, values, arguments), torch.Tensor
        ):
            hits = [value == evaluate(i, values, arguments) for i in items]
            mask = functools.reduce(operator.or_, hits, torch.zeros_like(value, dtype=torch.bool))
            return mask if op == "in" else ~mask
    result = evaluate(expr, values, arguments)
    return result.bool() if isinstance(result, torch.Tensor) else bool(result)


def told_by(rule: Any, tensors: Tensors) -> list[str]:
    """The tensors that a rule compares an index or a prefix sum with, or that say which entries are read."""
    found: list[str] = []
    if isinstance(rule, Index):
        found += [] if rule.live is None else names(rule.live)
        found += [n for n in (rule.apart_from, rule.segment_of) if n is not None]
    elif isinstance(rule, Indptr):
        found += [] if rule.longest is None else names(rule.longest)
    return [n for n in dict.fromkeys(found) if n in tensors]


def told_first(tensors: Tensors) -> list[str]:
    """The names of all tensors, each behind those by which it is told. Raises ``ValueError`` for a circle."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            circle = above[above.index(name) :]
            each = "each other" if circle[1:] else "itself"
            raise ValueError(f"the rules of {' and '.join(circle)} speak of {each}")
        for other in (n for rule in tensors[name].values for n in told_by(rule, tensors)):
            visit(other, (*above, name))
        if name not in order:
            order.append(name)

    for name in tensors:
        visit(name, ())
    return order


def live(
    rule: Index,
    shape: Sequence[int],
    tensors: Tensors,
    values: Mapping[str, Any],
    arguments: Mapping[str, Any],
    device: torch.device | None = None,
) -> torch.Tensor:
    """True for each entry of an index of that shape which the callable reads; all, where nothing given says which."""
    every = torch.ones(tuple(shape), dtype=torch.bool, device=device)
    if rule.segment_of is not None and (indptr := arguments.get(rule.segment_of)) is not None:
        every[_last(indptr) :] = False
    if not limited(rule, values, arguments):
        return every
    assert rule.live is not None
    known = dict(values)
    for name in (n for n in names(rule.live) if n in tensors):
        teller = arguments[name]
        known[name] = _last(teller) if is_indptr(tensors[name]) else teller.to(device)
    found = (evaluate if is_size(rule.live) else truths)(rule.live, known, arguments)
    if isinstance(found, torch.Tensor) and found.dtype == torch.bool:
        return every & found.reshape(*found.shape, *[1] * (every.dim() - found.dim()))
    most = found.unsqueeze(-1) if isinstance(found, torch.Tensor) else found
    return every & (torch.arange(every.shape[-1], device=device) < most)


def limited(rule: Index, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a call says which entries are read: everything of which ``live`` speaks is given."""
    known = {**arguments, **values}
    return rule.live is not None and all(known.get(n) is not None for n in names(rule.live))


def counts(name: str, tensors: Tensors, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> torch.Tensor:
    """True for each entry of an index argument that is read and not skipped."""
    index = arguments[name]
    kept = torch.ones(index.shape, dtype=torch.bool, device=index.device)
    for rule in tensors[name].values:
        if isinstance(rule, Index):
            kept &= live(rule, index.shape, tensors, values, arguments, index.device) & ~skipped(rule, index, values)
    return kept


def skipped(rule: Index, index: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """True for each value that the callable ignores."""
    if rule.skip is None:
        return torch.zeros_like(index, dtype=torch.bool)
    return holds(parse_condition(f"index {rule.skip}"), index, values)


def holds(expr: Expr, index: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """True for each value for which a condition on ``index`` is; what does not speak of it is one truth for all."""
    found = truths(expr, {**values, "index": index})
    return found if isinstance(found, torch.Tensor) else torch.full_like(index, found, dtype=torch.bool)


def longest(rule: Indptr, values: Mapping[str, Any], arguments: Mapping[str, Any], tensors: Tensors) -> Any:
    """What no step of a prefix sum may pass: a number, or a tensor with one for each step; None where there is none."""
    tellers = told_by(rule, tensors)
    if rule.longest is None or any(arguments.get(n) is None for n in tellers):
        return None
    return evaluate(rule.longest, {**values, **{n: arguments[n] for n in tellers}})


def segments(count: int, indptr: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The segment of a prefix sum in which each of the positions 0, 1, ... lies; their number for those behind all."""
    ends = indptr.to(device).long()[1:].contiguous()
    return torch.searchsorted(ends, torch.arange(count, device=device), right=True)


def _last(indptr: torch.Tensor) -> int:
    return int(indptr.reshape(-1)[-1]) if indptr.numel() else 0


def is_indptr(spec: TensorSpec) -> bool:
    """Whether an argument is a prefix sum."""
    return any(isinstance(r, Indptr) for r in spec.values)


# --- decoration -------------------------------------------------------------------------------------------------------


def mistakes(tensors: Tensors) -> Iterator[str]:
    """What makes the tellers of a contract's index rules ones that no call can have, in words."""
    for spec in tensors.values():
        for rule in spec.values:
            if isinstance(rule, Index):
                yield from _mistakes(spec, rule, tensors)
    try:
        told_first(tensors)
    except ValueError as error:
        yield str(error)


def _mistakes(spec: TensorSpec, rule: Index, tensors: Tensors) -> Iterator[str]:
    for field, kind in (("segment_of", Indptr), ("apart_from", Index)):
        other = getattr(rule, field)
        if other is not None and not (other in tensors and any(isinstance(r, kind) for r in tensors[other].values)):
            yield f"{field}={other!r}: {other} is no tensor with an {kind.__name__} rule"
    if rule.live is None or spec.form is None or spec.form.variadic:
        return
    sizes = spec.form.sizes
    for name in (n for n in names(rule.live) if n in tensors):
        form = tensors[name].form
        if form is None or form.variadic or is_indptr(tensors[name]):
            continue
        of_rows = sizes[:-1] if is_size(rule.live) and form.dtypes != (torch.bool,) else sizes[: len(form.sizes)]
        if form.sizes != of_rows:
            yield f"live={brief(rule.live)!r}: {name} has no value for each row of {spec.name}"
