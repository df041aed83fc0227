"""What tests/bench/kernels.py checks before it times anything, at small sizes, beside torch's own peers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench" / "kernels.py"
SIZES = {
    "store_works": [((256, "consecutive"), (256, "random"))],
    "quantize_works": [256],
    "move_works": [128],
    "unified_works": [256],
    "sparse_works": [((16, 3, 100, "fp8"), (3, 2, 40, "bf16"))],
    "paged_works": [((2, 128),)],
    "extend_works": [1, 128, 64],
    "prologue_works": [(("decode", 5, 1, 512), ("verify", 2, 3, 512), ("extend", 2, 5, 512))],
}


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_kernels", BENCH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.delenv("PEER_SGLANG", raising=False)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    # Traced as one graph, as there, and run as it is.
    monkeypatch.setattr(module, "compiled", lambda fn: torch.compile(fn, fullgraph=True, backend="eager"))
    torch.compiler.reset()
    torch.manual_seed(0)
    return module


@pytest.mark.parametrize("works", SIZES)
def test_checks(bench, works):
    made = list(getattr(bench, works)(*SIZES[works]))
    assert made
    for work in made:
        assert work.peers.keys() & {"torch.compile", "torch SDPA, contiguous bf16", "torch SDPA, bf16"}
        work.check()


@pytest.mark.parametrize(("works", "function"), [
    ("store_works", "torch_mxfp8"), ("quantize_works", "torch_mxfp8"), ("move_works", "torch_store_scales"),
    ("unified_works", "torch_store_unified"), ("sparse_works", "torch_sparse"), ("prologue_works", "torch_norm"),
])  # fmt: skip
def test_checks_see_a_peer_that_does_nothing_right(bench, works, function, monkeypatch):
    """Its results are doubled, and what it writes is not written."""

    def wrong(*arguments):
        if function.startswith("torch_store"):
            return None
        result = getattr(bench, f"right_{function}")(*arguments)
        return (result[0], result[1] + 1) if isinstance(result, tuple) else result * 2

    monkeypatch.setattr(bench, f"right_{function}", getattr(bench, function), raising=False)
    monkeypatch.setattr(bench, function, wrong)
    made = list(getattr(bench, works)(*SIZES[works]))
    with pytest.raises(AssertionError):
        [work.check() for work in made]


@pytest.mark.parametrize("works", ["paged_works", "extend_works"])
def test_checks_see_attention_that_is_wrong(bench, works, monkeypatch):
    attention = bench.paged_attention
    monkeypatch.setattr(bench, "paged_attention", lambda *given, **named: attention(*given, **named) * 1.1)
    for work in getattr(bench, works)(*SIZES[works]):
        with pytest.raises(AssertionError, match="relative error"):
            work.check()
