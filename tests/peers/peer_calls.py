"""Calls of sglang's functions, right ones and wrong ones, and what a right run of each would leave behind.

Every tensor stands inside a larger one that is filled with a canary, so a write beside it is seen. A call is made from
its function, its kind and a seed alone: it can be made again in another process.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import peer_sglang  # noqa: F401 - stands in for what sglang imports: before it
import torch
from sglang.kernels.ops.attention import inkling_attn_prologue
from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import paged_decode
from sglang.kernels.ops.kvcache.mxfp8_interleave_sf import store_sf_interleaved
from sglang.kernels.ops.kvcache.mxfp8_quant_store_kv import quant_store_kv_mxfp8
from sglang.kernels.ops.quantization.mxfp8_quant import to_mxfp8
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8
from torch import Tensor

from layoutcheck import LayoutError, mode
from layoutcheck.kernels._interpreter import correct_interpreter
from layoutcheck.peers.sglang import PEER

correct_interpreter()
CANARY, MARGIN = 0xA5, 8192
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass
class Case:
    """One call: ``right`` looks at what it left behind, and is None where reaching the launch is all there is."""

    function: Callable[..., Any]
    path: str
    arguments: dict[str, Any]
    right: Callable[[Any], bool]
    runs: Callable[..., Any] | None = None  # instead of the function
    memory: list[Memory] = field(default_factory=list)
    refusals: tuple[type[Exception], ...] = (AssertionError, ValueError, RuntimeError)
    launched: str = "\0"  # in the message of an error that is no refusal: all that is missing is a GPU

    def ours(self) -> list[str]:
        """The rules of our contract, ``values`` mode's as well, that the guard says this call breaks."""

        @functools.wraps(self.function)
        def nothing(*_: Any, **__: Any) -> None: ...

        try:
            with mode("values"):
                PEER.targets[self.path].guard(nothing)(**self.arguments)
        except LayoutError as error:
            return [f"{v.argument}: {v.rule}" for v in error.violations]
        return []

    def theirs(self) -> str:
        """What sglang does with the call."""
        try:
            result = (self.runs or self.function)(**self.arguments)
        except self.refusals as error:
            if self.launched in str(error):
                return RIGHT
            return f"{REFUSED}: {error}"
        if not all(m.untouched() for m in self.memory):
            return f"{WRONG}: wrote beside a buffer"
        try:
            return RIGHT if self.right(result) else f"{WRONG}: not what was asked for"
        except (IndexError, RuntimeError) as error:  # the buffer has no such element
            return f"{WRONG}: {error}"


class Memory:
    """A tensor between two canaries."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> None:
        if strides is None:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
        self.bytes = torch.full((2 * MARGIN + reach * dtype.itemsize,), CANARY, dtype=torch.uint8)
        inside = self.bytes[MARGIN : MARGIN + reach * dtype.itemsize]
        inside.zero_()
        self.tensor = inside.view(dtype).as_strided(shape, strides, MARGIN // dtype.itemsize)
        self.own = torch.zeros_like(self.bytes, dtype=torch.bool)
        own = torch.arange(reach).as_strided(shape, strides).reshape(-1)
        for byte in range(dtype.itemsize):
            self.own[MARGIN + own * dtype.itemsize + byte] = True
        self.before = self.bytes.clone()

    def untouched(self) -> bool:
        """Whether everything but the tensor's own elements is as it was."""
        return bool((self.bytes == self.before)[~self.own].all())

    def written(self, keep: Callable[[Tensor], None]) -> bool:
        """Whether the tensor's elements equal those of its old content after ``keep`` changed that."""
        old = torch.empty_like(self.tensor.view(torch.uint8).contiguous())
        before = self.before[MARGIN:-MARGIN].view(self.tensor.dtype)
        old.copy_(before.as_strided(self.tensor.shape, self.tensor.stride()).view(torch.uint8))
        keep(old)
        return torch.equal(old, self.tensor.view(torch.uint8))


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(payload, scale byte) of rows (..., d): 32 elements a scale, the smallest power of two that fits 448."""
    blocks = rows.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1).clamp(min=1e-30)
    # float32 as sglang's kernel: ceil(log2(amax / 448)); no amax here is within its error of a power of two
    byte = (torch.log2(amax.float() / 448).ceil() + 127).clamp(0, 254).to(torch.uint8)
    values = blocks / torch.exp2(byte.double() - 127).unsqueeze(-1)
    return values.clamp(-448, 448).float().to(torch.float8_e4m3fn).flatten(-2), byte


def make(path: str, kind: str, seed: int) -> Case:
    """The call of that function, kind and seed."""
    return KINDS[path][kind](np.random.default_rng(seed), kind)


def rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows that are a slice of a wider tensor half of the time."""
    values = torch.from_numpy(rng.normal(size=shape) * np.exp2(rng.integers(-8, 8, size=(*shape[:-1], 1)))).to(dtype)
    if rng.random() < 0.5:
        wide = torch.zeros(*shape[:-1], shape[-1] + 32, dtype=dtype)
        wide[..., : shape[-1]] = values
        return wide[..., : shape[-1]]
    return values


