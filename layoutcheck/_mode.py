"""How strict the guards are: ``warn``, ``raise`` or ``values``; per process, per context, per contract.

``LAYOUTCHECK=off`` in the environment when the library is imported is for good: decoration returns the original
callable itself. ``LAYOUTCHECK=warn|raise|values`` sets the process's mode to start with.
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar, Token
from typing import Literal, Self, get_args

Mode = Literal["warn", "raise", "values"]
MODES: tuple[Mode, ...] = get_args(Mode)


class _Block:
    """One ``with mode(...)`` that has been entered, and the one around it in the same thread or task."""

    __slots__ = ("outer", "value")

    def __init__(self, value: Mode, outer: _Block | None) -> None:
        self.value: Mode | None = value  # None once the block has been left
        self.outer = outer


_context: ContextVar[_Block | None] = ContextVar("layoutcheck_mode", default=None)


class _State:
    """The process's mode, and what compiled guards look at on every call: whether ``values`` is on anywhere."""

    __slots__ = ("_lock", "_values", "process", "watch")

    def __init__(self) -> None:
        setting = os.environ.get("LAYOUTCHECK", "raise")
        if setting != "off" and setting not in MODES:
            raise ValueError(f"LAYOUTCHECK={setting!r} in the environment; it may be off, {', '.join(MODES)}")
        self.process: Mode = "raise" if setting == "off" else setting  # type: ignore[assignment]
        self._values = 0  # blocks of ``values`` that are entered now
        self._lock = threading.Lock()
        self.watch = self.process == "values"

    def update(self, *, process: Mode | None = None, blocks: int = 0) -> None:
        """Set the process's mode, or count blocks of ``values`` that are entered or left."""
        with self._lock:
            self.process = process or self.process
            self._values += blocks
            self.watch = self.process == "values" or self._values > 0


OFF = os.environ.get("LAYOUTCHECK") == "off"
state = _State()


class mode:
    """Set the guards' mode: ``mode("warn")`` for the process, ``with mode("values"):`` for this thread or task.

    - ``raise`` (the default): a broken rule raises :class:`layoutcheck.LayoutError`.
    - ``warn``: it is a :class:`UserWarning`, once per call site and cause, and the call goes on.
    - ``values``: as ``raise``, and rules that read data (index ranges, indptr, padding) are checked as well; this
      synchronises with the device, and is skipped while a CUDA graph is captured.

    As a context manager the change is undone at the end of the block, also in threads and tasks that were started
    within it and took its context along. :meth:`set` makes it the process's mode. What a contract's own ``mode`` says
    comes first. A guard that is traced by ``torch.compile`` or ``torch.export`` raises in every mode.
    """

    def __init__(self, value: Mode) -> None:
        if value not in MODES:
            raise ValueError(f"mode {value!r} is none of {', '.join(MODES)}")
        self.value: Mode = value
        self._entered: list[tuple[_Block, Token[_Block | None]]] = []

    def __enter__(self) -> Self:
        block = _Block(self.value, _context.get())
        self._entered.append((block, _context.set(block)))
        state.update(blocks=self.value == "values")
        return self

    def __exit__(self, *_: object) -> None:
        block, token = self._entered.pop()
        block.value = None
        _context.reset(token)
        state.update(blocks=-(self.value == "values"))

    @staticmethod
    def set(value: Mode) -> None:
        """Make ``value`` the mode of the process, now and in every thread that has none of its own."""
        state.update(process=mode(value).value)

    @staticmethod
    def get() -> Mode:
        """The mode in force here."""
        block = _context.get()
        while block is not None:
            if block.value is not None:
                return block.value
            block = block.outer
        return state.process
