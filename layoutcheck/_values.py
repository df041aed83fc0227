"""Rules that read data: index ranges, prefix sums, the padding of padded layouts. Checked in ``values`` mode only.

Reading data synchronises with the device, so nothing here runs in the other modes. While a CUDA graph is captured the
rules are skipped: a captured stream may not be synchronised. Meta and fake tensors have no data and are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from layoutcheck import _dtypes, _entries, _index
from layoutcheck._call import case_of, filled, layout_dims, solve
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Expr, Name, Op, brief, evaluate, is_size, names, parse_condition, substitute
from layoutcheck._errors import Violation
from layoutcheck._rules import VALUE, Each, Finite, Index, Indptr
from layoutcheck._specs import Form, TensorSpec


def check(contract: Contract, arguments: Mapping[str, Any]) -> list[Violation]:
    """Every broken value rule of a call whose shapes have been found right."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []
    return list(_check(contract, arguments))


def _check(contract: Contract, arguments: Mapping[str, Any]) -> Iterator[Violation]:
    values, _ = solve(contract, arguments)
    found: dict[str, list[Violation]] = {}
    for name in _entries.told_first(contract.tensors):
        found[name] = list(_of_tensor(contract, name, arguments, values, {n for n, v in found.items() if v}))
    for name in contract.tensors:
        yield from found[name]
    for under, each in contract.conditions:
        if isinstance(each, Each) and _has_data(tensor := arguments.get(each.arguments[0])):
            holds = all(evaluate(u.expr, values, arguments) for u in under)
            if holds and (v := _each(values, each, tensor)) is not None:
                yield v


def _of_tensor(
    contract: Contract, name: str, arguments: Mapping[str, Any], values: Mapping[str, Any], wrong: set[str]
) -> Iterator[Violation]:
    """What is wrong with what one tensor holds, where ``wrong`` are those of which something is known to be."""
    spec, tensor = contract.tensors[name], arguments.get(name)
    if not _has_data(tensor):
        return
    for rule in spec.values:
        tellers = _entries.told_by(rule, contract.tensors)
        given = [v for n in tellers if (v := arguments.get(n)) is not None]
        if wrong.intersection(tellers) or not all(map(_has_data, given)):
            continue
        match rule:
            case Index():
                yield from _index_values(contract, name, rule, tensor, values, arguments)
            case Indptr():
                longest = _entries.longest(rule, values, arguments, contract.tensors)
                yield from _indptr(name, rule, tensor, values, longest)
            case Finite() if (case := case_of(spec, values, arguments)) is not None:
                if (v := _finite(name, spec.forms[case][1], rule, tensor, values)) is not None:
                    yield v
    if (case := case_of(spec, values, arguments)) is not None:
        yield from _padding(spec, spec.forms[case][1], tensor, values)


