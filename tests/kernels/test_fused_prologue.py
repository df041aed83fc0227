"""The fused prologue in the interpreter: against float64, the golden stores, poison, and wrong buffers from the wild.

Bytes moved (conv caches, windows) and bytes quantised from equal bf16 are compared for equality. A bf16 result may be
one ulp off: the kernel sums in fp32, the reference in float64, and where the sum lies within that error of the middle
between two bf16 values it may round to the other one. What is computed from a rounded value and rounded again (k, and q
times its factor) may then be two off: an ulp of 1.0 is two of 1.9. That is rare, so how many may differ is bounded too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import layoutcheck.kernels.fused_prologue as fp
from layoutcheck import LayoutError, mode
from layoutcheck.kernels.fused_prologue import fused_prologue_decode, fused_prologue_extend, fused_prologue_verify

GOLDEN = Path(__file__).parents[1] / "golden"
E4M3, E8M0, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16
NAN = float("nan")


# --- reference, in float64 --------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, bits: int, smallest: int) -> torch.Tensor:
    """float64 rounded once, to nearest even, to ``bits`` of significand; normal numbers begin at 2**smallest."""
    exponent = torch.frexp(x)[1] - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=smallest) - (bits - 1))
    return torch.where(torch.isfinite(x), torch.round(x / step) * step, x)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return rounded(x.double(), 8, -126)


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    heads = x.reshape(len(x), -1, 128)
    inverse = 1 / torch.sqrt((heads**2).mean(-1, keepdim=True) + eps)
    return bf16(heads * inverse * gamma.double()).reshape(x.shape)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload bytes of x's shape and scale bytes (..., size / 32) of bf16 values."""
    blocks = x.double().reshape(*x.shape[:-1], -1, 32)
    significand, exponent = torch.frexp(blocks.abs().amax(-1))
    scale = (exponent - 9 + (significand > 0.875).int()).clamp(-127, 127)  # 448 is 0.875 * 2^9
    nan = blocks.isnan().any(-1)
    payload = rounded(torch.ldexp(blocks, -scale[..., None]), 4, -6).clamp(-448, 448)
    payload = torch.where(nan[..., None], NAN, payload).float().to(E4M3).view(torch.uint8)
    return payload.reshape(x.shape), torch.where(nan, 255, scale + 127).to(torch.uint8)


def window(x: torch.Tensor, history: torch.Tensor, first: int, token: int) -> torch.Tensor:
    """The raw rows up to a token, whose sequence begins at ``first``: (width, dkv)."""
    return torch.cat([history, x[first : token + 1]])[-history.shape[0] - 1 :]


def convolved(windows: torch.Tensor, weight: torch.Tensor, silu: bool, residual: bool) -> torch.Tensor:
    rows = windows.double()
    y = (rows * weight.double().T).sum(1)
    if silu:
        y = y / (1 + torch.exp(-y))
    return bf16(y + rows[:, -1] if residual else y)


def accumulated(windows: torch.Tensor, weight: torch.Tensor, residual: bool) -> torch.Tensor:
    """What fp32 may lose of a convolution: 8 roundings of its terms, which may cancel to something much smaller."""
    terms = (windows.double() * weight.double().T).abs().sum(1)
    return 8 * 2.0**-24 * (terms + windows[:, -1].double().abs() if residual else terms)


def assert_rounded(
    got: torch.Tensor, want: torch.Tensor, *, twice: bool = False, slack: torch.Tensor | float = 0
) -> None:
    """One bf16 ulp where a value was rounded once, two where twice, beyond the ``slack`` of its fp32 arithmetic."""
    assert not got.isnan().any()
    exponent = torch.frexp(want.double())[1].clamp(min=-125)
    ulp = torch.ldexp(torch.ones_like(want, dtype=torch.float64), exponent - 8)
    off = (got.double() - want.double()).abs()
    assert (off <= (2 if twice else 1) * ulp + slack).all()
    assert (off > slack).sum() <= 1 + off.numel() // 500


