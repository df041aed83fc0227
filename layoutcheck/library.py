"""Operators from contracts: what ``torch.library.custom_op`` asks for is in the contract already.

The schema comes from the annotations, mutation from :class:`layoutcheck.Writes`, the fake kernel from the layouts of
what is returned. A kernel behind an operator traces on any device: its body is not looked into.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from layoutcheck import _compile, _specs
from layoutcheck._call import case_of, solve
from layoutcheck._contract import Contract
from layoutcheck._dims import Expr, Inexact, evaluate, plan
from layoutcheck._specs import Form, ScalarSpec, TensorSpec

__all__ = ["op"]

F = TypeVar("F", bound=Callable[..., Any])
# Written in place, these break torch 2.13: Inductor has no copy of them, and opcheck cannot compare them.
_AS_BYTES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu
)  # fmt: skip
_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}

_ABSENT = torch.uint64  # what stands for a result that is None is an empty tensor of a dtype that no kernel returns


def op(name: str, fn: F, *, fake: Callable[..., Any] | None = None) -> F:
    """An operator ``namespace::name`` that runs a function with a contract; called as the function is.

    ``op("mine::store", store)``. ``fn`` takes tensors, which may be optional, and ``int``, ``float``, ``bool``,
    ``str`` or ``Literal`` arguments; it returns None, a tensor or a tuple of tensors, none of which is memory of an
    argument. What :class:`layoutcheck.Writes` marks is mutated; nothing else may be.

    Of a tuple some may be None; inside the graph such a result is an empty tensor.

    ``fake`` makes what is returned, from the arguments, as empty tensors. It is needed only where the return
    annotation has no layout, or no single dtype, for some tensor: elsewhere they are allocated from their layouts.

    Buffers of 8-bit floats that are written are operands of type uint8, views that the returned function takes, with
    their dtype in an argument ``<name>_dtype``: opcheck of torch 2.13 cannot compare the others, and Inductor cannot
    copy them. It has no E8M0 inputs at all: take the view of such a buffer outside what is compiled,
    ``k_scale.view(torch.uint8)``, which every E8M0 layout accepts. The returned function is guarded by the contract;
    its ``.op`` is the ``torch.library.CustomOpDef``.

    Raises ``TypeError`` for a function without a contract, an argument that no schema can say, or a missing ``fake``.
    """
    contract = getattr(fn, "contract", None)
    if not isinstance(contract, Contract):
        raise TypeError(f"{name}: {getattr(fn, '__qualname__', fn)} has no contract: decorate it with @contract")
    written = [
        s.name
        for s in contract.tensors.values()
        if s.writes is not None and any(set(f.dtypes or _AS_BYTES) & set(_AS_BYTES) for _, f in s.forms)
    ]
    rebuilt, optional, results = _returned(fn, contract)
    if fake is None and any(r is None for r in results):
        raise TypeError(f"{name}: its return annotation does not say the layout and dtype of every tensor: pass fake=")
    parameters = contract.signature.parameters

    def unpacked(operands: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """The function's own arguments, bytes as what they are."""
        values = dict(zip(parameters, operands, strict=False))
        for n, dtype in zip(written, operands[len(parameters) :], strict=True):
            if dtype is not None:
                values[n] = values[n].view(dtype)
        keywords = {n: values.pop(n) for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        return list(values.values()), keywords

    def leave(result: Any, operands: tuple[Any, ...]) -> Any:
        if not optional:
            return tuple(result) if rebuilt is not None else result
        device = next(t.device for t in operands if isinstance(t, torch.Tensor))
        return tuple(torch.empty(0, dtype=_ABSENT, device=device) if t is None else t for t in result)

    def run(*operands: Any) -> Any:
        positional, keywords = unpacked(operands)
        return leave(fn(*positional, **keywords), operands)

    def describe(*operands: Any) -> Any:
        positional, keywords = unpacked(operands)
        if fake is not None:
            return leave(fake(*positional, **keywords), operands)
        values = dict(zip(parameters, positional, strict=False)) | keywords
        made = _empty(contract, typing.cast("list[TensorSpec]", results), values)
        return leave(made if rebuilt is not None else made[0] if made else None, operands)

    returns = f"({', '.join(['Tensor'] * len(results))})" if len(results) != 1 else "Tensor"
    schema = f"{_parameters(name, contract, written)} -> {returns}"
    mutated = [s.name for s in contract.tensors.values() if s.writes is not None]
    made = torch.library.custom_op(name, run, mutates_args=mutated, schema=schema)
    made.register_fake(describe)

    def apply(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(parameters, args, strict=False)) | kwargs
        dtypes: list[torch.dtype | None] = []
        for n in written:
            tensor = values[n]
            carried = tensor is not None and tensor.dtype in _AS_BYTES
            dtypes.append(tensor.dtype if carried else None)
            values[n] = tensor.view(torch.uint8) if carried else tensor
        result = made(*(values[n] for n in parameters), *dtypes)
        if rebuilt is None:
            return result
        return rebuilt([None if optional and t.dtype is _ABSENT else t for t in result])

    apply.__name__ = getattr(fn, "__name__", "apply")
    wrapper = _compile.compile_guard(apply, contract)
    functools.update_wrapper(wrapper, fn)
    wrapper.contract, wrapper.op = contract, made
    return typing.cast(F, wrapper)


# --- the schema -------------------------------------------------------------------------------------------------------


def _parameters(name: str, contract: Contract, written: list[str]) -> str:
    """No defaults, which the wrapper fills in, and no keywords, which ``custom_op`` cannot have for tensors."""
    parts = [f"{_type(name, contract, p, i)} {n}" for i, (n, p) in enumerate(contract.signature.parameters.items())]
    return f"({', '.join(parts + [f'ScalarType? {n}_dtype' for n in written])})"


def _type(name: str, contract: Contract, parameter: inspect.Parameter, alias: int) -> str:
    spec = contract.specs.get(parameter.name)
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        spec = None
    optional = "?" if spec is not None and (spec.optional or parameter.default is None) else ""
    match spec:
        case TensorSpec(writes=None):
            return f"Tensor{optional}"
        case TensorSpec():
            return f"Tensor(a{alias}!){optional}"
        case ScalarSpec():
            kinds = {type(c) for c in spec.choices} if spec.choices is not None else {spec.type}
            if len(kinds) == 1 and (kind := _TYPES.get(next(iter(kinds)))) is not None:
                return kind + optional
    raise TypeError(f"{name}: no schema can say the argument {parameter}; it may be a tensor, int, float, bool or str")


# --- what is returned -------------------------------------------------------------------------------------------------


def _returned(
    fn: Callable[..., Any], contract: Contract
) -> tuple[Callable[[list[Any]], Any] | None, bool, list[TensorSpec | None]]:
    """What makes a tuple of the results, where it is one; whether some may be None; and for each tensor its spec, or
    None where that does not say how to allocate it."""
    annotation = _specs.resolve(contract.signature.return_annotation, inspect.unwrap(fn))
    if annotation in (None, type(None), inspect.Signature.empty):
        return None, False, []
    rebuilt: Callable[[list[Any]], Any] | None = None
    items: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) is tuple:
        rebuilt, items = tuple, typing.get_args(annotation)
    elif hasattr(annotation, "_fields"):
        rebuilt, items = annotation._make, tuple(typing.get_type_hints(annotation).values())
    specs = contract.results or (None,) * len(items)
    optional = any(type(None) in typing.get_args(item) for item in items)
    said = [s if s is not None and all(_dtype(form) for _, form in s.forms) else None for s in specs]
    return rebuilt, optional, said


