"""A violation while ``torch.compile`` traces: what the graph ends with, and how the words get there.

Dynamo cannot trace the slow path, and need not: it calls :func:`reason`'s functions as they are, with the tensors
themselves, and takes their text for a constant. :func:`end_graph` then ends the graph with that text. Under
``fullgraph`` this is Dynamo's error, with the text in it; elsewhere the call goes on outside the graph, where the guard
raises as it always does. ``torch.export`` runs the guard itself, on fake tensors, and sees the ``LayoutError``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from layoutcheck._errors import LayoutError

if TYPE_CHECKING:
    from layoutcheck._contract import Contract

P = ParamSpec("P")
R = TypeVar("R")


def reason(contract: Contract) -> Callable[..., str]:
    """The function that says what a call breaks: its first argument is the result, or None before there is one."""

    def say(result: Any, /, **values: Any) -> str:
        from layoutcheck import _explain

        found = _explain.explain(contract, values) if result is None else _explain.explain_result(contract, result, values)
        return str(LayoutError(contract.name, found))

    return as_constant(say)


def as_constant(fn: Callable[..., str]) -> Callable[..., str]:
    """What ``torch.compiler.assume_constant_result`` does, without the second that importing Dynamo takes."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def end_graph(text: str) -> None:
    """End the graph that is being traced, for the reason in ``text``."""
    torch._dynamo.graph_break(msg=text)


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, kept out of graphs: Dynamo would compile each frame of the slow path, which takes half a minute."""
    return torch.compiler.disable(fn) if "torch._dynamo" in sys.modules else fn
