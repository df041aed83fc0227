"""The unified KV pool's kernels in the interpreter, against golden vectors and float64."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from layoutcheck import LayoutError, mode
from layoutcheck.kernels import unified_kv
from layoutcheck.kernels._unified_kv import attend_few_kernel
from layoutcheck.kernels.unified_kv import quantize_store_unified_kv, sparse_attention_unified_kv
from layoutcheck.layouts.unified_kv import UNIFIED_KV_SCALE

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS = {v["id"]: v for v in json.loads((GOLDEN / "index.json").read_text())["vectors"]}
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def golden(kind):
    return pytest.mark.parametrize("name", [n for n, v in VECTORS.items() if v["kind"] == kind])


def bits(array, dtype):
    return torch.from_numpy(array).view(dtype)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory that is NaN: an output that is not written, and scratch that is read before, show."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: empty(*size, **kw).fill_(math.nan))


# --- quantise and store -----------------------------------------------------------------------------------------------


@golden("quantize_fp8_group")
def test_quantize_golden(name):
    a = np.load(GOLDEN / f"{name}.npz")
    x = bits(a["x_bits"], torch.bfloat16 if a["x_bits"].dtype == np.uint16 else torch.float32)
    tokens, dim = x.shape
    loc = torch.arange(1, tokens + 1).flip(0)
    kv, scale = torch.zeros(tokens + 1, dim).to(E4M3), torch.full((tokens + 1, dim // 64), math.nan)
    quantize_store_unified_kv(x, loc, kv, scale)
    got_scale = scale[loc].double()
    decoded = (kv[loc].double().reshape(tokens, -1, 64) * got_scale[..., None]).reshape(tokens, dim)
    exact, want = x.double(), torch.from_numpy(a["scale"])
    rule = torch.from_numpy(a["rule"])
    of = {n: (rule == n) for n in range(5)}
    per = {n: m.repeat_interleave(64, 1) for n, m in of.items()}
    assert sum(m.sum() for m in of.values()) == rule.numel()

    torch.testing.assert_close(scale[loc][of[0]], want[of[0]], rtol=2**-22, atol=0)
    wide = got_scale.repeat_interleave(64, 1)
    bound = torch.maximum(exact.abs() / 16, wide * 2**-10) * (1 + 2**-10)
    assert ((decoded - exact).abs() <= bound)[per[0]].all()
    assert (got_scale > 0).all()
    assert got_scale.isfinite().all()
    assert (decoded[per[1]] == 0).all()
    assert ((decoded - exact).abs().reshape(tokens, -1, 64).amax(2) <= exact.reshape(tokens, -1, 64).abs().amax(2))[
        of[2]
    ].all()
    assert (decoded.isnan() == exact.isnan()).all(), "a NaN is that of its element alone"
    assert scale[0].isnan().all()
    assert (kv[0].double() == 0).all()


def quantized(x, page_size, dtype):
    """Payload and scales of whole pages, as the rule says, in torch."""
    largest = torch.finfo(dtype).max
    groups = x.float().reshape(-1, page_size, x.shape[1] // 64, 64)
    finite = groups.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    scale = (finite.amax((1, 3)) / largest).clamp(min=2.0**-126)
    codes = (groups * (1 / scale)[:, None, :, None]).clamp(-largest, largest).to(dtype)
    return codes.reshape(-1, page_size, x.shape[1]), scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("code", [E4M3, FNUZ])
@pytest.mark.parametrize(("page_size", "dim"), [(1, 192), (3, 128), (20, 320), (150, 64)])
def test_quantize_pages(page_size, dim, dtype, code):
    loc = torch.tensor([4, -1, 2, 0, 5])
    entries, pages = len(loc), 7
    generator = torch.Generator().manual_seed(page_size)
    # Rows that lie apart, of very different magnitude: a scale for each row would show.
    wide = torch.randn(entries * page_size, dim + 8, generator=generator) * 2.0 ** torch.randint(
        -9, 9, (entries * page_size, 1), generator=generator
    )
    wide[:, dim:] = math.nan
    rows = wide.to(dtype)[:, :dim]
    rows[:page_size, :64] = 0
    kv = torch.full((pages * page_size, dim), 0x7F, dtype=torch.uint8).view(code)
    scales = torch.full((pages, dim // 64 + 3), math.nan)
    quantize_store_unified_kv(rows, loc, kv, scales[:, : dim // 64], page_size=page_size)

    want_kv, want_scale = (
        torch.full((pages, page_size, dim), 0x7F, dtype=torch.uint8),
        scales.new_full(scales.shape, math.nan),
    )
    codes, scale = quantized(rows, page_size, code)
    for entry, page in enumerate(loc.tolist()):
        if page > 0:
            want_kv[page] = codes[entry].view(torch.uint8)
            want_scale[page, : dim // 64] = scale[entry]
    assert torch.equal(kv.view(torch.uint8).reshape(want_kv.shape), want_kv)
    assert torch.equal(scales.view(torch.int32), want_scale.view(torch.int32))


def test_nan_and_infinity_stay_in_their_element():
    rows = torch.full((4, 64), 0.5)
    rows[1, 3], rows[2, 5] = math.nan, -math.inf
    rows[3] = 0
    kv, scale = torch.zeros(8, 64).to(E4M3), torch.zeros(4, 1)
    quantize_store_unified_kv(rows[:2], torch.tensor([1]), kv, scale, page_size=2)
    quantize_store_unified_kv(rows[2:], torch.tensor([3]), kv, scale, page_size=2)
    decoded = kv.float() * scale.repeat_interleave(2, 0)
    assert decoded[3, 3].isnan()
    assert decoded[2:4].nan_to_num(nan=0.5).sub(0.5).abs().max() < 0.5 / 16
    # An infinity is the largest number there is. What stands beside it is lost, and is no NaN.
    assert kv[6, 5].float() == -448
    assert scale[3, 0] == torch.finfo(torch.float32).max / 448
    assert not decoded[6:].isnan().any()


def test_a_group_of_nan_alone_has_the_scale_of_zeros():
    rows = torch.ones(2, 128)
    rows[:, :64] = math.nan
    kv, scale = torch.zeros(4, 128).to(E4M3), torch.zeros(2, 2)
    quantize_store_unified_kv(rows, torch.tensor([1]), kv, scale, page_size=2)
    assert kv[2:, :64].float().isnan().all()
    assert (kv[2:, 64:].float() == 448).all()
    assert scale[1].tolist() == [2.0**-126, torch.tensor(1 / 448).item()]


def test_nothing_to_store():
    kv, scale = torch.zeros(6, 64).to(E4M3), torch.zeros(3, 1)
    quantize_store_unified_kv(torch.ones(0, 64), torch.ones(0, dtype=torch.int64), kv, scale, page_size=2)
    assert not kv.float().any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", dict(loc=torch.arange(6))),  # slots, not pages
        ("rows", dict(rows=torch.ones(5, 128))),  # not whole pages
        ("kv_scale", dict(kv_scale=torch.ones(12, 2))),  # scales for each token
        ("kv_scale", dict(kv_scale=torch.ones(3, 2))),  # for a pool that was smaller
        ("kv_scale", dict(kv_scale=torch.ones(4, 2, dtype=torch.float16))),
        ("loc", dict(loc=torch.tensor([1, 2], dtype=torch.int32))),
        ("kv", dict(kv=torch.zeros(12, 128, dtype=torch.bfloat16))),
        ("kv", dict(kv=torch.zeros(10, 128).to(E4M3))),
    ],
)
def test_refused_stores(name, change):
    good = dict(
        rows=torch.ones(6, 128), loc=torch.tensor([1, 2]), kv=torch.zeros(12, 128).to(E4M3), kv_scale=torch.ones(4, 2)
    )
    quantize_store_unified_kv(**good, page_size=3)
    with pytest.raises(LayoutError) as error:
        quantize_store_unified_kv(**{**good, **change}, page_size=3)
    assert name in str(error.value)


# --- attention --------------------------------------------------------------------------------------------------------


def reference(q, rows, indices, indptr, sink, scale):
    """Float64 attention; rows [slot, dim] are decoded."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(len(q)):
        listed = rows[indices[indptr[token] : indptr[token + 1]].long()].double()
        if len(listed) == 0:
            continue
        logits = q[token].double() @ listed.T * scale
        if sink is not None:
            logits = torch.cat([logits, sink.double()[:, None]], 1)
            listed = torch.cat([listed, torch.zeros_like(listed[:1])])
        out[token] = logits.softmax(1) @ listed
    return out