def _dtype(form: Form) -> torch.dtype | None:
    """The dtype of what is allocated; None where the form leaves a choice."""
    if form.layout is not None:
        return form.layout.dtype if len(form.layout.elements) == 1 else None
    return form.dtypes[0] if form.dtypes is not None and len(form.dtypes) == 1 else None


def _empty(contract: Contract, results: list[TensorSpec], arguments: dict[str, Any]) -> list[torch.Tensor]:
    values, _ = solve(contract, arguments)
    device = next(t.device for n in contract.tensors if isinstance(t := arguments.get(n), torch.Tensor))
    made = []
    for spec in results:
        case = case_of(spec, values, arguments)
        form = spec.forms[0 if case is None else case][1]
        known = dict(values)
        for n, expr, _ in plan(known, form.equations):
            with suppress(Inexact, KeyError):
                known[n] = evaluate(expr, known)
        shape = [evaluate(typing.cast(Expr, size), known) for size in form.sizes]
        made.append(torch.empty_strided(shape, _strides(form, shape, known), dtype=_dtype(form), device=device))
    return made


def _strides(form: Form, shape: list[Any], values: dict[str, Any]) -> list[Any]:
    """A free stride is that of a packed tensor."""
    packed = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    declared = form.strides or (None,) * len(shape)
    return [p if s is None else evaluate(s, values) for s, p in zip(declared, packed, strict=True)]
