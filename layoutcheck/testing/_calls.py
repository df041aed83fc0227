"""Valid calls of a contract's callable, as a Hypothesis strategy.

A call is drawn in four steps: words, dtypes and what is given (``_cases``); sizes (``_sizes``); the memory of every
tensor (``_memory``); values of indices. All but the last resort is constructive: hardly a draw is thrown away.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from layoutcheck import _dtypes, _tags
from layoutcheck._choose import Choose
from layoutcheck._contract import Contract, _tensor_contract
from layoutcheck._dims import Const, Expr, Name, Op, divisions, evaluate, names, parse_condition, substitute
from layoutcheck._dims import calls as spoken
from layoutcheck._layout import Layout
from layoutcheck._record import Record
from layoutcheck._rules import VALUE, Condition, Each, Finite, Forbids, Index, Indptr, Needs, Together
from layoutcheck._solve import names_of
from layoutcheck._specs import Form, ScalarSpec, TensorSpec
from layoutcheck._values import _mask as mask
from layoutcheck.testing import _memory
from layoutcheck.testing._cases import Case, Cases, pick_form
from layoutcheck.testing._guard import apply, contract_of
from layoutcheck.testing._sizes import Impossible, Plan, make_plan

_TRIES = 10
_MANY = 4096
_integers = functools.cache(st.integers)


@dataclass(frozen=True)
class Recipe:
    """How one tensor of a call is made; the arguments of :func:`layoutcheck.testing.tensor`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    data: int | tuple[int, ...] | None = 0
    holds: _dtypes.Element | None = None
    padding: Layout | None = None
    device: Any = None

    def build(self) -> torch.Tensor:
        return _memory.tensor(
            self.shape, self.strides, self.dtype, offset=self.offset, data=self.data, holds=self.holds,
            padding=self.padding, device=self.device,
        )  # fmt: skip

    def __str__(self) -> str:
        text = f"tensor({self.shape}, {self.strides}, {self.dtype}"
        if self.offset:
            text += f", offset={self.offset}"
        if self.data != 0:
            text += f", data={list(self.data) if isinstance(self.data, tuple) else self.data}"
        if self.holds is not None:
            text += f", holds={self.holds.name!r}"
        if self.padding is not None:
            sizes = ", ".join(f"{a.name}={self.padding.values_of(a.name)}" for a in self.padding.axes)
            text += f", padding=layout({self.padding.name!r})({sizes})"
        if self.device is not None:
            text += f", device={str(self.device)!r}"
        return text + ")"


@dataclass(frozen=True)
class Call:
    """A valid call: its arguments by name, and the sizes for which it was made. ``repr`` is code that repeats it.

    ``arguments`` are those of the signature; ``everything`` has the derived ones too, ``recipes`` how each tensor was
    made, ``forms`` which form of its spec each has.
    """

    fn: Callable[..., Any] = field(repr=False)
    arguments: dict[str, Any]
    everything: dict[str, Any]
    sizes: dict[str, Any]
    recipes: dict[str, Recipe]
    forms: dict[str, Form]

    @property
    def contract(self) -> Contract:
        """The contract that the call keeps."""
        return contract_of(self.fn)

    def __call__(self) -> Any:
        """Run it."""
        return apply(self.fn, self.contract, self.arguments)

    def with_arguments(self, **changed: Any) -> Call:
        """The same call with some arguments replaced, and code for them where they are tensors."""
        recipes = {n: r for n, r in self.recipes.items() if n not in changed}
        arguments = self.arguments | {n: v for n, v in changed.items() if n in self.arguments}
        return replace(self, arguments=arguments, everything=self.everything | changed, recipes=recipes)

    def copy(self) -> Call:
        """The same call with tensors of its own, equal in contents, strides and offsets."""
        made = {n: clone(v) for n, v in self.arguments.items() if isinstance(v, torch.Tensor)}
        return replace(self, arguments=self.arguments | made, everything=self.everything | made)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print the fields

    def __repr__(self) -> str:
        lines = [f"    {n}={self._shown(n, v)}," for n, v in self.arguments.items()]
        return f"{self.contract.name}(\n" + "\n".join(lines) + "\n)"

    def _shown(self, name: str, value: Any) -> str:
        if name in self.recipes:
            return str(self.recipes[name])
        return shown(value) if isinstance(value, torch.Tensor) else repr(value)


