"""Calls with exactly one fault, each with its name, and what the guard must say of it.

Whether a change is a fault is decided here by following the equations of the contract from every number of the call,
in any direction: not by the order in which the guard binds them, which is what is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from layoutcheck import _dtypes
from layoutcheck._call import layout_dims
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Equation, Expr, Inexact, Name, Op, evaluate
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._layout import Layout
from layoutcheck._rules import Condition, NoOverlap
from layoutcheck._specs import Form
from layoutcheck.layouts import entries
from layoutcheck.testing import _value_faults
from layoutcheck.testing._calls import Call, calls, tag, wrong_presence
from layoutcheck.testing._guard import refused
from layoutcheck.testing._memory import depth
from layoutcheck.testing._sizes import Impossible, follow

_GROW = ("slot", "page", "row", "token", "pool", "seq")
_SAME_WIDTH = {
    1: (torch.int8, torch.float8_e5m2, torch.uint8),
    2: (torch.float16, torch.bfloat16, torch.int16),
    4: (torch.int32, torch.float32),
    8: (torch.float64, torch.int64),
}
_ANY = frozenset({"shape", "relation"})


@dataclass(frozen=True)
class Fault:
    """A call with one fault.

    ``name`` is the kind of fault, ``argument`` what was changed, ``call`` the faulty call and ``valid`` the one that it
    was made from. The guard must report one of ``rules`` on one of ``blamed``, and nothing of any other argument.
    ``launchable`` is false where no kernel may see the call, as for tensors without memory.
    """

    name: str
    argument: str
    call: Call
    valid: Call
    rules: frozenset[str]
    blamed: frozenset[str]
    launchable: bool = True

    def rejected(self) -> tuple[Violation, ...]:
        """What the guard says of the call; nothing is run."""
        return refused(self.call.fn, self.call.arguments)

    def missed(self) -> str | None:
        """Why the guard's answer is not the right one, in words; None where it is."""
        found = self.rejected()
        if not found:
            return f"{self.name} of {self.argument} was accepted"
        shown = ", ".join(f"{v.rule} of {v.argument}" for v in found)
        wanted = f"{' or '.join(sorted(self.rules))} of {' or '.join(sorted(self.blamed))}"
        if not any(v.argument in self.blamed and v.rule in self.rules for v in found):
            return f"{self.name} of {self.argument} was rejected for {shown}, not for {wanted}"
        if strange := [v for v in found if v.argument not in self.blamed]:
            return f"{self.name} of {self.argument}: {strange[0].argument} was blamed too ({shown}), which is right"
        return None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        return f"# {self.name} of {self.argument}\n{self.call!r}"


@dataclass(frozen=True)
class Candidate:
    """A change that may be a fault: what to replace, and what to expect. ``sure`` where no equation must be followed."""

    name: str
    argument: str
    change: Callable[[], dict[str, Any]]
    rules: frozenset[str]
    blamed: frozenset[str]
    sure: bool = False
    launchable: bool = True


def faults(fn: Callable[..., Any], *, data: bool = True, **bounds: Any) -> st.SearchStrategy[Fault]:
    """Valid calls of a function with exactly one fault; arguments as for :func:`layoutcheck.testing.calls`."""
    return calls(fn, data=data, **bounds).flatmap(fault_of)


@st.composite
def fault_of(draw: st.DrawFn, valid: Call) -> Fault:
    """One fault of a given call."""
    by_name: dict[str, list[Candidate]] = {}
    for c in candidates(valid):
        by_name.setdefault(c.name, []).append(c)
    options = list(by_name)
    start = draw(st.integers(0, max(0, len(options) - 1)))
    which = draw(st.integers(0, 1023))
    for name in (*options[start:], *options[:start]):
        mine = by_name[name]
        for i in range(len(mine)):
            if (fault := made(valid, mine[(which + i) % len(mine)])) is not None:
                return fault
    reject()


def every_fault(valid: Call) -> list[Fault]:
    """Every fault of a call, each kind for each argument once."""
    found: dict[tuple[str, str], Fault] = {}
    for candidate in candidates(valid):
        key = candidate.name, candidate.argument
        if key not in found and (fault := made(valid, candidate)) is not None:
            found[key] = fault
    return list(found.values())


