"""How strict the guards are: ``warn``, ``raise`` or ``values``; per process, per context, per contract.

``LAYOUTCHECK=off`` in the environment when the library is imported is for good: decoration returns the original
callable itself. ``LAYOUTCHECK=warn|raise|values`` sets the process's mode to start with.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from typing import Literal, Self, get_args

Mode = Literal["warn", "raise", "values"]
MODES: tuple[Mode, ...] = get_args(Mode)

_context: ContextVar[Mode | None] = ContextVar("layoutcheck_mode", default=None)


class _State:
    """What compiled guards look at on every call: whether any ``values`` mode may be on at all."""

    __slots__ = ("process", "watch")

    def __init__(self) -> None:
        setting = os.environ.get("LAYOUTCHECK", "raise")
        if setting != "off" and setting not in MODES:
            raise ValueError(f"LAYOUTCHECK={setting!r} in the environment; it may be off, {', '.join(MODES)}")
        self.process: Mode = "raise" if setting == "off" else setting  # type: ignore[assignment]
        self.watch = self.process == "values"


OFF = os.environ.get("LAYOUTCHECK") == "off"
state = _State()


class mode:
    """Set the guards' mode: ``mode("warn")`` for the process, ``with mode("values"):`` for this thread or task.

    - ``raise`` (the default): a broken rule raises :class:`layoutcheck.LayoutError`.
    - ``warn``: it is a :class:`UserWarning`, and the call goes on.
    - ``values``: as ``raise``, and rules that read data (index ranges, indptr, padding) are checked as well; this
      synchronises with the device, and is skipped while a CUDA graph is captured.

    As a context manager the change is undone at the end of the block; :meth:`set` makes it the process's mode.
    """

    def __init__(self, value: Mode) -> None:
        if value not in MODES:
            raise ValueError(f"mode {value!r} is none of {', '.join(MODES)}")
        self.value: Mode = value
        self._tokens: list[Token[Mode | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_context.set(self.value))
        state.watch = state.watch or self.value == "values"
        return self

    def __exit__(self, *_: object) -> None:
        _context.reset(self._tokens.pop())

    @staticmethod
    def set(value: Mode) -> None:
        """Make ``value`` the mode of the process, now and in every thread that has none of its own."""
        state.process = mode(value).value
        state.watch = state.watch or value == "values"

    @staticmethod
    def get() -> Mode:
        """The mode in force here."""
        return _context.get() or state.process