def shown(value: torch.Tensor) -> str:
    """Code for a tensor that was not made from a recipe; its contents only where they are few integers."""
    data = None
    if not value.dtype.is_floating_point and 0 < value.numel() <= 64 and value.device.type != "meta":
        data = tuple(value.flatten().tolist())
    device = None if value.device.type == "cpu" else value.device
    return str(Recipe(tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), data, device=device))


def clone(value: torch.Tensor) -> torch.Tensor:
    """A tensor over a copy of the whole storage: strides, offset and the bytes between its elements are kept."""
    storage = value.untyped_storage().clone()
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    return made.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[no-any-return, call-overload]


def calls(fn: Callable[..., Any], *, data: bool = True, **bounds: Any) -> st.SearchStrategy[Call]:
    """Valid calls of a function with a contract: every rule holds, and every edge that the rules allow occurs.

    Edges: no tokens, one head, one page, odd numbers of pages, free outer strides, slices of wider buffers, storage
    offsets, odd strides of axes of size 1, skipped indices, every dtype and optional argument. ``bounds`` narrow what
    is drawn, by name: a size (``page_size=128``) or a range of it (``head=(1, 2)``), a word, a dtype for a tensor, None
    for an argument that is not given, a Hypothesis strategy, or a function of all arguments drawn so far, for what a
    contract cannot say (``self=lambda drawn: ...``). ``data=False`` leaves floats uninitialised, for speed.

    Indices by which rows are written are distinct also where the contract does not ask for it: of two rows in one slot
    either may win. Integers without a value rule are 0. Raises ``TypeError`` for a function without a contract, or an
    argument of which nothing is known.
    """
    source = _Source(contract_of(fn), fn, bounds, data)
    return _drawn(source)


