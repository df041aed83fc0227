"""``import layoutcheck`` stays light. What it costs in time is measured by ``tests/bench/import_time.py``."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("triton", "hypothesis", "sympy", "einops", "beartype", "jaxtyping", "pytest", "layoutcheck.kernels")


def loaded(statement: str) -> set[str]:
    code = f"import sys, torch; before = set(sys.modules); {statement}; print('\\n'.join(set(sys.modules) - before))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_library_imports_nothing_heavy():
    assert not loaded("import layoutcheck, layoutcheck.pools") & set(HEAVY)


def test_using_the_catalogue_a_pool_and_a_contract_imports_nothing_heavy():
    statement = (
        "from typing import Annotated; import layoutcheck; from layoutcheck.pools import MXFP8KVPool; "
        "x = layoutcheck.layout('mxfp8.flat')(slot=2, head=1, head_dim=32).empty(); "
        "f = layoutcheck.contract(lambda x: x); f(x); MXFP8KVPool.allocate(page=1, page_size=128, head=1, head_dim=32)"
    )
    assert not loaded(statement) & set(HEAVY)


def test_every_public_name_is_there():
    import layoutcheck

    assert sorted(layoutcheck.__all__, key=str) == sorted(set(layoutcheck.__all__), key=str)
    for name in layoutcheck.__all__:
        assert getattr(layoutcheck, name) is not None
