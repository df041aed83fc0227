"""Every kernel checked against its reference and then timed beside its peer, on the same inputs, in one run.

    python tests/bench/kernels.py                                  # torch's own peers only: SDPA and torch.compile
    PEER_SGLANG=FOLDER python tests/bench/kernels.py [NAME ...]    # sglang 0.5.23's kernels as well

FOLDER holds the files of the ``sglang`` package named in ``SGLANG_FILES`` below, at these paths; they are read, never
kept here. NAME selects works by a part of their name. A time counts only where the check in the same run has passed.

Inputs are fresh random numbers; everything that must not be read holds NaN, outputs are poisoned by the caching
allocator's leftovers. Times are medians: of ``triton.testing.do_bench``, and of graph replays where a work is so small
that launching it would be what is measured (``graph``); its time when it is launched stands beside it (``eager``).
Shares are of the copy bandwidth (bytes read and written) or the bf16 matrix rate that this run measured first.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import triton
import triton.testing
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from layoutcheck import layout, mode
from layoutcheck.kernels import (
    fused_prologue_decode,
    fused_prologue_extend,
    fused_prologue_verify,
    load_scales,
    move_slots,
    paged_attention,
    quantize_mxfp8,
    quantize_store_kv_mxfp8,
    quantize_store_unified_kv,
    sparse_attention_unified_kv,
    store_rows,
    store_scales,
)
from layoutcheck.pools import MXFP8KVPool

SGLANG_FILES = dict(
    store="kvcache/mxfp8_quant_store_kv.py",
    quantize="quantization/mxfp8_quant.py",
    sparse="attention/dsv4/unified_kv_kernels/paged_decode.py",
    paged="attention/decode_attention.py",
)
DEVICE = "cuda"
COPY = 4.3e12
MATMUL = 790e12


@dataclass
class Work:
    """One line of the table: what is run, what it must move or compute, and what it is compared with."""

    name: str
    run: Callable[[], Any]
    check: Callable[[], None]
    bytes: float = 0.0
    flops: float = 0.0
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    graph: bool = False


def median(call: Callable[[], Any], graph: bool) -> float:
    """Milliseconds."""
    if graph:
        with torch.cuda.stream(torch.cuda.Stream()):
            return float(triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median"))
    return float(triton.testing.do_bench(call, warmup=25, rep=150, return_mode="median"))


def timed(call: Callable[[], Any], graph: bool) -> tuple[float, str]:
    """Seconds, and the words for them: microseconds, those of launching it beside those in a graph."""
    time = median(call, graph) * 1e-3
    eager = f" (eager {median(call, False) * 1e3:.1f})" if graph else ""
    return time, f"{time * 1e6:.1f}{eager}"


def close(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    """Relative error in the Frobenius norm; NaN never passes."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= limit, f"{what}: relative error {error:.2e} is above {limit:.0e}"


# --- peers ------------------------------------------------------------------------------------------------------------


def sglang(name: str) -> Any | None:
    """A module of sglang's kernels, loaded by its path with stand-ins for what it imports; None without the folder."""
    folder = os.environ.get("PEER_SGLANG")
    if folder is None:
        return None
    for module in (
        "sglang", "sglang.srt", "sglang.srt.environ", "sglang.srt.utils", "sglang.srt.utils.common", "sglang.kernels",
        "sglang.kernels.ops", "sglang.kernels.ops.quantization", "sglang.kernels.ops.quantization.fp8_kernel",
        "sglang.kernels.ops.attention", "sglang.kernels.ops.attention.score_mod",
        "aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils", "aiter.ops.triton.utils.device_info",
    ):  # fmt: skip
        sys.modules.setdefault(module, MagicMock(name=module))
    sys.modules["sglang.kernels.ops.quantization.fp8_kernel"].is_fp8_fnuz = lambda: False
    sys.modules["sglang.kernels.ops.attention.score_mod"].unpack_aux_tensors = lambda *_: (None, 0, 0, 0)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    sys.modules["aiter.ops.triton.utils.device_info"].get_num_sms = lambda: count
    for module in ("sglang.srt.utils", "sglang.srt.utils.common"):
        for test in ("is_hip", "is_gfx1250_supported", "is_cuda", "is_npu", "is_xpu"):
            setattr(sys.modules[module], test, lambda: False)
    spec = importlib.util.spec_from_file_location(f"peer_{name}", Path(folder) / SGLANG_FILES[name])
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# What torch.compile makes of the same work: functions of plain torch, all of which trace as one graph. Ours are checked
# against them too, beside their float64 references.


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, dynamic=False)