def tensors(layout: Layout | Choose | Record, *, data: bool = True, **bounds: Any) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of one layout, with every size, stride and offset that it allows; ``bounds`` as for :func:`calls`."""
    if isinstance(layout, Choose):
        return st.one_of(*(tensors(one, data=data, **bounds) for one in layout.layouts))
    layout = layout.buffer if isinstance(layout, Record) else layout
    made = _tensor_contract(layout, tuple(sorted(layout.dims)))

    def holder(*, tensor: torch.Tensor, **dims: int) -> None: ...

    holder.contract = made  # type: ignore[attr-defined]
    return _drawn(_Source(made, holder, bounds, data)).map(lambda call: call.arguments["tensor"])


@st.composite
def _drawn(draw: st.DrawFn, source: _Source) -> Call:
    case = source.cases.case(draw(choice) for choice in source.choices)
    for _ in range(_TRIES):
        try:
            return source.call(draw, case)
        except Impossible:
            continue
    reject()


class _Source:
    """What is known of a contract before anything is drawn."""

    def __init__(self, contract: Contract, fn: Callable[..., Any], bounds: Mapping[str, Any], data: bool) -> None:
        self.contract, self.fn, self.data = contract, fn, data
        self.sizes: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        fixed: dict[tuple[str, str], Any] = {}
        for name, bound in bounds.items():
            spec = contract.specs.get(name)
            if bound is None and spec is not None and spec.optional:
                fixed["given", name] = False
            elif isinstance(bound, torch.dtype | _dtypes.Element) and isinstance(spec, TensorSpec):
                fixed["dtype", name] = _dtypes.element(bound).torch
            elif isinstance(bound, bool | str) and isinstance(spec, ScalarSpec):
                fixed["value", name] = bound
            elif isinstance(bound, int | tuple) and not isinstance(bound, bool):
                self.sizes[name] = bound
            else:
                self.given[name] = bound
            if spec is not None and spec.optional and bound is not None and not isinstance(spec, TensorSpec):
                fixed["given", name] = True
        self.cases = Cases(contract, fixed)
        self.choices = [st.sampled_from(group) for group in self.cases.groups]
        self.plans: dict[Any, tuple[Plan, dict[str, Form], list[Expr]]] = {}
        self.written_at = {s.writes.at for s in contract.tensors.values() if s.writes and s.writes.at}
        known = {*contract.specs, *contract.signature.parameters, *_names(contract)}
        if strange := [n for n in bounds if n not in known]:
            raise TypeError(f"{contract.name}: {strange[0]!r} is neither a size nor an argument here")

    # --- sizes -------------------------------------------------------------------------------------------------------

    def plan(self, case: Case) -> tuple[Plan, dict[str, Form], list[Expr]]:
        """The order in which to choose the sizes of a case, the form of each tensor, and what is checked at the end."""
        key = (case.given, tuple(sorted(case.words.items())), tuple(case.decided.items()), tuple(case.dtypes.items()))
        if key not in self.plans:
            self.plans[key] = self._plan(case)
        return self.plans[key]

    def _plan(self, case: Case) -> tuple[Plan, dict[str, Form], list[Expr]]:
        contract, facts = self.contract, case.facts(self.contract)
        forms, conditions, late = {}, [], []
        for spec in contract.tensors.values():
            if spec.name in case.given:
                index, asserted = pick_form(spec, case)
                forms[spec.name] = spec.forms[index][1]
                conditions += asserted
        numbers = {n for n, s in contract.scalars.items() if s.type is int and n in case.given}
        numbers |= {s.name for s in contract.steps} | {n for f in forms.values() for n in names_of(f)}
        for under, rule in contract.conditions:
            held = [facts.decide(u.expr) for u in under]
            if False in held:
                continue
            if not isinstance(rule, Condition):  # of what is given, which is settled: numbers may put it out of force
                whole: Expr = Const(not wrong_presence(rule, case.given))
            else:
                whole = rule.expr
            if whole == Const(True) or (isinstance(rule, Condition) and facts.decide(whole) is True):
                continue
            for u, h in zip(under, held, strict=True):
                if h is None:
                    whole = Op("or", (Op("not", (u.expr,)), whole))
            whole = substitute(whole, {n: Const(v) for n, v in case.words.items() if type(v) is int})
            if any(c.op not in ("given", "dtype") for c in spoken(whole)) or not set(names(whole)) <= numbers:
                late.append(whole)
            else:
                conditions.append(whole)
        equations = [q for f in forms.values() for q in f.equations]
        fixed = {s.name: s.index for s in contract.steps if s.kind == "default"}
        wanted = [n for f in forms.values() for n in names_of(f) if n != (f.variadic or (0, ""))[1]]
        wanted += [n for n, s in contract.scalars.items() if s.type is int and n in case.given and n not in self.given]
        for name in forms:
            for value in contract.tensors[name].values:
                wanted += [n for e in value.exprs for n in names(e) if n != "index" and n in numbers]
        used = {n for n in wanted}
        bounds = {n: b for n, b in (fixed | self.sizes).items() if n in used or n in _in(equations, conditions)}
        shown = [e for f in forms.values() for e in (*f.sizes, *(f.strides or ())) if e is not None]
        zero = _may_be_zero(contract, forms)
        return make_plan(equations, conditions, shown, wanted, bounds, zero), forms, late

    # --- a call ------------------------------------------------------------------------------------------------------

    def call(self, draw: st.DrawFn, case: Case) -> Call:
        plan, forms, late = self.plan(case)
        words = dict(case.words)
        for name, spec in self.contract.scalars.items():
            if name in case.given and spec.type is float and name not in self.given:
                words[name] = draw(self._floats(name, case))

        def pick(name: str, low: int, high: int, multiple: int) -> int:
            return draw(_integers(low // multiple, max(low, high) // multiple)) * multiple

        chosen: dict[str, Any] = dict(plan.choose(pick, case.facts(self.contract).arguments))
        sizes = {**words, **chosen}
        for form in forms.values():
            if form.variadic and form.variadic[1] not in sizes and form.variadic[1] != "...":
                sizes[form.variadic[1]] = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        seed = draw(_integers(0, 2**16 - 1))
        style = draw(_integers(0, 8 ** len(forms) - 1))
        rnd = random.Random(seed)
        recipes = {}
        for i, (name, form) in enumerate(forms.items()):
            recipes[name] = self._recipe(draw, name, form, case, sizes, seed and seed + i, style // 8**i % 8, rnd)
        built: dict[str, Any] = {n: r.build() for n, r in recipes.items()}
        tag(self.contract, built, sizes)
        everything = self._arguments(draw, case, sizes, built)
        for condition in late:
            if not evaluate(condition, {**sizes, **everything}, everything):
                raise Impossible(str(condition))
        arguments = {n: everything[n] for n in self.contract.signature.parameters if n in everything}
        shown_sizes = {n: v for n, v in sizes.items() if not n.startswith("quotient.") and "." not in n}
        return Call(self.fn, arguments, everything, shown_sizes, recipes, forms)

    def _arguments(self, draw: st.DrawFn, case: Case, sizes: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
        contract, values = self.contract, dict(built)
        later = []
        for name in (*contract.signature.parameters, *contract.derive):
            spec = contract.specs.get(name)
            parameter = contract.signature.parameters.get(name)
            if name in values:
                continue
            if name in self.given:
                bound = self.given[name]
                if isinstance(bound, st.SearchStrategy):
                    values[name] = draw(bound)
                elif callable(bound):
                    later.append(name)
                else:
                    values[name] = bound
            elif spec is not None and name not in case.given:
                values[name] = None
            elif name in sizes:
                values[name] = sizes[name]
            elif isinstance(spec, ScalarSpec):
                values[name] = self._scalar(draw, spec, parameter)
            elif parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            elif parameter.default is not parameter.empty:
                values[name] = parameter.default
            else:
                raise TypeError(f"{contract.name}: nothing is known of {name}; pass calls(..., {name}=a strategy)")
        for name in later:
            values[name] = self.given[name](values | {"sizes": sizes})
        return values

    def _scalar(self, draw: st.DrawFn, spec: ScalarSpec, parameter: inspect.Parameter | None) -> Any:
        if parameter is not None and parameter.default is not parameter.empty and parameter.default is not None:
            return parameter.default
        return draw(st.from_type(spec.type))

    def _floats(self, name: str, case: Case) -> st.SearchStrategy[float]:
        parameter = self.contract.signature.parameters.get(name)
        default = parameter.default if parameter else None
        options = [default] if isinstance(default, float) else []
        mine = [
            r.expr for _, r in self.contract.conditions if isinstance(r, Condition) and set(names(r.expr)) == {name}
        ]
        facts = case.facts(self.contract).arguments
        kept = [o for o in [*options, 1.0, 0.5, 2.0, 0.0, -1.0] if all(evaluate(e, {name: o}, facts) for e in mine)]
        if not kept:
            raise TypeError(f"{self.contract.name}: no value for {name} was found; pass calls(..., {name}=a strategy)")
        return st.sampled_from(kept[:3])

    def _recipe(
        self, draw: st.DrawFn, name: str, form: Form, case: Case, sizes: dict[str, Any], seed: int, style: int,
        rnd: random.Random,
    ) -> Recipe:  # fmt: skip
        dtype = case.dtypes[name]
        shape = [draw(_integers(1, 3)) if s is None else int(evaluate(s, sizes)) for s in form.sizes]
        if min(shape, default=0) < 0:
            raise Impossible(f"{name} has a negative size")
        if form.variadic:
            at, variadic = form.variadic
            covered = sizes[variadic] if variadic != "..." else draw(st.lists(st.integers(1, 3), max_size=2))
            shape[at:at] = covered
        wide, shifted, odd = style & 1, style & 2, style & 4

        def slack(i: int) -> int:
            return rnd.choice((1, 3, 8, 64)) if (odd if shape[i] <= 1 else wide) else 0

        strides = _memory.strides_of(form, shape, sizes, dtype.itemsize, slack)
        step = _memory.offset_step(form, sizes, dtype.itemsize)
        offset = rnd.randint(1, 16) * step if shifted else 0
        padding = None
        if form.layout is not None and form.layout.rules.pad and form.layout.rules.fill is not None:
            padding = form.layout(**{d: int(evaluate(e, sizes)) for d, e in form.dims})
        content: Any = seed if self.data or padding is not None else None
        count = math.prod(shape)
        for rule in self.contract.tensors[name].values:
            if isinstance(rule, Index):
                content = index_values(rule, count, sizes, rnd, rule.unique or name in self.written_at, bool(seed))
            elif isinstance(rule, Indptr):
                content = indptr_values(rule, count, sizes, rnd)
            elif isinstance(rule, Finite):
                content = seed
        for _, rule in self.contract.conditions:
            if isinstance(rule, Each) and rule.arguments == (name,):
                kept = [v for v in range(513) if evaluate(rule.expr, {**sizes, VALUE: v})]
                content = tuple(rnd.choice(kept) for _ in range(count))
        if content is None and not dtype.is_floating_point and dtype in (torch.int32, torch.int64):
            content = 0
        holds = form.layout.elements[0] if form.layout is not None else None
        if holds is None or holds.bits != dtype.itemsize * 8 or dtype in {e.torch for e in form.layout.elements}:  # type: ignore[union-attr]
            holds = None
        return Recipe(tuple(shape), strides, dtype, offset, content, holds, padding)


def tag(contract: Contract, built: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Declare of each tensor's memory what a rule ``tag(x, "fact") == ...`` asks for."""
    for _, rule in contract.conditions:
        match rule:
            case Condition(Op("==", (Op("tag", (Name(n), Const(fact))), Const() | Name() as wanted))) if n in built:
                value = evaluate(wanted, sizes) if isinstance(wanted, Const) or wanted.name in sizes else None
                if fact == "layout" and isinstance(value, str):
                    _tags.tag(built[n], value)
                elif value is not None:
                    _tags.tag(built[n], **{fact: value})


