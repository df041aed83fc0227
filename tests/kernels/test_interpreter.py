"""Low precision in Triton's corrected interpreter, against references made here from the definitions of the formats."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from layoutcheck.kernels._interpreter import correct_interpreter


@pytest.fixture(autouse=True)
def _corrected():
    assert correct_interpreter()


# --- The reference: every value of a format, from its definition ---------------------------------------------------


@dataclass(frozen=True)
class Format:
    torch: torch.dtype
    mantissa: int
    bias: int
    top: int  # the code of the largest finite value; those above are infinity and NaN
    infinity: int | None = None
    unsigned_zero: bool = False  # "fnuz": the code of -0 is the only NaN

    @property
    def bits(self) -> int:
        return self.torch.itemsize * 8

    @property
    def codes(self) -> torch.dtype:
        return torch.uint8 if self.bits == 8 else torch.uint16

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """The values of the codes 0 .. top, and the one that would follow, to which overflow rounds."""
        code = np.arange(self.top + 2)
        exponent, fraction = code >> self.mantissa, (code & ((1 << self.mantissa) - 1)).astype(np.float64)
        significand = np.where(exponent > 0, fraction + (1 << self.mantissa), fraction)
        return np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa)

    def decode(self) -> np.ndarray:
        """The values of all codes."""
        half = np.full(1 << (self.bits - 1), np.nan)
        half[: self.top + 1] = self.magnitudes[:-1]
        if self.infinity:
            half[self.infinity] = np.inf
        values = np.concatenate([half, -half])
        if self.unsigned_zero:
            values[1 << (self.bits - 1)] = np.nan
        return values

    def encode(self, x: np.ndarray, *, toward_zero: bool = False) -> np.ndarray:
        """The code of each float64, rounded once; -1 stands for NaN."""
        size = np.minimum(np.abs(x), self.magnitudes[-1])
        below = np.minimum(np.searchsorted(self.magnitudes, size, side="right") - 1, self.top)
        middle = (self.magnitudes[below] + self.magnitudes[below + 1]) / 2
        up = (size > middle) | ((size == middle) & (below % 2 == 1))
        code = below if toward_zero else below + up
        if self.bits == 8 and not toward_zero:
            code = np.minimum(code, self.top)
        elif self.infinity:
            code = np.where(np.isinf(x), self.infinity, code)
        negative = np.signbit(x) & ~((code == 0) & self.unsigned_zero)
        return np.where(np.isnan(x), -1, code | negative.astype(int) << (self.bits - 1))

    def inputs(self, dtype: type, count: int = 200_000) -> np.ndarray:
        """Each value, each middle of two, their neighbours in `dtype`, the ends of its range, and random bits."""
        low, high = self.magnitudes[:-1], self.magnitudes[1:]
        points = np.concatenate([low, (low + high) / 2]).astype(dtype)
        points = np.concatenate([points, np.nextafter(points, dtype(np.inf)), np.nextafter(points, dtype(-np.inf))])
        info = np.finfo(dtype)
        ends = np.array([0, info.smallest_subnormal, info.smallest_normal, info.max, np.inf, np.nan], dtype)
        noise = np.frombuffer(np.random.default_rng(0).bytes(count * info.bits // 8), dtype)
        return np.concatenate([points, -points, ends, -ends, noise])


FORMATS = {
    "e4m3fn": Format(torch.float8_e4m3fn, 3, 7, 0x7E),
    "e5m2": Format(torch.float8_e5m2, 2, 15, 0x7B, infinity=0x7C),
    "e4m3fnuz": Format(torch.float8_e4m3fnuz, 3, 8, 0x7F, unsigned_zero=True),
    "e5m2fnuz": Format(torch.float8_e5m2fnuz, 2, 16, 0x7F, unsigned_zero=True),
    "bf16": Format(torch.bfloat16, 7, 127, 0x7F7F, infinity=0x7F80),
    "fp16": Format(torch.float16, 10, 15, 0x7BFF, infinity=0x7C00),
}
FLOAT8 = [name for name in FORMATS if name.startswith("e")]


def test_the_references_hold_the_known_values():
    assert FORMATS["e4m3fn"].decode()[[0x01, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [2**-9, 2**-6, 1, 448, -448]
    assert FORMATS["e5m2"].decode()[[0x01, 0x3C, 0x7B, 0xFC]].tolist() == [2**-16, 1, 57344, -np.inf]
    assert FORMATS["e4m3fnuz"].decode()[[0x01, 0x40, 0x7F]].tolist() == [2**-10, 1, 240]
    assert FORMATS["bf16"].decode()[[0x0001, 0x3F80, 0x7F7F]].tolist() == [2**-133, 1, 255 * 2.0**120]
    assert FORMATS["e4m3fn"].encode(np.array([31.75, 100, 464, np.inf])).tolist() == [0x60, 0x6C, 0x7E, 0x7E]


# --- Conversions ---------------------------------------------------------------------------------------------------


@triton.jit
def _convert(x, y, N: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def convert(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    size = triton.next_power_of_2(x.numel())
    padded = torch.zeros(size, dtype=x.dtype)
    padded[: x.numel()] = x
    y = torch.zeros(size, dtype=dtype)
    _convert[(1,)](padded, y, size, rounding)
    return y[: x.numel()]


def every_code(form: Format) -> torch.Tensor:
    return torch.arange(1 << form.bits, dtype=torch.int32).to(form.codes).view(form.torch)


def as_float64(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x.astype(np.float64)


def assert_codes(actual: torch.Tensor, expected: np.ndarray, form: Format, x: np.ndarray) -> None:
    codes = actual.view(form.codes).numpy().astype(np.int64)
    wrong = np.where(expected < 0, ~np.isnan(form.decode()[codes]), codes != expected)
    first = np.flatnonzero(wrong)[:5]
    assert not first.size, f"{wrong.sum()} wrong, as {x[first]}: {codes[first]} for {expected[first]}"


WIDE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIDER = [(name, to) for name, form in FORMATS.items() for to in WIDE if form.bits < to.itemsize * 8]
NARROW = [(source, target) for source in ("bf16", "fp16", *FLOAT8) for target in FORMATS if source != target]


@pytest.mark.parametrize(("name", "target"), WIDER)
def test_every_code_widens_exactly(name, target):
    form = FORMATS[name]
    values = convert(every_code(form), target).double().numpy()
    np.testing.assert_array_equal(values, form.decode())
    np.testing.assert_array_equal(np.signbit(values) & (values == 0), np.signbit(form.decode()) & (values == 0))


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", FORMATS)
def test_floats_round_once_to_nearest_even(name, source):
    form = FORMATS[name]
    x = form.inputs(source)
    assert_codes(convert(torch.from_numpy(x), form.torch), form.encode(as_float64(x)), form, x)


@pytest.mark.parametrize(("source", "target"), NARROW)
def test_every_narrow_value_rounds_to_nearest_even(source, target):
    form = FORMATS[target]
    x = FORMATS[source].decode()
    assert_codes(convert(every_code(FORMATS[source]), form.torch), form.encode(x), form, x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m2"])
def test_rounding_toward_zero_is_respected(name):
    form = FORMATS[name]
    x = form.inputs(np.float32)
    expected = form.encode(as_float64(x), toward_zero=True)
    assert_codes(convert(torch.from_numpy(x), form.torch, "rtz"), expected, form, x)


def test_float64_rounds_to_float32():
    low = np.random.default_rng(0).integers(0, 0x7F7FFFFF, 10_000, dtype=np.uint32).view(np.float32)
    high = np.nextafter(low, np.float32(np.inf))
    middle = (low.astype(np.float64) + high) / 2
    even = np.where(low.view(np.uint32) % 2 == 0, low, high)
    inputs = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    actual = convert(torch.from_numpy(inputs), torch.float32).numpy()
    np.testing.assert_array_equal(actual, np.concatenate([even, low, high]))
    np.testing.assert_array_equal(convert(torch.from_numpy(middle), torch.float32, "rtz").numpy(), low)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
)
def test_integers_round_to_nearest_even(dtype, name):
    form = FORMATS[name]
    limit = 1 << min(dtype.itemsize * 8, 52)
    x = np.random.default_rng(0).integers(-limit, limit, 10_000) >> np.arange(10_000) % 52
    x = torch.from_numpy(x).to(dtype)
    assert_codes(convert(x, form.torch), form.encode(x.double().numpy()), form, x.numpy())


def test_integers_round_to_float32():
    low = np.random.default_rng(0).integers(1 << 23, 1 << 24, 10_000)
    even = low + low % 2  # of the neighbours low and low + 1
    for shift in range(2, 38):
        middle = (2 * low + 1) << (shift - 1)
        for step, expected in ((-1, low), (0, even), (1, low + 1)):
            actual = convert(torch.from_numpy(middle + step), torch.float32).double().numpy()
            np.testing.assert_array_equal(actual, np.ldexp(expected.astype(np.float64), shift))


# --- Dot products --------------------------------------------------------------------------------------------------

M = N = 16
K = 64


@triton.jit
def _dot(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + n[None, :] * K + k[:, None])
    at = m[:, None] * N + n[None, :]
    tl.store(out + at, tl.dot(left, right, tl.load(c + at), out_dtype=c.dtype.element_ty))


def random_codes(form: Format, shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Finite values of all sizes whose products float32 holds, subnormal ones too, with their float64 values."""
    rng, decoded = np.random.default_rng(seed), form.decode()
    codes = np.flatnonzero(np.isfinite(decoded) & (np.abs(decoded) < 2.0**60))
    codes = rng.choice(codes, shape)
    return torch.from_numpy(codes).to(form.codes).view(form.torch), decoded[codes]