def torch_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload, and scale bytes (..., group): the smallest power of two with amax <= 448 * 2^e, by the bits of amax."""
    blocks = x.float().unflatten(-1, (-1, 32))
    bits = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    byte = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(0, 253)  # 448 = 1.75 * 2^8
    payload = (blocks * ((254 - byte) << 23).view(torch.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return payload.flatten(-2), byte.squeeze(-1).to(torch.uint8)


def torch_quantize(x: Tensor, scale_layout: str) -> tuple[Tensor, Tensor]:
    """Rows (token, head, dim) with their scales, as bytes, in a layout without padding."""
    payload, byte = torch_mxfp8(x)
    heads, groups = byte.shape[1:]
    if scale_layout == "interleaved":  # page size 128
        byte = byte.reshape(-1, 4, 32, heads, groups).permute(0, 3, 2, 1, 4).contiguous()
    elif scale_layout == "128x4":
        byte = byte.reshape(-1, 4, 32, groups // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
    return payload, byte


def torch_store_scales(rows: Tensor, loc: Tensor, scale: Tensor) -> None:
    """Interleaved scales, page size 128."""
    scale[loc // 128, :, loc % 32, loc % 128 // 32] = rows


def torch_load_scales(loc: Tensor, scale: Tensor) -> Tensor:
    return scale[loc // 128, :, loc % 32, loc % 128 // 32]


def torch_store(k: Tensor, v: Tensor, loc: Tensor, *buffers: Tensor) -> None:
    """MXFP8 rows and interleaved scales at slots ``loc``, none of them 0. Buffers are bytes."""
    for x, cache, scale in zip((k, v), buffers[:2], buffers[2:], strict=True):
        payload, byte = torch_mxfp8(x)
        cache[loc] = payload.view(torch.uint8)
        torch_store_scales(byte, loc, scale)


def torch_store_rows(rows: Tensor, loc: Tensor, cache: Tensor) -> None:
    cache[loc] = rows


def torch_move_slots(src: Tensor, dst: Tensor, *buffers: Tensor) -> None:
    for cache in buffers[:2]:
        cache[dst] = cache[src]
    for scale in buffers[2:]:
        torch_store_scales(torch_load_scales(src, scale), dst, scale)


def torch_store_unified(x: Tensor, loc: Tensor, kv: Tensor, kv_scale: Tensor) -> None:
    """e4m3 rows with one fp32 scale for each 64 elements at slots ``loc``. ``kv`` is bytes."""
    blocks = x.float().unflatten(-1, (-1, 64))
    scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    payload = (blocks * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    kv[loc] = payload.flatten(-2).view(torch.uint8)
    kv_scale[loc] = scale.squeeze(-1)


def torch_sparse(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor, kv_scale: Tensor | None) -> Tensor:
    """Attention over lists of slots, here all of one length: (token, entry)."""
    rows = kv[indices]
    if kv_scale is not None:
        rows = (rows.float().unflatten(-1, (-1, 64)) * kv_scale[indices][..., None]).flatten(-2).to(q.dtype)
    logits = (q @ rows.mT).float() * q.shape[-1] ** -0.5
    most = torch.maximum(logits.amax(-1), sink)[..., None]
    p = torch.exp(logits - most)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - most)
    return (p / total).to(q.dtype) @ rows


def torch_norm(x: Tensor, gamma: Tensor) -> Tensor:
    """RMSNorm of heads (token, head, 128), rounded once."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma.float()).bfloat16()


def windows_of(x: Tensor, history: Tensor) -> Tensor:
    """The rows before each row and the row itself, (seq, token, width - 1 + 1, dkv), of sequences of one length."""
    rows = torch.cat([history, x.unflatten(0, (len(history), -1))], dim=1)
    return rows.unfold(1, history.shape[1] + 1, 1).mT


def torch_prologue(
    qkvr: Tensor, weights: Any, gammas: Any, conv: Any, loc: Tensor, buffers: Any, dq: int, saved: Any
) -> tuple[Tensor, ...]:
    """Sequences of one length, as many as conv caches but one: q, k, v, and the scales of q. SiLU, residual.

    k and v are stored; the conv caches are updated, or the windows after each token saved.
    """
    payload, byte = torch_mxfp8(torch_norm(qkvr[:, :dq].unflatten(-1, (-1, 128)), gammas[0]))
    made = []
    for i, new in enumerate(qkvr[:, dq:].chunk(2, dim=1)):
        windows = windows_of(new, conv[i][:-1])
        y = (windows.float() * weights[i].float().mT).sum(2).flatten(0, 1)
        made.append((torch.nn.functional.silu(y) + new.float()).bfloat16().unflatten(-1, (-1, 128)))
        if saved is None:
            conv[i][:-1] = windows[:, -1, 1:]
        else:
            saved[i][:-1] = windows[:, :, 1:]
    k, v = torch_norm(made[0], gammas[1]), made[1]
    torch_store(k, v, loc, *buffers)
    return payload, k, v, byte


# --- quantising -------------------------------------------------------------------------------------------------------


