"""How long ``import layoutcheck`` takes after ``import torch``: the least of several fresh processes, in milliseconds.

python tests/bench/import_time.py
"""

from __future__ import annotations

import subprocess
import sys

CODE = "import torch, time; t = time.perf_counter(); import layoutcheck; print((time.perf_counter() - t) * 1e3)"


def main() -> None:
    """Print the time."""
    times = [float(subprocess.check_output([sys.executable, "-c", CODE])) for _ in range(7)]
    print(f"import layoutcheck after import torch: {min(times):.1f} ms")


if __name__ == "__main__":
    main()
