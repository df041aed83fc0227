"""The unified KV pool's kernels, compiled, on larger random problems."""

import math

import pytest
import torch

from layoutcheck.kernels import unified_kv
from layoutcheck.kernels.unified_kv import quantize_store_unified_kv, sparse_attention_unified_kv

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


def pool(slots, dim, page_size, seed=0, dtype=torch.float32):
    """An FP8 pool written by the kernel, its scales (with a gap behind each row), and what both stand for."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(slots, dim, generator=generator, device="cuda")
    rows *= 2.0 ** torch.randint(-5, 5, (slots, 1), generator=generator, device="cuda")
    rows = rows.to(dtype)
    kv = torch.full((slots, dim), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    scale = torch.full((slots // page_size, dim // 64 + 3), math.nan, device="cuda")[:, : dim // 64]
    loc = torch.randperm(slots // page_size, generator=generator, device="cuda")
    quantize_store_unified_kv(rows, loc, kv, scale, page_size=page_size)
    order = (loc[:, None] * page_size + torch.arange(page_size, device="cuda")).reshape(-1)
    return rows, order, loc, kv, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("page_size", "dim"), [(1, 512), (1, 192), (48, 512), (64, 128), (256, 512), (300, 64)])
def test_quantize(page_size, dim, dtype):
    slots = page_size * max(4, 20_000 // page_size)
    rows, _, loc, kv, scale = pool(slots, dim, page_size, dtype=dtype)
    groups = rows.float().reshape(-1, page_size, dim // 64, 64)
    want = (groups.abs().amax((1, 3)).double() / 448).float()
    codes = (groups * (1 / want)[:, None, :, None]).clamp(-448, 448).to(E4M3).reshape(-1, page_size, dim)
    kept = loc > 0
    assert torch.equal(scale[loc][kept], want[kept])
    got = kv.view(torch.uint8).reshape(-1, page_size, dim)
    assert torch.equal(got[loc][kept], codes.view(torch.uint8)[kept])
    assert (got[0] == 0x7F).all()
    assert scale[0].isnan().all()


def reference(q, rows, indices, indptr, sink, scale):
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = indptr.tolist()
    for token in range(len(q)):
        listed = rows[indices[bounds[token] : bounds[token + 1]].long()].double()
        if len(listed) == 0:
            continue
        logits = torch.cat([q[token].double() @ listed.T * scale, sink.double()[:, None]], 1)
        out[token] = logits.softmax(1)[:, :-1] @ listed
    return out


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8, query fp16"])
@pytest.mark.parametrize(
    ("heads", "dim", "lengths", "page_size"),
    [
        (16, 512, [1024] * 40, 1),
        (16, 512, [4000, 0, 1, 63, 64, 65, 129], 16),
        (128, 512, [1152] * 30, 1),
        (128, 512, [300, 0, 700], 4),
        (32, 512, [900, 5, 0], 2),
        (40, 256, [500, 0, 77, 1000], 3),
        (5, 192, [5000], 1),
        (8, 64, [10, 0, 3000] * 20, 64),
        (64, 128, [400] * 8, 32),
    ],
)
def test_attention(heads, dim, lengths, page_size, kind):
    slots = page_size * (12_000 // page_size)
    generator = torch.Generator("cuda").manual_seed(heads)
    dtype = torch.float16 if kind.endswith("fp16") else torch.bfloat16
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    # Slots of odd pages are not listed, and NaN. Behind the lists is room that must not be read.
    page = torch.randint(1, slots // page_size // 2, (sum(lengths),), generator=generator, device="cuda") * 2
    token = torch.randint(page_size, page.shape, generator=generator, device="cuda")
    indices = torch.cat([page * page_size + token, page.new_full((77,), 2**31 - 1)]).int()
    odd = torch.arange(slots, device="cuda") // page_size % 2 == 1
    q = torch.randn(len(lengths), heads + 1, dim + 8, generator=generator, device="cuda").to(dtype)[:, 1:, :dim]
    sink = torch.randn(heads, generator=generator, device="cuda")
    sink[0] = -math.inf
    scale = None
    if kind.startswith("fp8"):
        *_, kv, scale = pool(slots, dim, page_size)
        rows = kv.float() * scale.repeat_interleave(page_size, 0).repeat_interleave(64, 1)
        # The kernel for few heads uses the codes as they are; else rows are rounded to q's dtype, as the reference's.
        few = unified_kv._device(q.device).few and heads <= 32 and dim == 512
        rows = (rows if few else rows.to(dtype)).double()
        kv.view(torch.uint8)[odd] = 0xFF
        scale[1::2] = math.nan
    else:
        kv = torch.randn(slots, dim, generator=generator, device="cuda").to(dtype)
        rows = kv.double()
        kv[odd] = math.nan
    # Rows of FP8 differ by powers of two: smaller queries keep the softmax from picking only the largest.
    q = q / 8 if scale is not None else q
    for given in (sink, None):
        out = sparse_attention_unified_kv(q, kv, indices, indptr, given, kv_scale=scale, page_size=page_size)
        want = reference(
            q, rows, indices, indptr, sink if given is not None else torch.full_like(sink, -math.inf), dim**-0.5
        )
        bit = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
        size = rows[indices[: sum(lengths)].long()].square().mean().sqrt().item()
        torch.testing.assert_close(out.double(), want, rtol=bit, atol=2 * bit * size)


def test_offsets_past_32_bits():
    dim, slots = 512, 2**22 + 64
    kv = torch.full((slots, dim), math.nan, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(64, dim, device="cuda").bfloat16()
    kv[-64:] = rows
    q = torch.randn(2, 16, dim, device="cuda").bfloat16()
    indices = torch.arange(slots - 64, slots, dtype=torch.int32, device="cuda").repeat(2)
    indptr = torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")
    none = torch.full((16,), -math.inf, device="cuda")
    want = reference(q, rows, indices - (slots - 64), indptr, none, dim**-0.5)
    out = sparse_attention_unified_kv(q, kv, indices, indptr)
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dim", [128, 512])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_splits(splits, dim, monkeypatch):
    monkeypatch.setattr(unified_kv, "_splits", lambda *_: splits)
    test_attention(16, dim, [1000, 0, 64, 300], 4, "fp8")


@pytest.mark.parametrize(("heads", "aligned"), [(16, True), (16, False), (128, True)])
def test_every_code_of_e4m3(heads, aligned):
    """A row of its own for each code, and a NaN where the code is one."""
    dim = 512
    wide = torch.zeros(256 * dim + 8, dtype=torch.uint8, device="cuda")
    kv = wide[: 256 * dim] if aligned else wide[8:]
    kv.copy_(torch.arange(256, device="cuda").repeat_interleave(dim))
    kv = kv.view(E4M3).view(256, dim)
    scale = torch.full((256, dim // 64), 0.5, device="cuda")
    indices = torch.arange(256, dtype=torch.int32, device="cuda")
    indptr = torch.arange(257, dtype=torch.int32, device="cuda")  # one slot for each token
    q = torch.randn(256, heads, dim, device="cuda").bfloat16()
    out = sparse_attention_unified_kv(q, kv, indices, indptr, kv_scale=scale)
    want = (kv.double() * 0.5)[:, None].expand(-1, heads, -1)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=0, equal_nan=True)


def test_replay_from_a_graph():
    """Lists change between replays; the buffers have room for the longest."""
    dim, slots = 512, 4096
    kv = torch.randn(slots, dim, device="cuda").bfloat16()
    q = torch.randn(4, 16, dim, device="cuda").bfloat16()
    indices = torch.zeros(4 * 1024, dtype=torch.int32, device="cuda")
    indptr = torch.zeros(5, dtype=torch.int32, device="cuda")
    sink = torch.zeros(16, device="cuda")
    sparse_attention_unified_kv(q, kv, indices, indptr, sink)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention_unified_kv(q, kv, indices, indptr, sink)
    for lengths in ([1024] * 4, [3, 0, 500, 1]):
        indptr.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        indices.copy_(torch.randint(slots, indices.shape))
        graph.replay()
        torch.testing.assert_close(
            out.double(), reference(q, kv, indices, indptr, sink, dim**-0.5), rtol=2**-7, atol=2**-6
        )
