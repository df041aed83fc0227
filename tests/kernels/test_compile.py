"""Every kernel compiles for every target, and says what to set where it can neither be compiled nor interpreted.

Both need processes without TRITON_INTERPRET, which is read when a kernel is defined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ["cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950"]
COMPILE_ALL = Path(__file__).with_name("compile_all.py")


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in another process, where kernels are not interpreted and no GPU is seen."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    inherited = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=inherited | hidden | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target, tmp_path):
    result = child(str(COMPILE_ALL), target, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    cases = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert {"quantize", "move"} <= {case["module"] for case in cases}
    failed = [f"{c['module']} {c['case']}: {c['error']}" for c in cases if c["error"] and not c["exception"]]
    assert not failed, f"on {target}, " + "\n\n".join(failed)
    stale = [f"{c['module']} {c['case']}: {c['exception']}" for c in cases if c["exception"] and not c["error"]]
    assert not stale, f"compiles on {target} by now, remove it from COMPILE_EXCEPTIONS: " + "\n".join(stale)


SHARED_MEMORY = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from layoutcheck.kernels import paged

cases = {name: case for name, *case in paged.compile_cases()}
for room, arch in ((227 * 1024, 90), (99 * 1024, 89)):
    for dims, queries, kind in (
        ((256, 256), 512, "bf16"), ((512, 512), 512, "bf16"), ((128, 128), 512, "bf16"), ((512, 512), 1, "bf16"),
        ((192, 128), 512, "mxfp8"), ((256, 256), 1, "mxfp8"),
    ):
        kernel, signature, constants = cases[f"{'extend' if queries > 1 else 'decode'}-{kind}"]
        sizes = paged._sizes(4, *dims, queries, kind == "mxfp8", room)
        constants = constants | sizes | dict(zip(("HEAD_DIM", "V_HEAD_DIM"), dims))
        types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
        # As real pointers and strides are: without it nothing is loaded ahead, and little shared memory is needed.
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if "*" in types[n] or "stride" in n}
        source = ASTSource(kernel, types, constants, aligned)
        options = paged._schedule(sizes, kind == "mxfp8", room, False)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        print(made.metadata.shared, room, arch, dims, queries, kind)
"""


SPARSE_SHARED_MEMORY = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from layoutcheck.kernels import unified_kv

kernel = unified_kv._attend_kernel
cases = [types for _, found, types, _ in unified_kv.compile_cases() if found is kernel]
for room, arch in ((227 * 1024, 90), (99 * 1024, 89)):
    for heads, dim, fp8 in (
        (128, 512, 1), (64, 448, 1), (128, 256, 1), (40, 1024, 1), (16, 192, 1),
        (128, 512, 0), (64, 256, 0), (32, 512, 0), (16, 512, 0), (24, 576, 0), (16, 128, 0),
    ):
        sizes = dict(unified_kv._attend_blocks(heads, dim, bool(fp8), room))
        options = {n: sizes.pop(n) for n in ("num_warps", "num_stages")}
        constants = dict(HEAD=heads, DIM=dim, PAGE_SIZE=1, PAGE_STRIDE=dim // 64 * fp8, lse=None, **sizes)
        signature = next(c for c in cases if c["kv"] == ("*fp8e4nv" if fp8 else "*bf16"))
        if not fp8:
            constants["kv_scale"] = None
        types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if "*" in types[n] or "stride" in n}
        source = ASTSource(kernel, types, constants, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        print(made.metadata.shared, room, arch, heads, dim, fp8, sizes)
"""


@pytest.mark.parametrize(("script", "count"), [(SHARED_MEMORY, 12), (SPARSE_SHARED_MEMORY, 22)])
def test_attention_fits_in_shared_memory(script, count, tmp_path):
    result = child("-c", script, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert len(lines) == count
    needed = [int(line.split()[0]) for line in lines]
    assert max(needed) > 99 * 1024
    assert not [line for n, line in zip(needed, lines, strict=True) if n > int(line.split()[1])]


FEW_HEADS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from layoutcheck.kernels import unified_kv

cases = {name: case for name, *case in unified_kv.compile_cases()}
kernel, signature, constants = cases["attend few heads"]
options = {n: unified_kv.FEW_BLOCKS[n] for n in ("num_warps", "num_stages")}
types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if "*" in types[n] or "stride" in n}
for room, arch in ((227 * 1024, 90), (99 * 1024, 89)):
    source = ASTSource(kernel, types, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    count = made.asm["ptx"].count
    print(room, made.metadata.shared, count("cp.async.cg"), count("cvt.rn.f16x2.e4m3x2"), count("shfl.sync.idx"))
"""


def test_few_heads_over_fp8_are_compiled_as_meant(tmp_path):
    """Two programs fit on a multiprocessor; tiles are copied 16 bytes at a time; every code is converted once for each
    product; none is moved from lane to lane, as it is where K_WIDTH is not what this version of Triton counts.
    """
    result = child("-c", FEW_HEADS, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [[int(n) for n in line.split()] for line in result.stdout.splitlines()]
    assert len(lines) == 2
    for room, shared, copies, conversions, moves in lines:
        assert 2 * (shared + 1024) <= room
        assert copies == 3 * 8  # of the first two tiles, and in the loop
        assert conversions == 128
        assert moves <= 4  # scalars


WITHOUT_A_GPU = """
import torch
from layoutcheck.kernels import load_scales, move_slots, store_rows, store_scales
from layoutcheck.kernels import quantize_mxfp8, quantize_store_kv_mxfp8

k, loc = torch.zeros(1, 2, 64), torch.tensor([1])
cache, scale = torch.zeros(32, 2, 64).to(torch.float8_e4m3fn), torch.zeros(1, 2, 32, 1, 2, dtype=torch.uint8)
rows = torch.zeros(1, 2, 2, dtype=torch.uint8)
for call in (
    lambda: quantize_mxfp8(k),
    lambda: quantize_store_kv_mxfp8(k, k, loc, cache, cache.clone(), scale, scale.clone(), page_size=32),
    lambda: store_scales(rows, loc, scale, page_size=32),
    lambda: load_scales(scale, loc, page_size=32),
    lambda: store_rows(cache[:1], loc, cache.clone()),
    lambda: move_slots(loc, loc, cache, cache.clone()),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
    else:
        print("ran")
"""


def test_without_gpu_or_interpreter():
    result = child("-c", WITHOUT_A_GPU)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert line.endswith(
            "_kernel got tensors on cpu: a compiled Triton kernel needs a GPU. To run it on a CPU, set "
            "TRITON_INTERPRET=1 in the environment before layoutcheck.kernels is imported"
        )
