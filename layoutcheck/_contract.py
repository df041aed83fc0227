"""Contract: the layouts and rules of one callable's arguments, and where each of its dims is bound.

What binds what is decided at decoration, from structure alone, in this order: a scalar argument with the dim's name; a
plain sighting in a required argument, in signature order; an equation with one unknown; an inverted sighting; a
default; a sighting in an optional argument, for dims that only that argument speaks of. A part of a composite axis
(the page of a slot) binds only where nobody else has bound the whole, so scales never bind the page size that they are
checked against. ``_compile`` turns the result into a function, ``_explain`` into words when a rule is broken.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch

from layoutcheck import _entries, _mode, _solve, _specs, _trace
from layoutcheck._choose import Choose
from layoutcheck._dims import Name, arguments, brief, names
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._layout import Layout
from layoutcheck._rules import Condition, Each, Finite, NoOverlap, Rule, as_rule, flatten
from layoutcheck._specs import ScalarSpec, Spec, TensorSpec

F = TypeVar("F", bound=Callable[..., Any])
GUARD_FILE = "<layoutcheck "  # how the names of compiled guards' source files begin


@dataclass(eq=False)
class Contract:
    """The layouts and rules of one callable. ``print`` shows where each dim is bound and where it is checked.

    ``source`` is the text of the compiled guard; ``arguments`` the specs by name; ``violations(**arguments)`` every
    rule that a call breaks, without calling anything.
    """

    name: str
    signature: inspect.Signature
    specs: dict[str, Spec]
    rules: tuple[Rule, ...]
    same_device: bool = False
    derive: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    results: tuple[TensorSpec | None, ...] = ()
    unresolved: tuple[str, ...] = ()
    lone: bool = False  # one tensor against one layout: there is nothing else that could bind a part
    mode: _mode.Mode | None = None
    source: str = ""

    def __post_init__(self) -> None:
        self.tensors = {n: s for n, s in self.specs.items() if isinstance(s, TensorSpec)}
        self.scalars = {n: s for n, s in self.specs.items() if isinstance(s, ScalarSpec)}
        if not self.lone:
            self.rules = tuple(dict.fromkeys((*self.rules, *self._no_negative_sizes())))
        self.conditions = [(under, r) for under, r in flatten(self.rules)]
        self.steps, self.checks = _solve.solve(self)
        self._warned: set[tuple[Any, ...]] = set()
        self._check_rules()

    # --- what a call means -------------------------------------------------------------------------------------------

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, defaults filled in, derived ones computed."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        values |= {name: fn(**values) for name, fn in self.derive.items()}
        return values

    def violations(self, /, *args: Any, **kwargs: Any) -> list[Violation]:
        """Every rule that a call with these arguments breaks; nothing is called."""
        from layoutcheck import _explain

        return _explain.explain(self, self.bind(args, kwargs))

    def broken(self, values: dict[str, Any]) -> None:
        """Called by the compiled guard when a rule is not kept: explain, then raise or warn."""
        _trace.untraced(self._refuse)(values)

    def _refuse(self, values: dict[str, Any]) -> None:
        from layoutcheck import _explain

        found = _explain.explain(self, values)
        if not found:
            raise RuntimeError(
                f"{self.name}: the compiled guard refused a call in which no broken rule can be found. This is a "
                "defect of layoutcheck; please report it with the shapes, dtypes and strides of the arguments"
            )
        self.report(found)

    def check_values(self, values: dict[str, Any]) -> None:
        """Called by the compiled guard where a ``values`` mode may be on."""
        if torch.compiler.is_compiling():
            return
        from layoutcheck import _values

        if (self.mode or _mode.mode.get()) == "values" and (found := _values.check(self, values)):
            self.report(found)

    def report(self, found: list[Violation]) -> None:
        """Raise the violations, or warn of them, as the mode says: once for each call site and broken rule."""
        if torch.compiler.is_compiling() or (self.mode or _mode.mode.get()) != "warn":
            raise LayoutError(self.name, found)
        site, level = _call_site()
        keys = {v: (*site, v.argument, v.rule, re.sub(r"\d+", "", v.headline)) for v in found}
        if new := [v for v in found if keys[v] not in self._warned]:
            warnings.warn(str(LayoutError(self.name, new)), UserWarning, stacklevel=level)
            self._warned.update(keys[v] for v in new)

    # --- decoration --------------------------------------------------------------------------------------------------

    def _no_negative_sizes(self) -> Iterator[Rule]:
        """A rule for each scalar that is a size, or a part of one, of which no shape shows that it is not below 0."""
        forms = [(s, f) for s in self.tensors.values() for _, f in s.forms]
        sizes = {n for _, f in forms for e in f.sizes if e is not None for n in names(e)}
        sizes |= {n for _, f in forms for q in f.equations for n in (*names(q.left), *names(q.right))}
        shown = {e.name for s, f in forms if s.form is f and not s.optional for e in f.sizes if isinstance(e, Name)}
        for name, spec in self.scalars.items():
            if spec.type is int and not spec.optional and name in sizes - shown:
                yield as_rule(f"{name} >= 0")

    def known_names(self) -> set[str]:
        """Every dim that some step binds."""
        return {s.name for s in self.steps}

    def _check_rules(self) -> None:
        parameters = [*self.signature.parameters, *self.derive]
        dims = self.known_names()
        for under, rule in self.conditions:
            used = [r.expr for r in (*under, rule) if isinstance(r, Condition)]
            for expr in used:
                for name in names(expr):
                    if name not in dims and name not in parameters:
                        raise TypeError(f"{self.name}: {brief(expr)!r}: {_unknown(name, [*dims, *parameters])}")
                for name in arguments(expr):
                    if name not in parameters:
                        raise TypeError(f"{self.name}: {brief(expr)!r}: {_unknown(name, parameters)}")
            for expr in used:
                for name in names(expr):
                    owners = {s.argument for s in self.steps if s.name == name and s.optional and s.case is None}
                    sure = any(s.name == name and not (s.optional and s.case is None) for s in self.steps)
                    if owners and not sure and not owners & {a for u in under for a in arguments(u.expr)}:
                        owner = min(owners)
                        raise TypeError(
                            f"{self.name}: {brief(expr)!r} speaks of {name}, which only {owner} binds, and {owner} may "
                            f"be None: write when('given({owner})', {brief(expr)!r})"
                        )
            for name in rule.names if isinstance(rule, Each) else ():
                if name not in dims and name not in parameters:
                    raise TypeError(f"{self.name}: {str(rule)!r}: {_unknown(name, [*dims, *parameters])}")
            if not isinstance(rule, Condition):
                for name in rule.arguments:  # type: ignore[union-attr]
                    if name not in parameters or (isinstance(rule, NoOverlap) and name not in self.tensors):
                        raise TypeError(f"{self.name}: {type(rule).__name__}: {_unknown(name, parameters)}")
        for spec in self.tensors.values():
            if spec.writes and spec.writes.at is not None and spec.writes.at not in self.tensors:
                raise TypeError(f"{self.name}: Writes(at=...): {_unknown(spec.writes.at, list(self.tensors))}")
            for value in spec.values:
                for axis in value.axes if isinstance(value, Finite) else ():
                    if not all(axis in form.axes for _, form in spec.forms):
                        raise TypeError(f"{self.name}: Finite: {axis!r} is no axis of {spec.name}")
                for name in (n for e in value.exprs for n in (*names(e), *arguments(e))):
                    if name not in dims and name not in parameters and name != "index":
                        raise TypeError(f"{self.name}: {type(value).__name__}: {_unknown(name, [*dims, *parameters])}")
        for mistake in _entries.mistakes(self.tensors):
            raise TypeError(f"{self.name}: Index: {mistake}")

    def sightings(self) -> dict[str, list[str]]:
        """For each visible dim, where it is seen: arguments whose form or equations speak of it, and rules."""
        seen: dict[str, list[str]] = {}
        for spec in self.tensors.values():
            for _, form in spec.forms:
                for n in {n for e in form.sizes if e is not None for n in names(e)} | {
                    n for q in form.equations for side in (q.left, q.right) for n in names(side)
                }:
                    if spec.name not in seen.setdefault(n, []):
                        seen[n].append(spec.name)
        for under, rule in self.conditions:
            for r in (*under, rule):
                if isinstance(r, Condition):
                    for n in names(r.expr):
                        seen.setdefault(n, []).append(f"'{r}'")
        return {n: s for n, s in seen.items() if "." not in n}

    def __str__(self) -> str:
        lines = [f"contract of {self.name}"]
        seen = self.sightings()
        width = max((len(s.name) for s in self.steps), default=0)
        for step in self.steps:
            if "." in step.name:
                continue
            others = [s for s in seen.get(step.name, []) if s != step.argument]
            where = f"bound by {step.where}"
            if step.kind == "derive":
                where = f"= {step.where}"
            checked = (
                f"checked in {', '.join(dict.fromkeys(others))}" if others else "seen once only: nothing checks it"
            )
            lines.append(f"   {step.name:<{width}}  {where}; {checked}")
        for _, rule in self.conditions:
            if isinstance(rule, Condition):
                lines.append(f"   needs {rule}")
        for name in self.unresolved:
            lines.append(f"   {name} is not checked: its annotation exists only for type checkers")
        return "\n".join(lines)


def _call_site() -> tuple[tuple[str, int], int]:
    """(file, line) of the call of the guard that is running, and its distance from who asks, for ``warnings``."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    inside = [f.f_code.co_filename.startswith(GUARD_FILE) for f in frames]
    at = inside.index(True)
    while at < len(frames) - 1 and inside[at]:  # Dynamo may have cut the guard in two
        at += 1
    return (frames[at].f_code.co_filename, frames[at].f_lineno), at + 1


