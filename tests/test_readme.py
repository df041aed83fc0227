"""The README's first example runs as it stands and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_prints_what_the_readme_says(tmp_path):
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    output = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code
    assert output
    script = tmp_path / "example.py"
    script.write_text(code[1])
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output[1]