def mxfp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload and scale bytes of bf16 rows, in float64: the smallest power of two with amax <= 448 * 2^e."""
    blocks = x.double().reshape(*x.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    exponent += (448 * torch.exp2(exponent) < amax).double() - (448 * torch.exp2(exponent - 1) >= amax).double()
    payload = (blocks / torch.exp2(exponent)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return payload.reshape(x.shape), (exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantised(payload: Tensor, byte: Tensor, shape: Any) -> Tensor:
    """The numbers of MXFP8 rows, in float64."""
    codes = payload.view(torch.float8_e4m3fn).double().view(-1, 32)
    return torch.ldexp(codes, byte.view(torch.uint8).view(-1, 1).int() - 127).view(shape)


def rows(*shape: int) -> Tensor:
    """Random rows whose blocks differ widely in size."""
    x = torch.randn(*shape, device=DEVICE)
    return (x * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), device=DEVICE))).bfloat16()


STORED = ("k", "v", "k_scale", "v_scale")


def stored(pool: MXFP8KVPool, loc: Tensor, part: str) -> Tensor:
    """The bytes of K or V, or of their scales, at slots of a pool with page size 128."""
    buffer = getattr(pool, part).view(torch.uint8)
    return torch_load_scales(loc, buffer) if "scale" in part else buffer[loc]


def poison(pool: MXFP8KVPool, pages: slice = slice(None)) -> None:
    """NaN in pages of 128 slots that must be written anew, or not be read."""
    for part in STORED:
        buffer = getattr(pool, part).view(torch.uint8)
        (buffer if "scale" in part else buffer.unflatten(0, (-1, 128)))[pages] = 0xFF


STORES = ((65_536, "consecutive"), (262_144, "consecutive"), (262_144, "random"), (16, "consecutive"))


def store_works(sizes: Any = STORES) -> Iterator[Work]:
    """New K and V rows into a paged MXFP8 cache: 8 heads x 128, page size 128."""
    peer = sglang("store")
    for tokens, order in sizes:
        pool = MXFP8KVPool.allocate(device=DEVICE, page=tokens // 128 + 2, page_size=128, head=8, head_dim=128)
        k, v = rows(tokens, 8, 128), rows(tokens, 8, 128)
        slots = torch.arange(1, 1 + tokens, device=DEVICE)
        loc = slots if order == "consecutive" else slots[torch.randperm(tokens, device=DEVICE)]
        buffers = (pool.k, pool.v, pool.k_scale, pool.v_scale)

        def run(k: Tensor = k, v: Tensor = v, loc: Tensor = loc, buffers: Any = buffers) -> None:
            quantize_store_kv_mxfp8(k, v, loc, *buffers, page_size=128)

        def theirs(k: Tensor = k, v: Tensor = v, loc: Tensor = loc, buffers: Any = buffers) -> None:
            peer.quant_store_kv_mxfp8(
                k, v, loc, *buffers[:2], *(s.view(torch.uint8) for s in buffers[2:]), page_size=128
            )

        peers = {"sglang": theirs} if peer is not None else {}
        peers["torch.compile"] = partial(compiled(torch_store), k, v, loc, *(b.view(torch.uint8) for b in buffers))

        def check(
            k: Tensor = k, v: Tensor = v, loc: Tensor = loc, pool: MXFP8KVPool = pool,
            run: Callable[[], None] = run, peers: dict[str, Callable[[], None]] = peers,
        ) -> None:  # fmt: skip
            run()
            scale_layout = layout("mxfp8.interleaved")(slot=len(pool.k), head=8, head_dim=128, page_size=128)
            some = torch.randperm(len(loc), device=DEVICE)[:8192]
            for x, cache, scale in ((k, pool.k, pool.k_scale), (v, pool.v, pool.v_scale)):
                payload, byte = mxfp8_reference(x[some])
                assert torch.equal(cache[loc[some]].view(torch.uint8), payload.view(torch.uint8)), "payload"
                found = scale_layout.unpack(scale).view(torch.uint8)[loc[some]]
                assert torch.equal(found, byte), "scales"
            mine = [stored(pool, loc, n).clone() for n in STORED]
            for name, call in peers.items():
                poison(pool)
                call()
                for part, want in zip(STORED, mine, strict=True):
                    if name == "sglang" and "scale" not in part:
                        continue  # its scale bytes are what has to be equal
                    assert torch.equal(stored(pool, loc, part), want), f"{part} differs from {name}'s"

        moved = 2 * tokens * 8 * (128 * 3 + 4) + 8 * tokens
        name = f"quantize + store K/V, T {tokens:,}, {order}"
        yield Work(name, run, check, bytes=moved, peers=peers, graph=tokens <= 128)


def quantize_works(tokens: int = 262_144) -> Iterator[Work]:
    """Rows to payload and scales: 8 heads x 128."""
    peer = sglang("quantize")
    x = rows(tokens, 8, 128)
    for scale_layout in ("linear", "interleaved", "128x4"):

        def run(scale_layout: str = scale_layout) -> tuple[Tensor, Tensor]:
            return quantize_mxfp8(x, scale_layout=scale_layout)

        theirs = partial(compiled(torch_quantize), x, scale_layout)

        def check(
            scale_layout: str = scale_layout, run: Callable[[], Any] = run, theirs: Callable[[], Any] = theirs
        ) -> None:
            values, scale = run()
            n = 8192
            payload, byte = mxfp8_reference(x[:n])
            assert torch.equal(values[:n].view(torch.uint8), payload.view(torch.uint8)), "payload"
            for mine, other in zip((values, scale), theirs(), strict=True):
                assert torch.equal(mine.view(torch.uint8).flatten(), other.view(torch.uint8).flatten()), "torch.compile"
            if scale_layout == "interleaved":
                scale = layout("mxfp8.interleaved")(slot=tokens, head=8, head_dim=128, page_size=128).unpack(scale)
            elif scale_layout == "128x4":
                scale = layout("scale.128x4")(row=tokens * 8, col=4).unpack(scale).reshape(tokens, 8, 4)
            assert torch.equal(scale[:n].view(torch.uint8), byte), "scales"

        peers = {"sglang": lambda: peer.to_mxfp8(x)} if peer is not None and scale_layout == "linear" else {}
        peers["torch.compile"] = theirs
        moved = tokens * 8 * (128 * 3 + 4)
        yield Work(f"quantize_mxfp8, T {tokens:,}, {scale_layout}", run, check, bytes=moved, peers=peers)


def move_works(tokens: int = 65_536) -> Iterator[Work]:
    """Rows and scales of an MXFP8 cache at random slots: 8 heads x 128, page size 128."""
    pool = MXFP8KVPool.allocate(device=DEVICE, page=2 * tokens // 128 + 1, page_size=128, head=8, head_dim=128)
    buffers = [getattr(pool, part) for part in STORED]
    data = [b.view(torch.uint8) for b in buffers]
    for x in data:
        x.random_(0, 0x7F)
    src, dst = (1 + torch.randperm(2 * tokens, device=DEVICE)).chunk(2)
    here = layout("mxfp8.interleaved")(slot=len(pool.k), head=8, head_dim=128, page_size=128)
    head, group = torch.arange(8, device=DEVICE)[:, None], torch.arange(4, device=DEVICE)
    scale_at = here.offset(slot=dst[:, None, None], head=head, group=group)
    scales = torch.randint(0x7F, (tokens, 8, 4), device=DEVICE, dtype=torch.uint8)
    rows = torch.randint(0x7F, (tokens, 8, 128), device=DEVICE, dtype=torch.uint8)
    row, scale_row, entry = 8 * 128, 8 * 4, 8
    moves = {
        "store_scales": (
            partial(store_scales, scales, dst, buffers[2]),
            torch_store_scales,
            (scales, dst, data[2]),
        ),
        "load_scales": (partial(load_scales, buffers[2], src), torch_load_scales, (src, data[2])),
        "store_rows": (partial(store_rows, rows, dst, data[0]), torch_store_rows, (rows, dst, data[0])),
        "move_slots": (partial(move_slots, src, dst, *buffers), torch_move_slots, (src, dst, *data)),
    }
    bytes_ = dict(store_scales=scale_row, load_scales=scale_row, store_rows=row, move_slots=2 * (row + scale_row))
    for name, (run, peer, arguments) in moves.items():
        theirs = partial(compiled(peer), *arguments)

        def check(name: str = name, run: Callable[[], Any] = run, theirs: Callable[[], Any] = theirs) -> None:
            before = [stored(pool, src, part) for part in STORED]
            wanted = dict(
                store_scales={"k_scale": scales}, store_rows={"k": rows}, load_scales={},
                move_slots=dict(zip(STORED, before, strict=True)),
            )[name]  # fmt: skip
            for who, call in (("ours", run), ("torch.compile's", theirs)):
                for part in wanted:
                    x = getattr(pool, part).view(torch.uint8)
                    if "scale" in part:
                        x.view(-1)[scale_at] = 0xFF
                    else:
                        x[dst] = 0xFF
                result = call()
                for part, want in wanted.items():
                    assert torch.equal(stored(pool, dst, part), want), f"{who} {name} {part}"
                if name == "load_scales":
                    assert torch.equal(result.view(torch.uint8), before[2]), f"{who} {name}"
            after = [stored(pool, src, part) for part in STORED]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), f"{name} changes other slots"

        entries = tokens * entry * (2 if name == "move_slots" else 1)
        moved = 2 * tokens * bytes_[name] + entries
        label, peers = f"{name}, T {tokens:,}, random", {"torch.compile": theirs}
        yield Work(label, run, check, bytes=moved, peers=peers, graph=True)


def unified_works(tokens: int = 262_144) -> Iterator[Work]:
    """New rows into a unified pool, page size 1, random slots: D 512."""
    x = rows(tokens, 512)
    loc = 1 + torch.randperm(tokens, device=DEVICE)
    kv = torch.empty(tokens + 1, 512, device=DEVICE, dtype=torch.uint8)
    scale = torch.empty(tokens + 1, 8, device=DEVICE)
    run = partial(quantize_store_unified_kv, x, loc, kv.view(torch.float8_e4m3fn), scale)
    theirs = partial(compiled(torch_store_unified), x, loc, kv, scale)

    def check() -> None:
        some = torch.randperm(tokens, device=DEVICE)[:8192]
        blocks = x[some].double().unflatten(-1, (-1, 64))
        want = (blocks.abs().amax(-1) / 448).float()
        for who, call in (("ours", run), ("torch.compile's", theirs)):
            kv.fill_(0xFF)
            scale.fill_(float("nan"))
            call()
            found = scale[loc[some]]
            assert who != "ours" or torch.equal(found, want), "scales"
            close(found, want, 1e-6, f"{who} scales")  # inductor's division is not correctly rounded
            codes = kv[loc[some]].view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 64))
            close(codes * found.double()[..., None], blocks, 4e-2, f"{who} rows")  # e4m3 has three bits of mantissa

    moved = tokens * (512 * 3 + 32 + 8)
    name = f"quantize + store unified KV, T {tokens:,}, random"
    yield Work(name, run, check, bytes=moved, peers={"torch.compile": theirs})


# --- attention --------------------------------------------------------------------------------------------------------


SPARSE = (
    (16, 128, 4096, "fp8"), (16, 128, 4096, "bf16"), (128, 128, 1152, "fp8"), (128, 128, 1152, "bf16")
)  # fmt: skip


def sparse_works(sizes: Any = SPARSE) -> Iterator[Work]:
    """Sparse decode over a unified pool: D 512, per-token slot lists."""
    peer = sglang("sparse")
    for heads, tokens, length, kind in sizes:
        slots = tokens * length * 5 // 4
        bf16 = torch.randn(slots, 512, device=DEVICE).bfloat16()
        indices = (torch.randperm(slots - 1, device=DEVICE)[: tokens * length] + 1).int()
        indptr = (torch.arange(tokens + 1, device=DEVICE) * length).int()
        unread = torch.ones(slots, dtype=torch.bool, device=DEVICE)
        unread[indices.long()] = False
        scale = None
        if kind == "fp8":
            kv = torch.full((slots, 512), float("nan"), device=DEVICE).to(torch.float8_e4m3fn)
            scale = torch.full((slots, 8), float("nan"), device=DEVICE)
            quantize_store_unified_kv(bf16, torch.arange(slots, device=DEVICE), kv, scale)
            kv.view(torch.uint8)[unread] = 0x7F
            scale[unread] = float("nan")
        else:
            kv = bf16
            kv[unread] = float("nan")
        q = torch.randn(tokens, heads, 512, device=DEVICE).bfloat16()
        sink = torch.randn(heads, device=DEVICE)

        def run(
            q: Tensor = q, kv: Tensor = kv, i: Tensor = indices, p: Tensor = indptr, s: Any = sink, z: Any = scale
        ) -> Tensor:
            return sparse_attention_unified_kv(q, kv, i, p, s, kv_scale=z, softmax_scale=512**-0.5)

        def theirs(
            q: Tensor = q, kv: Tensor = kv, i: Tensor = indices, p: Tensor = indptr, s: Any = sink, z: Any = scale
        ) -> Tensor:
            return peer._sparse_attn_v4_paged_decode_triton(q, kv, i, p, s, 512**-0.5, kv_scales=z)

        compiles = partial(compiled(torch_sparse), q, kv, indices.view(tokens, length), sink, scale)

        def check(
            q: Tensor = q, kv: Tensor = kv, i: Tensor = indices, p: Tensor = indptr, s: Tensor = sink, z: Any = scale,
            run: Callable[[], Tensor] = run, compiles: Callable[[], Tensor] = compiles,
        ) -> None:  # fmt: skip
            out = run()
            close(compiles(), out, 1e-2, "sparse attention of torch.compile")
            for t in (0, 1, len(q) - 1):
                listed = i[p[t] : p[t + 1]].long()
                x = kv[listed].double()
                if z is not None:
                    x *= z[listed].double().repeat_interleave(64, dim=1)
                scores = torch.cat([q[t].double() @ x.T * 512**-0.5, s.double()[:, None]], dim=1)
                close(out[t], torch.softmax(scores, dim=1)[:, :-1] @ x, 1e-2, "sparse attention")

        read = tokens * length * (512 + 32 if kind == "fp8" else 1024)
        flops = 4.0 * tokens * length * heads * 512
        name = f"sparse decode, {kind}, {heads} heads, T {tokens} x {length:,}"
        peers = {"sglang": theirs} if peer is not None else {}
        peers["torch.compile"] = compiles
        yield Work(name, run, check, bytes=read, flops=flops if heads >= 64 else 0, peers=peers)


PAGED = ((32, 8192), (128, 4096), (64, 32_768), (1, 8192))


def paged_works(sizes: Any = PAGED) -> Iterator[Work]:
    """Dense paged decode: 32 query heads, 8 KV heads x 128, page size 128."""
    peer = sglang("paged")
    for batch, length in sizes:
        pages = batch * length // 128
        bf16 = [torch.randn(pages + 1, 128, 8, 128, device=DEVICE).bfloat16().view(-1, 8, 128) for _ in "kv"]
        table = (torch.randperm(pages, device=DEVICE) + 1).int().view(batch, -1)
        lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        for cache in bf16:
            cache[:128] = float("nan")
        q = torch.randn(batch, 32, 128, device=DEVICE).bfloat16()
        pool = MXFP8KVPool.allocate(device=DEVICE, page=pages + 1, page_size=128, head=8, head_dim=128)
        pool.store(*(c.nan_to_num() for c in bf16), torch.arange(len(bf16[0]), device=DEVICE))
        poison(pool, slice(1))
        q8, q_scale = quantize_mxfp8(q)
        slots = (table[:, :, None] * 128 + torch.arange(128, device=DEVICE)).view(batch, -1).int()

        def run_mxfp8(
            q8: Tensor = q8, pool: Any = pool, t: Tensor = table, n: Tensor = lens, s: Tensor = q_scale
        ) -> Tensor:
            return paged_attention(q8, pool.k, pool.v, t, n, q_scale=s, k_scale=pool.k_scale, v_scale=pool.v_scale)

        def run_bf16(q: Tensor = q, kv: Any = bf16, t: Tensor = table, n: Tensor = lens) -> Tensor:
            return paged_attention(q, *kv, t, n)

        def check_mxfp8(
            run: Callable[[], Tensor] = run_mxfp8,
            q8: Tensor = q8,
            s: Tensor = q_scale,
            pool: Any = pool,
            slots: Tensor = slots,
        ) -> None:
            out = run()
            scales = layout("mxfp8.interleaved")(slot=len(pool.k), head=8, head_dim=128, page_size=128)
            powers = [
                torch.exp2(scales.unpack(x).view(torch.uint8).double() - 127) for x in (pool.k_scale, pool.v_scale)
            ]
            for b in {0, len(q8) - 1}:
                at = slots[b].long()
                query = q8[b].double() * torch.exp2(s[b].view(torch.uint8).double() - 127).repeat_interleave(32, -1)
                k, v = (
                    c[at].double() * p[at].repeat_interleave(32, -1)
                    for c, p in zip((pool.k, pool.v), powers, strict=True)
                )
                close(out[b], _attention(query, k, v), 1e-2, "paged attention, MXFP8")

        def check_bf16(
            run: Callable[[], Tensor] = run_bf16, q: Tensor = q, kv: Any = bf16, slots: Tensor = slots
        ) -> None:
            out = run()
            for b in {0, len(q) - 1}:
                at = slots[b].long()
                close(out[b], _attention(q[b].double(), *(c[at].double() for c in kv)), 1e-2, "paged attention, bf16")

        peers: dict[str, Callable[[], Any]] = {}
        if peer is not None:
            peers["sglang bf16"] = _sglang_paged(peer, q, bf16, slots, batch, length)
        if batch * length <= 32 * 8192:
            contiguous = [c[slots.long()].transpose(1, 2).contiguous() for c in bf16]

            def sdpa(q: Tensor = q, kv: Any = contiguous) -> Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], *kv, enable_gqa=True)

            peers["torch SDPA, contiguous bf16"] = sdpa
        for kind, run, check, size in (("mxfp8", run_mxfp8, check_mxfp8, 264), ("bf16", run_bf16, check_bf16, 512)):
            name = f"paged decode, {kind}, B {batch} x {length:,}"
            yield Work(name, run, check, bytes=batch * length * 8 * size, peers=peers, graph=batch == 1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token's attention, grouped heads, in float64."""
    k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
    p = torch.softmax(torch.einsum("hd,nhd->hn", q, k) * q.shape[-1] ** -0.5, dim=1)
    return torch.einsum("hn,nhd->hd", p, v)