# --- values -----------------------------------------------------------------------------------------------------------


def wrong_presence(rule: Any, given: Container[str]) -> set[str]:
    """The arguments that a rule asks for and are not given, or refuses and are given."""
    match rule:
        case Needs(args):
            return {a for a in args if a not in given}
        case Forbids(args):
            return {a for a in args if a in given}
        case Together(args) if any(a in given for a in args):
            return {a for a in args if a not in given}
    return set()


def live_values(rule: Index, sizes: Mapping[str, Any]) -> list[int]:
    """The values of an index that select something."""
    start, stop = int(evaluate(rule.start, sizes)), int(evaluate(rule.stop, sizes))
    every = torch.arange(start, max(start, min(stop, start + _MANY)))
    if stop > start + _MANY:  # the last one too
        every = torch.cat([every, torch.tensor([stop - 1])])
    return every[~skipped(rule, every, sizes)].tolist()  # type: ignore[no-any-return]


def skipped(rule: Index, values: torch.Tensor, sizes: Mapping[str, Any]) -> torch.Tensor:
    """Which of some values the callable ignores."""
    if rule.skip is None:
        return torch.zeros_like(values, dtype=torch.bool)
    return mask(parse_condition(f"index {rule.skip}"), {**sizes, "index": values})


def skipped_values(rule: Index, sizes: Mapping[str, Any]) -> list[int]:
    """Some values that the callable ignores."""
    options = torch.tensor((-1, 0, -2))
    return options[skipped(rule, options, sizes)].tolist()  # type: ignore[no-any-return]


