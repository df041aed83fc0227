"""A latent KV pool with FP8 group scales per page: quantise, attend, and see which scales a reader trusts.

    TRITON_INTERPRET=1 python examples/latent_pool.py      # on a CPU; on a GPU leave the variable out

One row of scales belongs to a *page* of the pool. With pages of one slot that is a row a token (DeepSeek-V4's unified
pool); with larger pages, scales per token are the classic mistake, and have a shape that the guard refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layoutcheck import LayoutError
from layoutcheck.kernels import quantize_store_unified_kv, sparse_attention_unified_kv
from layoutcheck.pools import UnifiedKVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(q: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
    """Attention of one token over its rows in float64; the sink is one more logit whose value is zero."""
    logits = torch.cat([q.double() @ rows.double().T * q.shape[-1] ** -0.5, sink.double()[:, None]], dim=1)
    return torch.softmax(logits, dim=1)[:, :-1] @ rows.double()


def main() -> None:
    """Two page sizes; then the scales of the wrong granularity."""
    torch.manual_seed(0)
    page, head, dim = 12, 3, 192
    for page_size in (1, 8):
        pool = UnifiedKVPool.allocate(device=DEVICE, page=page, page_size=page_size, dim=dim, kv_dtype="fp8")
        pages = torch.arange(1, page, device=DEVICE)  # page 0 is the sink of padding
        rows = torch.randn(len(pages) * page_size, dim, device=DEVICE).bfloat16()
        quantize_store_unified_kv(rows, pages, pool.kv, pool.kv_scale, page_size=page_size)

        q = torch.randn(2, head, dim, device=DEVICE).bfloat16()
        sink = torch.zeros(head, device=DEVICE)
        lists = [torch.tensor([3, 7, 9]), torch.arange(page_size, page * page_size)]
        indices = torch.cat(lists).int().to(DEVICE)
        indptr = torch.tensor([0, *map(len, lists)]).cumsum(0).int().to(DEVICE)
        out = sparse_attention_unified_kv(
            q, pool.kv, indices, indptr, sink, kv_scale=pool.kv_scale, page_size=page_size
        )
        stored = torch.zeros(page * page_size, dim, device=DEVICE)
        stored[page_size:] = rows.float()
        for t, slots in enumerate(lists):
            want = reference(q[t], stored[slots.to(DEVICE)], sink)
            error = float((out[t].double() - want).norm() / want.norm())
            print(f"page_size {page_size}, {len(slots):>3} slots: relative error {error:.4f}")

    per_token = pool.kv_scale.repeat_interleave(page_size, dim=0)
    try:
        sparse_attention_unified_kv(q, pool.kv, indices, indptr, sink, kv_scale=per_token, page_size=page_size)
    except LayoutError as error:
        print(error)


if __name__ == "__main__":
    main()
