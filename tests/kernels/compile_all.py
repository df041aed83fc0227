"""Compiles what every kernel module lists in ``compile_cases()`` for one target, without a GPU.

    python compile_all.py cuda:90

Prints one line of JSON for each case: module, case, seconds, and the error or null. A module says in
``COMPILE_EXCEPTIONS``, by target, which cases the compiler cannot do and why: those must fail still.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import tempfile
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import layoutcheck.kernels


def target(name: str) -> GPUTarget:
    """``cuda:90`` or ``hip:gfx942``."""
    backend, arch = name.split(":")
    return GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def compile_one(kernel: Any, signature: dict[str, str], constants: dict[str, Any], to: GPUTarget) -> None:
    """Raises also where LLVM says on stderr that it cannot do a kernel's assembly, and Triton goes on."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            triton.compile(ASTSource(kernel, types, constants), target=to)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            text = said.read().decode(errors="replace")
            sys.stderr.write(text)
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    if errors:
        raise RuntimeError(errors[0])


def main(name: str) -> None:
    for found in sorted(m.name for m in pkgutil.iter_modules(layoutcheck.kernels.__path__)):
        module = importlib.import_module(f"layoutcheck.kernels.{found}")
        if found.startswith("_") or not hasattr(module, "compile_cases"):
            continue
        for case, kernel, signature, constants in module.compile_cases():
            start, error = time.perf_counter(), None
            try:
                compile_one(kernel, signature, constants, target(name))
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            reason = getattr(module, "COMPILE_EXCEPTIONS", {}).get(name, {}).get(case)
            seconds = round(time.perf_counter() - start, 1)
            line = dict(module=found, case=case, seconds=seconds, error=error, exception=reason)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