# --- a problem --------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Arguments of one call. No two sizes are equal. What must not be read is NaN, and so is what is written."""

    mode: str
    lengths: list[int]  # tokens of each sequence
    mxfp8: bool = True
    width: int = 4
    silu: bool = True
    residual: bool = True
    factor: bool = True
    track: bool = False
    heads: int = 2
    q_heads: int = 3
    page_size: int = 96
    pages: int = 5
    seed: int = 0
    index_dtype: torch.dtype = torch.int32
    args: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(BF16)

        self.dq, self.dkv = self.q_heads * 128, self.heads * 128
        tokens, seqs, slots = sum(self.lengths), len(self.lengths), self.page_size * self.pages
        self.v_offset, self.q_offset = 8, 8 + self.dkv + 16
        self.k_offset = self.q_offset + self.dq
        row = self.k_offset + self.dkv + 24
        qkvr = torch.full((tokens, row + 40), NAN, dtype=BF16)[:, :row]
        for start, size in ((self.q_offset, self.dq), (self.k_offset, self.dkv), (self.v_offset, self.dkv)):
            qkvr[:, start : start + size] = draw(tokens, size) * 2
        pool = 2 * seqs + 6  # enough for each sequence to be tracked in a slot of its own
        index = torch.randperm(pool, generator=g)[:seqs]
        mask = torch.arange(seqs) % 3 != 1
        index[seqs // 2] = -1 if seqs > 2 else index[seqs // 2]
        self.cu = torch.tensor([0, *np.cumsum(self.lengths)])
        # K and V of the conv cache interleaved, as one buffer of an engine may hold them.
        conv = torch.full((pool, self.width - 1, 2 * self.dkv + 32), NAN, dtype=BF16)
        for i, m in zip(index.tolist(), mask.tolist(), strict=True):
            if i >= 0 and m:
                conv[i, :, : 2 * self.dkv] = draw(self.width - 1, 2 * self.dkv)
        loc = 1 + torch.randperm(slots - 1, generator=g)[:tokens]
        loc[:2] = torch.tensor([0, -7])[: len(loc[:2])] if tokens > 1 else loc[:2]
        element = E4M3 if self.mxfp8 else BF16

        def cache() -> torch.Tensor:
            size = (slots, self.heads, 128 * element.itemsize)
            return torch.full(size, 0xFF, dtype=torch.uint8).view(element)

        def scale() -> torch.Tensor | None:
            size = (self.pages, self.heads, 32, self.page_size // 32, 4)
            return torch.full(size, 0xFF, dtype=torch.uint8).view(E8M0) if self.mxfp8 else None

        self.args = dict(
            qkvr=qkvr,
            k_weight=draw(self.dkv, self.width),
            v_weight=draw(self.dkv, self.width),
            q_gamma=draw(128),
            k_gamma=draw(128),
            k_conv=conv[:, :, : self.dkv],
            v_conv=conv[:, :, self.dkv : 2 * self.dkv],
            cache_indices=index.to(self.index_dtype),
            cache_mask=mask,
            loc=loc,
            k_cache=cache(),
            v_cache=cache(),
            k_scale=scale(),
            v_scale=scale(),
            dq=self.dq,
            q_offset=self.q_offset,
            k_offset=self.k_offset,
            v_offset=self.v_offset,
            page_size=self.page_size,
            eps=0.25,  # large enough to be seen
            silu=self.silu,
            residual=self.residual,
            q_factor=torch.rand(tokens, generator=g) + 0.5 if self.factor else None,
        )
        if self.mode == "verify":
            (draft,) = set(self.lengths)
            size = (seqs + 1, draft, self.width - 1, self.dkv)
            self.args |= dict(draft_tokens=draft, k_window=torch.full(size, NAN, dtype=BF16))
            self.args |= dict(v_window=torch.full(size, NAN, dtype=BF16))
        if self.mode == "extend":
            seq = torch.repeat_interleave(torch.arange(seqs), torch.tensor(self.lengths))
            self.args |= dict(cu_seqlens=self.cu, seq_index=seq.int())
        if self.track:
            free = [i for i in range(pool) if i not in index.tolist()]
            self.args |= dict(
                track_indices=torch.tensor([free[i % len(free)] for i in range(seqs)]),
                track_mask=torch.arange(seqs) % 2 == 0,
            )
            if self.mode == "extend":
                rows = torch.randint(0, tokens, (seqs, self.width - 1), generator=g)
                self.args |= dict(track_rows=rows)

    def call(self) -> fp.Prologue:
        entry = {"decode": fused_prologue_decode, "verify": fused_prologue_verify, "extend": fused_prologue_extend}
        return entry[self.mode](**self.args)

    def slices(self, which: str) -> torch.Tensor:
        start = {"q": self.q_offset, "k": self.k_offset, "v": self.v_offset}[which]
        return self.args["qkvr"][:, start : start + (self.dq if which == "q" else self.dkv)]

    def history(self, which: str, conv: torch.Tensor) -> list[torch.Tensor]:
        """The raw rows before each sequence."""
        pairs = zip(self.args["cache_indices"].tolist(), self.args["cache_mask"].tolist(), strict=True)
        return [conv[i] if i >= 0 and m else torch.zeros(conv.shape[1:], dtype=BF16) for i, m in pairs]

    def windows(self, which: str, conv: torch.Tensor) -> torch.Tensor:
        x, history = self.slices(which), self.history(which, conv)
        starts = [(s, t) for s, n in enumerate(self.lengths) for t in range(int(self.cu[s]), int(self.cu[s]) + n)]
        return torch.stack([window(x, history[s], int(self.cu[s]), t) for s, t in starts])


def check(p: Problem) -> fp.Prologue:
    """Call, and compare every result and every byte of every buffer."""
    a = p.args
    before = {n: t.clone() for n, t in a.items() if isinstance(t, torch.Tensor)}
    got = p.call()

    q = norm(p.slices("q").double(), a["q_gamma"], a["eps"])
    if p.factor:
        q = bf16(q * a["q_factor"].double()[:, None])
    if p.mxfp8:
        assert got.q.dtype == E4M3
        assert got.q_scale.dtype == E8M0
        assert got.q_scale.shape == (len(q), p.q_heads, 4)
        value = got.q.double().reshape(len(q), -1, 32) * got.q_scale.double().reshape(len(q), -1, 1)
        # half a step of e4m3 at the block's largest magnitude, and the rounding of q itself
        amax = q.reshape(len(q), -1, 32).abs().amax(-1, keepdim=True)
        assert ((value - q.reshape(value.shape)).abs() <= amax * (2**-4 + 2**-8)).all()
    else:
        assert got.q_scale is None
        assert_rounded(got.q, q, twice=p.factor)

    index, rows = a["cache_indices"].tolist(), [s for s, n in enumerate(p.lengths) for _ in range(n)]
    for which, result in (("k", got.k), ("v", got.v)):
        raw = p.windows(which, before[f"{which}_conv"])
        want = convolved(raw, a[f"{which}_weight"], p.silu, p.residual)
        slack = accumulated(raw, a[f"{which}_weight"], p.residual)
        if which == "k":
            heads = want.reshape(len(want), -1, 128)
            factor = a["k_gamma"].double().abs() / torch.sqrt((heads**2).mean(-1, keepdim=True) + a["eps"])
            slack = slack * factor.reshape(slack.shape)
            want = norm(want, a["k_gamma"], a["eps"])
        assert_rounded(result, want, twice=which == "k", slack=slack)

        cache, scale = before[f"{which}_cache"], before.get(f"{which}_scale")
        heads = result.reshape(-1, p.heads, 128)
        bytes_, scales = quantised(heads) if p.mxfp8 else (heads.view(torch.uint8), None)
        for t, slot in enumerate(a["loc"].tolist()):
            if slot > 0 and index[rows[t]] >= 0:
                cache.view(torch.uint8)[slot] = bytes_[t]
                if scale is not None:
                    page, at = divmod(slot, p.page_size)
                    scale.view(torch.uint8)[page, :, at % 32, at // 32] = scales[t]
        assert torch.equal(a[f"{which}_cache"].view(torch.uint8), cache.view(torch.uint8))
        if scale is not None:
            assert torch.equal(a[f"{which}_scale"].view(torch.uint8), scale.view(torch.uint8))

        conv = before[f"{which}_conv"].clone()
        history = p.history(which, before[f"{which}_conv"])
        for s, (i, n) in enumerate(zip(index, p.lengths, strict=True)):
            if i < 0 or not n or p.mode == "verify":
                continue
            first = int(p.cu[s])
            conv[i] = torch.cat([history[s], p.slices(which)[first : first + n]])[-(p.width - 1) :]
            if p.track and a["track_mask"][s]:
                tracked = p.slices(which)[a["track_rows"][s]] if p.mode == "extend" else conv[i]
                conv[a["track_indices"][s]] = tracked
        same_bits(a[f"{which}_conv"], conv)
        if p.mode == "verify":
            windows = before[f"{which}_window"]
            for t, s in enumerate(rows):
                if index[s] >= 0:
                    windows[s, t - int(p.cu[s])] = raw[t, 1:]
            same_bits(a[f"{which}_window"], windows)
    return got


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN: a byte of a result that no kernel writes is found."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(fp.torch, "empty", poisoned)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    def set_(*sizes: int) -> None:
        monkeypatch.setattr(fp, "_tiles", lambda tokens: sizes)

    return set_


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "bf16"])
@pytest.mark.parametrize(
    ("width", "silu", "residual", "factor", "track"),
    [(4, True, True, True, True), (3, False, True, False, False), (2, True, False, True, False)],
)
def test_decode(mxfp8, width, silu, residual, factor, track, tiles):
    tiles(4, 2, 4)
    check(Problem("decode", [1] * 5, mxfp8, width, silu, residual, factor, track))


@pytest.mark.parametrize("tile", [(1, 4, 1), (2, 1, 2)])
def test_decode_in_tiles_of_any_size(tile, tiles):
    tiles(*tile)
    check(Problem("decode", [1] * 3, track=True, seed=1, index_dtype=torch.int64))


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "bf16"])
@pytest.mark.parametrize("draft", [2, 5])  # shorter and longer than the window
def test_verify(mxfp8, draft, tiles):
    tiles(8, 2, 4)
    check(Problem("verify", [draft] * 3, mxfp8))