def assert_float32_dot(actual: torch.Tensor, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    exact, size = a @ b.T + c, np.abs(a) @ np.abs(b.T) + np.abs(c)
    assert np.all(np.abs(actual.double().numpy() - exact) <= K * (2.0**-24 * size + 2.0**-149))


@pytest.mark.parametrize(
    ("left", "right"), [*((name, name) for name in FORMATS), ("e4m3fn", "e5m2"), ("e5m2fnuz", "e4m3fnuz")]
)
def test_dot_takes_exact_operands_and_sums_in_float32(left, right):
    (a, exact_a), (b, exact_b) = random_codes(FORMATS[left], (M, K), 0), random_codes(FORMATS[right], (N, K), 1)
    c, out = torch.randn(M, N), torch.empty(M, N)
    _dot[(1,)](a, b, c, out, M, N, K)
    assert_float32_dot(out, exact_a, exact_b, c.double().numpy())


def test_dot_of_subnormal_bf16():
    a = torch.full((M, K), 2.0**-130, dtype=torch.bfloat16)
    b = torch.full((N, K), 2.0**100, dtype=torch.bfloat16)
    out = torch.zeros(M, N)
    _dot[(1,)](a, b, out, out, M, N, K)
    assert torch.equal(out, torch.full((M, N), K * 2.0**-30))


def test_dot_in_float16_rounds_once():
    a, b = torch.full((M, K), 32, dtype=torch.float16), torch.ones(N, K, dtype=torch.float16)
    a[:, 0] = 33  # The product is 2049, which float16 does not hold.
    c, out = torch.ones(M, N, dtype=torch.float16), torch.empty(M, N, dtype=torch.float16)
    _dot[(1,)](a, b, c, out, M, N, K)
    assert torch.equal(out, torch.full_like(out, 2050))


def test_dot_of_int8():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator) for _ in range(2))
    c, out = torch.ones(M, N, dtype=torch.int32), torch.empty(M, N, dtype=torch.int32)
    _dot[(1,)](a, b, c, out, M, N, K)
    assert torch.equal(out, a.int() @ b.int().T + 1)