def index_values(
    rule: Index, count: int, sizes: Mapping[str, Any], rnd: random.Random, unique: bool, mixed: bool
) -> tuple[int, ...]:
    """``count`` values that keep an index rule; skipped ones among them where ``mixed``."""
    live, ignored = live_values(rule, sizes), skipped_values(rule, sizes)
    if not count:
        return ()
    if not live and not ignored:
        raise Impossible("an index without a value that it may have")
    if not mixed and len(live) >= count:
        return tuple(live[:count])
    if unique or not live:
        values = rnd.sample(live, min(count, len(live)))
    else:
        values = [rnd.choice((live[0], live[-1], rnd.choice(live))) for _ in range(count)]
    if len(values) < count and not ignored:
        raise Impossible("more rows than places for them")
    result: list[int] = [*values, *(rnd.choice(ignored) for _ in range(count - len(values)))]
    if ignored:
        result = [rnd.choice(ignored) if rnd.random() < 0.2 else v for v in result]
    rnd.shuffle(result)
    return tuple(result)


def indptr_values(rule: Indptr, count: int, sizes: Mapping[str, Any], rnd: random.Random) -> tuple[int, ...]:
    """``count`` values of a prefix sum."""
    stop = int(evaluate(rule.stop, sizes))
    if count == 0 or (count == 1 and stop and not rule.capacity):
        raise Impossible("a prefix sum needs a first entry and a last one")
    longest = stop if rule.longest is None else int(evaluate(rule.longest, sizes))
    steps = count - 1
    if not rule.capacity and steps * longest < stop:
        raise Impossible("too few steps of a prefix sum")
    result = [0]
    for left in range(steps, 0, -1):
        least = 0 if rule.capacity else max(0, stop - result[-1] - (left - 1) * longest)
        most = min(longest, stop - result[-1])
        step = rnd.randint(least, most) if left > 1 or rule.capacity else stop - result[-1]
        result.append(result[-1] + step)
    return tuple(result)


