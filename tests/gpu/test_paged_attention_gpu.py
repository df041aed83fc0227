"""Paged attention compiled, on larger problems than the interpreter can do, against a float64 reference."""

from __future__ import annotations

import pytest
import torch

from layoutcheck.kernels import quantize_mxfp8
from layoutcheck.kernels.paged import paged_attention
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_INTERLEAVED
from layoutcheck.pools import MXFP8KVPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def dequantise(payload, byte):
    return payload.double() * torch.exp2(byte.double() - 127).repeat_interleave(32, -1)


def reference(q, k, v, table, lengths, counts, page_size, window, cap):
    """(output, sum of p |v|), from dequantised float64 q (token, q_head, ·), k and v (slot, head, ·)."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    slack, token = torch.zeros_like(out), 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if not count or not length:
            token += count
            continue
        j = torch.arange(length, device=q.device)
        at = table[s, j // page_size].long() * page_size + j % page_size
        group = q.shape[1] // k.shape[1]
        keys, values = (x[at].repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q[token : token + count], keys) * q.shape[2] ** -0.5
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        position = torch.arange(length - count, length, device=q.device)[:, None]
        seen = (j <= position) & (j > position - window if window is not None else j >= 0)
        p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
        out[token : token + count] = torch.einsum("hij,jhd->ihd", p, values)
        slack[token : token + count] = torch.einsum("hij,jhd->ihd", p, values.abs())
        token += count
    return out, slack


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, "interleaved", "flat"])
@pytest.mark.parametrize(
    ("lengths", "counts", "shape"),
    [
        ([8192], None, dict()),
        ([0, 1, 127, 128, 129, 4096, 3333, 900], None, dict(window=1000)),
        ([2000, 17, 600], None, dict(q_head=8, head=8, head_dim=64, v_head_dim=128, page_size=64)),
        ([700, 65], None, dict(q_head=64, head=4, head_dim=256, v_head_dim=64, page_size=32, cap=5.0)),
        ([500, 1000], None, dict(q_head=6, head=2, head_dim=96, v_head_dim=160, page_size=96)),
        ([3000, 400, 64, 0, 1500], [4, 1, 4, 0, 3], dict()),
        ([3000, 700, 50, 0, 1500], [1000, 700, 0, 0, 1], dict()),
        (
            [900, 700],
            [333, 700],
            dict(q_head=12, head=4, head_dim=64, v_head_dim=192, page_size=64, window=200, cap=3.0),
        ),
        ([300, 100], [300, 40], dict(q_head=4, head=1, head_dim=256, v_head_dim=256, page_size=32)),
    ],
)
def test_against_float64(kind, lengths, counts, shape):
    shape = dict(q_head=32, head=8, head_dim=128, v_head_dim=128, page_size=128, window=None, cap=None) | shape
    q_head, head, d, dv, page_size = (shape[n] for n in ("q_head", "head", "head_dim", "v_head_dim", "page_size"))
    decode, counts = counts is None, counts or [1] * len(lengths)
    rng = torch.Generator("cuda").manual_seed(len(lengths) * 1000 + d)
    needed = [-(-n // page_size) for n in lengths]
    pages, slots = sum(needed) + 2, (sum(needed) + 2) * page_size
    order = torch.randperm(pages - 1, generator=rng, device="cuda").int() + 1
    table = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32, device="cuda")
    for s, n in enumerate(needed):
        table[s, :n], order = order[:n], order[n:]

    mx = isinstance(kind, str)
    dtype = E4M3 if mx else kind
    q, k, v = (
        torch.randn(size, generator=rng, device="cuda").to(dtype)
        for size in ((sum(counts), q_head, d), (slots, head, d), (slots, head, dv))
    )
    options = dict(page_size=page_size, window=shape["window"], soft_cap=shape["cap"])
    wide, bytes_ = [x.double() for x in (q, k, v)], []
    if mx:
        bytes_ = [
            torch.randint(122, 131, (*x.shape[:2], x.shape[2] // 32), generator=rng, device="cuda", dtype=torch.uint8)
            for x in (q, k, v)
        ]
        wide = [dequantise(x, b) for x, b in zip((q, k, v), bytes_, strict=True)]
    expected, slack = reference(*wide, table, lengths, counts, page_size, shape["window"], shape["cap"])

    live = torch.zeros(slots, dtype=torch.bool, device="cuda")
    for s, n in enumerate(lengths):
        j = torch.arange(n, device="cuda")
        live[table[s, j // page_size].long() * page_size + j % page_size] = True
    for x in (k, v):  # NaN in every slot of no sequence
        x.view(torch.uint8 if mx else torch.int16)[~live] = 0x7F if mx else -1
    if mx:
        for b in bytes_[1:]:
            b[~live] = 0xFF
        packed = [b.view(E8M0) for b in bytes_]
        if kind == "interleaved":
            for i, dim in ((1, d), (2, dv)):
                layout = MXFP8_SCALE_INTERLEAVED(slot=slots, head=head, head_dim=dim, page_size=page_size)
                packed[i] = layout.pack(packed[i])
        options |= dict(q_scale=packed[0], k_scale=packed[1], v_scale=packed[2], scale_layout=kind)
    if not decode:
        starts = torch.tensor([0, *counts], device="cuda").cumsum(0)
        options["query_start"] = starts.int()
    out = paged_attention(q, k, v, table, torch.tensor(lengths, device="cuda", dtype=torch.int32), **options)

    # Output and probabilities are rounded once each; beyond that, the fp32 sums of long dot products.
    coarse = 2.0**-11 if out.dtype == torch.float16 else 2.0**-8
    bound = coarse * expected.abs() + (coarse + 2.0**-15) * slack + 2.0**-24
    assert out.isfinite().all()
    worst = ((out.double() - expected).abs() / bound).max().item()
    assert worst <= 1.0, worst


def test_scales_may_begin_at_any_byte():
    """Where they are aligned, all of a key's are loaded as one number."""
    pool = MXFP8KVPool.allocate(page=9, page_size=128, head=4, head_dim=128, device="cuda")
    k, v = (torch.randn(pool.dims["slot"], 4, 128, device="cuda").bfloat16() for _ in "kv")
    pool.store(k, v, torch.arange(len(k), device="cuda"))
    q, q_scale = quantize_mxfp8(torch.randn(2, 16, 128, device="cuda").bfloat16())
    table, lens = torch.randperm(8, device="cuda").int().view(2, 4) + 1, torch.tensor([500, 77], device="cuda").int()
    outs = []
    for shift in (0, 1, 2):
        scales = []
        for scale in (pool.k_scale, pool.v_scale):
            whole = torch.zeros(scale.numel() + shift, dtype=torch.uint8, device="cuda")
            whole[shift:] = scale.view(torch.uint8).flatten()
            scales.append(whole[shift:].view(scale.shape))
        named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        outs.append(paged_attention(q, pool.k, pool.v, table, lens, q_scale=q_scale, **named))
    assert outs[0].isfinite().all()
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=2**-7, atol=2**-9)


def test_offsets_pass_2_31():
    """Slots whose offset in elements does not fit in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    pages, page_size = 2**31 // (128 * 8 * 128) + 8, 128
    k = torch.zeros(pages * page_size, 8, 128, dtype=torch.float16, device="cuda")
    v = torch.zeros_like(k)
    v[(pages - 1) * page_size :] = 3.0
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device="cuda")
    q = torch.ones(1, 8, 128, dtype=torch.float16, device="cuda")
    out = paged_attention(q, k, v, table, torch.tensor([100], dtype=torch.int32, device="cuda"))
    assert (out == 3.0).all()
