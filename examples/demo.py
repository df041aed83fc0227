"""The main job on real numbers: allocate a pool, store K and V, read them back, and get every call wrong once.

    TRITON_INTERPRET=1 python examples/demo.py      # on a CPU; on a GPU leave the variable out

The rows are the K and V of one attention layer of a sentence encoder that read the opening of a novel
(``examples/data``): 439 tokens, 12 heads of 32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from layoutcheck import LayoutError, layout
from layoutcheck.kernels import load_scales
from layoutcheck.pools import MXFP8KVPool, PagedKVPool

DATA = Path(__file__).parent / "data" / "minilm_qkv.safetensors"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_SIZE = 128


def title(text: str) -> None:
    """A heading."""
    print(f"\n--- {text} " + "-" * max(0, 100 - len(text)))


def decoded(payload: Tensor, scale: Tensor) -> Tensor:
    """MXFP8 rows as float64: e4m3 times 2^(byte - 127), 32 elements a byte."""
    power = torch.exp2(scale.view(torch.uint8).double() - 127)
    return payload.double() * power.repeat_interleave(32, dim=-1)


def store_and_read(k: Tensor, v: Tensor) -> MXFP8KVPool:
    """Allocate a pool from one binding, store the rows, read them back, and compare."""
    tokens, heads, head_dim = k.shape
    pages = -(-tokens // PAGE_SIZE) + 1  # page 0 is the sink of padded tokens
    sizes = dict(page=pages, page_size=PAGE_SIZE, head=heads, head_dim=head_dim)
    title("one binding sizes every buffer")
    pool = MXFP8KVPool.allocate(device=DEVICE, **sizes)
    for name, concrete, tensor in pool.buffers():
        print(
            f"   {name:<8} {concrete.name:<18} {tuple(tensor.shape)!s:<22} {tensor.numel() * tensor.element_size():>8} bytes"
        )
    bytes_bf16, bytes_mxfp8 = PagedKVPool.nbytes(**sizes), MXFP8KVPool.nbytes(**sizes)
    print(f"   {bytes_mxfp8} bytes, {bytes_mxfp8 / bytes_bf16:.3f} of the {bytes_bf16} that bf16 takes")
    per_page = dict(page_size=PAGE_SIZE, head=heads, head_dim=head_dim)
    print(f"   {MXFP8KVPool.fit(2**30, free='page', **per_page)} pages fit in one GiB")

    title("quantise and store, then read back")
    loc = torch.arange(PAGE_SIZE, PAGE_SIZE + tokens, device=DEVICE)
    start = time.perf_counter()
    pool.store(k, v, loc)
    print(f"   {tokens} rows stored in {time.perf_counter() - start:.2f} s ({DEVICE})")
    interleaved = layout("mxfp8.interleaved")(**sizes)
    reference = interleaved.unpack(pool.k_scale)[loc]
    assert torch.equal(load_scales(pool.k_scale, loc).view(torch.uint8), reference.view(torch.uint8))
    print(f"   {'head':>6}  " + "  ".join(f"{h:>6}" for h in range(heads)))
    for name, rows, cache, scale in (("K", k, pool.k, pool.k_scale), ("V", v, pool.v, pool.v_scale)):
        error = decoded(cache[loc], load_scales(scale, loc)) - rows.double()
        relative = error.norm(dim=(0, 2)) / rows.double().norm(dim=(0, 2))
        print(f"   {name:>6}  " + "  ".join(f"{x:6.4f}" for x in relative.tolist()) + "   relative error")
    return pool


def attempt(what: str, call: Callable[[], object]) -> None:
    """Make a call that is wrong, and print what the caller is told."""
    try:
        call()
    except LayoutError as error:
        print(f"\n* {what}\n{error}")
    else:
        raise AssertionError(f"not refused: {what}")


def get_it_wrong(k: Tensor, v: Tensor, pool: MXFP8KVPool) -> None:
    """Every mistake that this project began with. Nothing is written by any of these calls."""
    loc = torch.arange(1, 1 + len(k), device=DEVICE)
    title("storing into an MXFP8 pool")
    attempt("rows that are fp8 already, without their scales", lambda: pool.store(pool.k[loc], pool.v[loc], loc))
    scales = load_scales(pool.k_scale, loc)
    attempt("only one of the two scales", lambda: pool.store(pool.k[loc], pool.v[loc], loc, scales))
    attempt("scales for rows that are not fp8", lambda: pool.store(k, v, loc, scales, scales))


def main() -> None:
    """Run all of it."""
    rows = {name: tensor.to(DEVICE) for name, tensor in load_file(DATA).items()}
    pool = store_and_read(rows["k"], rows["v"])
    get_it_wrong(rows["k"], rows["v"], pool)


if __name__ == "__main__":
    main()