def made(valid: Call, candidate: Candidate) -> Fault | None:
    """The fault, or None where the change is one that the contract allows."""
    try:
        changed = candidate.change()
    except (LayoutError, TypeError, Inexact):
        return None
    tag(valid.contract, {n: v for n, v in changed.items() if isinstance(v, torch.Tensor)}, valid.sizes)
    if not candidate.sure and not contradicts(valid, changed):
        return None
    call = valid.with_arguments(**changed)
    return Fault(
        candidate.name, candidate.argument, call, valid, candidate.rules, candidate.blamed, candidate.launchable
    )


def candidates(valid: Call) -> Iterator[Candidate]:
    """Every change that may be a fault of a call."""
    for name, form in valid.forms.items():
        if name not in valid.arguments:  # reached through another argument: not ours to replace
            continue
        yield from _shape(valid, name, form)
        yield from _dtype(valid, name, form)
        yield from _stride(valid, name, form)
        yield from _device(valid, name)
        yield from _value_faults.values(valid, name, form)
    yield from _stale(valid)
    yield from _swapped(valid)
    yield from _presence(valid)
    yield from _scalars(valid)
    yield from _elements(valid)
    yield from _overlapping(valid)


# --- is it a fault? ---------------------------------------------------------------------------------------------------


def contradicts(valid: Call, changed: Mapping[str, Any]) -> bool:
    """Whether the changed call breaks an equation or a condition, or shows a form that is not the argument's."""
    contract, arguments = valid.contract, valid.everything | dict(changed)
    known: dict[str, Any] = {}
    for n, v in arguments.items():
        if n not in contract.tensors and isinstance(v, int | float | str | bool):
            known[n] = v
    equations: list[Equation] = [Equation(Name(s.name), Const(s.index)) for s in contract.steps if s.kind == "default"]
    for name, form in valid.forms.items():
        value = arguments.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        shape = list(value.shape)
        if form.variadic:
            at, variadic = form.variadic
            behind = len(form.sizes) - at
            if len(shape) < len(form.sizes):
                return True
            covered = tuple(shape[at : len(shape) - behind])
            if variadic != "..." and known.setdefault(variadic, covered) != covered:
                return True
            del shape[at : len(shape) - behind]
        elif len(shape) != len(form.sizes):
            return True
        equations += form.equations
        equations += [Equation(s, Const(n)) for s, n in zip(form.sizes, shape, strict=True) if s is not None]
    integers = {n: v for n, v in known.items() if type(v) is int or isinstance(v, tuple)}
    conditions = [(under, r.expr) for under, r in contract.conditions if isinstance(r, Condition)]
    equations += [
        Equation(*e.args) for under, e in conditions
        if not under and isinstance(e, Op) and e.op == "==" and all(_plain(a) for a in e.args)
    ]  # fmt: skip
    try:
        values = {**known, **follow(equations, integers)}
        for name, form in valid.forms.items():
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and value.numel() and _wrong_strides(form, value, values):
                return True
        return any(_breaks(under, expr, values, arguments) for under, expr in conditions)
    except Impossible:
        return True


def _plain(expr: Expr) -> bool:
    return isinstance(expr, Name | Const) or (
        isinstance(expr, Op) and expr.op in "+-*/" and all(map(_plain, expr.args))
    )


