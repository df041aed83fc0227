"""Hypothesis profiles: ``ci`` always runs the same examples; ``dev`` draws new ones and prints the seed to repeat them.

``HYPOTHESIS_PROFILE`` chooses; without it ``ci`` is taken where the environment has ``CI``, ``dev`` elsewhere.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import core, settings

settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None, max_examples=100)
settings.register_profile("dev", print_blob=True, deadline=None, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    if not settings.default.derandomize and core.global_force_seed is None:
        core.global_force_seed = random.SystemRandom().getrandbits(32)


def pytest_report_header() -> str:
    if settings.default.derandomize:
        return "hypothesis: the same examples in every run"
    return f"hypothesis: repeat these examples with --hypothesis-seed={core.global_force_seed}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/gpu compiles the kernels that tests/kernels interprets: it is run by itself, ``pytest tests/gpu``."""
    if collection_path == Path(__file__).parent / "gpu" and not any("gpu" in Path(a).parts for a in config.args):
        return True
    return None
