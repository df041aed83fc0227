"""Tests of other projects' contracts are marked ``peers`` where they need the project itself."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Kernels are interpreted or compiled as this says when they are defined: set it before any test module is imported.
os.environ["TRITON_INTERPRET"] = "1"

# Each needs a package that is no dependency of this library: `make test-peers` has them.
NEEDS = {"sglang": "sglang", "flashinfer": "flashinfer", "torchao": "torchao"}
collect_ignore_glob = [
    f"test_{name}*.py" for name, package in NEEDS.items() if importlib.util.find_spec(package) is None
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.removeprefix("test_").split("_")[0].removesuffix(".py") in NEEDS:
            item.add_marker("peers")
