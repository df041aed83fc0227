"""The main job on real numbers: allocate, store, read back, attend, and get every call wrong once.

    TRITON_INTERPRET=1 python examples/demo.py      # on a CPU; on a GPU leave the variable out

The rows are the Q, K and V of one attention layer of a sentence encoder that read the opening of a novel
(``examples/data``): 439 tokens, 12 heads of 32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from layoutcheck import LayoutError, layout
from layoutcheck.kernels import (
    fused_prologue_decode,
    load_scales,
    paged_attention,
    quantize_mxfp8,
    quantize_store_unified_kv,
    sparse_attention_unified_kv,
)
from layoutcheck.pools import MXFP8KVPool, PagedKVPool, UnifiedKVPool

DATA = Path(__file__).parent / "data" / "minilm_qkv.safetensors"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_SIZE = 128
QUERIES = (7, 100, 250, 438)  # tokens of the text whose attention is computed


def title(text: str) -> None:
    """A heading."""
    print(f"\n--- {text} " + "-" * max(0, 110 - len(text)))


def decoded(payload: Tensor, scale: Tensor) -> Tensor:
    """MXFP8 rows as float64: e4m3 times 2^(byte - 127), 32 elements a byte."""
    power = torch.exp2(scale.view(torch.uint8).double() - 127)
    return payload.double() * power.repeat_interleave(32, dim=-1)


def relative(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def store_and_read(k: Tensor, v: Tensor, loc: Tensor) -> MXFP8KVPool:
    """Allocate a pool from one binding, store the rows, read them back, and compare."""
    tokens, heads, head_dim = k.shape
    sizes = dict(page=-(-tokens // PAGE_SIZE) + 1, page_size=PAGE_SIZE, head=heads, head_dim=head_dim)
    title("one binding sizes every buffer")
    pool = MXFP8KVPool.allocate(device=DEVICE, **sizes)
    for name, concrete, tensor in pool.buffers():
        size = tensor.numel() * tensor.element_size()
        print(f"   {name:<8} {concrete.name:<18} {tuple(tensor.shape)!s:<22} {size:>8} bytes")
    bf16, mxfp8 = PagedKVPool.nbytes(**sizes), MXFP8KVPool.nbytes(**sizes)
    print(f"   {mxfp8} bytes, {mxfp8 / bf16:.3f} of the {bf16} that bf16 takes")
    per_page = dict(page_size=PAGE_SIZE, head=heads, head_dim=head_dim)
    print(f"   {MXFP8KVPool.fit(2**30, free='page', **per_page)} pages fit in one GiB")

    title("quantise and store, then read back")
    start = time.perf_counter()
    pool.store(k, v, loc)
    print(f"   {tokens} rows stored in {time.perf_counter() - start:.2f} s ({DEVICE})")
    reference = layout("mxfp8.interleaved")(**sizes).unpack(pool.k_scale)[loc]
    assert torch.equal(load_scales(pool.k_scale, loc).view(torch.uint8), reference.view(torch.uint8))
    print("   head  " + "  ".join(f"{h:>6}" for h in range(heads)) + "   relative error")
    for name, rows, cache, scale in (("K", k, pool.k, pool.k_scale), ("V", v, pool.v, pool.v_scale)):
        error = decoded(cache[loc], load_scales(scale, loc)) - rows.double()
        by_head = error.norm(dim=(0, 2)) / rows.double().norm(dim=(0, 2))
        print(f"   {name:>4}  " + "  ".join(f"{x:6.4f}" for x in by_head.tolist()))
    return pool


def attend(q: Tensor, k: Tensor, v: Tensor, loc: Tensor, pool: MXFP8KVPool) -> UnifiedKVPool:
    """Four tokens of the text over three caches, each against attention in float32 on the same rows."""
    tokens, heads, head_dim = k.shape
    pages = pool.dims["page"]
    title(f"attention of tokens {', '.join(map(str, QUERIES))} over all {tokens}")
    q = q[list(QUERIES)]
    logits = torch.einsum("thd,nhd->thn", q.float(), k.float()) * head_dim**-0.5
    exact = torch.einsum("thn,nhd->thd", torch.softmax(logits, -1), v.float())
    table = torch.arange(1, pages, dtype=torch.int32, device=DEVICE).repeat(len(q), 1)
    lens = torch.full((len(q),), tokens, dtype=torch.int32, device=DEVICE)

    plain = PagedKVPool.allocate(device=DEVICE, page=pages, page_size=PAGE_SIZE, head=heads, head_dim=head_dim)
    plain.k[loc], plain.v[loc] = k, v
    bf16_bytes = 2 * k[0].numel() * 2
    results = [("bf16", paged_attention(q, plain.k, plain.v, table, lens), exact, bf16_bytes)]

    q8, q_scale = quantize_mxfp8(q)
    scales = dict(q_scale=q_scale, k_scale=pool.k_scale, v_scale=pool.v_scale)
    mxfp8_bytes = 2 * (k[0].numel() + k[0].numel() // 32)
    results.append(("MXFP8", paged_attention(q8, pool.k, pool.v, table, lens, **scales), exact, mxfp8_bytes))

    # As a latent row: the K heads of a token side by side, V := K, each query zero outside its own head.
    dim = heads * head_dim
    latent = UnifiedKVPool.allocate(device=DEVICE, slot=len(plain.k), page_size=1, dim=dim, kv_dtype="fp8")
    quantize_store_unified_kv(k.reshape(tokens, dim), loc, latent.kv, latent.kv_scale)
    wide = torch.zeros(len(q), heads, heads, head_dim, dtype=q.dtype, device=DEVICE)
    wide[:, range(heads), range(heads)] = q
    indices = loc.int().repeat(len(q))
    indptr = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE) * tokens
    out = sparse_attention_unified_kv(
        wide.view(len(q), heads, dim),
        latent.kv,
        indices,
        indptr,
        kv_scale=latent.kv_scale,
        softmax_scale=head_dim**-0.5,
    )
    rows = torch.einsum("thn,nd->thd", torch.softmax(logits, -1), k.reshape(tokens, dim).float())
    results.append(("FP8 groups, latent row", out, rows, dim + dim // 64 * 4))
    for name, got, want, size in results:
        base = bf16_bytes if "latent" not in name else 2 * dim
        error = relative(got, want)
        print(f"   {name:<24} relative error {error:.4f}   {size:>5} bytes a token, {size / base:.3f} of bf16")
    return latent


def attempt(what: str, call: Callable[[], object]) -> None:
    """Make a call that is wrong, and print what the caller is told."""
    try:
        call()
    except LayoutError as error:
        print(f"\n* {what}\n{error}")
    else:
        raise AssertionError(f"not refused: {what}")


def get_it_wrong(q: Tensor, k: Tensor, v: Tensor, pool: MXFP8KVPool, latent: UnifiedKVPool) -> None:
    """Every mistake that this project began with. Nothing is launched or written by any of these calls."""
    loc = torch.arange(1, 1 + len(k), device=DEVICE)
    scales = load_scales(pool.k_scale, loc)
    title("storing into an MXFP8 pool")
    attempt("rows that are fp8 already, without their scales", lambda: pool.store(pool.k[loc], pool.v[loc], loc))
    attempt("only one of the two scales", lambda: pool.store(pool.k[loc], pool.v[loc], loc, scales))
    attempt("scales for rows that are not fp8", lambda: pool.store(k, v, loc, scales, scales))

    title("attention over an MXFP8 cache")
    q8, q_scale = quantize_mxfp8(q[:2])
    table = torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(2, dtype=torch.int32, device=DEVICE)
    both = dict(k_scale=pool.k_scale, v_scale=pool.v_scale)
    attempt("no scales for Q", lambda: paged_attention(q8, pool.k, pool.v, table, lens, **both))
    plain = PagedKVPool.allocate(device=DEVICE, page=2, page_size=PAGE_SIZE, head=k.shape[1], head_dim=k.shape[2])
    attempt("scales for Q over bf16", lambda: paged_attention(q[:2], plain.k, plain.v, table, lens, q_scale=q_scale))

    title("a unified KV pool with FP8 group scales per page")
    paged = UnifiedKVPool.allocate(device=DEVICE, page=20, page_size=4, dim=128, kv_dtype="fp8")
    older = UnifiedKVPool.allocate(device=DEVICE, page=16, page_size=4, dim=128, kv_dtype="fp8")
    query = torch.zeros(1, 3, 128, dtype=torch.bfloat16, device=DEVICE)
    lists = (torch.ones(1, dtype=torch.int32, device=DEVICE), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))

    def read(scale: Tensor | None, kv: Tensor = paged.kv) -> object:
        return sparse_attention_unified_kv(query, kv, *lists, kv_scale=scale, page_size=4)

    right = paged.kv_scale
    attempt("one row of scales per token instead of per page", lambda: read(right.repeat_interleave(4, 0)))
    attempt("flat scales", lambda: read(right.view(-1)))
    attempt("one group too many", lambda: read(torch.zeros(20, 3, device=DEVICE)))
    attempt("scales for an older, smaller cache", lambda: read(older.kv_scale))
    attempt("fp16 scales", lambda: read(right.half()))
    attempt("an FP8 pool without scales", lambda: read(None))
    attempt("a bf16 pool with scales", lambda: read(right, paged.kv.bfloat16()))

    title("the scale buffers of the fused attention prologue")
    prologue = Prologue(slots=1024, dkv=512)
    prologue.run()  # put right, the call goes through

    def sized(page_size: int = 128, slots: int = 1024, dkv: int = 512) -> Tensor:
        made = layout("mxfp8.interleaved")(slot=slots, head=dkv // 128, head_dim=128, page_size=page_size)
        return made.empty(device=DEVICE)

    stale = sized(slots=512)
    attempt("a missing dim", lambda: prologue.run(k_scale=sized()[..., 0]))
    attempt("allocated for another page size", lambda: prologue.run(k_scale=sized(page_size=64)))
    attempt("stale after the cache grew", lambda: prologue.run(k_scale=stale))
    attempt("both of them stale", lambda: prologue.run(k_scale=stale, v_scale=stale))
    attempt("the buffer of a layer with another dkv", lambda: prologue.run(v_scale=sized(dkv=1024)))
    attempt("a transposed view", lambda: prologue.run(k_scale=sized().transpose(2, 3)))
    attempt("a sliced view", lambda: prologue.run(k_scale=sized(dkv=1024)[:, ::2]))
    attempt("only one of the two", lambda: prologue.run(v_scale=None))
    attempt("dq that is no multiple of 128", lambda: prologue.run(dq=200))


class Prologue:
    """A call of the fused prologue for two tokens, with what may be got wrong as an argument."""

    def __init__(self, slots: int, dkv: int) -> None:
        heads = dkv // 128
        pool = MXFP8KVPool.allocate(device=DEVICE, slot=slots, page_size=PAGE_SIZE, head=heads, head_dim=128)

        def rows(*shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)

        self.arguments: dict[str, Any] = dict(
            qkvr=rows(2, 256 + 2 * dkv),
            k_weight=rows(dkv, 4),
            v_weight=rows(dkv, 4),
            q_gamma=rows(128),
            k_gamma=rows(128),
            k_conv=rows(3, 3, dkv),
            v_conv=rows(3, 3, dkv),
            cache_indices=torch.arange(2, dtype=torch.int32, device=DEVICE),
            cache_mask=torch.ones(2, dtype=torch.bool, device=DEVICE),
            loc=torch.tensor([1, 2], device=DEVICE),
            k_cache=pool.k,
            v_cache=pool.v,
            k_scale=pool.k_scale,
            v_scale=pool.v_scale,
            dq=256,
            q_offset=0,
            k_offset=256,
            v_offset=256 + dkv,
            page_size=PAGE_SIZE,
        )

    def run(self, **changes: Any) -> object:
        """Make the call."""
        return fused_prologue_decode(**self.arguments | changes)


def main() -> None:
    """Run all of it."""
    rows = {name: tensor.to(DEVICE) for name, tensor in load_file(DATA).items()}
    q, k, v = rows["q"], rows["k"], rows["v"]
    loc = torch.arange(PAGE_SIZE, PAGE_SIZE + len(k), device=DEVICE)  # page 0 is the sink of padded tokens
    pool = store_and_read(k, v, loc)
    latent = attend(q, k, v, loc, pool)
    get_it_wrong(q, k, v, pool, latent)


if __name__ == "__main__":
    main()