@pytest.mark.parametrize(("width", "silu", "residual"), [(2, False, True), (3, True, False)])
def test_verify_other_widths(width, silu, residual, tiles):
    tiles(4, 1, 4)
    check(Problem("verify", [3, 3], width=width, silu=silu, residual=residual, factor=False, index_dtype=torch.int64))


@pytest.mark.parametrize("mxfp8", [True, False], ids=["mxfp8", "bf16"])
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_extend(mxfp8, track, tiles):
    tiles(8, 2, 4)
    check(Problem("extend", [1, 0, 2, 7, 3, 2, 4], mxfp8, track=track))


@pytest.mark.parametrize(("width", "silu", "residual"), [(2, False, True), (3, True, False)])
def test_extend_other_widths(width, silu, residual, tiles):
    tiles(4, 4, 4)
    p = Problem("extend", [2, 1, 0, 4], width=width, silu=silu, residual=residual, track=True, index_dtype=torch.int64)
    p.args["cu_seqlens"] = p.args["cu_seqlens"].int()
    check(p)


@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
def test_q_is_quantised_from_its_bf16_values(entry, tiles):
    tiles(4, 1, 4)
    lengths = {"decode": [1] * 4, "verify": [2, 2], "extend": [3, 1]}[entry]
    exact, got = Problem(entry, lengths, mxfp8=False).call(), Problem(entry, lengths).call()
    payload, scale = quantised(exact.q)
    assert torch.equal(got.q.view(torch.uint8), payload)
    assert torch.equal(got.q_scale.view(torch.uint8).reshape(scale.shape), scale)
    assert torch.equal(got.k, exact.k)
    assert torch.equal(got.v, exact.v)


