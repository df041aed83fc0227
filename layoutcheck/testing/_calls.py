"""Valid calls of a contract's callable, as a Hypothesis strategy.

A call is drawn in four steps: words, dtypes and what is given (``_cases``); sizes (``_sizes``); the memory of every
tensor (``_memory``); values of indices. All but the last resort is constructive: hardly a draw is thrown away.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from layoutcheck import _dtypes, _entries
from layoutcheck._choose import Choose
from layoutcheck._contract import Contract, _tensor_contract
from layoutcheck._dims import Const, Expr, Op, evaluate, names, substitute
from layoutcheck._dims import calls as spoken
from layoutcheck._layout import Layout
from layoutcheck._record import Record
from layoutcheck._rules import VALUE, Condition, Each, Finite, Index, Indptr
from layoutcheck._solve import names_of
from layoutcheck._specs import Form, ScalarSpec, TensorSpec
from layoutcheck.testing import _lists, _memory
from layoutcheck.testing._call import Call, Recipe
from layoutcheck.testing._cases import Case, Cases, pick_form
from layoutcheck.testing._contents import index_values, indptr_values, tag, wrong_presence
from layoutcheck.testing._guard import contract_of
from layoutcheck.testing._sizes import Impossible, Plan, make_plan
from layoutcheck.testing._zero import may_be_zero

_TRIES = 10
_integers = functools.cache(st.integers)


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
    return reject()


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
        self.lists = [n for n in _lists.spoken_of(contract) if n not in self.given]
        self.cases = Cases(contract, fixed)
        self.choices = [st.sampled_from(group) for group in self.cases.groups]
        self.plans: dict[Any, tuple[Plan, dict[str, Form], list[Expr]]] = {}
        self.written_at = {s.writes.at for s in contract.tensors.values() if s.writes and s.writes.at}
        self.order = _entries.told_first(contract.tensors)
        self.tellers = {
            n for s in contract.tensors.values() for r in s.values for n in _entries.told_by(r, contract.tensors)
        }
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
        lists = [n for n in self.lists if n in case.given]
        sums = {size(n) for n in lists for size in (_lists.total, _lists.number)}
        numbers |= sums
        conditions += _lists.divisible(contract, lists)
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
            whole = _lists.with_sizes(whole, lists)
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
        used = set(wanted)
        bounds = {n: b for n, b in (fixed | self.sizes).items() if n in used or n in _in(equations, conditions)}
        shown = [e for f in forms.values() for e in (*f.sizes, *(f.strides or ())) if e is not None]
        zero = {*may_be_zero(contract, forms), *sums}
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
        recipes: dict[str, Recipe] = {}
        built: dict[str, Any] = {}
        numbers = {name: i for i, name in enumerate(forms)}
        for name in (n for n in self.order if n in forms):
            i = numbers[name]
            recipes[name] = self._recipe(
                draw, name, forms[name], case, sizes, seed and seed + i, style // 8**i % 8, rnd, built
            )
            built[name] = recipes[name].build()
        recipes = {name: recipes[name] for name in forms}
        tag(self.contract, built, sizes)
        built |= {n: _lists.values(self.contract, n, sizes, rnd) for n in self.lists if n in case.given}
        everything = self._arguments(draw, case, sizes, built)
        for condition in late:
            if not evaluate(condition, {**sizes, **everything}, everything):
                raise Impossible(str(condition))
        for under, rule in self.contract.conditions:
            if isinstance(rule, Each) and isinstance(everything.get(rule.arguments[0]), list | tuple):
                held = all(evaluate(u.expr, {**sizes, **everything}, everything) for u in under)
                known = {**everything, **sizes}
                if held and not all(evaluate(rule.expr, {**known, VALUE: v}) for v in everything[rule.arguments[0]]):
                    raise Impossible(str(rule))
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
        rnd: random.Random, built: Mapping[str, Any],
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
        content: Any = seed if self.data or padding is not None or name in self.tellers else None
        count = math.prod(shape)
        for rule in self.contract.tensors[name].values:
            if isinstance(rule, Index):
                read = _entries.live(rule, shape, self.contract.tensors, sizes, built)
                indptr = None if rule.segment_of is None else built.get(rule.segment_of)
                unique = rule.unique or name in self.written_at
                taken = self._taken(rule, sizes, built)
                content = index_values(rule, read, sizes, rnd, unique, bool(seed), taken, indptr)
            elif isinstance(rule, Indptr):
                longest = _entries.longest(rule, sizes, built, self.contract.tensors)
                content = indptr_values(rule, count, sizes, rnd, longest)
            elif isinstance(rule, Finite):
                content = seed
        for _, condition in self.contract.conditions:
            if isinstance(condition, Each) and condition.arguments == (name,):
                kept = [v for v in range(513) if evaluate(condition.expr, {**sizes, VALUE: v})]
                content = tuple(rnd.choice(kept) for _ in range(count))
        if content is None and not dtype.is_floating_point and dtype in (torch.int32, torch.int64):
            content = 0
        holds = form.layout.elements[0] if form.layout is not None else None
        if holds is None or holds.bits != dtype.itemsize * 8 or dtype in {e.torch for e in form.layout.elements}:  # type: ignore[union-attr]
            holds = None
        return Recipe(tuple(shape), strides, dtype, offset, content, holds, padding)

    def _taken(self, rule: Index, sizes: dict[str, Any], built: Mapping[str, Any]) -> set[int]:
        """The values of another index that this one must not have."""
        other = rule.apart_from
        if other is None or built.get(other) is None:
            return set()
        return set(built[other][_entries.counts(other, self.contract.tensors, sizes, built)].tolist())


def _names(contract: Contract) -> set[str]:
    found = {n for s in contract.tensors.values() for _, f in s.forms for n in names_of(f)}
    return found | {n for _, r in contract.conditions if isinstance(r, Condition) for n in names(r.expr)}


def _in(equations: list[Any], conditions: list[Expr]) -> set[str]:
    found = {n for q in equations for side in (q.left, q.right) for n in names(side)}
    return found | {n for c in conditions for n in names(c)}
