"""Faults of several arguments at once, or of what is no tensor: stale pools, swaps, what is missing, scalars."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from layoutcheck import _dtypes
from layoutcheck._contract import Contract
from layoutcheck._dims import Name
from layoutcheck._rules import Condition, NoOverlap
from layoutcheck._specs import Form
from layoutcheck.testing._call import Call
from layoutcheck.testing._candidate import (
    ANY,
    INTEGERS,
    Candidate,
    blamed_for,
    concerned,
    like,
    named,
    replaced,
    value_of,
)
from layoutcheck.testing._contents import wrong_presence
from layoutcheck.testing._contradiction import breaks


def several(valid: Call) -> Iterator[Candidate]:
    """Every change of more than one tensor's looks."""
    yield from _stale(valid)
    yield from _swapped(valid)
    yield from _presence(valid)
    yield from _scalars(valid)
    yield from _elements(valid)
    yield from _overlapping(valid)


def _stale(valid: Call) -> Iterator[Candidate]:
    """Every buffer but the first from before a resize."""
    pages = valid.sizes.get("page")
    if not isinstance(pages, int) or pages < 2:
        return
    half = {"page": pages // 2, "slot": pages // 2 * valid.sizes.get("page_size", 1)}
    shown = {
        n: [half.get(s.name, k) if isinstance(s, Name) else k for s, k in zip(f.sizes, v.shape, strict=True)]
        for n, f in valid.forms.items()
        if not f.variadic and (v := valid.arguments.get(n)) is not None
    }
    stale = [n for n, shape in shown.items() if shape != list(valid.arguments[n].shape)]
    if len(stale) > 1:
        yield Candidate(
            "all_stale_after_resize", " and ".join(stale[1:]),
            lambda: {n: like(valid.forms[n], valid.arguments[n], shown[n]) for n in stale[1:]},
            ANY, frozenset(valid.contract.specs),
        )  # fmt: skip


def _swapped(valid: Call) -> Iterator[Candidate]:
    tensors = [(n, v) for n in valid.forms if isinstance(v := valid.arguments.get(n), torch.Tensor)]
    for (a, first), (b, second) in itertools.combinations(tensors, 2):
        if first.dtype == second.dtype and first.dim() == second.dim() and first.shape != second.shape:
            yield Candidate(
                "swapped", f"{a} and {b}", _swap(a, b, first, second),
                ANY | {"stride"}, blamed_for(valid, a) | blamed_for(valid, b),
            )  # fmt: skip


def _swap(a: str, b: str, first: torch.Tensor, second: torch.Tensor) -> Callable[[], dict[str, Any]]:
    return lambda: {a: second, b: first}


def _presence(valid: Call) -> Iterator[Candidate]:
    contract = valid.contract
    for name, spec in contract.specs.items():
        if name not in valid.arguments:
            continue
        value = valid.arguments[name]
        if name in contract.tensors and not spec.optional:
            yield Candidate("missing", name, value_of(name, None), frozenset({"presence"}),
                            frozenset({name}), sure=True)  # fmt: skip
            continue
        if not spec.optional:
            continue
        other: Any = None if value is not None else (torch.zeros(1) if name in contract.tensors else 1)
        if wrong := _wrong_presence(contract, valid.everything | {name: other}, valid.sizes):
            yield Candidate(
                "missing" if value is not None else "one_argument_too_many", name,
                value_of(name, other), frozenset({"presence"}), concerned(valid, name) | wrong,
                sure=True,
            )  # fmt: skip


def _wrong_presence(contract: Contract, arguments: Mapping[str, Any], values: Mapping[str, Any]) -> set[str]:
    """The arguments that a rule asks for and are not given, or refuses and are given."""
    found: set[str] = set()
    for under, rule in contract.conditions:
        if any(breaks((), u.expr, {**values, **arguments}, arguments) for u in under):
            continue
        found |= wrong_presence(rule, {n for n, v in arguments.items() if v is not None})
    return found


def _scalars(valid: Call) -> Iterator[Candidate]:
    contract = valid.contract
    every = frozenset(contract.specs)
    for name, spec in contract.scalars.items():
        if name not in valid.arguments or valid.arguments[name] is None:
            continue
        wrong: Any = None
        if spec.choices is not None:
            wrong = "no such word"
        elif spec.classes is not None and not issubclass(str, spec.classes):
            wrong = "1"
        if wrong is not None:
            yield Candidate("wrong_scalar", name, value_of(name, wrong), frozenset({"value"}),
                            every, sure=True)  # fmt: skip
        value = valid.arguments[name]
        if type(value) in (int, float):
            for other in (value + 1, value - 1, value * 2, value * 0, -1 * abs(value) - 1):
                yield Candidate("scalar_that_breaks_a_rule", name, value_of(name, other), ANY, every)


def _elements(valid: Call) -> Iterator[Candidate]:
    """Another element that the argument alone may have, but not together with the others."""
    for name, form in valid.forms.items():
        value = valid.arguments.get(name)
        if value is None or form.dtypes is None or name not in valid.arguments:
            continue
        for dtype in form.dtypes:
            if dtype == value.dtype or dtype not in _dtypes._BY_TORCH:
                continue
            stand_in = valid.everything | {name: torch.empty(0, dtype=dtype)}
            broken = [
                r for under, r in valid.contract.conditions
                if isinstance(r, Condition) and name in set(named(r.expr))
                and breaks(under, r.expr, valid.sizes, stand_in)
            ]  # fmt: skip
            broken += sorted(_wrong_presence(valid.contract, stand_in, valid.sizes))  # type: ignore[arg-type]
            if broken:
                yield Candidate(
                    "element_of_another_mode", name, replaced(name, _element, form, value, dtype),
                    frozenset({"dtype", "presence", "relation"}), frozenset(valid.contract.specs), sure=True,
                )  # fmt: skip
                break


def _element(form: Form, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of another dtype in the same shape."""
    return like(form, value, value.shape).view(INTEGERS[value.element_size()]).to(torch.float32).to(dtype)


def _overlapping(valid: Call) -> Iterator[Candidate]:
    for under, rule in valid.contract.conditions:
        if not isinstance(rule, NoOverlap) or any(breaks((), u.expr, valid.sizes, valid.everything) for u in under):
            continue
        for a, b in itertools.combinations(rule.arguments, 2):
            first, second = valid.arguments.get(a), valid.arguments.get(b)
            if first is None or second is None or not first.numel() or not second.numel():
                continue
            yield Candidate(
                "overlapping", b, replaced(b, _over, first, second), frozenset({"relation"}),
                frozenset({a, b}), sure=True,
            )  # fmt: skip


def _over(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A tensor like the second one that begins at the first one's first element."""
    if first.dtype != second.dtype:
        raise TypeError("only tensors of one element are laid over each other")
    return torch.empty(0, dtype=second.dtype).set_(
        _grown(first, second), first.storage_offset(), second.shape, second.stride()
    )


def _grown(first: torch.Tensor, second: torch.Tensor) -> Any:
    """The first one's storage, which is made large enough for the second one at the same place."""
    storage = first.untyped_storage()
    reach = sum((n - 1) * s for n, s in zip(second.shape, second.stride(), strict=True)) + 1
    needed = (first.storage_offset() + reach) * first.element_size()
    if storage.nbytes() < needed:
        storage.resize_(int(needed))
    return storage
