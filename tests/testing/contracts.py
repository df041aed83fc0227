"""The contracts of the repo that the toolkit is run on: the kernels', a pool's, and those of the public bug reports.

As a script: so many valid calls and faults of each (``python tests/testing/contracts.py 2000``), and what came of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from layoutcheck.pools import MXFP8KVPool
from layoutcheck.testing import calls, faults
from layoutcheck.testing._check import for_each
from layoutcheck.testing._guard import refused

_KERNELS = ("quantize", "move", "paged", "unified_kv", "fused_prologue")
_CASES = ("contracts_cache", "contracts_rows", "contracts_scale")
# What the signature alone does not say how to make: arguments of any number or type, and values derived from lists.
_NOT_ALONE = {"prefill_run", "kv_transfer_handshake", "kv_transfer_reconnect", "register_kv_layers"}


def pool(drawn: dict[str, Any]) -> SimpleNamespace:
    """A stand-in for the pool whose method is called, with the buffers that were drawn for it."""
    return SimpleNamespace(
        dims=drawn["sizes"], layers=None, k=drawn["k_cache"], v=drawn["v_cache"],
        k_scale=drawn["k_scales"], v_scale=drawn["v_scales"],
    )  # fmt: skip


def kernels() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(name, function, bounds) of every kernel wrapper, and of the method of a pool."""
    for name in _KERNELS:
        module = import_module(f"layoutcheck.kernels.{name}")
        for attribute, value in vars(module).items():
            if hasattr(value, "contract") and value.__module__ == module.__name__ and not attribute.startswith("_"):
                yield f"kernels.{attribute}", value, {}
    yield "pools.MXFP8KVPool.store", MXFP8KVPool.store, dict(self=pool, layer=None)


def cases() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(name, function, bounds) of the contracts of the bug reports."""
    for name in _CASES:
        for attribute, value in vars(import_module(f"cases.{name}")).items():
            if hasattr(value, "contract") and attribute not in _NOT_ALONE:
                yield f"cases.{attribute}", value, {}


def count(
    fn: Callable[..., Any], bounds: dict[str, Any], examples: int
) -> tuple[Counter[str], Counter[str], list[str]]:
    """Valid calls and faults drawn, by kind; and every wrong answer of the guard, in words."""
    drawn: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong: list[str] = []

    def accept(call: Any) -> None:
        drawn["valid"] += 1
        if found := refused(fn, call.arguments):
            wrong.append(f"a valid call was rejected: {found[0]}\n{call!r}")

    def reject(fault: Any) -> None:
        drawn["faulty"] += 1
        kinds[fault.name] += 1
        if why := fault.missed():
            wrong.append(f"{why}\n{fault!r}")

    for_each(calls(fn, data=False, **bounds), accept, examples)
    for_each(faults(fn, data=False, **bounds), reject, examples)
    return drawn, kinds, wrong


if __name__ == "__main__":
    number = int(sys.argv[1])
    drawn, kinds, mistakes = Counter[str](), Counter[str](), 0
    for name, fn, bounds in (*kernels(), *cases()):
        start = time.monotonic()
        found, names, wrong = count(fn, bounds, number)
        drawn, kinds, mistakes = drawn + found, kinds + names, mistakes + len(wrong)
        print(f"{name:<42} {dict(found)} {len(wrong)} wrong {time.monotonic() - start:5.1f} s", flush=True)
        for text in wrong[:2]:
            print(text)
    print(f"{drawn['valid']} valid calls, {drawn['faulty']} faults of {len(kinds)} kinds, {mistakes} wrong answers")
    print(dict(kinds.most_common()))