def test_verify_of_one_token_is_decode_without_its_update(tiles):
    tiles(4, 1, 4)
    decode, verify = Problem("decode", [1] * 5), Problem("verify", [1] * 5)
    for a, b in zip(decode.call(), verify.call(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for s, i in enumerate(decode.args["cache_indices"].tolist()):
        if i >= 0:
            same_bits(verify.args["k_window"][s, 0], decode.args["k_conv"][i])


def test_extend_in_two_parts_is_extend_in_one(tiles):
    tiles(4, 1, 4)
    whole = Problem("extend", [7], factor=False)
    want = whole.call()
    parts = Problem("extend", [7], factor=False)
    for first, last in ((0, 2), (2, 7)):
        piece = {n: parts.args[n][first:last] for n in ("qkvr", "loc", "seq_index")}
        got = fused_prologue_extend(**(parts.args | piece | dict(cu_seqlens=torch.tensor([0, last - first]))))
        assert torch.equal(got.k, want.k[first:last])
        assert torch.equal(got.v, want.v[first:last])
        parts.args["cache_mask"] = torch.tensor([True])
    same_bits(parts.args["k_conv"], whole.args["k_conv"])
    assert torch.equal(parts.args["k_cache"].view(torch.uint8), whole.args["k_cache"].view(torch.uint8))


def test_a_nan_stays_in_its_block_and_head(tiles):
    tiles(4, 1, 4)
    p, clean = Problem("decode", [1] * 4, factor=False), Problem("decode", [1] * 4, factor=False)
    p.args["qkvr"][3, p.v_offset + 33] = NAN
    p.args["qkvr"][3, p.q_offset + 128] = NAN
    got, want = p.call(), clean.call()
    assert got.v[3].isnan().nonzero().tolist() == [[33]]
    slot, page = int(p.args["loc"][3]), p.page_size
    scale = p.args["v_scale"].view(torch.uint8)[slot // page, 0, slot % page % 32, slot % page // 32]
    expected = clean.args["v_scale"].view(torch.uint8)[slot // page, 0, slot % page % 32, slot % page // 32]
    assert scale.tolist() == [int(expected[0]), 255, *expected[2:].tolist()]
    assert (
        got.q_scale.view(torch.uint8)[3].tolist()[1] == [255] * 4
    )  # the norm spreads it over its head, and no further
    same = torch.ones(p.dq, dtype=torch.bool)
    same[128:256] = False
    assert torch.equal(got.q.view(torch.uint8)[3, same], want.q.view(torch.uint8)[3, same])
    assert torch.equal(got.k, want.k)


def identity(p: Problem, v: torch.Tensor, loc: torch.Tensor) -> Problem:
    """The problem with a convolution that does nothing, and these rows as v."""
    p.args["v_weight"] = torch.zeros(p.dkv, p.width, dtype=BF16)
    p.args["v_weight"][:, -1] = 1
    p.args["qkvr"][:, p.v_offset : p.v_offset + p.dkv] = v
    p.args["cache_indices"] = torch.arange(len(v))
    p.args["cache_mask"].fill_(False)
    p.args["loc"] = loc
    return p


def test_golden_blocks(tiles):
    tiles(16, 1, 4)
    with np.load(GOLDEN / "quant-mxfp8-s11.npz") as golden:
        x, scale, payload, rule = (torch.from_numpy(golden[n]) for n in ("x_bits", "scale", "payload", "rule"))
    payload[x == 0x8000] = 0  # a sum that begins with zero has no negative zero
    blocks = torch.zeros(480, 32, dtype=torch.uint16)
    blocks[: len(x)] = x
    rows = blocks.view(BF16).reshape(60, 256)
    problem = Problem("decode", [1] * 60, silu=False, residual=False, q_heads=1)
    p = identity(problem, rows, torch.arange(1, 61))
    p.call()
    stored = p.args["v_cache"].view(torch.uint8)[1:61].reshape(480, 32)[: len(x)]
    slot = torch.arange(1, 61)
    at = p.args["v_scale"].view(torch.uint8)[slot // p.page_size, :, slot % p.page_size % 32, slot % p.page_size // 32]
    scales = at.reshape(480)[: len(x)]
    exact = rule == 0
    assert exact.sum() > 400
    assert torch.equal(stored[exact], payload[exact])
    assert torch.equal(scales[exact], scale[exact])
    assert (stored[rule == 1] & 0x7F == 0).all()
    assert (scales[rule == 1] != 255).all()
    assert (scales[rule == 2] == 255).all()


@pytest.mark.parametrize("rows", ["k", "v"])
@pytest.mark.parametrize("name", ["store-mxfp8-p2-h2-d128", "store-mxfp8-p3-h1-d128"])
def test_golden_stores(name, rows, tiles):
    tiles(16, 1, 4)
    with np.load(GOLDEN / f"{name}.npz") as golden:
        x, loc = torch.from_numpy(golden[f"{rows}_bits"]).view(BF16), torch.from_numpy(golden["loc"])
        cache, scale = torch.from_numpy(golden[f"{rows}_cache"]), torch.from_numpy(golden[f"{rows}_scale"])
    pages, heads, _, chunks, _ = scale.shape
    p = Problem(
        "decode", [1] * len(x), heads=heads, pages=pages, page_size=chunks * 32, silu=False, residual=False, q_heads=1
    )
    identity(p, x.reshape(len(x), -1), loc)
    unused = next(s for s in range(len(cache)) if s not in loc.tolist())  # before the call all bytes are the same
    p.args["v_cache"].view(torch.uint8).fill_(cache[unused, 0, 0])
    p.args["v_scale"].view(torch.uint8).fill_(
        scale[unused // p.page_size, 0, unused % p.page_size % 32, unused % p.page_size // 32, 0]
    )
    p.call()
    assert torch.equal(p.args["v_cache"].view(torch.uint8), cache)
    assert torch.equal(p.args["v_scale"].view(torch.uint8), scale)


def test_no_work_is_no_launch(monkeypatch):
    monkeypatch.setattr(fp, "launch", lambda *args, **kwargs: pytest.fail("launched"))
    for entry, seqs in (("decode", 0), ("verify", 0), ("extend", 0), ("extend", 2)):
        p = Problem(entry, [2, 2] if entry == "verify" else [1, 1], track=entry == "extend")
        per_seq = ("cache_indices", "cache_mask", "track_indices", "track_mask", "track_rows")
        for n in ("qkvr", "loc", "q_factor", "seq_index", *per_seq):
            if n in p.args:
                p.args[n] = p.args[n][: seqs if n in per_seq else 0]
        if entry == "extend":
            p.args["cu_seqlens"] = torch.zeros(seqs + 1, dtype=torch.int64)
        assert [tuple(t.shape) for t in p.call()] == [(0, 384), (0, 256), (0, 256), (0, 3, 4)]


# --- wrong buffers ----------------------------------------------------------------------------------------------------


def scales(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E8M0)


def bf16_caches(p: Problem) -> dict:
    return {n: p.args[n].new_zeros(p.args[n].shape, dtype=BF16) for n in ("k_cache", "v_cache")}


# What was seen in the wild, and the like: how the arguments of a good call are changed (1024 slots in 8 pages of 128,
# 8 heads), and what the error must say besides.
WRONG: dict[str, tuple[Callable[[Problem], dict], list[str]]] = {
    "missing dim": (lambda p: dict(k_scale=scales(8, 32, 4, 4)), ["k_scale", "(8, 8, 32, 4, 4)", "4 dimensions"]),
    "other page size": (
        lambda p: dict(k_scale=scales(16, 8, 32, 2, 4)),
        ["k_scale", "(8, 8, 32, 4, 4)", "page_size = 64", "page_size = 128"],
    ),
    "slots for pages": (lambda p: dict(v_scale=scales(1024, 8, 32, 4, 4)), ["v_scale", "1024 is the number of slots"]),
    "stale": (
        lambda p: dict(k_scale=scales(4, 8, 32, 4, 4)),
        ["k_scale", "slot = 512", "slot = 1024", "before k_cache grew"],
    ),
    "both stale": (
        lambda p: dict(k_scale=scales(4, 8, 32, 4, 4), v_scale=scales(4, 8, 32, 4, 4)),
        ["k_scale fits slot = 512", "v_scale fits slot = 512", "before k_cache grew"],
    ),
    "of a layer with another dkv": (
        lambda p: dict(k_scale=scales(8, 4, 32, 4, 4), v_scale=scales(8, 4, 32, 4, 4)),
        ["k_scale fits dkv = 512", "v_scale fits dkv = 512", "dkv = 1024 (k_weight)"],
    ),
    "transposed": (
        lambda p: dict(k_scale=scales(8, 8, 4, 32, 4).transpose(2, 3)),
        ["k_scale", "transposed view", "(page head chunk lane group)"],
    ),
    "built transposed": (lambda p: dict(k_scale=scales(8, 8, 4, 32, 4)), ["k_scale", "chunk and lane are swapped"]),
    "sliced": (lambda p: dict(v_scale=scales(8, 16, 32, 4, 4)[:, :8]), ["v_scale", "slice of a wider tensor", "8192"]),
    "flat": (lambda p: dict(k_scale=scales(1024, 8, 4)), ["k_scale", "(1024, 8, 4)", "(8, 8, 32, 4, 4)"]),
    "one of two": (lambda p: dict(v_scale=None), ["v_scale is required", "got None"]),
    "none": (lambda p: dict(k_scale=None, v_scale=None), ["k_scale is required", "v_scale is required"]),
    "given and ignored": (bf16_caches, ["k_scale must be None", "v_scale must be None", "bfloat16"]),
    "one cache quantised": (
        lambda p: dict(v_cache=bf16_caches(p)["v_cache"]),
        ["v_cache", "float8_e4m3fn"],
    ),
    "of fp32": (lambda p: dict(k_scale=torch.zeros(8, 8, 32, 4, 4)), ["k_scale", "float8_e8m0fnu or uint8", "float32"]),
    "one cache twice": (lambda p: dict(v_cache=p.args["k_cache"]), ["v_cache overlaps k_cache"]),
    "page size": (
        lambda p: dict(page_size=16, k_scale=scales(64, 8, 32, 1, 4), v_scale=scales(64, 8, 32, 1, 4)),
        ["page_size % 32 == 0", "16 % 32 = 16"],
    ),
    "dq": (lambda p: dict(dq=200), ["dq % 128 == 0", "200 % 128 = 72"]),
    "slice past the row": (
        lambda p: dict(k_offset=p.k_offset + 128),
        ["k_offset + dkv <= row", f"row = {8 + 1024 + 16 + 128 + 1024 + 24}"],
    ),
    "negative slice": (lambda p: dict(q_offset=-8), ["q_offset", "-8"]),
    "conv cache of another width": (
        lambda p: dict(k_conv=torch.zeros(p.args["k_conv"].shape[0], 4, 1024, dtype=BF16)),
        ["k_conv", "width = 5", "width = 4"],
    ),
    "conv caches of two pools": (lambda p: dict(v_conv=p.args["v_conv"][1:]), ["v_conv", "pool"]),
    "heads before slots": (
        lambda p: dict(k_cache=torch.zeros(8, 1024, 128, dtype=torch.uint8).view(E4M3).transpose(0, 1)),
        ["k_cache", "transposed view"],
    ),
    "int32 loc": (lambda p: dict(loc=p.args["loc"].int()), ["loc", "int64", "int32"]),
    "strided loc": (lambda p: dict(loc=p.args["loc"].repeat_interleave(2)[::2]), ["loc", "stride"]),
    "gamma of another head_dim": (lambda p: dict(q_gamma=torch.zeros(64, dtype=BF16)), ["q_gamma", "128", "64"]),
}


def wide(entry: str, **changes) -> Problem:
    lengths = {"decode": [1] * 6, "verify": [3] * 2, "extend": [1, 5]}[entry]
    return Problem(entry, lengths, heads=8, q_heads=1, page_size=128, pages=8, track=entry != "verify", **changes)


@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_buffers(wrong, entry, monkeypatch):
    monkeypatch.setattr(fp, "launch", lambda *args, **kwargs: pytest.fail("launched"))
    change, says = WRONG[wrong]
    p = wide(entry)
    p.args |= change(p)
    with pytest.raises(LayoutError) as raised:
        p.call()
    message = str(raised.value)
    assert message.startswith(f"fused_prologue_{entry}: ")
    for text in says:
        assert text in message


@pytest.mark.parametrize(
    ("entry", "change", "says"),
    [
        (
            "decode",
            lambda p: {n: torch.zeros(1000, 4, dtype=BF16) for n in ("k_weight", "v_weight")},
            ["1000 % 128 = 104"],
        ),
        ("decode", lambda p: dict(track_mask=None), ["track_mask is required", "track_indices"]),
        ("extend", lambda p: dict(track_rows=None), ["track_rows is required"]),
        ("verify", lambda p: dict(draft_tokens=2), ["token == seq * draft_tokens", "draft_tokens = 2"]),
        ("verify", lambda p: dict(k_window=p.args["k_window"][:1]), ["window_seq >= seq"]),
        ("verify", lambda p: dict(v_window=p.args["v_window"][:, :, :2]), ["v_window", "width"]),
        ("verify", lambda p: dict(v_window=p.args["k_window"]), ["v_window overlaps k_window"]),
        ("extend", lambda p: dict(cu_seqlens=p.args["cu_seqlens"][:-1]), ["cu_seqlens", "seq + 1"]),
        ("extend", lambda p: dict(seq_index=p.args["seq_index"][:-1]), ["seq_index", "token"]),
        ("decode", lambda p: dict(cache_mask=p.args["cache_mask"][:-1]), ["cache_mask", "token"]),
    ],
)
def test_wrong_arguments_of_one_entry_point(entry, change, says):
    p = wide(entry)
    p.args |= change(p)
    with pytest.raises(LayoutError) as raised:
        p.call()
    for text in says:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "change", "says"),
    [
        ("decode", lambda p: p.args["loc"].fill_(1024), ["loc", "1024"]),
        ("decode", lambda p: p.args["loc"].fill_(5), ["loc", "5"]),
        ("decode", lambda p: p.args["cache_indices"].fill_(-2), ["cache_indices", "-2"]),
        ("verify", lambda p: p.args["cache_indices"].fill_(0), ["cache_indices", "0"]),
        ("extend", lambda p: p.args["cu_seqlens"][-1].fill_(7), ["cu_seqlens", "7"]),
        ("extend", lambda p: p.args["seq_index"].fill_(2), ["seq_index", "2"]),
        ("extend", lambda p: p.args["seq_index"][-1].fill_(0), ["seq_index", "cu_seqlens"]),
        ("extend", lambda p: p.args["track_rows"].fill_(-1), ["track_rows", "-1"]),
        ("extend", lambda p: p.args["track_indices"].fill_(99), ["track_indices", "99"]),
        (
            "decode",
            lambda p: p.args["track_indices"].copy_(p.args["cache_indices"]),
            ["track_indices", "cache_indices"],
        ),
    ],
)
def test_wrong_values(entry, change, says):
    p = wide(entry)
    change(p)
    with mode("values"), pytest.raises(LayoutError) as raised:
        p.call()
    for text in says:
        assert text in str(raised.value)


@pytest.mark.parametrize("entry", ["decode", "verify", "extend"])
def test_good_neighbours(entry, tiles):
    tiles(4, 1, 4)
    p = wide(entry)
    p.args |= {n: p.args[n].view(torch.uint8) for n in ("k_scale", "v_scale")}
    with mode("values"):
        check(p)
    p = wide(entry, mxfp8=False)
    p.args["page_size"] = 100  # of no meaning without scales
    check(p)


def test_a_call_on_a_cpu_without_the_interpreter_says_what_to_do(monkeypatch):
    monkeypatch.setattr("layoutcheck.kernels._launch.interpreted", lambda kernel: False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        Problem("decode", [1]).call()
