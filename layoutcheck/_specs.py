"""From an annotation to what one argument must look like.

``BFloat16[Tensor, "token head"]`` (jaxtyping), ``Annotated[Tensor, layout, Writes(at="loc")]``, ``Tensor``, and
anything else, for which ``isinstance`` or beartype decides. Which names are known when is ``_contract``'s business.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layoutcheck._choose import Choose
from layoutcheck._dims import Const, DimSyntaxError, Equation, Expr, Name, brief, names, parse
from layoutcheck._layout import Layout
from layoutcheck._record import Record
from layoutcheck._rules import ValueRule, Writes

VARIADIC = "*"
_UNRESOLVED = object()


@dataclass(frozen=True)
class Form:
    """One way in which a tensor may look: a layout's, or a plain list of dims.

    ``sizes`` has None for a dimension of any size; with ``variadic`` (name and position) any number of dimensions
    stands there. ``strides`` is None where no stride is checked, and has None for a free one, which must be at least
    ``inner``. ``parts`` are the names that are parts of a composite axis, with the name of the whole.
    """

    labels: tuple[str, ...]
    sizes: tuple[Expr | None, ...]
    dtypes: tuple[torch.dtype, ...] | None = None
    variadic: tuple[int, str] | None = None
    strides: tuple[Expr | None, ...] | None = None
    inner: tuple[Expr | None, ...] = ()
    plain: bool = False
    equations: tuple[Equation, ...] = ()
    align: tuple[tuple[int | None, Expr], ...] = ()
    int32: tuple[int, ...] = ()  # dimensions whose terms are added up in 32 bits
    strict: frozenset[int] = frozenset()  # dimensions whose stride counts even where their size is 1
    defaults: tuple[tuple[str, int], ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    layout: Layout | None = None
    dims: tuple[tuple[str, Expr], ...] = ()  # the layout's open dims in the contract's names
    text: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the logical coordinates: a layout's axes, or the dims as they are written."""
        return self.labels if self.layout is None else tuple(a.name for a in self.layout.axes)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor argument must keep: one form, or one per case of a ``Choose``, each with its condition."""

    name: str
    forms: tuple[tuple[Expr | None, Form], ...]
    optional: bool = False
    writes: Writes | None = None
    values: tuple[ValueRule, ...] = ()

    @property
    def form(self) -> Form | None:
        """The only form, where there is no choice."""
        return self.forms[0][1] if len(self.forms) == 1 and self.forms[0][0] is None else None


@dataclass(frozen=True)
class ScalarSpec:
    """What an argument that is no tensor must be: ``test`` is None where nothing is checked."""

    name: str
    type: Any
    optional: bool = False
    classes: tuple[type, ...] | None = None
    choices: tuple[Any, ...] | None = None
    test: Callable[[Any], bool] | None = None


Spec = TensorSpec | ScalarSpec


def resolve(annotation: Any, fn: Any) -> Any:
    """The annotation's value; :data:`UNRESOLVED` where a string names something that does not exist at run time.

    Raises ``TypeError`` where such a string speaks of a layout, which must not be lost.
    """
    if not isinstance(annotation, str):
        return annotation
    module = _globals(fn)
    try:
        return eval(annotation, module, _enclosing(module))
    except NameError as error:
        if re.search(r"\bAnnotated\b|\[[^\]]*[\"']", annotation):
            raise TypeError(
                f"{getattr(fn, '__qualname__', fn)}: the annotation {annotation!r} declares a tensor but cannot be "
                f"read: {error}. Import the name at run time, not only under TYPE_CHECKING"
            ) from None
        return _UNRESOLVED


def _globals(fn: Any) -> dict[str, Any]:
    """The module in whose names a callable's annotations are written: of a partial, its function's; of an object, its
    ``__call__``'s."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    found: dict[str, Any] = getattr(fn if hasattr(fn, "__globals__") else type(fn).__call__, "__globals__", {})
    return found