def _has_data(tensor: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type != "meta"
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


def _index_values(
    contract: Contract,
    name: str,
    rule: Index,
    tensor: torch.Tensor,
    values: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Iterator[Violation]:
    """Index rules, on the entries that are live and not skipped."""
    flat, device = tensor.reshape(-1), tensor.device
    live = _entries.live(rule, tensor.shape, contract.tensors, values, arguments, device).reshape(-1)
    kept = live & ~_entries.skipped(rule, flat, values)
    outside = _out_of_range(contract, name, rule, tensor, live, kept, values, arguments)
    if outside is not None:
        yield outside
    elif rule.segment_of is not None and (indptr := arguments.get(rule.segment_of)) is not None:
        yield from _segments(name, rule, tensor, kept, indptr)
    if rule.unique:
        found, counts = torch.unique(flat[kept], return_counts=True)
        if len(twice := found[counts > 1]):
            value = int(twice[0])
            where = (kept & (flat == value)).nonzero().reshape(-1)[:2].tolist()
            yield Violation(
                name, "value", "no value twice", f"{value} at {where[0]} and {where[1]}", None,
                f"give each row a slot of its own in {name}: of two writes to one slot either may win",
                headline=f"{name} has {len(twice)} {'value' if len(twice) == 1 else 'values'} more than once",
            )  # fmt: skip
    if rule.apart_from is not None and arguments.get(rule.apart_from) is not None:
        yield from _shared(contract, name, rule.apart_from, tensor, kept, values, arguments)


def _shared(
    contract: Contract,
    name: str,
    other: str,
    tensor: torch.Tensor,
    kept: torch.Tensor,
    values: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Iterator[Violation]:
    """The first value of an index that is also one of another index from which it must be apart."""
    others = arguments[other]
    counts = _entries.counts(other, contract.tensors, values, arguments)
    flat = tensor.reshape(-1)
    both = (kept & torch.isin(flat, others[counts].to(tensor.device))).nonzero()
    if len(both):
        at = int(both[0])
        value = int(flat[at])
        where = int((counts & (others == value)).reshape(-1).nonzero()[0])
        got = f"{name}{_place(tensor, at)} = {value} = {other}{_place(others, where)}"
        count = f"{len(both)} {'value' if len(both) == 1 else 'values'}"
        yield Violation(
            name, "value", f"no value of {other}", got, None,
            f"give each row a slot of its own in {name} and {other}: of two writes to one slot either may win",
            headline=f"{name} has {count} of {other}",
        )  # fmt: skip


def _out_of_range(
    contract: Contract,
    name: str,
    rule: Index,
    tensor: torch.Tensor,
    live: torch.Tensor,
    kept: torch.Tensor,
    values: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Violation | None:
    flat = tensor.reshape(-1)
    start, stop = evaluate(rule.start, values), evaluate(rule.stop, values)
    outside = (kept & ((flat < start) | (flat >= stop))).nonzero()
    if not len(outside):
        return None
    at = int(outside[0])
    bad = int(flat[at])
    place = _place(tensor, at)
    skipped = f"; skipped are {_filled_text(rule.skip, values)}" if rule.skip else ""
    limited = _entries.limited(rule, values, arguments)
    read = f"; live are {_live_text(contract, rule, values, arguments)}" if limited else ""
    wanted = f"{start} <= {name} < {_sized(rule.stop, values)}{skipped}{read}"
    of = f"{int(live.sum())} live values" if limited else f"{len(flat)} values"
    return Violation(
        name, "value", wanted, f"{name}{place} = {bad}", _read_as(bad, start, stop),
        f"pass values from {start} to {stop - 1}",
        headline=f"{name} has {len(outside)} of {of} out of range",
        body=(f"expected {wanted}", f"got      {name}{place} = {bad}"),
    )  # fmt: skip


def _live_text(contract: Contract, rule: Index, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """``those where mask is set``, ``the first cdiv(seq_lens, page_size) of a row``, ``the first indptr[-1] = 7``."""
    assert rule.live is not None
    tellers = {n: arguments[n] for n in names(rule.live) if n in contract.tensors}
    if not is_size(rule.live) or (isinstance(rule.live, Name) and _is_mask(tellers.get(rule.live.name))):
        return f"those where {brief(rule.live)}"
    ends = {n: t for n, t in tellers.items() if _entries.is_indptr(contract.tensors[n])}
    shown = substitute(rule.live, {n: Name(f"{n}[-1]") for n in ends})
    if len(ends) < len(tellers):
        return f"the first {brief(shown)} of a row"
    known = {**values, **{f"{n}[-1]": int(t.reshape(-1)[-1]) for n, t in ends.items()}}
    return f"the first {_sized(shown, known)}"


def _is_mask(teller: Any) -> bool:
    return isinstance(teller, torch.Tensor) and teller.dtype == torch.bool


def _segments(
    name: str, rule: Index, tensor: torch.Tensor, kept: torch.Tensor, indptr: torch.Tensor
) -> Iterator[Violation]:
    """The first entry that is another segment's number than that of the segment in which it lies."""
    other, flat = rule.segment_of, tensor.reshape(-1)
    rows, width = tensor.shape[0], flat.numel() // max(tensor.shape[0], 1)

    def lies_in(starts: torch.Tensor) -> torch.Tensor:
        return _entries.segments(rows, starts, tensor.device).repeat_interleave(width)

    right = lies_in(indptr)
    bad = (kept & (flat != right)).nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    got, segment = f"{name}{_place(tensor, at)} = {int(flat[at])}", int(right[at])
    first, end = (int(indptr[i]) for i in (segment, segment + 1))
    wanted = f"{name}{_place(tensor, at)} = {segment}"
    why = f"{other}[{segment}] = {first} <= {at // width} < {other}[{segment + 1}] = {end}"
    cause = None
    if torch.equal(flat[kept], right[kept] + 1):
        cause = f"{name} counts segments from 1"
    elif torch.equal(flat[kept], lies_in(indptr + 1)[kept]):
        cause = "each segment begins one too late, as searchsorted without right=True has it"
    yield Violation(
        name, "value", f"{wanted}, as {why}", got, cause,
        f"pass torch.repeat_interleave(torch.arange({len(indptr) - 1}), {other}.diff())",
        headline=f"{name} has {len(bad)} of {int(kept.sum())} values that are not the segment of {other} they lie in",
        body=(f"expected {wanted}, as {why}", f"got      {got}"),
    )  # fmt: skip


def _read_as(bad: int, start: int, stop: int) -> str | None:
    """What an index below zero addresses where it is taken as it stands."""
    if bad >= 0 or start != 0 or stop + bad < 0:
        return None
    return f"taken as it stands, {bad} counts from the end and is {stop + bad}"


def _sized(expr: Expr, values: Mapping[str, Any]) -> str:
    """``slot = 8192``, or the number alone."""
    value = evaluate(expr, values)
    if isinstance(expr, Const):
        return str(value)
    numbers = f" = {brief(filled(expr, values))}" if isinstance(expr, Op) else ""
    return f"{brief(expr)}{numbers} = {value}"


def _filled_text(skip: str, values: Mapping[str, Any]) -> str:
    known = [n for n in dict.fromkeys(names(parse_condition(f"index {skip}"))) if n in values and n != "index"]
    return skip + "".join(f" ({n} = {values[n]})" for n in known)


def _place(tensor: torch.Tensor, at: int) -> str:
    """``[0, 1]`` for the position of a value in a tensor read row by row."""
    return str([int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape)])


def _indptr(
    name: str, rule: Indptr, tensor: torch.Tensor, values: Mapping[str, Any], longest: Any
) -> Iterator[Violation]:
    stop = evaluate(rule.stop, values)
    flat = tensor.reshape(-1)
    fix = f"compute {name} as the prefix sum of the lengths, with a 0 in front"
    if not len(flat) or int(flat[0]) != 0:
        got = f"{name}[0] = {int(flat[0])}" if len(flat) else "no entries"
        yield Violation(name, "value", f"{name}[0] = 0", got, None, fix, headline=f"{name} does not start at 0")
        return
    steps = flat[1:] - flat[:-1]
    if isinstance(longest, torch.Tensor):
        longest = longest.to(tensor.device)
    if len(falls := (steps < 0).nonzero()):
        at = int(falls[0])
        got = f"{name}[{at}] = {int(flat[at])}, {name}[{at + 1}] = {int(flat[at + 1])}"
        yield Violation(name, "value", f"{name} never decreases", got, None, fix, headline=f"{name} decreases")
    elif longest is not None and len(long := (steps > longest).nonzero()):
        assert rule.longest is not None
        at = int(long[0])
        got = f"{name}[{at + 1}] - {name}[{at}] = {int(steps[at])}"
        if isinstance(longest, torch.Tensor):
            wanted = f"{name}[{at + 1}] - {name}[{at}] <= {int(longest[at])} ({brief(rule.longest)})"
            shorter = f"compute {name} from lengths that are at most {brief(rule.longest)}"
        else:
            wanted = f"no step above {_sized(rule.longest, values)}"
            shorter = f"raise {brief(rule.longest)}, or split the sequence"
        yield Violation(
            name, "value", wanted, got, None, shorter, headline=f"{name} has a step that is too long"
        )  # fmt: skip
    last = int(flat[-1])
    if last > stop or (last != stop and not rule.capacity):
        wanted = f"{name}[-1] {'<=' if rule.capacity else '='} {_sized(rule.stop, values)}"
        yield Violation(
            name, "value", wanted, f"{name}[-1] = {last}", None, fix, headline=f"{name} ends at {last}, not {stop}"
        )


def _each(call_values: Mapping[str, Any], rule: Each, tensor: torch.Tensor) -> Violation | None:
    """The first value of a tensor that does not keep a comparison."""
    flat = tensor.reshape(-1)
    good = _entries.holds(substitute(rule.expr, {VALUE: Name("index")}), flat, call_values)
    bad = (~good).nonzero()
    if not len(bad):
        return None
    (name,) = rule.arguments
    at = int(bad[0])
    got = f"{name}{_place(tensor, at)} = {flat[at].item()}"
    return Violation(
        name, "value", f"every {rule}", got, None, f"correct {name} where it is computed",
        headline=f"{name} has {len(bad)} of {len(flat)} values for which {rule} does not hold",
    )  # fmt: skip


def _finite(name: str, form: Form, rule: Finite, tensor: torch.Tensor, values: Mapping[str, Any]) -> Violation | None:
    """The first element that is not a number, where the rule says."""
    at = {axis: int(evaluate(e, values)) for axis, e in rule.at}
    content, labels, element = tensor, form.axes, _dtypes.of(tensor.dtype)
    if form.layout is not None:
        dims = layout_dims(form, values)
        if dims is None or form.layout.elements[0].bits < 8:
            return None  # not known where the elements are, or of a type that has no such code
        element = element if element in form.layout.elements else form.layout.elements[0]
        content = _index.elements(form.layout(**dims), tensor, element.torch)
    if any(at.get(label, -1) >= n for label, n in zip(labels, content.shape, strict=True)):
        return None  # nothing is there, as in a pool without pages
    part = content[tuple(at.get(label, slice(None)) for label in labels)]
    bad = (~part.float().isfinite()).nonzero()
    if not len(bad):
        return None
    code = part[tuple(bad[0].tolist())].reshape(1)
    number = str(code.float().item())
    shown = f"{int(code.view(torch.uint8)):#04x}, which is {number} in {element}" if element.bits == 8 else number
    free = [label for label in labels if label not in at]
    first = ", ".join(f"{n} {i}" for n, i in [*at.items(), *zip(free, bad[0].tolist(), strict=False)])
    where = ", ".join(f"{n} {i}" for n, i in at.items())
    fix = f"fill {where} of {name} with 0 when it is allocated, and never write it" if at else None
    return Violation(
        name, "value", f"finite elements{' at ' if at else ''}{where}", f"{shown}, at {first}", None,
        fix or f"correct {name} where it is computed",
        headline=f"{name} has {len(bad)} of {part.numel()} elements that are not finite{' at ' if at else ''}{where}",
    )  # fmt: skip


def _padding(spec: TensorSpec, form: Form, tensor: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Padding of a padded layout must hold the layout's fill: a reader takes it for data."""
    layout = form.layout
    if layout is None or not layout.rules.pad or layout.rules.fill is None or tensor.numel() == 0:
        return
    dims = layout_dims(form, values)
    if dims is None:
        return  # the logical sizes are the argument's own secret: nothing says what is padding
    concrete = layout(**dims)
    where, code = _index.wrong_padding(concrete, tensor)
    if where is None:
        return
    element = _dtypes.of(tensor.dtype)
    nan = ", which is NaN" if element.nan and code in element.nan else ""
    at = ", ".join(f"{n} {i}" for n, i in where.items())
    sizes = ", ".join(f"{a.name} < {concrete.values_of(a.name)}" for a in concrete.axes)
    shown = f"{code:#04x}" if tensor.element_size() == 1 else str(code)
    yield Violation(
        spec.name, "value", f"padding of {layout.rules.fill} (data is {sizes})", f"{shown} at {at}{nan}", None,
        f"fill the padding of {spec.name} when it is allocated or written: layout({layout.name!r})(...).empty() does",
        headline=f"{spec.name} has padding that is not {layout.rules.fill}",
        body=(f"expected {layout.rules.fill} wherever it is not {sizes}", f"got      {shown} at {at}{nan}"),
    )  # fmt: skip