def _sglang_paged(peer: Any, q: Tensor, kv: list[Tensor], slots: Tensor, batch: int, length: int) -> Callable[[], Any]:
    """sglang's grouped decode kernel with the number of splits that its backend would take at most."""
    splits = 8
    out = torch.empty_like(q)
    logits = torch.empty(batch, 32, splits, 128, dtype=torch.float32, device=DEVICE)
    lse = torch.empty(batch, 32, splits, dtype=torch.float32, device=DEVICE)
    indptr = (torch.arange(batch + 1, device=DEVICE) * length).int()
    count = torch.full((batch,), splits, dtype=torch.int32, device=DEVICE)
    flat = slots.reshape(-1)

    def call() -> None:
        peer.decode_attention_fwd_grouped(
            q, *kv, out, indptr, flat, logits, lse, count, splits, q.shape[-1] ** -0.5, 1.0, 1.0
        )

    return call


def extend_works(batch: int = 8, length: int = 4096, last: int = 512) -> Iterator[Work]:
    """Prefill of all tokens, and of the last of each sequence; 32 query heads, 8 KV heads x 128, causal."""
    keys = batch * length
    pool = MXFP8KVPool.allocate(device=DEVICE, page=keys // 128 + 1, page_size=128, head=8, head_dim=128)
    table = (torch.arange(keys // 128, device=DEVICE) + 1).int().view(batch, -1)
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    loc = torch.arange(128, 128 + keys, device=DEVICE)
    k, v = rows_like(keys + 128, 8), rows_like(keys + 128, 8)
    pool.store(k, v, torch.arange(len(k), device=DEVICE))
    poison(pool, slice(1))
    k[:128] = v[:128] = float("nan")
    scales = layout("mxfp8.interleaved")(slot=len(pool.k), head=8, head_dim=128, page_size=128)
    powers = [torch.exp2(scales.unpack(x).view(torch.uint8).double() - 127) for x in (pool.k_scale, pool.v_scale)]
    for kind, new in (("mxfp8", length), ("mxfp8", last), ("bf16", length)):
        q = rows_like(batch * new, 32)
        start = (torch.arange(batch + 1, device=DEVICE) * new).int()
        q8, q_scale = quantize_mxfp8(q)

        def run(kind: str = kind, q: Tensor = q, q8: Tensor = q8, s: Tensor = q_scale, start: Tensor = start) -> Tensor:
            if kind == "bf16":
                return paged_attention(q, k, v, table, lens, query_start=start)
            return paged_attention(
                q8, pool.k, pool.v, table, lens,
                q_scale=s, k_scale=pool.k_scale, v_scale=pool.v_scale, query_start=start,
            )  # fmt: skip

        def check(
            run: Callable[[], Tensor] = run, kind: str = kind, new: int = new, q: Tensor = q, q8: Tensor = q8,
            s: Tensor = q_scale,
        ) -> None:  # fmt: skip
            out = run()
            for t in {0, 100 % (batch * new), new - 1, batch * new - 1}:
                key = t // new * length + length - new + t % new
                at = loc[key - key % length : key + 1]
                if kind == "bf16":
                    query, kv = q[t].double(), [x[at].double() for x in (k, v)]
                else:
                    query = q8[t].double() * torch.exp2(s[t].view(torch.uint8).double() - 127).repeat_interleave(32, -1)
                    caches = zip((pool.k, pool.v), powers, strict=True)
                    kv = [c[at].double() * p[at].repeat_interleave(32, -1) for c, p in caches]
                close(out[t], _attention(query, *kv), 2e-2, f"extend, {kind}")

        heads_first = [
            x.view(batch, -1, x.shape[1], 128).transpose(1, 2).contiguous() for x in (q, k[loc], v[loc])
        ]  # fmt: skip
        if new < length:  # the bias does not know grouped heads
            heads_first[1:] = [x.repeat_interleave(4, dim=1) for x in heads_first[1:]]

        def sdpa(heads_first: Any = heads_first, new: int = new) -> Tensor:
            if new == length:
                causal: dict[str, Any] = dict(is_causal=True, enable_gqa=True)
            else:
                causal = dict(attn_mask=causal_lower_right(new, length))
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, **causal)

        flops = 4.0 * batch * 32 * 128 * new * (length - new / 2)
        name = f"extend, {kind}, {batch} x {length:,}" + (f", last {new}" if new < length else "")
        yield Work(name, run, check, flops=flops, peers={"torch SDPA, bf16": sdpa})


def rows_like(tokens: int, heads: int) -> Tensor:
    """Rows as attention sees them."""
    return torch.randn(tokens, heads, 128, device=DEVICE).bfloat16()


# --- the fused prologue -----------------------------------------------------------------------------------------------


DECODES = ((1, 4096), (16, 4096), (128, 4096), (1024, 4096), (4096, 4096), (16_384, 4096), (4096, 8192))
PROLOGUES = (
    *(("decode", tokens, 1, dq) for tokens, dq in DECODES), ("verify", 1024, 4, 4096), ("extend", 8, 2048, 4096)
)  # fmt: skip


def prologue_works(sizes: Any = PROLOGUES) -> Iterator[Work]:
    """MXFP8: width 4, SiLU, residual, dkv 1,024. Decode has one token a sequence."""
    for mode_, seqs, length, dq in sizes:
        tokens, dkv, width = seqs * length, 1024, 4
        pages = tokens // 128 + 2
        pool = MXFP8KVPool.allocate(device=DEVICE, page=pages, page_size=128, head=dkv // 128, head_dim=128)
        qkvr = torch.randn(tokens, dq + 2 * dkv, device=DEVICE).bfloat16()
        weights = [torch.randn(dkv, width, device=DEVICE).bfloat16() for _ in "kv"]
        gammas = [torch.randn(128, device=DEVICE).bfloat16() for _ in "qk"]
        conv = [torch.randn(seqs + 1, width - 1, dkv, device=DEVICE).bfloat16() for _ in "kv"]
        for cache in conv:
            cache[-1] = float("nan")  # nobody's
        loc = torch.arange(1, tokens + 1, device=DEVICE)
        buffers = (pool.k, pool.v, pool.k_scale, pool.v_scale)
        saved = None
        index = dict(
            cache_indices=torch.arange(seqs, device=DEVICE, dtype=torch.int32),
            cache_mask=torch.ones(seqs, dtype=torch.bool, device=DEVICE),
        )
        if mode_ == "verify":
            saved = [torch.empty(seqs + 1, length, width - 1, dkv, device=DEVICE).bfloat16() for _ in "kv"]
            index |= dict(zip(("k_window", "v_window"), saved, strict=True))
        elif mode_ == "extend":
            seq = torch.arange(tokens, device=DEVICE, dtype=torch.int32) // length
            index |= dict(cu_seqlens=torch.arange(seqs + 1, device=DEVICE) * length, seq_index=seq)
        options = dict(dq=dq, q_offset=0, k_offset=dq, v_offset=dq + dkv, page_size=128, silu=True, residual=True)
        if mode_ == "verify":
            options["draft_tokens"] = length
        entry = dict(decode=fused_prologue_decode, verify=fused_prologue_verify, extend=fused_prologue_extend)[mode_]
        named = dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), buffers, strict=True))
        run = partial(entry, qkvr, *weights, *gammas, *conv, **index, loc=loc, **named, **options)
        data = [b.view(torch.uint8) for b in buffers]
        theirs = partial(compiled(torch_prologue), qkvr, weights, gammas, conv, loc, data, dq, saved)

        def check(
            qkvr: Tensor = qkvr, weights: Any = weights, gammas: Any = gammas, conv: Any = conv, saved: Any = saved,
            run: Callable[[], Any] = run, theirs: Callable[[], Any] = theirs, dq: int = dq, loc: Tensor = loc,
            pool: MXFP8KVPool = pool,
        ) -> None:  # fmt: skip
            before = [c.clone() for c in conv]
            new = qkvr[:, dq:].chunk(2, dim=1)
            windows = [windows_of(x, history[:-1]) for x, history in zip(new, before, strict=True)]
            made = []
            for x, w, window in zip(new, weights, windows, strict=True):
                y = torch.cat([(part.double() * w.double().mT).sum(2) for part in window.split(64)]).flatten(0, 1)
                made.append((torch.nn.functional.silu(y) + x.double()).bfloat16().double().unflatten(-1, (-1, 128)))
            q = qkvr[:, :dq].double().unflatten(-1, (-1, 128))
            for i, x in enumerate((q, made[0])):
                x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gammas[i].double()
            for name, call in (("ours", run), ("torch.compile's", theirs)):
                for c, b in zip(conv, before, strict=True):
                    c.copy_(b)
                for x in saved or ():
                    x.fill_(float("nan"))
                poison(pool)
                payload, k, v, byte = call()
                close(dequantised(payload, byte, q.shape), q, 4e-2, f"{name} prologue q")  # e4m3's 3 bits of mantissa
                for part, x, want in zip("kv", (k, v), made, strict=True):
                    x = x.view(want.shape)
                    close(x, want, 8e-3, f"{name} prologue {part}")
                    codes, scales = stored(pool, loc, part), stored(pool, loc, f"{part}_scale")
                    close(dequantised(codes, scales, x.shape), x, 4e-2, f"{name} stored {part}")
                    if name == "ours":  # inductor does not round what it quantises
                        want_codes, want_scales = mxfp8_reference(x)
                        assert torch.equal(codes, want_codes.view(torch.uint8)), f"{part} payload"
                        assert torch.equal(scales, want_scales), f"{part} scales"
                for i, window in enumerate(windows):
                    if saved is None:
                        assert torch.equal(conv[i][:-1], window[:, -1, 1:]), f"{name} conv cache"
                    else:
                        same = torch.equal(conv[i].view(torch.int16), before[i].view(torch.int16))  # NaN too
                        assert same, f"{name} conv cache is only read"
                        assert torch.equal(saved[i][:-1], window[:, :, 1:]), f"{name} windows"

        kv = 2 * dkv
        caches = kv * (width - 1) * 2 * (tokens + seqs if mode_ == "verify" else 2 * seqs)
        moved = tokens * ((dq + kv) * 2 + dq * (1 + 1 / 32) + kv * 2 + kv * (1 + 1 / 32)) + caches
        name = f"fused prologue, {mode_}, T {tokens:,}, dq {dq:,}"
        yield Work(name, run, check, bytes=moved, peers={"torch.compile": theirs}, graph=True)