def _enclosing(module: dict[str, Any]) -> Mapping[str, Any]:
    """The local names around the decoration: a string annotation may speak of what no closure holds."""
    frame: types.FrameType | None = sys._getframe(1)
    scopes = []
    while frame is not None:
        if frame.f_globals is module and frame.f_locals is not module:
            scopes.append(dict(frame.f_locals))
        frame = frame.f_back
    return ChainMap(*scopes)


def read(name: str, annotation: Any) -> Spec | None:
    """The spec of an annotation; None where there is nothing to check."""
    if annotation is _UNRESOLVED or annotation is Any:
        return None
    annotation, optional = _without_none(annotation)
    extras: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *rest = typing.get_args(annotation)
        extras = tuple(rest)
        annotation, inner_optional = _without_none(annotation)
        optional = optional or inner_optional
    return replace(spec, optional=optional) if (spec := _read_one(name, annotation, extras)) else None


def _read_one(name: str, annotation: Any, extras: tuple[Any, ...]) -> Spec | None:
    layouts = [e.buffer if isinstance(e, Record) else e for e in extras if isinstance(e, Layout | Choose | Record)]
    if len(layouts) > 1:
        raise TypeError(f"{name}: Annotated holds {len(layouts)} layouts; use Choose to pick one by a condition")
    writes = next((e for e in extras if isinstance(e, Writes)), None)
    values = tuple(e for e in extras if isinstance(e, ValueRule))
    if layouts:
        return TensorSpec(name, _layout_forms(name, layouts[0]), writes=writes, values=values)
    if _is_jaxtyping(annotation):
        return TensorSpec(name, ((None, _plain_form(annotation)),), writes=writes, values=values)
    if isinstance(annotation, type) and issubclass(annotation, torch.Tensor):
        return TensorSpec(name, ((None, Form((), (), variadic=(0, "..."))),), writes=writes, values=values)
    if writes or values:
        raise TypeError(f"{name}: {writes or values[0]} needs a tensor annotation, not {annotation!r}")
    return _scalar(name, annotation)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        args = typing.get_args(annotation)
        rest = tuple(a for a in args if a is not type(None))
        if len(rest) < len(args):
            return (rest[0] if len(rest) == 1 else typing.Union[rest]), True  # noqa: UP007 - built at run time
    return annotation, False


# --- tensors ----------------------------------------------------------------------------------------------------------


def _is_jaxtyping(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "dim_str") and hasattr(annotation, "dtypes")


def _plain_form(annotation: Any) -> Form:
    """The form of a jaxtyping annotation. Its dims are read from ``dim_str`` with this library's grammar."""
    if not (isinstance(annotation.array_type, type) and issubclass(annotation.array_type, torch.Tensor)):
        raise TypeError(f"{annotation.__name__} is no tensor of torch")
    text = annotation.dim_str
    labels: list[str] = []
    sizes: list[Expr | None] = []
    equations: list[Equation] = []
    variadic: tuple[int, str] | None = None
    for token in text.split():
        if token == "..." or token.startswith("*"):
            if variadic:
                raise DimSyntaxError(f"{text!r} has two dimensions of any number")
            variadic = (len(sizes), "..." if token == "..." else token[1:])
            continue
        if token[0] in "#?{" or token in ("+", "-", "/", "//", "%", "="):
            what = "write the expression without spaces" if token[0] not in "#?{" else "not supported in a contract"
            raise DimSyntaxError(f"{text!r} has {token!r}: {what}")
        name, equals, value = token.partition("=")
        if equals and name.isidentifier():
            equations.append(Equation(Name(name), parse(int(value) if value.isdigit() else value)))
            token = name
        labels.append(token)
        sizes.append(None if token.startswith("_") else parse(int(token) if token.isdigit() else token))
    allowed = {str(d) for d in annotation.dtypes} if isinstance(annotation.dtypes, list | tuple) else None
    dtypes = None
    if allowed is not None:
        named = (getattr(torch, n, None) for n in allowed)
        found = {d for d in named if isinstance(d, torch.dtype) and str(d).removeprefix("torch.") in allowed}
        dtypes = tuple(sorted(found, key=str))
    return Form(
        tuple(labels),
        tuple(sizes),
        dtypes,
        variadic,
        equations=tuple(equations),
        text=f"[{text}]" if text else "scalar",
    )