def _names(contract: Contract) -> set[str]:
    found = {n for s in contract.tensors.values() for _, f in s.forms for n in names_of(f)}
    return found | {n for _, r in contract.conditions if isinstance(r, Condition) for n in names(r.expr)}


def _in(equations: list[Any], conditions: list[Expr]) -> set[str]:
    found = {n for q in equations for side in (q.left, q.right) for n in names(side)}
    return found | {n for c in conditions for n in names(c)}


def _may_be_zero(contract: Contract, forms: Mapping[str, Form]) -> Iterator[str]:
    """Sizes that may be 0: outermost in every tensor that shows them, and no divisor of anything."""
    inner: set[str] = set()
    outer: set[str] = set()
    for form in forms.values():
        for i, size in enumerate(form.sizes):
            if size is None:
                continue
            (outer if i == 0 and isinstance(size, Name) else inner).update(names(size))
    exprs = [e for s in contract.steps if s.expr is not None for e in (s.expr,)]
    exprs += [side for c in contract.checks for side in (c.equation.left, c.equation.right)]
    exprs += [r.expr for _, r in contract.conditions if isinstance(r, Condition)]
    divisors = {n for e in exprs for d in divisions(e) for n in names(d.args[1])}
    divisors |= {n for e in exprs for n in _remainders(e)}
    for name in outer - inner - divisors:
        yield name
    for form in forms.values():  # the whole of an outermost part is zero with it
        for part, whole in form.parts.items():
            if part in outer - inner - divisors and whole not in inner | divisors:
                yield whole


def _remainders(expr: Expr) -> Iterator[str]:
    match expr:
        case Op("%" | "//" | "cdiv" | "align", (a, b)):
            yield from names(b)
            yield from _remainders(a)
        case Op(_, args):
            for a in args:
                yield from _remainders(a)