def _unknown(name: str, known: Iterable[str]) -> str:
    options = [k for k in dict.fromkeys(known) if "." not in k]
    close = difflib.get_close_matches(name, options, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name!r} is neither a dim nor an argument here ({', '.join(options)}){hint}"


# --- the public way in ------------------------------------------------------------------------------------------------


def make(
    fn: Callable[..., Any],
    rules: Iterable[str | Rule],
    *,
    same_device: bool = False,
    derive: Mapping[str, Callable[..., Any]] | None = None,
    annotations: Mapping[str, Any] | None = None,
    mode: _mode.Mode | None = None,
) -> Contract:
    """The contract of a callable, from its annotations and rules; ``annotations`` replaces them by name."""
    signature = inspect.signature(fn)
    derive = dict(derive or {})
    given = dict(annotations or {})
    known = [*signature.parameters, *derive, "return"]
    for name in given:
        if name not in known:
            raise TypeError(f"{_name(fn)}: {_unknown(name, known)}")
    specs: dict[str, Spec] = {}
    unresolved = []
    for name in (*signature.parameters, *derive):
        parameter = signature.parameters.get(name)
        annotation = given.get(name, parameter.annotation if parameter else inspect.Parameter.empty)
        if annotation is inspect.Parameter.empty or (
            parameter and parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ):
            continue
        if isinstance(annotation, Layout | Choose):
            annotation = typing.Annotated[torch.Tensor, annotation]
        value = _specs.resolve(annotation, fn)
        if value is _specs._UNRESOLVED:
            unresolved.append(name)
        elif spec := _specs.read(name, value):
            specs[name] = spec
    returned = _specs.resolve(given.get("return", signature.return_annotation), fn)
    return Contract(
        _name(fn),
        signature,
        specs,
        tuple(as_rule(r) for r in rules),
        same_device,
        derive,
        _results(returned),
        tuple(unresolved),
        mode=mode,
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn)).rpartition("<locals>.")[2]


