"""MXFP8 arithmetic shared by the kernels: the scale of a block, and its payload. Element-wise, in fp32.

A block is 32 elements with one E8M0 byte b, worth 2^(b - 127) (OCP MX v1.0). The scale is the smallest power of two for
which the largest magnitude is at most 448, taken from the bits of that magnitude: exact, where a float log2 is not.
448 is 1.75 * 2^8, so the exponent is that of amax minus 8, plus one where the mantissa is above 1.75.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)


@triton.jit
def abs_bits(x):
    """|x| as integers that order as the magnitudes do, NaN above all: a maximum of them never loses a NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax_bits, FLOOR: tl.constexpr):
    """The E8M0 byte of a block from the bits of its largest magnitude; 0xFF where a NaN is in it.

    ``FLOOR`` selects OCP's floor rule, with which blocks whose amax is above 448 * 2^e saturate.
    """
    # Infinity takes the scale of the largest finite value, and saturates.
    finite = tl.minimum(amax_bits, 0x7F7FFFFF)
    up = 0 if FLOOR else ((finite & 0x7FFFFF) > 0x600000).to(tl.int32)
    byte = tl.maximum((finite >> 23) - 8 + up, 0)
    return tl.where(amax_bits > 0x7F800000, 255, byte)


@triton.jit
def inverse_scale(byte):
    """2^(127 - byte) as fp32, NaN for the byte 0xFF."""
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """2^(byte - 127) as fp32, exact down to the subnormal 2^-127; NaN for 0xFF."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def payload(x, inverse):
    """x times the inverse scale in e4m3, to nearest even, saturated at 448; NaN stays NaN."""
    y = tl.clamp(x.to(tl.float32) * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return y.to(tl.float8e4nv)