def _breaks(under: Iterable[Condition], expr: Expr, values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a condition is in force and does not hold, as far as that is known."""
    try:
        if not all(evaluate(u.expr, values, arguments) for u in under):
            return False
        return not evaluate(expr, values, arguments)
    except Inexact:
        return True
    except (KeyError, AttributeError, TypeError):
        return False


def _wrong_strides(form: Form, value: torch.Tensor, sizes: Mapping[str, Any]) -> bool:
    for i, stride in enumerate(form.strides or ()):
        if value.shape[i] <= 1:
            continue
        if value.stride(i) == 0 and stride is None:
            return True
        try:
            if stride is not None and value.stride(i) != evaluate(stride, sizes):
                return True
        except (KeyError, Inexact):
            continue
    return False


# --- changes of one tensor --------------------------------------------------------------------------------------------


def like(form: Form, value: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """A packed tensor of zeros with another shape, its axes in the form's order in memory."""
    shape = list(shape)
    order = list(range(len(shape)))
    if form.layout is not None and len(shape) == len(form.layout.view_leaves):
        order.sort(key=lambda i: depth(form, i))
    back = [order.index(i) for i in range(len(order))]
    made = torch.zeros([shape[i] for i in order], dtype=torch.uint8 if value.dtype.itemsize == 1 else value.dtype)
    return made.view(value.dtype).permute(back)


def _binding(valid: Call, name: str) -> bool:
    """Whether dims of the call are bound by this argument, so that others are blamed for what is wrong with it."""
    return any(
        s.argument == name and s.kind in ("shape", "variadic") and not (s.optional and "." in s.name)
        for s in valid.contract.steps
    )


def _blamed(valid: Call, name: str) -> frozenset[str]:
    return frozenset(valid.contract.specs) if _binding(valid, name) else frozenset({name})


def _shape(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    shape, blamed = list(value.shape), _blamed(valid, name)
    # Another size may as well be right where another pitch is not.
    rules = _ANY | {"stride"} if form.layout is not None and form.layout.rules.pitch else _ANY

    def resized(i: int, size: int) -> Callable[[], dict[str, Any]]:
        return lambda: {name: like(form, value, [*shape[:i], size, *shape[i + 1 :]])}

    for i, n in enumerate(shape):
        yield Candidate("one_too_many_of_an_axis", name, resized(i, n + 1), rules, blamed)
        if n:
            yield Candidate("one_too_few_of_an_axis", name, resized(i, n - 1), rules, blamed)
    page_size = valid.sizes.get("page_size", 1)
    for i, label in enumerate(form.labels if not form.variadic else ()):
        n = shape[i]
        if label.startswith(("slot", "(page")) and page_size > 1:
            yield Candidate("one_page_too_many", name, resized(i, n + page_size), rules, blamed)
        if label in _GROW and n > 1:
            yield Candidate("stale_after_resize", name, resized(i, n // 2), rules, blamed)
    for i, j in itertools.combinations(range(len(shape)), 2):
        if shape[i] != shape[j]:
            yield Candidate(
                "transposed", name, _of(name, lambda i=i, j=j: value.transpose(i, j)), _ANY | {"stride"}, blamed
            )
        elif shape[i] > 1 and form.strides is not None:
            yield Candidate(
                "transposed", name, _of(name, lambda i=i, j=j: value.transpose(i, j)), frozenset({"stride"}),
                frozenset({name}),
            )  # fmt: skip
    if not form.variadic:
        if len(shape) > 1:
            yield Candidate("flat", name, _of(name, lambda: like(form, value, [value.numel()])), _ANY, blamed)
            yield Candidate("axis_missing", name, _of(name, lambda: like(form, value, shape[:-1])), _ANY, blamed)
        yield Candidate("axis_too_many", name, _of(name, lambda: value[None]), _ANY, blamed)
    if form.layout is not None:
        yield from _other_layouts(valid, name, form, blamed)


def _of(name: str, make: Callable[[], torch.Tensor]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: make()}


def _other_layouts(valid: Call, name: str, form: Form, blamed: frozenset[str]) -> Iterator[Candidate]:
    layout, value = form.layout, valid.arguments[name]
    assert layout is not None
    dims = layout_dims(form, valid.sizes) or {}

    def other_page_size(page_size: int) -> dict[str, Any]:
        return {name: like(form, value, layout(**dims | {"page_size": page_size}).shape)}

    if dims.get("page_size", 1) > 1:
        for size in (dims["page_size"] * 2, dims["page_size"] // 2):
            yield Candidate("other_page_size", name, lambda size=size: other_page_size(size), _ANY, blamed)
    axes = {a.name for a in layout.axes}
    for entry in entries().values():
        if not isinstance(entry, Layout) or entry.name == layout.name or {a.name for a in entry.axes} != axes:
            continue
        if value.dtype not in entry.accepted:
            continue
        yield Candidate(
            "other_layout", name, lambda entry=entry: {name: _laid(entry, dims, value)}, _ANY | {"stride"}, blamed
        )


def _laid(entry: Layout, dims: Mapping[str, int], value: torch.Tensor) -> torch.Tensor:
    concrete = entry(**{d: n for d, n in dims.items() if d in entry.dims})
    return torch.zeros(concrete.nbytes, dtype=torch.uint8).view(value.dtype).as_strided(
        concrete.shape, concrete.strides
    )  # fmt: skip


def _dtype(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    if form.dtypes is None:
        return
    others = [("same_width", d) for d in _SAME_WIDTH[value.element_size()]]
    if value.dtype is torch.float8_e4m3fn:
        others.append(("fnuz_for_fn", torch.float8_e4m3fnuz))
    elif value.dtype in (torch.int32, torch.int64):
        narrow = value.dtype is torch.int64
        others.append(("int64_as_int32", torch.int32) if narrow else ("int32_as_int64", torch.int64))
    for kind, dtype in others:
        if dtype not in form.dtypes:
            yield Candidate(
                kind, name, _of(name, lambda dtype=dtype: _as(value, dtype)), frozenset({"dtype"}),
                _about_dtype(valid, name), sure=True,
            )  # fmt: skip


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers where both are integers, the same bits otherwise."""
    if value.element_size() == dtype.itemsize:
        return value.view(dtype)
    made = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
    return made.copy_(value)


def _about_dtype(valid: Call, name: str) -> frozenset[str]:
    """The argument and those that some rule about its dtype names."""
    found = {name}
    for under, rule in valid.contract.conditions:
        exprs = [r.expr for r in (*under, rule) if isinstance(r, Condition)]
        named = {n for e in exprs for n in _named(e)}
        if name in named:
            found |= named | set(getattr(rule, "arguments", ()))
    return frozenset(found)


def _named(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("dtype" | "given" | "numel", (Name(n),)):
            yield n
        case Op(_, args):
            for a in args:
                yield from _named(a)


def _stride(valid: Call, name: str, form: Form) -> Iterator[Candidate]:
    value = valid.arguments[name]
    if form.strides is None or value.numel() == 0 or value.dim() == 0:
        return
    mine, rules = frozenset({name}), frozenset({"stride"})
    order = sorted(range(value.dim()), key=lambda i: (-value.stride(i), -value.shape[i]))
    shape = [value.shape[i] for i in order]
    back = [order.index(i) for i in range(len(order))]

    def wider(extra: int, step: int) -> dict[str, Any]:
        whole = torch.zeros([*shape[:-1], shape[-1] * step + extra], dtype=torch.uint8).repeat_interleave(
            value.element_size(), -1
        )  # fmt: skip
        sliced = whole.view(value.dtype)[..., : shape[-1] * step : step]
        sliced.view(_raw(value)).copy_(value.permute(order).view(_raw(value)))
        return {name: sliced.permute(back)}

    yield Candidate("slice_of_a_wider_tensor", name, lambda: wider(1, 1), rules, mine)
    yield Candidate("every_other_element", name, lambda: wider(0, 2), rules, mine)
    for i in range(value.dim()):
        if value.shape[i] > 1:
            yield Candidate("expanded", name, lambda i=i: {name: _expanded(value, i)}, rules, mine)
    for index, size in form.align:
        if index is None and evaluate(size, valid.sizes) > value.element_size():
            yield Candidate(
                "misaligned_base", name, lambda: {name: _shifted(value)}, frozenset({"alignment"}), mine, sure=True
            )
    if form.int32:
        free = [i for i in form.int32 if form.strides[i] is None and value.shape[i] > 1]
        for i in free[:1]:
            yield Candidate(
                "overflow", name, lambda i=i: _huge(valid, name, i), frozenset({"overflow"}), mine,
                sure=True, launchable=False,
            )  # fmt: skip


def _raw(value: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]


def _expanded(value: torch.Tensor, i: int) -> torch.Tensor:
    return value.narrow(i, 0, 1).expand(value.shape)


def _shifted(value: torch.Tensor) -> torch.Tensor:
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 2
    moved = torch.zeros(reach * value.element_size(), dtype=torch.uint8).view(value.dtype)
    return moved.as_strided(value.shape, value.stride(), 1)


def _huge(valid: Call, name: str, i: int) -> dict[str, Any]:
    """Every tensor without memory, one of them with a stride that passes 2**31."""
    made = {}
    for n, v in valid.arguments.items():
        if isinstance(v, torch.Tensor):
            strides = list(v.stride())
            if n == name:
                strides[i] = max(strides[i], 2**31 // (v.shape[i] - 1) + 1)
                inner = strides[i] * v.shape[i]
                strides = [inner * 2 if s > v.stride(i) else s for s in strides[:i]] + strides[i:]
            made[n] = torch.empty_strided(v.shape, strides, dtype=v.dtype, device="meta")
    return made


def _device(valid: Call, name: str) -> Iterator[Candidate]:
    given = [n for n in valid.forms if isinstance(valid.everything.get(n), torch.Tensor)]
    if valid.contract.same_device and len(given) > 1:
        value = valid.arguments[name]
        required = [n for n in given if not valid.contract.tensors[n].optional]
        blamed = frozenset(given) if name == (required or given)[0] else frozenset({name})
        yield Candidate(
            "other_device", name,
            lambda: {name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")},
            frozenset({"device"}), blamed, sure=True, launchable=False,
        )  # fmt: skip


# --- changes of several, or of something else -------------------------------------------------------------------------


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
            lambda: {n: like(valid.forms[n], valid.arguments[n], shown[n]) for n in stale[1:]}, _ANY, frozenset(valid.contract.specs),
        )  # fmt: skip


def _swapped(valid: Call) -> Iterator[Candidate]:
    tensors = [(n, v) for n in valid.forms if isinstance(v := valid.arguments.get(n), torch.Tensor)]
    for (a, first), (b, second) in itertools.combinations(tensors, 2):
        if first.dtype == second.dtype and first.dim() == second.dim() and first.shape != second.shape:
            yield Candidate(
                "swapped", f"{a} and {b}", lambda a=a, b=b, x=first, y=second: {a: y, b: x},
                _ANY | {"stride"}, _blamed(valid, a) | _blamed(valid, b),
            )  # fmt: skip


def _presence(valid: Call) -> Iterator[Candidate]:
    contract = valid.contract
    for name, spec in contract.specs.items():
        if name not in valid.arguments:
            continue
        value = valid.arguments[name]
        if name in contract.tensors and not spec.optional:
            yield Candidate("missing", name, lambda name=name: {name: None}, frozenset({"presence"}),
                            frozenset({name}), sure=True)  # fmt: skip
            continue
        if not spec.optional:
            continue
        other: Any = None if value is not None else (torch.zeros(1) if name in contract.tensors else 1)
        if named := _wrong_presence(contract, valid.everything | {name: other}, valid.sizes):
            yield Candidate(
                "missing" if value is not None else "one_argument_too_many", name,
                lambda name=name, other=other: {name: other}, frozenset({"presence"}), frozenset({*named, name}),
                sure=True,
            )  # fmt: skip


def _wrong_presence(contract: Contract, arguments: Mapping[str, Any], values: Mapping[str, Any]) -> set[str]:
    """The arguments that a rule asks for and are not given, or refuses and are given."""
    found: set[str] = set()
    for under, rule in contract.conditions:
        if any(_breaks((), u.expr, {**values, **arguments}, arguments) for u in under):
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
            yield Candidate("wrong_scalar", name, lambda name=name, wrong=wrong: {name: wrong}, frozenset({"value"}),
                            every, sure=True)  # fmt: skip
        value = valid.arguments[name]
        if type(value) in (int, float):
            for other in (value + 1, value - 1, value * 2, value * 0, -1 * abs(value) - 1):
                yield Candidate(
                    "scalar_that_breaks_a_rule", name, lambda name=name, other=other: {name: other}, _ANY, every
                )


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
                if isinstance(r, Condition) and name in set(_named(r.expr))
                and _breaks(under, r.expr, valid.sizes, stand_in)
            ]  # fmt: skip
            broken += sorted(_wrong_presence(valid.contract, stand_in, valid.sizes))  # type: ignore[arg-type]
            if broken:
                yield Candidate(
                    "element_of_another_mode", name, _of(name, lambda f=form, v=value, d=dtype: like(f, v, v.shape).view(
                        _raw(v)).to(torch.float32).to(d)), frozenset({"dtype", "presence", "relation"}),
                    frozenset(valid.contract.specs), sure=True,
                )  # fmt: skip
                break


def _overlapping(valid: Call) -> Iterator[Candidate]:
    for under, rule in valid.contract.conditions:
        if not isinstance(rule, NoOverlap) or any(_breaks((), u.expr, valid.sizes, valid.everything) for u in under):
            continue
        for a, b in itertools.combinations(rule.arguments, 2):
            first, second = valid.arguments.get(a), valid.arguments.get(b)
            if first is None or second is None or not first.numel() or not second.numel():
                continue
            yield Candidate(
                "overlapping", b, lambda b=b, x=first, y=second: {b: _over(x, y)}, frozenset({"relation"}),
                frozenset({a, b}), sure=True,
            )  # fmt: skip


def _over(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A tensor like the second one that begins at the first one's first element."""
    if first.dtype != second.dtype:
        raise TypeError("only tensors of one element are laid over each other")
    return torch.empty(0, dtype=second.dtype).set_(  # type: ignore[no-any-return, call-overload]
        _grown(first, second), first.storage_offset(), second.shape, second.stride()
    )


def _grown(first: torch.Tensor, second: torch.Tensor) -> Any:
    """The first one's storage, which is made large enough for the second one at the same place."""
    storage = first.untyped_storage()
    reach = sum((n - 1) * s for n, s in zip(second.shape, second.stride(), strict=True)) + 1
    needed = (first.storage_offset() + reach) * first.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)
    return storage
