"""The guard of a contract alone: what it says of a call, without the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import layoutcheck._mode as _mode
from layoutcheck import _compile
from layoutcheck._contract import Contract
from layoutcheck._errors import LayoutError, Violation


def contract_of(fn: Callable[..., Any]) -> Contract:
    """The contract of a decorated function. Raises ``TypeError`` for one that has none."""
    made = getattr(fn, "contract", None)
    if not isinstance(made, Contract):
        off = "; LAYOUTCHECK=off is set, so decoration did nothing" if _mode.OFF else ""
        raise TypeError(f"{getattr(fn, '__qualname__', fn)!r} has no contract: decorate it with @contract{off}")
    return made


def refused(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Violation, ...]:
    """Every rule, those that read data included, for which the guard of ``fn`` refuses a call; nothing is run."""
    made = contract_of(fn)
    try:
        with _mode.mode("values"):
            apply(_alone(made), made, arguments)
    except LayoutError as error:
        return error.violations
    return ()


def apply(fn: Callable[..., Any], made: Contract, arguments: Mapping[str, Any]) -> Any:
    """Call a function with arguments by name, whatever their kind."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for p in made.signature.parameters.values():
        if p.name not in arguments:
            continue
        value = arguments[p.name]
        if p.kind is p.POSITIONAL_ONLY:
            positional.append(value)
        elif p.kind is p.VAR_POSITIONAL:
            positional += value
        elif p.kind is p.VAR_KEYWORD:
            named |= value
        else:
            named[p.name] = value
    return fn(*positional, **named)


@lru_cache(maxsize=256)
def _alone(made: Contract) -> Callable[..., Any]:
    def nothing(*args: Any, **kwargs: Any) -> None: ...

    return _compile.compile_guard(nothing, dataclasses.replace(made, results=(), mode=None))  # type: ignore[no-any-return]
