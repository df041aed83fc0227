"""Paged attention in the interpreter, against float64 references that gather slot by slot and use no layout."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from layoutcheck import LayoutError, mode
from layoutcheck.kernels import _interpreter
from layoutcheck.kernels._interpreter import correct_interpreter
from layoutcheck.kernels.paged import paged_attention

module = sys.modules[paged_attention.__module__]
ROOM = 227 * 1024
GOLDEN = Path(__file__).parents[1] / "golden"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Corrected, and with every buffer that the wrapper allocates full of NaN."""
    assert correct_interpreter()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def factor(byte):
    """2^(byte - 127) in float64, NaN for 0xFF."""
    one = torch.ones_like(byte, dtype=torch.float64)
    return torch.where(byte == 255, torch.nan, torch.ldexp(one, byte.int() - 127))


def dequantise(payload, byte):
    return payload.double() * factor(byte).repeat_interleave(32, -1)


@dataclass
class Problem:
    """One call and what it should return. ``slack`` is what rounding the probabilities may do to each output."""

    arguments: tuple
    options: dict
    expected: torch.Tensor
    slack: torch.Tensor

    def check(self, probability: float | None = None, **options):
        out = paged_attention(*self.arguments, **self.options | options)
        coarse = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
        probability = coarse if probability is None else probability
        assert out.shape == self.expected.shape
        assert out.isfinite().all()
        # Beside the two roundings, fp32 logits of a few hundred terms: 2^-16 of a probability.
        bound = coarse * self.expected.abs() + (probability + 2.0**-16) * self.slack + 2.0**-24
        worst = ((out.double() - self.expected).abs() / bound).max().item()
        assert worst <= 1.0, worst
        return out


