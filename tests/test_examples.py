"""Each example runs on a CPU and says what it should. ``examples/demo.py`` is run by ``make demo``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstart", ["gathered", "bound by scale", "page_size = 128"]),
        ("guard_a_foreign_kernel", ["stored 3 rows", "Engine.store: scales does not match mxfp8.interleaved"]),
        ("latent_pool", ["page_size 8,  88 slots: relative error 0.0", "instead of one per page"]),
    ],
)
def test_example(name, says):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in says:
        assert text in done.stdout
