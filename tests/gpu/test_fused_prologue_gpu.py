"""The fused prologue compiled: larger problems of the interpreter's tests, and what only a GPU shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import triton

import layoutcheck.kernels.fused_prologue as fp

spec = importlib.util.spec_from_file_location(
    "fused_prologue_reference", Path(__file__).parents[1] / "kernels" / "test_fused_prologue.py"
)
ref = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = ref
spec.loader.exec_module(ref)
poisoned_results = ref.poisoned_results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not isinstance(fp.prologue_kernel, triton.JITFunction), reason="kernels are interpreted"),
]


class Problem(ref.Problem):
    """A problem whose call happens on the GPU, with the strides of its tensors kept."""

    def on_gpu(self) -> dict:
        moved = dict(self.args)
        for name, t in self.args.items():
            if isinstance(t, torch.Tensor):
                moved[name] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)
        return moved

    def call(self) -> fp.Prologue:
        moved = self.on_gpu()
        entries = dict(
            decode=fp.fused_prologue_decode, verify=fp.fused_prologue_verify, extend=fp.fused_prologue_extend
        )
        result = entries[self.mode](**moved)
        for name, t in self.args.items():
            if isinstance(t, torch.Tensor):
                t.copy_(moved[name])
        return fp.Prologue(*(None if t is None else t.cpu() for t in result))


SIZES = dict(heads=8, q_heads=32, page_size=128)
LENGTHS = {
    "decode": [1] * 4099,
    "verify": [7] * 300,
    "extend": [1, 0, 700, 3, 2, 64, 1025, 0, 17],
}


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "bf16"])
@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
def test_large(entry, mxfp8):
    tokens = sum(LENGTHS[entry])
    ref.check(Problem(entry, LENGTHS[entry], mxfp8, track=entry != "verify", pages=tokens // 128 + 3, **SIZES))


@pytest.mark.parametrize("tokens", [1, 3, 16, 128, 130, 1024, 1030])
def test_every_tile_size(tokens):
    ref.check(Problem("decode", [1] * tokens, track=True, pages=tokens // 128 + 3, **SIZES))


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
def test_other_widths(entry, width):
    lengths = {"decode": [1] * 150, "verify": [3] * 50, "extend": [5, 150, 0, 1]}[entry]
    ref.check(Problem(entry, lengths, width=width, pages=7, silu=width % 2 == 0, residual=width < 5))


@pytest.mark.parametrize("tokens", [16, 2048])
def test_dq_8192(tokens):
    ref.check(Problem("decode", [1] * tokens, pages=tokens // 128 + 3, **(SIZES | dict(q_heads=64))))


@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
def test_q_is_quantised_from_its_bf16_values(entry):
    lengths = {"decode": [1] * 300, "verify": [4] * 75, "extend": [299, 1]}[entry]
    exact = Problem(entry, lengths, mxfp8=False, pages=5, **SIZES).call()
    got = Problem(entry, lengths, pages=5, **SIZES).call()
    payload, scale = ref.quantised(exact.q)
    assert torch.equal(got.q.view(torch.uint8), payload)
    assert torch.equal(got.q_scale.view(torch.uint8).reshape(scale.shape), scale)


def test_golden_blocks(monkeypatch):
    monkeypatch.setattr(ref, "Problem", Problem)
    ref.test_golden_blocks(lambda *sizes: None)


def test_replayed_from_a_graph():
    p = Problem("decode", [1] * 16, pages=3, **SIZES)
    a = p.on_gpu()
    fp.fused_prologue_decode(**a)
    start = {n: t.clone() for n, t in a.items() if isinstance(t, torch.Tensor)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fp.fused_prologue_decode(**a)
    graph.replay()
    replayed = [t.clone() for t in got]
    for n, t in start.items():
        a[n].copy_(t)
    for x, y in zip(replayed, fp.fused_prologue_decode(**a), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_offsets_past_32_bits():
    slots = 2**31 // 1024 + 4 * 128
    p = Problem("decode", [1] * 5, pages=3, **SIZES)
    a = p.on_gpu()
    for n in ("k_cache", "v_cache"):
        a[n] = torch.zeros(slots, 8, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    for n in ("k_scale", "v_scale"):
        a[n] = torch.zeros(slots // 128, 8, 32, 4, 4, dtype=torch.uint8, device="cuda")
    a["loc"] = torch.tensor([1, slots - 1, 2, slots - 130, slots - 3], device="cuda")
    got = fp.fused_prologue_decode(**a)
    for which, result in (("k", got.k), ("v", got.v)):
        payload, scale = ref.quantised(result.cpu().reshape(5, 8, 128))
        for t in (1, 3, 4):
            slot = int(a["loc"][t])
            assert torch.equal(a[f"{which}_cache"][slot].view(torch.uint8).cpu(), payload[t])
            stored = a[f"{which}_scale"][slot // 128, :, slot % 128 % 32, slot % 128 // 32].cpu()
            assert torch.equal(stored, scale[t])