def _layout_forms(argument: str, layout: Layout | Choose) -> tuple[tuple[Expr | None, Form], ...]:
    if isinstance(layout, Layout):
        return ((None, layout_form(argument, layout)),)
    cases = [*layout.cases, *([(None, layout.default)] if layout.default is not None else [])]
    return tuple((c, layout_form(f"{argument}.{i}", case)) for i, (c, case) in enumerate(cases))


@functools.lru_cache(maxsize=1024)
def layout_form(prefix: str, original: Layout) -> Form:
    """The form of a layout as one argument's: names that others may not see get ``prefix`` in front."""
    private = [n for n in sorted(original._names) if n not in original.visible]
    layout = original.with_names({n: f"{prefix}.{n}" for n in private})
    dims = layout.tensor_dims
    labels = tuple(d.label for d in original.tensor_dims)
    parts: dict[str, str] = {}
    for axis in layout.axes:
        whole = layout.size_of(axis.name)
        for node in list(axis.walk())[1:]:
            for n in names(layout.size_of(node.name)):
                if isinstance(whole, Name):
                    parts[n] = whole.name
    align = []
    for target, size in layout.rules.align:
        index = next((i for i, d in enumerate(original.tensor_dims) if d.label == target), None)
        if target != "base" and index is None:
            raise TypeError(f"{original.name}: align names {target}, which no dimension of the tensor shows alone")
        align.append((index, size))
    return Form(
        labels,
        tuple(d.size for d in dims),
        original.accepted,
        strides=tuple(d.stride for d in dims),
        inner=tuple(d.inner for d in dims),
        plain=layout.plain,
        equations=layout.equations,
        align=tuple(align),
        int32=tuple(i for i, group in enumerate(original.view_leaves) if set(group) & set(original.narrow)),
        strict=frozenset(i for i, group in enumerate(original.view_leaves) if original.strict & set(group)),
        defaults=tuple((n, v) for n, v in layout.rules.default if n in layout._names),
        parts=parts,
        layout=original,
        dims=tuple((d, Name(f"{prefix}.{d}" if d in private else d)) for d in original.dims),
        text=original.name,
    )


# --- everything else --------------------------------------------------------------------------------------------------


def _scalar(name: str, annotation: Any) -> ScalarSpec | None:
    if typing.get_origin(annotation) is typing.Literal:
        return ScalarSpec(name, annotation, choices=typing.get_args(annotation))
    simple = {int: (int, torch.SymInt), float: (float, int, torch.SymFloat, torch.SymInt), bool: (bool, torch.SymBool)}
    if annotation in simple:
        return ScalarSpec(name, annotation, classes=simple[annotation])
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return ScalarSpec(name, annotation, classes=(annotation,))

    def bearable(value: Any) -> bool:
        from beartype.door import is_bearable  # 50 ms to import: only for types that need it

        return bool(is_bearable(value, annotation))

    return ScalarSpec(name, annotation, test=bearable)


def type_text(spec: ScalarSpec) -> str:
    """The type as a person would write it."""
    if spec.choices is not None:
        return " or ".join(map(repr, spec.choices))
    return getattr(spec.type, "__name__", None) or str(spec.type).replace("typing.", "")


def size_text(size: Expr | None) -> str:
    """A size for a message: its expression, or ``_`` for any."""
    if size is None:
        return "_"
    return str(size.value) if isinstance(size, Const) else brief(size)