def problem(
    kind, seq_lens, queries=None, *, q_head=4, head=2, head_dim=64, v_head_dim=32, page_size=96, window=None, cap=None,
    edit=None, seed=0,
):  # fmt: skip
    """Random rows in scattered pages. Slots that no query reads, their scales and spare table entries are poison."""
    rng = torch.Generator().manual_seed(seed)
    decode = queries is None
    queries = [1] * len(seq_lens) if decode else queries
    needed = [-(-n // page_size) for n in seq_lens]
    pages, max_pages = sum(needed) + 3, max([*needed, 1]) + 1
    order = (torch.randperm(pages - 1, generator=rng) + 1).tolist()
    table = torch.full((len(seq_lens), max_pages), 2**30, dtype=torch.int32)
    for s, n in enumerate(needed):
        table[s, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    slots, tokens = pages * page_size, sum(queries)

    def rows(n, heads, dim):
        return torch.randn(n, heads, dim, generator=rng)

    def scales(n, heads, dim):
        return torch.randint(121, 131, (n, heads, dim // 32), generator=rng, dtype=torch.uint8)

    mx = kind in ("interleaved", "flat")
    dtype = E4M3 if mx else kind
    parts = dict(
        q=rows(tokens, q_head, head_dim).to(dtype),
        k=rows(slots, head, head_dim).to(dtype),
        v=rows(slots, head, v_head_dim).to(dtype),
    )
    if mx:
        parts |= dict(
            qs=scales(tokens, q_head, head_dim), ks=scales(slots, head, head_dim), vs=scales(slots, head, v_head_dim)
        )

    def slot(s, j):
        return int(table[s, j // page_size]) * page_size + j % page_size

    if edit:
        edit(parts, slot)
    wide = {n: dequantise(parts[n], parts[n + "s"]) if mx else parts[n].double() for n in "qkv"}

    expected = torch.zeros(tokens, q_head, v_head_dim, dtype=torch.float64)
    slack = torch.zeros_like(expected)
    read = torch.zeros(slots, dtype=torch.bool)
    token = 0
    for s, n in enumerate(seq_lens):
        for i in range(queries[s]):
            last = n - queries[s] + i
            first = 0 if window is None else max(0, last - window + 1)
            at = torch.tensor([slot(s, j) for j in range(first, last + 1)])
            for h in range(q_head if len(at) else 0):
                read[at] = True
                logits = wide["k"][at, h // (q_head // head)] @ wide["q"][token, h] * head_dim**-0.5
                if cap is not None:
                    logits = cap * torch.tanh(logits / cap)
                p = torch.softmax(logits, 0)
                v = wide["v"][at, h // (q_head // head)]
                expected[token, h], slack[token, h] = p @ v, p @ v.abs()
            token += 1

    for name in ("k", "v"):
        raw = parts[name].view(torch.uint8 if mx else torch.int16)
        raw[~read] = (0x7F if name == "k" else 0xFF) if mx else -1
        if mx:
            parts[name + "s"][~read] = 0xFF
    options = dict(page_size=page_size, window=window, soft_cap=cap)
    if mx:
        options |= dict(q_scale=parts["qs"].view(E8M0), scale_layout=kind)
        for name in ("ks", "vs"):
            flat = parts[name]
            if kind == "interleaved":
                packed = torch.full((pages, head, 32, page_size // 32, flat.shape[2]), 0xFF, dtype=torch.uint8)
                for slot in range(slots):
                    page, t = divmod(slot, page_size)
                    packed[page, :, t % 32, t // 32] = flat[slot]
                flat = packed
            options[f"{name[0]}_scale"] = flat.view(E8M0)
    if not decode:
        options["query_start"] = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return Problem((parts["q"], parts["k"], parts["v"], table, lengths), options, expected, slack)


MX_SPREAD = 2.0**-11  # fp16 probabilities
MX_TILES = 2.0**-8  # bf16 probabilities


@pytest.mark.parametrize(
    ("vector", "splits"), [("paged-mxfp8-q4-kv2-d128-dv128", 1), ("paged-mxfp8-q4-kv2-d128-dv64-poison", 2)]
)
def test_golden(vector, splits, monkeypatch):
    monkeypatch.setattr(module, "_splits", lambda *_: splits)
    a = {name: torch.from_numpy(array) for name, array in np.load(GOLDEN / f"{vector}.npz").items()}
    scales = {name: a[name].view(E8M0) for name in ("q_scale", "k_scale", "v_scale")}
    caches = (a[name].view(E4M3) for name in ("q_codes", "k_cache", "v_cache"))
    out = paged_attention(*caches, a["page_table"], a["seq_lens"], **scales, softmax_scale=0.022097086533904076)
    # The vectors' own tolerance for bf16 output: atol is 2^-7 of the largest value of V.
    atol = {64: 0.0703125, 128: 0.09375}[out.shape[2]]
    assert out.dtype == torch.bfloat16
    assert ((out.double() - a["out"]).abs() <= atol + 0.0078125 * a["out"].abs()).all()
    # Ours is better than that: probabilities are fp16, and only the output is rounded to bf16.
    assert ((out.double() - a["out"]).abs() <= 2.0**-11 + 2.0**-8 * a["out"].abs()).all()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, dict(q_head=4, head=2, head_dim=64, v_head_dim=32, page_size=16)),
        (torch.float16, dict(q_head=6, head=2, head_dim=80, v_head_dim=48, page_size=128)),
        (torch.bfloat16, dict(q_head=3, head=3, head_dim=32, v_head_dim=128, page_size=64, window=70)),
        (torch.float16, dict(q_head=16, head=1, head_dim=96, v_head_dim=64, page_size=7, cap=1.5)),
        (torch.bfloat16, dict(q_head=40, head=2, head_dim=48, v_head_dim=80, page_size=1, window=3, cap=0.7)),
    ],
)
def test_decode(dtype, shape):
    problem(dtype, [0, 1, 64, 150], **shape).check()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("interleaved", dict(q_head=4, head=2, head_dim=128, v_head_dim=64, page_size=64)),
        ("interleaved", dict(q_head=6, head=2, head_dim=96, v_head_dim=32, page_size=96, window=50)),
        ("interleaved", dict(q_head=2, head=2, head_dim=64, v_head_dim=128, page_size=32, cap=2.0)),
        ("flat", dict(q_head=8, head=1, head_dim=32, v_head_dim=96, page_size=128)),
        ("flat", dict(q_head=4, head=4, head_dim=64, v_head_dim=64, page_size=5, window=9, cap=1.0)),
    ],
)
def test_decode_mxfp8(kind, shape):
    problem(kind, [1, 0, 64, 130], **shape).check(MX_SPREAD)


def moved_by_a_byte(scale):
    """The same scales where no number wider than a byte can be loaded."""
    whole = torch.zeros(scale.numel() + 1, dtype=torch.uint8, device=scale.device)
    whole[1:] = scale.view(torch.uint8).flatten()
    return whole[1:].view(E8M0).view(scale.shape)


def noted(monkeypatch):
    """What attention kernels are launched with from now on."""
    launched, launch = [], module.launch

    def noting(kernel, *arguments, **meta):
        if kernel is module._attend_kernel:
            launched.append(meta)
        launch(kernel, *arguments, **meta)

    monkeypatch.setattr(module, "launch", noting)
    return launched


@pytest.mark.parametrize("kind", ["interleaved", "flat"])
def test_programs_of_one_tile(kind, monkeypatch):
    launched = noted(monkeypatch)
    problem(kind, [600, 130], head_dim=128, v_head_dim=128, page_size=128).check()
    (meta,) = launched
    assert (meta["BLOCK_N"], meta["num_stages"], meta["SPLITS"]) == (64, 1, 12)
    assert meta["AHEAD"]


@pytest.mark.parametrize("kind", ["interleaved", "flat"])
@pytest.mark.parametrize("queries", [None, [3, 40]])
@pytest.mark.parametrize(
    ("dims", "words"), [((128, 256), ("int32", "int64")), ((64, 128), ("int16", "int32")), ((96, 128), (None, "int32"))]
)
def test_scales_of_a_key_are_one_number_where_they_are_aligned(dims, words, kind, queries, monkeypatch):
    """By hand a tile ahead where Triton would not load them ahead: of fewer than 4 bytes, or one by one."""
    launched = noted(monkeypatch)
    made = problem(kind, [150, 60], queries, head_dim=dims[0], v_head_dim=dims[1])
    want = made.check()
    for name in ("k_scale", "v_scale"):
        made.options[name] = moved_by_a_byte(made.options[name])
    assert torch.equal(made.check(), want)
    aligned, moved = launched
    assert tuple(w and w.name for w in (aligned["K_WORD"], aligned["V_WORD"])) == words
    assert moved["K_WORD"] is moved["V_WORD"] is None
    assert aligned["AHEAD"] == (queries is None and words != ("int32", "int64"))
    assert moved["AHEAD"] == (queries is None)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, "interleaved", "flat"])
@pytest.mark.parametrize("window", [None, 33])
def test_extend(kind, window):
    """A chunk over a cached prefix, a whole prompt, a sequence with no new token, an empty one, one decode token."""
    shape = dict(q_head=3, head=1, head_dim=64, v_head_dim=96, page_size=32 if window else 64, window=window)
    made = problem(kind, [80, 40, 50, 0, 17], [20, 40, 0, 0, 1], **shape)
    assert not module._sizes(3, 64, 96, 13, True, ROOM)["SPREAD"]
    made.check(MX_TILES if isinstance(kind, str) else None)


def counted(monkeypatch, name):
    """What a function of the module was called with."""
    seen, original = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a: (seen.append(a), original(*a))[1])
    return seen


@pytest.mark.parametrize("kind", ["interleaved", "flat"])
@pytest.mark.parametrize("options", [dict(window=21), dict(cap=1.5), dict()])
def test_whole_prompts_are_dequantised_first(kind, options, monkeypatch):
    """As many rows of q as of keys; a prefix that is cached, a prompt that fills its page, an empty sequence."""
    copies = counted(monkeypatch, "expanded")
    made = problem(
        kind, [80, 64, 0], [60, 64, 0], q_head=6, head=1, head_dim=96, v_head_dim=64, page_size=32, **options
    )
    made.check(MX_TILES)
    assert [len(a) > 3 for a in copies] == [False, True, True]  # q, then K and V by their pages


def test_what_is_dequantised_first(monkeypatch):
    copies = counted(monkeypatch, "expanded")
    many = module._sizes(4, 128, 128, 64, True, ROOM)
    assert module._worth_expanding(1024, 1024, many, False)
    assert not module._worth_expanding(1024, 1025, many, False)  # would take more memory than the call has otherwise
    assert not module._worth_expanding(1024, 1024, many, True)
    assert not module._worth_expanding(1024, 64, module._sizes(4, 128, 128, 1, True, ROOM), False)
    problem("flat", [80, 64], [4, 20], q_head=3, head=1, head_dim=64, page_size=64).check(MX_TILES)
    problem(torch.bfloat16, [20], [20], q_head=6, head=1, head_dim=32, page_size=16).check()
    assert not copies


@pytest.mark.skipif(
    not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"), reason="the interpreter of Triton before 3.8"
)
@pytest.mark.parametrize("kind", ["interleaved", "flat"])
def test_extend_by_the_block_scaled_product_of_the_hardware(kind, monkeypatch):
    products = []
    scaled = _interpreter._dot_scaled
    monkeypatch.setattr(_interpreter, "_dot_scaled", lambda *a: products.append(a) or scaled(*a))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", lambda *a: _interpreter._dot_scaled(*a))
    monkeypatch.setattr(module, "_block_scaled", lambda device: True)
    made = problem(kind, [80, 40, 0], [20, 40, 0], q_head=3, head=1, head_dim=96, v_head_dim=64, page_size=64)
    made.check(MX_TILES)
    assert products


def test_which_hardware_has_the_block_scaled_product(monkeypatch):
    def on(**properties):
        module._block_scaled.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
        return module._block_scaled(torch.device("cuda", 0))

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(module, "TRITON", (3, 9))
    assert [on(major=major) for major in (8, 9, 10, 12)] == [False, False, True, True]
    monkeypatch.setattr(module, "TRITON", (3, 8))
    assert [on(major=major) for major in (10, 12)] == [False, True]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    names = ("gfx942:sramecc+", "gfx950:sramecc+")
    assert [on(major=9, gcnArchName=name) for name in names] == [False, True]
    module._block_scaled.cache_clear()


@pytest.mark.parametrize("kind", [torch.bfloat16, "interleaved"])
@pytest.mark.parametrize("splits", [2, 5])
def test_verify_splits(kind, splits, monkeypatch):
    """Few new tokens over a long prefix; with more splits than tiles, some are empty."""
    monkeypatch.setattr(module, "_splits", lambda *_: splits)
    made = problem(kind, [150, 3, 0, 64], [3, 3, 0, 2], head=2, q_head=2, page_size=64)
    assert module._sizes(1, 64, 32, 2, True, ROOM)["SPREAD"]
    made.check(MX_SPREAD if isinstance(kind, str) else None)


def test_splits_join_to_the_same(monkeypatch):
    made = problem("interleaved", [150, 70], q_head=2, head=1, page_size=32, cap=3.0)
    monkeypatch.setattr(module, "_splits", lambda *_: 1)
    whole = made.check(MX_SPREAD)
    monkeypatch.setattr(module, "_splits", lambda *_: 3)
    # Two roundings of the output, and one of the probabilities on each side.
    bound = 2.0**-7 * whole.double().abs() + 2 * MX_SPREAD * made.slack
    assert ((made.check(MX_SPREAD).double() - whole.double()).abs() <= bound).all()


def test_queries_and_table_may_be_slices():
    made = problem(torch.bfloat16, [70, 20], page_size=64)
    q, k, v, table, lengths = made.arguments
    wide = torch.full((2, 9, 64), torch.nan, dtype=q.dtype)
    wide[:, 3:7] = q
    wide_table = torch.full((2, 7), -1, dtype=torch.int32)
    wide_table[:, : table.shape[1]] = table
    made.arguments = (wide[:, 3:7], k, v, wide_table[:, : table.shape[1]], lengths)
    made.check()


# --- range -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [None, [1, 40]])
@pytest.mark.parametrize(("large", "small"), [("k", "q"), ("q", "k")])
def test_largest_blocks_cancel(large, small, queries):
    """The block of the largest finite bf16 decodes to 2^128; times values near 2^-127 the logits are ordinary."""

    def edit(parts, slot):
        parts[large + "s"][..., 0], parts[small + "s"][..., 0] = 247, 0  # 2^120 and 2^-127
        parts[large][..., :32] = 0.0
        parts[large][..., 7] = 256.0
        parts[small][..., :32] = (parts[small][..., :32].float().abs().clamp(0.25, 1.0) * 16.0).to(E4M3)

    made = problem("interleaved", [5, 66], queries, edit=edit)
    assert module._sizes(2, 64, 32, 21, True, ROOM)["SPREAD"] is False
    made.check(MX_SPREAD if queries is None else MX_TILES)


@pytest.mark.parametrize("queries", [None, [1, 40]])
def test_largest_values(queries):
    """Means of values close to the largest of bf16 are finite, though their sums are not."""

    def edit(parts, slot):
        parts["vs"][:] = 246  # 2^119
        parts["v"] = (parts["v"].float().abs() + 440.0).to(E4M3)

    made = problem("interleaved", [40, 130], queries, head_dim=32, edit=edit)
    assert made.expected.max() > 2.0**127
    made.check(MX_SPREAD if queries is None else MX_TILES)


@pytest.mark.parametrize("queries", [None, [1, 40]])
def test_zero_blocks_with_large_scales(queries):
    """A zero block may carry any scale but NaN: twice 2^127 is not finite, zero times it is zero."""

    def edit(parts, slot):
        for name in "qk":
            parts[name][..., 32:] = 0.0
            parts[name + "s"][..., 1] = 254

    made = problem("flat", [3, 50], queries, q_head=2, head=1, head_dim=64, edit=edit)
    made.check(MX_SPREAD if queries is None else MX_TILES)


def test_values_of_very_different_scale():
    """A huge value that gets next to no probability leaves the others as they are."""

    def edit(parts, slot):
        parts["qs"][:], parts["ks"][slot(1, 3)] = 127, 127
        parts["k"][slot(1, 3)] = (parts["q"][1].float().sign() * -8).to(E4M3)  # logits of about -8 * 64 * 0.8 / 8 = -50
        parts["vs"][slot(1, 3)] = 167  # 2^40
        parts["vs"][slot(1, 7)] = 87

    problem("flat", [3, 100], q_head=2, head=2, edit=edit).check(MX_SPREAD)


@pytest.mark.parametrize("queries", [None, [1, 40]])
def test_live_nan_stays_visible(queries):
    """Only what is not read is silenced: a NaN block makes the output of queries that read it NaN, of its KV head."""
    made = problem("flat", [30, 70], queries, q_head=4, head=2)
    slot = int(made.arguments[3][1, 0]) * 96 + 2
    made.options["v_scale"].view(torch.uint8)[slot, 1, 0] = 0xFF
    out = paged_attention(*made.arguments, **made.options)
    assert out[-1, 2:].isnan().all()
    assert out[:, :2].isfinite().all()
    assert out[0].isfinite().all()


# --- edges and contract ----------------------------------------------------------------------------------------------


def test_nothing_to_do():
    made = problem("interleaved", [5], page_size=32)
    q, k, v, table, lengths = made.arguments
    options = made.options | dict(q_scale=made.options["q_scale"][:0])
    out = paged_attention(q[:0], k, v, table[:0], lengths[:0], **options)
    assert out.shape == (0, 4, 32)
    made = problem(torch.bfloat16, [0, 0])
    assert (made.check() == 0).all()


@pytest.mark.parametrize("missing", ["q_scale", "k_scale", "v_scale"])
def test_scales_are_required_over_mxfp8(missing):
    made = problem("interleaved", [5], page_size=32)
    made.options[missing] = None
    with pytest.raises(LayoutError, match=missing):
        paged_attention(*made.arguments, **made.options)


def _with(made, index, tensor):
    return (*made.arguments[:index], tensor, *made.arguments[index + 1 :])


def test_contract():
    plain, scaled = problem(torch.bfloat16, [5], page_size=32), problem("interleaved", [5], page_size=32)
    q, _, v, table, _ = plain.arguments

    def refused(match, arguments=plain.arguments, options=plain.options):
        with pytest.raises(LayoutError, match=match):
            paged_attention(*arguments, **options)

    refused("q_scale", options=plain.options | dict(q_scale=scaled.options["q_scale"]))
    refused("q must be bfloat16", _with(plain, 0, q.half()))
    refused("v_cache must be bfloat16", _with(plain, 2, v.half()))
    refused("q must be float8_e4m3fn", _with(scaled, 0, q), scaled.options)
    refused("q_head", _with(plain, 0, torch.zeros(1, 3, 64, dtype=q.dtype)))
    refused("token", _with(plain, 0, torch.zeros(2, 4, 64, dtype=q.dtype)))
    refused("head_dim", _with(plain, 0, torch.zeros(1, 4, 32, dtype=q.dtype)))
    refused("page_table", _with(plain, 3, table.long()))
    refused("seq_lens", _with(plain, 4, torch.tensor([5, 5], dtype=torch.int32)))
    refused("page_size", options=plain.options | dict(page_size=31))
    refused("window", options=plain.options | dict(window=0))
    refused("soft_cap", options=plain.options | dict(soft_cap=0.0))
    refused("scale", scaled.arguments, scaled.options | dict(scale_layout="flat"))
    refused("k_scale", scaled.arguments, scaled.options | dict(k_scale=scaled.options["k_scale"][:-1]))
    refused("query_start", options=plain.options | dict(query_start=torch.zeros(3, dtype=torch.int32)))


def test_values_mode():
    """A table row that is too short for its sequence, a page that the pool does not have, an indptr that ends early."""
    made = problem(torch.bfloat16, [5], [3], page_size=32)
    table = made.arguments[3].clamp(max=1)

    def refused(match, arguments, **options):
        with mode("values"), pytest.raises(LayoutError, match=match):
            paged_attention(*arguments, **made.options | options)

    made.arguments = _with(made, 3, table)
    refused("seq_lens", _with(made, 4, torch.tensor([65], dtype=torch.int32)))
    refused("page_table", _with(made, 3, table + 100))
    refused("query_start", made.arguments, query_start=torch.tensor([0, 2], dtype=torch.int32))


def test_the_grid_follows_from_shapes():
    assert module._splits(32 * 8, 8192, False) == 8
    assert module._splits(32 * 8, 8192, True) == 4
    assert module._splits(8, 8192, False) == 32
    assert module._splits(8, 8192, True) == 128
    for spread in (False, True):
        assert module._splits(10**6, 8192, spread) == 1
        assert module._splits(8, 63, spread) == 1