def _results(annotation: Any) -> tuple[TensorSpec | None, ...]:
    if annotation in (inspect.Signature.empty, None, type(None)) or annotation is _specs._UNRESOLVED:
        return ()
    items = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else (annotation,)
    specs = [_specs.read("return" if len(items) == 1 else f"return[{i}]", item) for i, item in enumerate(items)]
    found = tuple(s if isinstance(s, TensorSpec) and not _says_nothing(s) else None for s in specs)
    return found if any(found) else ()


def _says_nothing(spec: TensorSpec) -> bool:
    """A plain ``Tensor``: what comes back is the callable's own business."""
    form = spec.form
    return form is not None and form.layout is None and form.dtypes is None and not form.sizes


@overload
def contract(fn: F, /) -> F: ...


@overload
def contract(
    *rules: str | Rule,
    same_device: bool = False,
    mode: _mode.Mode | None = None,
    derive: Mapping[str, Callable[..., Any]] | None = None,
    **annotations: Any,
) -> Callable[[F], F]: ...


def contract(
    *rules: Any,
    same_device: bool = False,
    mode: _mode.Mode | None = None,
    derive: Mapping[str, Callable[..., Any]] | None = None,
    **annotations: Any,
) -> Any:
    """Check every call of a function against the layouts in its annotations and the given rules.

    Annotations: jaxtyping for plain tensors (``BFloat16[Tensor, "token head head_dim"]``), ``Annotated[Tensor, layout,
    ...]`` for laid-out buffers, with :class:`Writes`, :class:`Index`, :class:`Indptr` and :class:`Finite` beside the
    layout. Rules: comparisons in text (``"page_size % 32 == 0"``), :func:`when`, :func:`needs`, :func:`forbids`,
    :func:`together`, :func:`no_overlap`, :func:`each`, :func:`agree`. ``same_device``: all tensors are on one device.
    ``mode`` overrides the process's mode.

    ``derive`` reaches what is not an argument: ``derive={"page_size": lambda self, **_: self.page_size}``; each
    function is called with every argument by name, and its result is a dim or, where ``annotations`` gives it a
    layout, a buffer. ``annotations`` name parameters, derived values or ``return_`` and replace what the signature
    says.

    The decorated function has ``.contract``; printing it shows where each dim is bound and checked. A broken rule
    raises
    :class:`LayoutError` before the function runs. With ``LAYOUTCHECK=off`` in the environment at import the function
    itself is returned.

    Raises ``TypeError`` at decoration for a contract that cannot be decided: a dim that nothing determines, an unknown
    name, an annotation that declares a layout and cannot be read.
    """
    if "return_" in annotations:
        annotations["return"] = annotations.pop("return_")

    def decorate(fn: Any) -> Any:
        if _mode.OFF:
            return fn
        if isinstance(fn, staticmethod | classmethod):
            return type(fn)(decorate(fn.__func__))
        made = make(fn, rules, same_device=same_device, derive=derive, annotations=annotations, mode=mode)
        return _guarded(fn, made)

    if len(rules) == 1 and (callable(rules[0]) or isinstance(rules[0], staticmethod | classmethod)):
        fn, rules = rules[0], ()
        return decorate(fn)
    return decorate