def slots(rng: np.random.Generator, tokens: int, slot: int) -> Tensor:
    """Different slots: the last one, so that a buffer that is too small is noticed, the sink sometimes, any others."""
    others = rng.permutation(np.arange(1, slot - 1))[: max(tokens - 1, 0)]
    if tokens > 2 and rng.random() < 0.5:
        others[-1] = 0
    return torch.from_numpy(rng.permutation([slot - 1, *others])[:tokens].astype(np.int64))


def other_slot(loc: Tensor, slot: int) -> int:
    """A slot that no row goes to."""
    return next(s for s in range(1, slot) if s not in loc.tolist())


def shortened(loc: Tensor, slot: int) -> Tensor:
    """One entry too few; behind them in memory stands another slot."""
    memory = torch.full((len(loc) + 1,), other_slot(loc, slot))
    memory[: len(loc) - 1] = loc[:-1]
    return memory[: len(loc) - 1]


def spread(loc: Tensor, slot: int) -> Tensor:
    """Every second entry of a tensor that holds another slot in between."""
    memory = torch.full((2 * len(loc),), other_slot(loc, slot))
    memory[::2] = loc
    return memory[::2]


# --- quant_store_kv_mxfp8 ---------------------------------------------------------------------------------------------


def scale_memory(pages: int, heads: int, page_size: int, groups: int, kind: str) -> Memory:
    """A scale buffer, wrong as the kind says."""
    if kind == "scales strided":
        shape = (pages, heads, 32, page_size // 32, groups)
        wide = (pages, heads, 32, page_size // 32, 2 * groups)
        strides = tuple(math.prod(wide[i + 1 :]) for i in range(5))
        return Memory(shape, torch.float8_e8m0fnu, strides)
    if kind == "gaps between pages":
        shape = (pages, heads, 32, page_size // 32, groups)
        inner = tuple(math.prod(shape[i + 1 :]) for i in range(5))
        return Memory(shape, torch.float8_e8m0fnu, (inner[0] + 64, *inner[1:]))
    if kind == "scales of another page size":
        return Memory((2 * pages, heads, 32, page_size // 64, groups), torch.float8_e8m0fnu)
    if kind == "scales of other heads":
        return Memory((pages, heads + 1, 32, page_size // 32, groups), torch.float8_e8m0fnu)
    if kind == "stale scales":
        return Memory((pages - 1, heads, 32, page_size // 32, groups), torch.float8_e8m0fnu)
    if kind == "flat scales":
        return Memory((pages * page_size, heads, groups), torch.float8_e8m0fnu)
    return Memory((pages, heads, 32, page_size // 32, groups), torch.float8_e8m0fnu)


def stored(memory: Memory, loc: Tensor, values: Tensor) -> bool:
    """Whether the rows of a cache are the given payload at their slots, and nothing else changed."""

    def keep(old: Tensor) -> None:
        live = loc != 0
        old[loc[live]] = values.view(torch.uint8)[live]

    return memory.written(keep)


def scales_stored(memory: Memory, loc: Tensor, byte: Tensor, page_size: int) -> bool:
    """Whether each scale is where the interleaved layout says, and nothing else changed."""

    def keep(old: Tensor) -> None:
        for slot, row in zip(loc.tolist(), byte, strict=False):
            if slot:
                old[slot // page_size, :, slot % page_size % 32, slot % page_size // 32] = row

    return memory.written(keep)


def quant_store(rng: np.random.Generator, kind: str) -> Case:
    tokens, heads = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    head_dim, page_size = int(rng.choice([32, 64, 128])), int(rng.choice([64, 128]))
    pages = int(rng.integers(2, 4))
    slot = pages * page_size
    k, v = rows(rng, (tokens, heads, head_dim)), rows(rng, (tokens, heads, head_dim))
    loc = slots(rng, tokens, slot)
    if kind == "no tokens":
        k, v, loc = k[:0], v[:0], loc[:0]
    where = loc
    cache_heads = heads + 1 if kind == "cache of other heads" else heads
    cache_dtype = torch.bfloat16 if kind == "bf16 cache" else torch.float8_e4m3fn
    strides = (cache_heads * head_dim + 32, head_dim, 1) if kind == "strided cache" else None
    k_cache, v_cache = (Memory((slot, cache_heads, head_dim), cache_dtype, strides) for _ in "kv")
    sfk = scale_memory(pages, heads, page_size, head_dim // 32, kind)
    sfv = scale_memory(pages, heads, page_size, head_dim // 32, kind if rng.random() < 0.5 else "")
    given = page_size
    match kind:
        case "short loc":
            where = shortened(loc, slot)
        case "strided loc":
            where = spread(loc, slot)
        case "longer loc":
            where = torch.cat([loc, loc[:1]])
        case "int32 loc":
            where = loc.to(torch.int32)
        case "packed head_dim":
            k = torch.stack([k, k], dim=-1)[..., 0]
        case "head_dim 48":
            k, v = k[..., :16].repeat(1, 1, 3), v[..., :16].repeat(1, 1, 3)
        case "page size 48":
            given = 48
        case "another page size":
            given = page_size // 2
        case "v of other heads":
            v = v.repeat(1, 2, 1)
        case "v of another head_dim":
            v = torch.cat([v, v], dim=-1)
        case "slot beyond the end":
            where = loc.clone()
            where[0] = slot
            loc = where

    def right(_: Any) -> bool:
        payload = [quantised(x) for x in (k, v)]
        return all(
            stored(cache, loc, values.view(cache.tensor.dtype) if kind != "bf16 cache" else values)
            and scales_stored(sf, loc, byte, given)
            for cache, sf, (values, byte) in zip((k_cache, v_cache), (sfk, sfv), payload, strict=True)
        )

    arguments = dict(
        k=k, v=v, loc=where, k_cache=k_cache.tensor, v_cache=v_cache.tensor, sfk=sfk.tensor, sfv=sfv.tensor,
        page_size=given,
    )  # fmt: skip
    return Case(
        quant_store_kv_mxfp8, "quant_store_kv_mxfp8", arguments, right, memory=[k_cache, v_cache, sfk, sfv],
        refusals=(AssertionError,),
    )  # fmt: skip


# --- store_sf_interleaved ---------------------------------------------------------------------------------------------


def store_sf(rng: np.random.Generator, kind: str) -> Case:
    tokens, heads, pages = int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(rng.integers(2, 4))
    slot, page_size = pages * 128, 128
    byte = torch.from_numpy(rng.integers(1, 255, size=(tokens, heads, 4)).astype(np.uint8))
    sf_in = byte.view(torch.float8_e8m0fnu) if rng.random() < 0.5 else byte
    loc = where = slots(rng, tokens, slot)
    out = scale_memory(pages, heads, 128, 4, kind)
    match kind:
        case "no tokens":
            sf_in, byte, loc = sf_in[:0], byte[:0], loc[:0]
            where = loc
        case "strided rows":
            sf_in = torch.stack([byte, byte], dim=-1)[..., 0]
        case "short loc":
            where = shortened(loc, slot)
        case "strided loc":
            where = spread(loc, slot)
        case "longer loc":
            where = torch.cat([loc, loc[:1]])
        case "eight scales a row":
            sf_in = torch.cat([byte, byte], dim=-1)
        case "page size 64":
            page_size = 64
        case "slot beyond the end":
            loc = where = torch.cat([torch.tensor([slot]), loc[1:]])
    return Case(
        store_sf_interleaved, "store_sf_interleaved",
        dict(sf_in=sf_in, sf_out=out.tensor, loc=where, page_size=page_size),
        lambda _: scales_stored(out, loc, byte, 128), memory=[out], refusals=(AssertionError,),
    )  # fmt: skip


# --- to_mxfp8 ---------------------------------------------------------------------------------------------------------


def quantise(rng: np.random.Generator, kind: str) -> Case:
    shape = [int(n) for n in rng.integers(1, 5, size=rng.integers(0, 4))]
    width = {"width 48": 48, "no width": 0}.get(kind, int(rng.choice([32, 64, 96])))
    x = rows(rng, (*shape, width), torch.bfloat16 if rng.random() < 0.5 else torch.float32)
    if kind == "no rows":
        x = x[..., None, :][..., :0, :]

    def right(result: Any) -> bool:
        values, byte = quantised(x)
        return torch.equal(result.data.view(torch.uint8), values.view(torch.uint8)) and torch.equal(result.scale, byte)

    return Case(to_mxfp8, "to_mxfp8", dict(x=x), right, refusals=(ValueError, RuntimeError))


# --- the fused prologues ----------------------------------------------------------------------------------------------


def prologue(rng: np.random.Generator, kind: str, which: str) -> Case:
    """Up to the launch: the compiled module is a stand-in that takes anything."""
    tokens, heads, q_heads = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    page_size, pages, taps = int(rng.choice([32, 64, 96, 128])), int(rng.integers(2, 4)), int(rng.integers(2, 5))
    slot, dq, dkv = pages * page_size, 128 * q_heads, 128 * heads
    mxfp8 = kind != "bf16"
    cache_dtype = torch.float8_e4m3fn if mxfp8 else torch.bfloat16
    k_buf, v_buf = (torch.zeros(slot, heads, 128, dtype=cache_dtype) for _ in "kv")
    sf = [scale_memory(pages, heads, page_size, 4, "").tensor if mxfp8 else None for _ in "kv"]
    sfk, sfv = sf
    loc = slots(rng, tokens, slot)
    conv = [torch.zeros(3, taps - 1, dkv, dtype=torch.bfloat16) for _ in "kv"]
    weight = [torch.zeros(dkv, taps, dtype=torch.bfloat16) for _ in "kv"]
    arguments: dict[str, Any] = dict(
        qkvr=torch.zeros(tokens, dq + 2 * dkv + 8 * int(rng.integers(0, 3)), dtype=torch.bfloat16),
        k_cache=conv[0], v_cache=conv[1], cache_indices=torch.zeros(tokens, dtype=torch.int64),
        cache_mask=torch.ones(tokens, dtype=torch.bool), k_weight=weight[0], v_weight=weight[1],
        q_gamma=torch.ones(128), k_gamma=torch.ones(128), eps=1e-6, loc=loc, k_buf=k_buf, v_buf=v_buf,
        q_off=0, k_off=dq, v_off=dq + dkv, dq=dq, dkv=dkv, mxfp8_quant=mxfp8, sfk=sfk, sfv=sfv, page_size=page_size,
    )  # fmt: skip
    if which == "verify":
        arguments |= dict(k_inter=torch.zeros(1, 1, 1, 8), v_inter=torch.zeros(1, 1, 1, 8), draft_token_num=1)
    if which == "extend":
        empty = torch.zeros(0)
        arguments |= dict(
            has_initial_state=empty, cu=empty, si=empty, track_rows=empty, track_mask=empty, track_dst=empty
        )
    wrong = {
        "no sfk": dict(sfk=None),
        "no scales": dict(sfk=None, sfv=None),
        "stale sfk": dict(sfk=sfk[1:] if mxfp8 else None),
        "stale scales": dict(sfk=sfk[1:] if mxfp8 else None, sfv=sfv[1:] if mxfp8 else None),
        "sfv without a dim": dict(sfv=sfv[..., 0] if mxfp8 else None),
        "sfk of another page size": dict(page_size=2 * page_size),
        "transposed sfk": dict(sfk=sfk.transpose(-1, -2).contiguous().transpose(-1, -2) if mxfp8 else None),
        "sliced sfv": dict(sfv=torch.stack([sfv, sfv], -1)[..., 0] if mxfp8 else None),
        "flat sfk": dict(sfk=sfk.reshape(slot, heads, 4) if mxfp8 else None),
        "dq 64 too much": dict(dq=dq + 64),
        "dkv 64 too much": dict(dkv=dkv + 64),
        # what sglang's Python does not look at
        "cache of other heads": dict(k_buf=torch.zeros(slot, 2 * heads, 128, dtype=cache_dtype)),
        "v cache of fewer slots": dict(v_buf=v_buf[page_size:]),
        "short loc": dict(loc=shortened(loc, slot)),
        "int32 loc": dict(loc=loc.int()),
        "v past the row": dict(v_off=dq + dkv + 64),
        "odd q_off": dict(q_off=1),
        "bf16 cache": dict(k_buf=k_buf.to(torch.bfloat16)),
        "slot beyond the end": dict(loc=torch.full_like(loc, slot)),
    }
    arguments |= wrong.get(kind, {})
    silent = (
        "cache of other heads", "v cache of fewer slots", "short loc", "int32 loc", "v past the row", "odd q_off",
        "bf16 cache", "slot beyond the end",
    )  # fmt: skip
    function = getattr(inkling_attn_prologue, f"inkling_attn_prologue_{which}")

    def run(**given: Any) -> None:
        with mock.patch.object(inkling_attn_prologue, "_jit_attn_prologue_module", mock.MagicMock()):
            function(**given)

    return Case(function, f"inkling_attn_prologue_{which}", arguments, lambda _: kind not in silent, runs=run)


# --- sparse decoding over the unified pool ----------------------------------------------------------------------------


class OnDevice(Tensor):
    """A CPU tensor that says it is on a GPU, which is the first thing that sglang asks."""

    is_cuda = True


def sparse(rng: np.random.Generator, kind: str) -> Case:
    tokens, heads, rows_ = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(4, 12))
    fp8 = kind in ("fp8", "strided fp8 scales") or "scales" in kind
    dim = int(rng.choice([64, 128])) if fp8 else int(rng.choice([32, 48, 64]))
    dtype = torch.float16 if fp8 else torch.bfloat16  # the interpreter has no bf16 arithmetic
    q = torch.from_numpy(rng.normal(size=(tokens, heads, dim))).to(dtype)
    pool = torch.from_numpy(rng.normal(size=(rows_, dim)))
    scales = torch.from_numpy(np.exp2(rng.integers(-2, 3, size=(rows_, dim // 64 or 1)))).float() if fp8 else None
    kv = pool.to(torch.float8_e4m3fn if fp8 else dtype)
    lengths = rng.integers(1, rows_, size=tokens)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    indices = torch.from_numpy(rng.integers(0, rows_ - 1, size=int(lengths.sum())).astype(np.int32))
    indices[-1] = rows_ - 1  # the last row, so that a pool that is too small is noticed
    sink = torch.from_numpy(rng.normal(size=heads)).float()
    scale = dim**-0.5
    arguments: dict[str, Any] = dict(
        q=q.as_subclass(OnDevice), unified_kv=kv, kv_indices=indices, kv_indptr=indptr, attn_sink=sink,
        softmax_scale=scale, kv_scales=scales, kv_splits=1,
    )  # fmt: skip
    match kind:
        case "strided fp8 scales":
            arguments["kv_scales"] = torch.stack([scales, scales], -1)[..., 0]
        case "scales per token":
            arguments["kv_scales"] = torch.ones(rows_ + 1, dim // 64)
        case "stale scales":
            arguments["kv_scales"] = scales[1:]
        case "flat scales":
            arguments["kv_scales"] = scales.reshape(-1)
        case "scales one group off":
            arguments["kv_scales"] = torch.ones(rows_, dim // 64 + 1)
        case "fp16 scales":
            arguments["kv_scales"] = scales.half()
        case "no scales for fp8":
            arguments["kv_scales"] = None
        case "bf16 pool with scales":
            arguments["unified_kv"] = pool.to(dtype)
        case "fp16 pool":
            arguments["unified_kv"] = kv.half()
        case "fp32 q":
            arguments["q"] = q.float().as_subclass(OnDevice)
        case "q of another dim":
            arguments["unified_kv"] = torch.cat([kv, kv], -1)
        case "short indptr":
            memory = torch.cat([indptr[:-1], torch.zeros(1, dtype=torch.int32)])
            arguments["kv_indptr"] = memory[:-1]
        case "strided indices":
            spaced = torch.zeros(2 * len(indices), dtype=torch.int32)
            spaced[::2] = indices
            arguments["kv_indices"] = spaced[::2]
        case "index beyond the end":
            memory = torch.full((rows_ + 4, dim), 3.0, dtype=kv.dtype)
            memory[:rows_] = kv
            arguments["unified_kv"] = memory[: rows_ - 1]
        case "sink of fewer heads":
            arguments["attn_sink"] = torch.cat([sink[:-1], torch.full((1,), 9.0)])[:-1]

    def right(out: Tensor) -> bool:
        given, where, starts = arguments["unified_kv"], arguments["kv_indices"], arguments["kv_indptr"]
        full = given.double()
        if arguments["kv_scales"] is not None:
            full = full * arguments["kv_scales"].double().repeat_interleave(64, dim=1)
        for t in range(tokens):
            keys = full[where[starts[t] : starts[t + 1]].long()]
            logits = torch.cat([q[t].double() @ keys.T * scale, arguments["attn_sink"].double()[:, None]], dim=1)
            wanted = logits.softmax(-1)[:, :-1] @ keys
            if not torch.allclose(out[t].double(), wanted, atol=2e-2, rtol=2e-2):
                return False
        return True

    return Case(
        paged_decode._sparse_attn_v4_paged_decode_triton, "_sparse_attn_v4_paged_decode_triton", arguments, right
    )


# --- the KV pool ------------------------------------------------------------------------------------------------------


def pool_store(rng: np.random.Generator, kind: str) -> Case:
    tokens, heads = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    head_dim, page_size = int(rng.choice([32, 64, 128])), 64 if kind == "page size 64" else 128
    pool = MHATokenToKVPoolMXFP8(
        size=2 * page_size, page_size=page_size, dtype=torch.float8_e4m3fn, head_num=heads, head_dim=head_dim,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    slot, pages, groups = 3 * page_size, 3, head_dim // 32
    caches = [Memory((slot, heads, head_dim), torch.float8_e4m3fn) for _ in "kv"]
    scales = [scale_memory(pages, heads, page_size, groups, "") for _ in "kv"]
    if kind in ("scales strided", "stale scales", "scales of another page size", "scales of other heads"):
        scales[int(rng.integers(2))] = scale_memory(pages, heads, page_size, groups, kind)
    pool.k_buffer[1], pool.v_buffer[1] = (c.tensor for c in caches)
    if page_size == 128:
        pool.k_scale_buffer[1], pool.v_scale_buffer[1] = (s.tensor for s in scales)
    k, v = (rows(rng, (tokens, heads, head_dim)) for _ in "kv")
    loc = where = slots(rng, tokens, slot)
    arguments: dict[str, Any] = dict(self=pool, layer=types.SimpleNamespace(layer_id=1), cache_k=k, cache_v=v)
    unit = torch.full((tokens, heads, groups), 127, dtype=torch.uint8)
    match kind:
        case "fp8 rows without scales":
            arguments |= dict(cache_k=k.to(torch.float8_e4m3fn), cache_v=v.to(torch.float8_e4m3fn))
        case "fp8 rows with scales":
            arguments |= dict(cache_k=k.to(torch.float8_e4m3fn), cache_v=v.to(torch.float8_e4m3fn))
            arguments |= dict(k_scale=unit, v_scale=unit)
        case "fp8 rows with one scale":
            arguments |= dict(cache_k=k.to(torch.float8_e4m3fn), cache_v=v.to(torch.float8_e4m3fn), k_scale=unit)
        case "short loc":
            where = shortened(loc, slot)
        case "rows of other heads":
            arguments["cache_k"] = k.repeat(1, 2, 1)
            arguments["cache_v"] = v.repeat(1, 2, 1)
        case "rows of another head_dim":
            arguments["cache_k"], arguments["cache_v"] = (torch.cat([x, x], -1) for x in (k, v))
        case "slot beyond the end":
            loc = where = torch.cat([torch.tensor([slot]), loc[1:]])

    def right(_: Any) -> bool:
        payload = [quantised(arguments[n]) for n in ("cache_k", "cache_v")]
        return all(
            stored(cache, loc, values) and scales_stored(sf, loc, byte, 128)
            for cache, sf, (values, byte) in zip(caches, scales, payload, strict=True)
        )

    path = "MHATokenToKVPoolMXFP8.set_kv_buffer"
    return Case(
        MHATokenToKVPoolMXFP8.set_kv_buffer, path, arguments | dict(loc_info=where), right, memory=[*caches, *scales],
        refusals=(ValueError, AssertionError), launched="requires CUDA and store_cache-compatible rows",
    )  # fmt: skip


def scale_arguments(rng: np.random.Generator, kind: str) -> Case:
    heads, pages = int(rng.integers(1, 4)), int(rng.integers(2, 4))
    head_dim = int(rng.choice([64, 128]))
    stale = kind if kind in ("stale scales", "scales of other heads", "scales of another page size") else ""
    scales = [scale_memory(pages, heads, 128, head_dim // 32, stale).tensor for _ in "kv"]
    pool = types.SimpleNamespace(
        size=(pages - 1) * 128, page_size=128, head_num=heads, head_dim=head_dim, v_head_dim=head_dim,
        get_kv_scale_buffer=lambda layer_id: tuple(scales),
    )  # fmt: skip
    mxfp8 = kind != "bf16"
    backend = types.SimpleNamespace(
        kv_cache_is_mxfp8=mxfp8, fa_impl_ver=3 if kind in ("FA3", "bf16") else 4, token_to_kv_pool=pool
    )
    q_descale = None if kind in ("no Q scales", "bf16") else torch.ones(2, 4, dtype=torch.uint8)
    arguments = dict(self=backend, layer=types.SimpleNamespace(layer_id=0), forward_batch=None, q_descale=q_descale)

    def right(result: Any) -> bool:
        wanted = {"sfq": q_descale, "sfk": scales[0], "sfv": scales[1]} if mxfp8 else {}
        return not stale and result == wanted if not mxfp8 else not stale and result.keys() == wanted.keys()

    return Case(
        FlashAttentionBackend._mxfp8_sf_kwargs, "FlashAttentionBackend._mxfp8_sf_kwargs", arguments, right,
        refusals=(RuntimeError,),
    )  # fmt: skip


# --- which there are --------------------------------------------------------------------------------------------------

_SCALES = (
    "scales strided",
    "gaps between pages",
    "scales of another page size",
    "scales of other heads",
    "stale scales",
    "flat scales",
)
_PROLOGUE = (
    "valid", "valid", "bf16", "no sfk", "no scales", "stale sfk", "stale scales", "sfv without a dim",
    "sfk of another page size", "transposed sfk", "sliced sfv", "flat sfk", "dq 64 too much", "dkv 64 too much",
    "cache of other heads", "v cache of fewer slots", "short loc", "int32 loc", "v past the row", "odd q_off",
    "bf16 cache", "slot beyond the end",
)  # fmt: skip
Maker = Callable[[np.random.Generator, str], Case]


def _prologue(which: str) -> Maker:
    return lambda rng, kind: prologue(rng, kind, which)


KINDS: dict[str, dict[str, Maker]] = {
    path: dict.fromkeys(kinds, maker)
    for path, maker, kinds in (
        (
            "quant_store_kv_mxfp8", quant_store,
            ("valid", "no tokens", "int32 loc", "longer loc", *_SCALES, "cache of other heads", "bf16 cache",
             "strided cache", "short loc", "strided loc", "packed head_dim", "head_dim 48", "page size 48",
             "another page size", "v of other heads", "v of another head_dim", "slot beyond the end"),
        ),
        (
            "store_sf_interleaved", store_sf,
            ("valid", "no tokens", "strided rows", "longer loc", *_SCALES, "short loc", "strided loc",
             "eight scales a row", "page size 64", "slot beyond the end"),
        ),
        ("to_mxfp8", quantise, ("valid", "no rows", "width 48", "no width")),
        *((f"inkling_attn_prologue_{w}", _prologue(w), _PROLOGUE) for w in ("decode", "verify", "extend")),
        (
            "_sparse_attn_v4_paged_decode_triton", sparse,
            ("valid", "fp8 scales", "strided fp8 scales", "scales per token", "stale scales", "flat scales",
             "scales one group off", "fp16 scales", "no scales for fp8", "bf16 pool with scales", "fp16 pool", "fp32 q",
             "q of another dim", "short indptr", "strided indices", "index beyond the end", "sink of fewer heads"),
        ),
        (
            "MHATokenToKVPoolMXFP8.set_kv_buffer", pool_store,
            ("valid", "page size 64", "scales strided", "stale scales", "scales of another page size",
             "scales of other heads", "fp8 rows without scales", "fp8 rows with one scale", "fp8 rows with scales",
             "short loc", "rows of other heads", "rows of another head_dim", "slot beyond the end"),
        ),
        (
            "FlashAttentionBackend._mxfp8_sf_kwargs", scale_arguments,
            ("valid", "bf16", "FA3", "no Q scales", "stale scales", "scales of other heads",
             "scales of another page size"),
        ),
    )
}  # fmt: skip
