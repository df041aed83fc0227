"""Running something in a child process: what is called without its guard may crash the interpreter that runs it."""

from __future__ import annotations

import faulthandler
import io
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Outcome:
    """How a child ended: with a value, with an exception (``error``), or not by itself (``crash``)."""

    value: Any = None
    error: str | None = None
    crash: str | None = None


def in_child(job: Callable[[], Any], *, seconds: float = 60.0) -> Outcome:
    """The outcome of ``job()`` in a forked process; its value must be one that ``torch.save`` can save.

    Needs ``os.fork``, and tensors in the memory of this process: a fork has no use of a GPU that its parent has used.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none of them
        pid = os.fork()
    if pid == 0:
        _be_child(job, read, write)
    os.close(write)
    data = _all_of(read, time.monotonic() + seconds)
    if data is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if data is None:
        return Outcome(crash=f"did not end within {seconds:g} s")
    if os.WIFSIGNALED(status):
        return Outcome(crash=f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
    if os.WEXITSTATUS(status) or not data:
        return Outcome(crash=f"exit {os.WEXITSTATUS(status)}")
    return Outcome(**torch.load(io.BytesIO(data), weights_only=False))  # what our own child said


def _be_child(job: Callable[[], Any], read: int, write: int) -> None:
    try:
        os.close(read)
        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)  # what the C library says of a corrupted heap is no news here
        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        try:
            data = _packed(dict(value=job()))
        except BaseException as error:
            data = _packed(dict(error=f"{type(error).__name__}: {error}"))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(data)
        os._exit(0)
    finally:
        os._exit(1)


def _packed(found: dict[str, Any]) -> bytes:
    """As torch saves it: pickle alone does not know every float8."""
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


def _all_of(read: int, deadline: float) -> bytes | None:
    parts: list[bytes] = []
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = pipe.read(1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
