"""A violation while ``torch.compile`` traces: what the graph ends with, and how the words get there.

Dynamo cannot trace the slow path, and need not: the guard describes its arguments in numbers, which are constants of
the trace, and :func:`reason`'s functions, which Dynamo calls as they are, make fake tensors of them and explain those.
(The tensors themselves would have to be computed first, and what computes them may write.) :func:`end_graph` then ends
the graph with that text. Under ``fullgraph`` this is Dynamo's error, with the text in it; elsewhere the call goes on
outside the graph, where the guard raises or warns as it always does. ``torch.export`` runs the guard itself, on fake
tensors, and sees the ``LayoutError``.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from layoutcheck._errors import LayoutError

if TYPE_CHECKING:
    from layoutcheck._contract import Contract

P = ParamSpec("P")
R = TypeVar("R")


def described(value: Any) -> Any:
    """A tensor as its shape, strides, dtype and device, a symbol as the number it stands for; the rest as it is."""
    if isinstance(value, torch.Tensor):
        shape = [operator.index(n) for n in value.shape]
        strides = [operator.index(n) for n in value.stride()]
        return (torch.Tensor, shape, strides, value.dtype, value.device.type, value.device.index)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, tuple | list):
        return tuple([described(v) for v in value])
    return value


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if len(value) == 6 and value[0] is torch.Tensor:
        _, shape, strides, dtype, kind, index = value
        return torch.empty_strided(shape, strides, dtype=dtype, device=torch.device(kind, index))
    return tuple(_rebuilt(v) for v in value)


def reason(contract: Contract) -> Callable[..., str]:
    """The function that says what a call breaks, from its :func:`described` arguments."""

    def say(**values: Any) -> str:
        from layoutcheck import _explain

        with torch._subclasses.FakeTensorMode():
            given = {name: _rebuilt(value) for name, value in values.items()}
            return str(LayoutError(contract.name, _explain.explain(contract, given, memory=False)))

    return _as_constant(say)


def reason_of_result(contract: Contract) -> Callable[..., str]:
    """The function that says what is wrong with a return value, from it and the arguments, described as well."""

    def say(result: Any, /, **values: Any) -> str:
        from layoutcheck import _explain

        with torch._subclasses.FakeTensorMode():
            given = {name: _rebuilt(value) for name, value in values.items()}
            return str(LayoutError(contract.name, _explain.explain_result(contract, _rebuilt(result), given)))

    return _as_constant(say)


def _as_constant(fn: Callable[..., str]) -> Callable[..., str]:
    """What ``torch.compiler.assume_constant_result`` does, without the second that importing Dynamo takes."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def end_graph(text: str) -> None:
    """End the graph that is being traced, for the reason in ``text``."""
    torch._dynamo.graph_break(msg=text)


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, kept out of graphs: Dynamo would compile each frame of the slow path, which takes half a minute."""
    if "torch._dynamo" not in sys.modules:
        return fn
    kept_out: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
    return kept_out
