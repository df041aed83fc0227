"""The source of a guard's comparisons: dims as local variables, conditions as expressions, the tests of one tensor.

What is compared, in which order and on which branch, is ``_compile``'s business.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from layoutcheck import _manifest, _mode, _shards, _tags, _trace, _twins
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Expr, Name, Op, divisions, source
from layoutcheck._dtypes import Element
from layoutcheck._solve import Step
from layoutcheck._specs import Form, TensorSpec
from layoutcheck._strides import INT32_MAX, apart, free_dims, free_inner, overlap, packed

# What a comparison on something that is no tensor, or has the wrong rank, may raise. The slow path then names it.
CAUGHT = (AttributeError, TypeError, ValueError, ZeroDivisionError, IndexError)
_NEED_NO_PARENTHESES = (
    "+", "-", "*", "/", "//", "%", "cdiv", "align", "min", "max", "dtype", "numel", "tuple", "len", "sum", "tag", "tags"
)  # fmt: skip


def of_required(contract: Contract, argument: str) -> bool:
    """Whether an argument is always there and has one form, so that its equations hold in every call."""
    spec = contract.tensors[argument]
    return not spec.optional and spec.form is not None


class Writer:
    """Source of the comparisons of one contract: names, sizes, conditions, and the forms of its tensors."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.globals: dict[str, Any] = {
            "_live": _mode.state,
            "_compiling": torch.compiler.is_compiling,
            "_dynamo": torch.compiler.is_dynamo_compiling,
            "_contract": contract,
            "_modules": sys.modules,
            "_dtensor": _shards.MODULE,
            "_any_sharded": _shards.any_sharded,
            "_check_shards": _shards.check,
            "_broken": contract.broken,
            "_reason": _trace.reason(contract),
            "_described": _trace.described,
            "_end_graph": _trace.end_graph,
            "_values": contract.check_values,
            "_caught": CAUGHT,
            "_overlap": overlap,
            "_apart": apart,
            "_packed": packed,
            "_agree": _manifest.agree,
            "_address": _tags.address,
            "_fact": _tags.fact,
            "_facts": _tags.facts,
        }
        self._locals: dict[str, str] = {}
        self.lines: list[str] = []
        self.settled = {s.equation for s in contract.steps if not s.optional}
        self.settled |= {c.equation for c in contract.checks if of_required(contract, c.argument)}
        self.done: set[str] = set()  # tests made on every call: no branch repeats them
        self.always: list[str] = []  # tests of more than metadata and scalars, which no memo answers
        self.remembers = False  # whether the guard has a memo
        self.kept: list[str] = []  # the scalars that it remembers
        self.assigned: dict[str, bool] = {}  # the variables that the lines assign, and whether every call does

    def constant(self, value: Any) -> str:
        """A global that holds a value, one per value."""
        for name, known in self.globals.items():
            if known is value:
                return name
        name = f"_c{len(self.globals)}"
        self.globals[name] = value
        return name

    def local(self, name: str) -> str:
        """The variable that holds a dim or a scalar argument."""
        if (found := self._locals.get(name)) is None:
            passed = name in self.contract.signature.parameters and name not in self.contract.tensors
            found = self._locals[name] = name if passed else "_d_" + re.sub(r"\W", "_", name)
        return found

    def size(self, expr: Expr) -> str:
        return source(expr, self.local)

    def test(self, expr: Expr) -> str:
        """A condition as source."""
        match expr:
            case Const(Element() as element):
                return self.constant(element.torch)
            case Op("given", (Name(n),)):
                return f"{n} is not None"
            case Op("dtype", (Name(n),)):
                spec = self.contract.tensors.get(n)
                return f"(None if {n} is None else {n}.dtype)" if spec is None or spec.optional else f"{n}.dtype"
            case Op("numel", (Name(n),)):
                return f"{n}.numel()"
            case Op("len" | "sum" as op, (Name(n),)):
                return f"{op}({n})"
            case Op("tag", (Name(n), Const(fact))):
                return f"(None if _compiling() else _fact({n}, {fact!r}))"
            case Op("tags", (Name(n), Const(fact))):
                return f"(() if _compiling() else _facts({n}, {fact!r}))"
            case Op("pow2", (a,)):
                text = self.test(a)
                return f"({text} > 0 and {text} & ({text} - 1) == 0)"
            case Op("and" | "or" as op, parts):
                return f" {op} ".join(f"({self.test(p)})" for p in parts)
            case Op("not", (a,)):
                return f"not ({self.test(a)})"
            case Op("tuple", parts):
                return "(" + ", ".join(self.test(p) for p in parts) + ",)"
            case Op("==" | "!=" | "<" | "<=" | ">" | ">=" | "in" | "not in" as op, (a, b)):
                word = {"==": "is", "!=": "is not"}.get(op, op) if b == Const(None) else op
                exact = [d for side in (a, b) for d in divisions(side)]
                compare = f"{self.operand(a)} {word} {self.operand(b)}"
                return " and ".join([*(self.exact(d) for d in exact), compare])
        return self.size(expr)

    def operand(self, expr: Expr) -> str:
        """One side of a comparison as source."""
        text = self.test(expr)
        return text if not isinstance(expr, Op) or expr.op in _NEED_NO_PARENTHESES else f"({text})"

    def exact(self, division: Op) -> str:
        return self.size(Op("%", division.args)) + " == 0"

    # --- one tensor --------------------------------------------------------------------------------------------------

    def bind(self, spec: TensorSpec, form: Form, steps: list[Step]) -> None:
        """Unpack the shape of an argument that binds dims; what it does not bind is compared in :meth:`shape`."""
        mine = {s.index: s for s in steps if s.argument == spec.name and s.kind in ("shape", "variadic")}
        if not mine:
            return
        if form.variadic:
            at, name = form.variadic
            behind = len(form.sizes) - at
            self.lines.append(f"_s = {spec.name}.shape")
            if any(s.kind == "variadic" for s in mine.values()):
                stop = f"len(_s) - {behind}" if behind else "len(_s)"
                self.lines.append(f"{self.local(name)} = _s[{at}:{stop}]")
            for index, step in mine.items():
                if step.kind == "shape":
                    self.lines.append(f"{self.local(step.name)} = _s[{index}]")
            return
        targets = [
            self.local(mine[i].name) if i in mine else "_" if size is None else f"_{spec.name}_{i}"
            for i, size in enumerate(form.sizes)
        ]
        self.lines.append(f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {spec.name}.shape")

    def fresh(self, tests: list[str]) -> str:
        """The tests, joined, without those that every call makes already."""
        kept = [t for t in dict.fromkeys(tests) if t not in self.done]
        return " and ".join(kept) or "True"

    def form(self, spec: TensorSpec, form: Form, bound: set[str]) -> list[str]:
        """The comparisons of one form of one tensor: of its metadata, and of its memory."""
        return self.metadata(spec, form, bound) + self.memory(spec, form)

    def metadata(self, spec: TensorSpec, form: Form, bound: set[str]) -> list[str]:
        """The comparisons of dtype, shape and strides."""
        x = spec.name
        tests = []
        if form.dtypes is not None:
            if len(form.dtypes) == 1:
                tests.append(f"{x}.dtype is {self.constant(form.dtypes[0])}")
            else:
                tests.append(f"{x}.dtype in {self.constant(form.dtypes)}")
        else:
            tests.append(f"isinstance({x}, {self.constant(torch.Tensor)})")
        tests += self.shape(x, form, bound)
        tests += self.strides(x, form)
        for index, size in form.align:
            if index is not None:
                pitch = f"{x}.stride({index}) * {x}.element_size() % {atom(self.size(size))}"
                tests.append(f"{pitch} == 0" if index in form.strict else f"({x}.shape[{index}] <= 1 or {pitch} == 0)")
        if form.int32:
            reach = " + ".join(f"({x}.shape[{i}] - 1) * {x}.stride({i})" for i in form.int32)
            tests.append(f"({x}.numel() == 0 or {reach} <= {INT32_MAX})")
        return tests

    def memory(self, spec: TensorSpec, form: Form) -> list[str]:
        """The tests of where a tensor's memory begins, and of what it is known to hold."""
        x = spec.name
        tests = [
            f"(_compiling() or _address({x}) % {atom(self.size(size))} == 0)"
            for index, size in form.align
            if index is None
        ]
        if (reader := _twins.reader(form.layout, form.dims)) is not None:
            sizes = ", ".join([x, *(self.size(e) for _, e in form.dims)])
            tests.append(f"(_compiling() or {self.constant(reader)}({sizes}))")
        return tests

    def shape(self, x: str, form: Form, bound: set[str]) -> list[str]:
        sizes = form.sizes
        exact = [self.exact(d) for s in sizes if s is not None for d in divisions(s)]
        if form.variadic:
            at, name = form.variadic
            behind = len(sizes) - at
            tests = [f"len({x}.shape) >= {len(sizes)}"] if sizes else []
            if name != "..." and f"{x}:{name}" not in bound:
                stop = f"len({x}.shape) - {behind}" if behind else f"len({x}.shape)"
                tests.append(f"{x}.shape[{at}:{stop}] == {self.local(name)}")
            for i, size in enumerate(sizes):
                index = i - len(sizes) if i >= at else i
                if size is not None and f"{x}:{index}" not in bound:
                    tests.append(f"{x}.shape[{index}] == {self.size(size)}")
            return [*exact, *tests]
        open_ = [i for i, s in enumerate(sizes) if s is None]
        fresh = [i for i in range(len(sizes)) if f"{x}:{i}" in bound]
        if not open_ and not fresh:
            wanted = ", ".join(self.size(s) for s in sizes if s is not None)
            return [*exact, f"{x}.shape == ({wanted}{',' if len(sizes) == 1 else ''})"]
        tests = [
            f"{f'_{x}_{i}' if fresh else f'{x}.shape[{i}]'} == {self.size(s)}"
            for i, s in enumerate(sizes)
            if s is not None and f"{x}:{i}" not in bound
        ]
        rank = [] if fresh else [f"len({x}.shape) == {len(sizes)}"]  # unpacking the shape has checked the rank
        return [*rank, *exact, *tests]

    def strides(self, x: str, form: Form) -> list[str]:
        if form.strides is None or not form.strides:
            return []
        exact = [self.exact(d) for s in form.strides if s is not None for d in divisions(s)]
        if form.plain:
            strides = "".join(f"{self.size(s)}, " for s in form.strides if s is not None).rstrip(" ")
            tests = " and ".join([*exact, f"_packed({x}, ({strides}))"])
            return [f"({x}.is_contiguous() or {tests} or {x}.numel() == 0)"]
        checks, in_order = [], []
        for i, stride in enumerate(form.strides):
            if stride is not None:
                check = f"{x}.stride({i}) == {atom(self.size(stride))}"
                checks.append(check if i in form.strict else f"({check} or {x}.shape[{i}] <= 1)")
            else:
                in_order.append(f"({x}.stride({i}) >= {atom(self.floor(x, form, i))} or {x}.shape[{i}] <= 1)")
        if in_order:  # as declared, nearly always; any other order will do if elements do not overlap
            free, inner = free_dims(form)
            checks.append(f"({' and '.join(in_order)} or _apart({x}, {free}, {atom(self.size(inner))}))")
        tests = " and ".join([*exact, *checks])
        return [f"(({tests}) or {x}.numel() == 0)"]

    def floor(self, x: str, form: Form, index: int) -> str:
        """Extent of what lies inside a free axis: its stride must not be smaller, or elements would overlap."""
        inside = free_inner(form, index)
        if inside is None:
            return self.size(form.inner[index])  # type: ignore[arg-type]
        return f"({x}.stride({inside}) * {x}.shape[{inside}])"


def atom(text: str) -> str:
    """The text, in parentheses unless it is a name or a number."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"