def close(got, want, rows):
    """Tolerance of the golden vectors, whose rows have a magnitude of 1, for bf16; fp16 has three bits more."""
    bit = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=bit, atol=2 * bit * rows.double().square().mean().sqrt().item())


@golden("sparse_attention_unified_kv")
def test_attention_golden(name):
    a, v = np.load(GOLDEN / f"{name}.npz"), VECTORS[name]
    fp8 = "kv_codes" in a
    out = sparse_attention_unified_kv(
        bits(a["q_bits"], torch.bfloat16),
        bits(a["kv_codes"], E4M3) if fp8 else bits(a["kv_bits"], torch.bfloat16),
        *(torch.from_numpy(a[n]) for n in ("kv_indices", "kv_indptr", "sink")),
        kv_scale=torch.from_numpy(a["kv_scale"]) if fp8 else None,
        softmax_scale=v["sizes"]["softmax_scale"],
    )
    allowed = v["tolerance"]["bf16"]
    torch.testing.assert_close(
        out.double(), torch.from_numpy(a["out"]), rtol=allowed["rtol"], atol=allowed["atol"], equal_nan=False
    )


class Problem:
    """Lists over a pool in which every row that is not listed, and every gap, is NaN."""

    def __init__(self, lengths, heads, dim, dtype, code=None, page_size=1, seed=0, pages=60):
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        slots = pages * page_size
        # Whole pages stay unlisted; a slot may be listed twice.
        allowed = np.concatenate([np.arange(p * page_size, (p + 1) * page_size) for p in range(0, pages, 2)])
        lists = [random.choice(allowed, n) for n in lengths]
        flat = np.concatenate([*lists, np.full(9, 2**31 - 1)])  # behind the lists: nothing may read it
        self.indices = torch.from_numpy(flat.astype(np.int32))
        self.indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        unlisted = torch.ones(slots, dtype=torch.bool)
        unlisted[self.indices[: self.indptr[-1]].long()] = False

        whole = torch.randn(len(lengths), heads + 2, dim + 5, generator=generator, dtype=torch.float32).to(dtype)
        self.q = whole[:, 1:-1, :dim]  # a slice of a fused projection
        self.scale = None
        values = torch.randn(slots, dim, generator=generator)
        if code is None:
            values[unlisted] = math.nan
            self.kv = values.to(dtype)
            self.rows = self.kv.double()
        else:
            apart = torch.full((pages, dim // 64 + 2), math.nan)
            self.scale = apart[:, : dim // 64]
            # Neighbouring pages and groups differ up to eight times: another page's scale would show.
            self.scale[:] = 2.0 ** (torch.rand(self.scale.shape, generator=generator) * 3 - 7)
            wide = self.scale.repeat_interleave(page_size, 0).repeat_interleave(64, 1)
            self.kv = (values / wide).clamp(-240, 240).to(code)
            self.rows = self.kv.double() * wide.double()
            self.kv.view(torch.uint8)[unlisted] = 0x80 if code is FNUZ else 0x7F
            self.scale[1::2] = math.nan
        self.sink = torch.randn(heads, generator=generator)
        self.sink[0] = -math.inf
        self.page_size, self.dim = page_size, dim

    def run(self, with_sink=True, **change):
        arguments = dict(
            q=self.q, kv=self.kv, indices=self.indices, indptr=self.indptr, sink=self.sink if with_sink else None,
            kv_scale=self.scale, page_size=self.page_size,
        )  # fmt: skip
        return sparse_attention_unified_kv(**{**arguments, **change})

    def check(self, with_sink=True):
        got = self.run(with_sink)
        want = reference(self.q, self.rows, self.indices, self.indptr, self.sink if with_sink else None, self.dim**-0.5)
        assert got.dtype is self.q.dtype
        close(got, want, self.rows[~self.rows.isnan().any(1)])


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("code", "page_size"), [(None, 1), (E4M3, 1), (E4M3, 3), (FNUZ, 4)])
def test_attention(code, page_size, dtype, sink):
    Problem([7, 0, 150], heads=5, dim=192, dtype=dtype, code=code, page_size=page_size).check(sink)


@pytest.mark.parametrize("code", [None, E4M3])
def test_many_heads(code):
    Problem([3, 70], heads=70, dim=64, dtype=torch.bfloat16, code=code, page_size=2).check()


@pytest.mark.parametrize("code", [None, E4M3])
def test_largest_rows(code):
    Problem([5, 0, 140], heads=2, dim=512, dtype=torch.bfloat16, code=code).check()


@pytest.fixture
def launched(monkeypatch):
    """The kernels that ran."""
    kernels = []
    launch = unified_kv.launch

    def note(kernel, *args, **kw):
        kernels.append(kernel)
        launch(kernel, *args, **kw)

    monkeypatch.setattr(unified_kv, "launch", note)
    return kernels


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits(splits, dim, sink, launched, monkeypatch):
    """More parts than a list has tiles, lists that end in any part, and one that is empty."""
    monkeypatch.setattr(unified_kv, "_splits", lambda *_: splits)
    Problem([200, 0, 65], heads=3, dim=dim, dtype=torch.bfloat16, code=E4M3, page_size=5).check(sink)
    assert len(launched) == (1 if splits == 1 else 2)


# --- few heads over FP8 rows of 512 have a kernel of their own --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "page_size"), [(1, 1), (16, 2), (17, 3), (32, 64)])
def test_few_heads(heads, page_size, dtype, launched):
    pages = 60 if page_size < 64 else 8
    problem = Problem([31, 32, 33, 1, 0, 100], heads, 512, dtype, E4M3, page_size, pages=pages)
    problem.check()
    assert launched[0] is attend_few_kernel


@pytest.mark.parametrize("width", [2, 4])
def test_either_order_of_what_is_summed(width, monkeypatch):
    """Which one is quick depends on Triton's version; both are right with any."""
    monkeypatch.setitem(unified_kv.FEW_BLOCKS, "K_WIDTH", width)
    Problem([70, 3], 5, 512, torch.bfloat16, E4M3, page_size=2).check()


def test_many_heads_over_the_largest_rows(launched):
    Problem([3, 130], heads=70, dim=512, dtype=torch.bfloat16, code=E4M3, page_size=2).check()
    assert launched[0] is unified_kv._attend_kernel
    assert unified_kv._attend_blocks(70, 512, True, 232_448)["STAGES"] > 0


@pytest.mark.parametrize(
    ("power", "dtype"), [*((p, torch.bfloat16) for p in (-140, -60, 0, 60, 120)), (0, torch.float16)]
)
def test_queries_of_any_size(power, dtype):
    """Heads of one query differ by up to 2^20, and softmax_scale makes up for the size of all."""
    problem = Problem([70], 4, 512, dtype, E4M3)
    small = problem.q * (2.0 ** torch.tensor([0.0, -3, -10, -20]))[:, None].to(dtype)
    scale = 512**-0.5 * 2.0 ** (-power if power > -100 else 100)
    want = reference(small, problem.rows, problem.indices, problem.indptr, problem.sink, 512**-0.5)
    if power == -140:  # subnormal: their products vanish
        want = reference(small * 0, problem.rows, problem.indices, problem.indptr, problem.sink, 512**-0.5)
    close(problem.run(q=small * 2.0**power, softmax_scale=scale), want, problem.rows[~problem.rows.isnan().any(1)])


@pytest.mark.parametrize("spread", [0, 20, 60])
def test_scales_of_any_size(spread):
    """Rows with scales 2^spread times those of others have no weight: the others are not lost beside them."""
    problem = Problem([90], 5, 512, torch.bfloat16, E4M3)
    large = problem.indices[:10].long()
    problem.kv[large] = torch.ones(512).to(E4M3)
    problem.scale[large] = 2.0 ** (spread - 4)
    problem.rows = problem.kv.double() * problem.scale.repeat_interleave(64, 1).double()
    q = (-problem.q.float().abs() * 2.0 ** (9 - spread)).bfloat16()
    sink = torch.full((5,), -math.inf)
    want = reference(q, problem.rows, problem.indices, problem.indptr, sink, 512**-0.5)
    others = problem.rows[[n for n in problem.indices[:90].tolist() if n not in large.tolist()]]
    assert want.abs().max() < 2 * others.abs().max()
    close(problem.run(q=q, sink=sink), want, others)


def test_negative_and_zero_scales():
    problem = Problem([50, 20], 3, 512, torch.bfloat16, E4M3)
    used = problem.indices[:70].long()
    problem.scale[used[::3], 2] *= -1
    problem.scale[used[::4], 5] = 0.0
    problem.rows = problem.kv.double() * problem.scale.repeat_interleave(64, 1).double()
    problem.check()


@pytest.mark.parametrize("group", range(8))
def test_few_heads_do_not_lose_a_nan(group):
    problem = Problem([40, 30], 3, 512, torch.bfloat16, E4M3)
    problem.kv.view(torch.uint8)[problem.indices[50], group * 64 + 7] = 0x7F
    out = problem.run()
    assert out[1].isnan().all()
    assert not out[0].isnan().any() or problem.indices[50] in problem.indices[:40]


def test_rows_that_are_not_aligned_have_the_general_kernel(launched):
    problem = Problem([40], 3, 512, torch.bfloat16, E4M3)
    wide = torch.zeros(problem.kv.numel() + 8, dtype=torch.uint8)
    start = 8 - wide.data_ptr() % 16 % 8
    apart = wide[start : start + problem.kv.numel()].view(E4M3).view(problem.kv.shape)
    apart.view(torch.uint8)[:] = problem.kv.view(torch.uint8)
    assert apart.data_ptr() % 16 != 0
    problem.kv = apart
    problem.check()
    assert launched[0] is unified_kv._attend_kernel


def test_few_long_lists_are_cut():
    assert unified_kv._splits(1, 64, 132) > 8
    assert unified_kv._splits(128, 64, 264) == 2
    assert unified_kv._splits(256, 18, 132) == 1
    assert unified_kv._splits(1, 0, 132) == 1


def test_a_listed_nan_is_not_lost():
    p = Problem([40, 30], heads=3, dim=64, dtype=torch.bfloat16, code=E4M3)
    p.kv.view(torch.uint8)[p.indices[50], 7] = 0x7F
    out = p.run()
    assert out[1].isnan().all()


def test_softmax_scale():
    p = Problem([20], heads=4, dim=64, dtype=torch.float16)
    want = reference(p.q, p.rows, p.indices, p.indptr, p.sink, 0.5)
    close(p.run(softmax_scale=0.5), want, p.rows[~p.rows.isnan().any(1)])
    with pytest.raises(AssertionError):
        close(p.run(), want, p.rows[~p.rows.isnan().any(1)])


def test_a_large_sink_takes_everything():
    p = Problem([20], heads=4, dim=64, dtype=torch.float16)
    p.sink[:] = 1e4
    assert (p.run() == 0).all()


def test_nothing_to_attend_to():
    p = Problem([0, 0], heads=4, dim=64, dtype=torch.bfloat16, code=E4M3)
    for sink in (True, False):
        assert (p.run(sink) == 0).all()
    assert (p.run(indices=p.indices[:0]) == 0).all()
    none = p.run(q=p.q[:0], indptr=p.indptr[:1])
    assert none.shape == (0, 4, 64)


def test_offsets_past_32_bits():
    """Rows behind element 2^31 are stored and read. The pool is never touched in between, so takes no memory."""
    dim, page_size, page = 512, 8, 2**19 + 3
    pages = page + 1
    kv = torch.from_numpy(np.empty((pages * page_size, dim), np.uint8)).view(E4M3)
    scale = torch.from_numpy(np.empty((pages, dim // 64), np.float32))
    rows = torch.randn(page_size, dim, generator=torch.Generator().manual_seed(1))
    quantize_store_unified_kv(rows, torch.tensor([page]), kv, scale, page_size=page_size)
    q = torch.randn(1, 2, dim, dtype=torch.float16)
    indices = torch.arange(page * page_size, pages * page_size, dtype=torch.int32)
    indptr = torch.tensor([0, page_size], dtype=torch.int32)
    assert int(indices[0]) * dim > 2**31
    out = sparse_attention_unified_kv(q, kv, indices, indptr, kv_scale=scale, page_size=page_size)
    codes, scales = quantized(rows, page_size, E4M3)
    decoded = codes[0].double() * scales[0].double().repeat_interleave(64)
    close(out, reference(q, decoded, indices - indices[0], indptr, None, dim**-0.5), decoded)


def test_round_trip():
    p = Problem([9, 33], heads=3, dim=128, dtype=torch.bfloat16, code=E4M3, page_size=4)
    rows = torch.randn(p.kv.shape, generator=torch.Generator().manual_seed(2))
    loc = torch.arange(len(p.scale))
    quantize_store_unified_kv(rows, loc, p.kv, p.scale, page_size=4)
    decoded = p.kv.double() * p.scale.double().repeat_interleave(4, 0).repeat_interleave(64, 1)
    used = p.indices[: p.indptr[-1]].long()
    p.indices[: p.indptr[-1]] = torch.where(used < 4, used + 4, used).int()  # page 0 is not written
    close(p.run(), reference(p.q, decoded, p.indices, p.indptr, p.sink, 128**-0.5), rows)


@triton.jit
def _scale_offsets(out, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    slot, group = tl.arange(0, 16)[:, None], tl.arange(0, 4)[None, :]
    at = unified_kv.slot_scale_offset(slot, group, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE)
    tl.store(out + slot * 4 + group, at)


def test_scales_of_slots_are_those_of_their_page():
    got = torch.zeros(16, 4, dtype=torch.int64)
    _scale_offsets[(1,)](got, PAGE_SIZE=3, PAGE_STRIDE=6)
    of_page = UNIFIED_KV_SCALE(page=6, dim=256, row_gap=2)
    slot, group = torch.arange(16)[:, None], torch.arange(4)
    assert torch.equal(got, of_page.offset(page=slot // 3, group=group))


# --- what must be refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kv_scale=torch.ones(240, 3)), ("kv_scale", "240", "60")),  # one row a token
        (dict(kv_scale=torch.ones(60 * 3)), ("kv_scale",)),  # flat
        (dict(kv_scale=torch.ones(60, 4)), ("kv_scale", "4", "3")),  # a group too many
        (dict(kv_scale=torch.ones(60, 2)), ("kv_scale", "2", "3")),
        (dict(kv_scale=torch.ones(40, 3)), ("kv_scale", "40", "60")),  # of a pool that has grown since
        (dict(kv_scale=torch.ones(60, 3, dtype=torch.float16)), ("kv_scale", "float16", "float32")),
        (dict(kv_scale=None), ("kv_scale",)),
        (dict(kv_scale=torch.ones(3, 60).T), ("kv_scale",)),  # transposed
        (dict(page_size=1), ("kv_scale", "60", "240")),
        (dict(page_size=0), ("page_size",)),
        (dict(page_size=7), ("page_size",)),
        (dict(kv=torch.ones(240, 192, dtype=torch.bfloat16)), ("kv_scale",)),  # scales over a pool that has none
        (dict(kv=torch.ones(240, 192, dtype=torch.float16), kv_scale=None), ("q", "kv", "float16", "bfloat16")),
        (dict(kv=torch.ones(240, 128).to(E4M3)), ("kv",)),
        (dict(kv=torch.ones(240, 200).to(E4M3)[:, :192]), ("kv",)),  # rows apart
        (dict(q=torch.ones(2, 5, 100, dtype=torch.bfloat16)), ("dim",)),
        (dict(q=torch.ones(2, 5, 192)), ("q",)),
        (dict(indices=torch.ones(30, dtype=torch.int64)), ("indices", "int32")),
        (dict(indptr=torch.zeros(2, dtype=torch.int32)), ("indptr", "3", "2")),
        (dict(sink=torch.ones(6)), ("sink", "6", "5")),
    ],
)
def test_refused_calls(change, words):
    p = Problem([12, 18], heads=5, dim=192, dtype=torch.bfloat16, code=E4M3, page_size=4)
    with pytest.raises(LayoutError) as error:
        p.run(**change)
    for word in words:
        assert word in str(error.value)


def test_values_are_checked_where_asked_for():
    p = Problem([12, 18], heads=5, dim=64, dtype=torch.bfloat16)
    indices = p.indices[:30]
    with mode("values"):
        p.run(indices=indices)
        with pytest.raises(LayoutError, match="indices"):
            p.run(indices=torch.where(torch.arange(30) == 4, 60, indices).int())
        with pytest.raises(LayoutError, match="indptr"):
            p.run(indices=indices, indptr=torch.tensor([0, 31, 30], dtype=torch.int32))
        with pytest.raises(LayoutError, match="indptr"):
            p.run(indices=indices, indptr=torch.tensor([0, 12, 31], dtype=torch.int32))
        p.run(indices=indices, indptr=torch.tensor([0, 12, 20], dtype=torch.int32))  # room for more is fine