def guard(fn: F, *rules: str | Rule, **keywords: Any) -> F:
    """A guarded version of somebody else's function, which is not changed: :func:`contract` from outside.

    ``guard(store, "page_size % 32 == 0", k_scale=MXFP8_SCALE_INTERLEAVED, derive={...})``; keywords as there.
    """
    return contract(*rules, **keywords)(fn)


def _guarded(fn: Any, made: Contract) -> Any:
    from layoutcheck import _compile

    wrapper = _compile.compile_guard(fn, made)
    functools.update_wrapper(wrapper, fn)
    if isinstance(fn, types.FunctionType) and not hasattr(fn, "__wrapped__"):  # others have them in the signature alone
        wrapper.__defaults__, wrapper.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    wrapper.contract = made
    return wrapper


def check_tensor(
    layout: Layout, tensor: torch.Tensor, known: Mapping[str, int], *, memory: bool = True
) -> dict[str, int]:
    """``Layout.check``: one tensor against one layout; returns the sizes that it was solved for.

    Without ``memory`` it does not matter what its memory is known to hold.
    """
    if strange := [n for n in known if n not in layout._names]:
        raise TypeError(f"{layout.name}.check: {_unknown(strange[0], layout._names)}")
    made = _tensor_contract(layout, tuple(sorted(known)))
    values = {"tensor": tensor, **known}
    from layoutcheck import _call, _explain

    if found := _explain.explain(made, values, memory=memory):
        raise LayoutError(layout.name, found)
    solved = _call.solve(made, values)[0]
    return {name.removeprefix("tensor."): int(value) for name, value in solved.items() if ".shape[" not in name}


@functools.lru_cache(maxsize=512)
def _tensor_contract(layout: Layout, known: tuple[str, ...]) -> Contract:
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("tensor", *known)]
    specs: dict[str, Spec] = {"tensor": TensorSpec("tensor", ((None, _specs.layout_form("tensor", layout)),))}
    specs |= {n: ScalarSpec(n, int, classes=(int,)) for n in known}
    return Contract(layout.name, inspect.Signature(parameters), specs, (), lone=True)