@triton.jit
def _dot_scaled(a, a_scale, b, b_scale, out, LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    m, k, g = tl.arange(0, M), tl.arange(0, K), tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + m[None, :] * K + k[:, None])
    scale = m[:, None] * (K // 32) + g[None, :]
    product = tl.dot_scaled(left, tl.load(a_scale + scale), LEFT, right, tl.load(b_scale + scale), RIGHT)
    tl.store(out + m[:, None] * M + m[None, :], product)


@pytest.mark.parametrize(
    ("left", "right"), [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("bf16", "e4m3fn"), ("e4m3fn", "fp16")]
)
def test_dot_scaled(left, right):
    (a, exact_a), (b, exact_b) = random_codes(FORMATS[left], (M, K), 0), random_codes(FORMATS[right], (N, K), 1)
    rng, out = np.random.default_rng(2), torch.empty(M, N)
    scale_a, scale_b = (rng.integers(100, 150, (M, K // 32), dtype=np.uint8) for _ in range(2))
    scale_a[:2], scale_a[2] = 0, 255  # 2^-127 and NaN
    names = (name.removesuffix("fn") for name in (left, right))

    def run():
        _dot_scaled[(1,)](a, torch.from_numpy(scale_a), b, torch.from_numpy(scale_b), out, *names, M, K)

    if not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"):  # before Triton 3.8
        with pytest.raises(InterpreterError):
            run()
        return
    run()
    exact_a = exact_a * np.repeat(np.ldexp(1.0, scale_a.astype(int) - 127), 32, axis=1)
    exact_b = exact_b * np.repeat(np.ldexp(1.0, scale_b.astype(int) - 127), 32, axis=1)
    assert out[2].isnan().all()
    rest = [row for row in range(M) if row != 2]
    assert_float32_dot(out[rest], exact_a[rest], exact_b, np.zeros((M - 1, N)))


@triton.jit
def _dot_e2m1(
    a, a_scale, b, b_scale, out, RIGHT: tl.constexpr, A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    rows: tl.constexpr = M if A_ALONG_K else M // 2
    width: tl.constexpr = K // 2 if A_ALONG_K else K
    left = tl.load(a + tl.arange(0, rows)[:, None] * width + tl.arange(0, width)[None, :])
    packed: tl.constexpr = RIGHT == "e2m1"
    depth: tl.constexpr = K // 2 if packed and B_ALONG_K else K
    columns: tl.constexpr = N // 2 if packed and not B_ALONG_K else N
    right = tl.load(b + tl.arange(0, depth)[:, None] * columns + tl.arange(0, columns)[None, :])
    left_scale = tl.load(a_scale + m[:, None] * (K // 32) + g[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // 32) + g[None, :])
    product = tl.dot_scaled(
        left, left_scale, "e2m1", right, right_scale, RIGHT, lhs_k_pack=A_ALONG_K, rhs_k_pack=B_ALONG_K
    )
    tl.store(out + m[:, None] * N + n[None, :], product)


def random_e2m1(shape, axis, seed):
    """Bytes of two numbers along an axis, the lower half first, and the numbers: 1 bit of mantissa, a bias of 1."""
    codes = np.random.default_rng(seed).integers(0, 16, shape)
    exponent, fraction = codes >> 1 & 3, codes & 1
    exact = np.ldexp(np.where(exponent > 0, 1 + fraction / 2, fraction / 2), np.maximum(exponent, 1) - 1)
    low, high = (codes.take(range(i, shape[axis], 2), axis) for i in (0, 1))
    return torch.from_numpy((low | high << 4).astype(np.uint8)), np.where(codes & 8, -exact, exact)


@pytest.mark.skipif(
    not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"), reason="Triton before 3.8 cannot interpret it"
)
@pytest.mark.parametrize(("right", "a_along_k", "b_along_k"), [("e2m1", 1, 1), ("e2m1", 0, 0), ("e4m3", 1, 1)])
def test_dot_scaled_of_e2m1(right, a_along_k, b_along_k):
    columns = 2 * N
    a, exact_a = random_e2m1((M, K), 1 if a_along_k else 0, 0)
    if right == "e2m1":
        b, exact_b = random_e2m1((K, columns), 0 if b_along_k else 1, 1)
    else:
        b, exact_b = random_codes(FORMATS["e4m3fn"], (K, columns), 1)
    rng, out = np.random.default_rng(2), torch.empty(M, columns)
    scale_a, scale_b = (rng.integers(120, 135, (rows, K // 32), dtype=np.uint8) for rows in (M, columns))
    scales = [torch.from_numpy(s) for s in (scale_a, scale_b)]
    _dot_e2m1[(1,)](a, scales[0], b, scales[1], out, right, bool(a_along_k), bool(b_along_k), M, columns, K)
    exact_a = exact_a * np.repeat(np.ldexp(1.0, scale_a.astype(int) - 127), 32, axis=1)
    exact_b = exact_b.T * np.repeat(np.ldexp(1.0, scale_b.astype(int) - 127), 32, axis=1)
    assert_float32_dot(out, exact_a, exact_b, np.zeros((M, columns)))


# --- What may be done to bits, and what may not --------------------------------------------------------------------


@triton.jit
def _apply(x, y, out, OPERATION: tl.constexpr):
    i = tl.arange(0, 4)
    a, b = tl.load(x + i), tl.load(y + i)
    if OPERATION == "add":
        r = a + b
    elif OPERATION == "subtract":
        r = a - b
    elif OPERATION == "multiply":
        r = a * b
    elif OPERATION == "scale":
        r = a * 0.5
    elif OPERATION == "negate":
        r = -a
    elif OPERATION == "abs":
        r = tl.abs(a)
    elif OPERATION == "fma":
        r = tl.fma(a, b, a)
    elif OPERATION == "less":
        r = a < b
    elif OPERATION == "equal":
        r = a == b
    elif OPERATION == "truth":
        r = a.to(tl.int1)
    elif OPERATION == "sum":
        r = tl.sum(a, axis=0) + tl.zeros([4], tl.float32)
    elif OPERATION == "scan":
        r = tl.associative_scan(a, 0, _first)
    elif OPERATION == "atomic_add":
        r = tl.atomic_add(x + i, b)
    elif OPERATION == "maximum":
        r = tl.maximum(a, b)
    elif OPERATION == "clamp":
        r = tl.clamp(a, -1.0, 1.0)
    elif OPERATION == "max":
        r = tl.max(a, axis=0) + tl.zeros([4], tl.float32)
    elif OPERATION == "divide":
        r = a / b
    elif OPERATION == "mixed":
        r = a * b.to(tl.float32)
    elif OPERATION == "where":
        r = tl.where(i < 2, a, b)
    elif OPERATION == "where_constant":
        r = tl.where(i < 2, a, 1.5)
    elif OPERATION == "masked":
        r = tl.load(x + i, mask=i < 2, other=-2.0)
    elif OPERATION == "bitcast":
        r = (a.to(tl.uint16, bitcast=True) ^ 0x8000).to(tl.bfloat16, bitcast=True)
    elif OPERATION == "shapes":
        r = tl.reshape(tl.trans(tl.join(a, b)), [2, 2, 2])
        _, r = tl.split(tl.trans(r, 1, 2, 0))
        r = tl.reshape(r, [4])
    tl.store(out + i, r)


@triton.jit
def _first(a, b):
    return a


def apply(operation: str, x: torch.Tensor, y: torch.Tensor, out: torch.dtype = torch.float32) -> list[float]:
    result = torch.empty(4, dtype=out)
    _apply[(1,)](x, y, result, operation)
    return result.tolist()


X, Y = torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.tensor([2.0, 0.5, -1.0, 4.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "operation", ["add", "subtract", "multiply", "negate", "abs", "fma", "less", "equal", "sum", "scan"]
)
def test_arithmetic_on_bits_is_an_error(operation, dtype):
    with pytest.raises(InterpreterError, match=r"convert the operands with \.to\(tl\.float32\)"):
        apply(operation, X.to(dtype), Y.to(dtype), dtype)


@pytest.mark.parametrize("operation", ["scale", "atomic_add"])
def test_arithmetic_on_bf16_is_an_error(operation):
    with pytest.raises(InterpreterError):
        apply(operation, X.bfloat16(), Y.bfloat16())


@pytest.mark.parametrize(("operation", "expected"), [("maximum", [2, 0.5, 0.5, 4]), ("clamp", [1, -1, 0.5, 0])])
def test_what_not_every_version_of_triton_widens(operation, expected):
    if hasattr(tl.core, "_promote_bfloat16_to_float32"):
        assert apply(operation, X.bfloat16(), Y.bfloat16()) == expected
    else:
        with pytest.raises(InterpreterError, match="convert the operands"):
            apply(operation, X.bfloat16(), Y.bfloat16())


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        # Triton itself computes these in float32.
        ("truth", [1, 1, 1, 0]),
        ("max", [1, 1, 1, 1]),
        ("divide", [0.5, -4, -0.5, 0]),
        ("mixed", [2, -1, -0.5, 0]),
        # These move bits.
        ("where", [1, -2, -1, 4]),
        ("where_constant", [1, -2, 1.5, 1.5]),
        ("masked", [1, -2, -2, -2]),
        ("bitcast", [-1, 2, -0.5, -0.0]),
        ("shapes", [2, 0.5, -1, 4]),
    ],
)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_what_bf16_may_do(operation, expected, out):
    assert apply(operation, X.bfloat16(), Y.bfloat16(), out) == expected


@triton.jit
def _copy_bits(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty, bitcast=True))


@pytest.mark.parametrize("name", FORMATS)
def test_bitcasts_keep_every_code(name):
    form = FORMATS[name]
    codes, back = torch.empty(1 << form.bits, dtype=form.codes), torch.empty(1 << form.bits, dtype=form.torch)
    _copy_bits[(1,)](every_code(form), codes, 1 << form.bits)
    _copy_bits[(1,)](codes, back, 1 << form.bits)
    assert codes.tolist() == list(range(1 << form.bits))
    assert back.view(form.codes).tolist() == codes.tolist()


# --- Operations on float32 and integers that kernels rely on -------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "expected"), [("maximum", [1, 2, np.nan, 3]), ("clamp", [1, -1, -1, 1]), ("max", [3, 3, 3, 3])]
)
def test_nan_gives_way_to_numbers(operation, expected):
    nan = float("nan")
    x, y = torch.tensor([1.0, nan, nan, 3.0]), torch.tensor([nan, 2.0, nan, -1.0])
    np.testing.assert_array_equal(apply(operation, x, y), expected)


@triton.jit
def _float32(x, exponent, power, total, largest, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(exponent + i, (a.to(tl.int32, bitcast=True) >> 23) & 0xFF)
    tl.store(power + i, tl.exp2(a))
    tl.atomic_add(total + i * 0, a)
    tl.atomic_max(largest + i * 0, a)


def test_float32_bits_powers_and_atomics():
    x = torch.arange(-128.0, 128.0)
    exponent, power = torch.empty(256, dtype=torch.int32), torch.empty(256)
    total, largest = torch.zeros(1), torch.full((1,), -1000.0)
    _float32[(1,)](x, exponent, power, total, largest, 256)
    significand, expected = np.frexp(x.numpy())
    np.testing.assert_array_equal(exponent.numpy(), np.where(significand == 0, 0, expected + 126))
    np.testing.assert_allclose(power.numpy(), np.exp2(x.double().numpy()), rtol=2**-22)
    assert (total.item(), largest.item()) == (-128.0, 127.0)


# --- The correction itself -----------------------------------------------------------------------------------------


def test_a_second_call_changes_nothing():
    before = dict(vars(interpreter.InterpreterBuilder))
    assert correct_interpreter()
    assert dict(vars(interpreter.InterpreterBuilder)) == before


def test_compiled_kernels_are_left_alone(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not correct_interpreter()


def test_an_unknown_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr(interpreter, "InterpreterBuilder", type("InterpreterBuilder", (), {"create_clampf": None}))
    with pytest.raises(RuntimeError, match=rf"triton {triton.__version__}: it has no 'binary_op'"):
        correct_interpreter()


UNCORRECTED = """
import torch, triton, triton.language as tl

@triton.jit
def to_e4m3(x, y):
    tl.store(y, tl.load(x).to(tl.float8e4nv))

@triton.jit
def square(x, y):
    tl.store(y, tl.load(x) * tl.load(x))

def run(kernel, x, dtype):
    y = torch.zeros(1, dtype=dtype)
    kernel[(1,)](torch.tensor([x], dtype=torch.bfloat16 if kernel is square else torch.float32), y)
    return y.item()

fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
print(run(to_e4m3, 31.75, fp8), run(to_e4m3, 100.0, fp8), run(square, 1.0, bf16))
"""


@pytest.fixture(scope="module")
def uncorrected(tmp_path_factory):
    script = tmp_path_factory.mktemp("uncorrected") / "script.py"
    script.write_text(UNCORRECTED)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=env, check=True, capture_output=True, text=True)
    return [float(value) for value in done.stdout.split()]


@pytest.mark.parametrize(("index", "right"), [(0, 32.0), (1, 96.0), (2, 1.0)], ids=["carry", "tie", "bf16 product"])
def test_upstream_still_needs_the_correction(uncorrected, index, right):
    assert uncorrected[index] != right, "upstream is right now: delete the correction"