# --- the table --------------------------------------------------------------------------------------------------------


def ceilings() -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read + written) and bf16 matrix rate in FLOP/s, of this card in this run."""
    a = torch.empty(2**31, dtype=torch.int16, device=DEVICE).random_()
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 2 / (median(lambda: b.copy_(a), False) * 1e-3)
    del a, b
    x, y = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in "xy")
    return copy, 2 * 8192**3 / (median(lambda: x @ y, False) * 1e-3)


def main() -> None:
    """Print the table."""
    wanted = sys.argv[1:]
    copy, matmul = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: ", end="")
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 matmul {matmul / 1e12:.0f} TFLOP/s")
    print("| work | µs | rate | share | peer | its µs | ratio |\n|---|---|---|---|---|---|---|")
    works = (
        store_works,
        quantize_works,
        move_works,
        unified_works,
        sparse_works,
        paged_works,
        extend_works,
        prologue_works,
    )
    failed = 0
    for make in works:
        for work in make():
            if wanted and not any(w in work.name for w in wanted):
                continue
            try:
                work.check()
                torch.cuda.synchronize()
            except Exception as error:  # a work that fails its check has no time; the others still have theirs
                failed += 1
                print(
                    f"| {work.name} | CHECK FAILED: {type(error).__name__}: {str(error)[:300]!r} | | | | | |",
                    flush=True,
                )
                continue
            time, words = timed(work.run, work.graph)
            rate = f"{work.flops / time / 1e12:.0f} TFLOP/s" if work.flops else f"{work.bytes / time / 1e12:.2f} TB/s"
            share = work.flops / time / matmul if work.flops else work.bytes / time / copy
            line = f"| {work.name}{' (graph)' if work.graph else ''} | {words} | {rate} | {share:.2f} "
            if not work.peers:
                print(line + "| | | |", flush=True)
            for peer, call in work.peers.items():
                try:
                    other, words = timed(call, work.graph)
                    print(line + f"| {peer} | {words} | {other / time:.2f} |", flush=True)
                except Exception as error:
                    print(line + f"| {peer} | failed: {str(error)[:120]!r} | |", flush=True)
                line = "| | | | "
            torch.compiler.reset()  # of one function it keeps only so many shapes
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"{failed} works failed their check")


if __name__ == "__main__":
    with mode("raise"):
        main()
