"""MXFP8 in float64, from the definition of the format: what kernels are compared with.

Nothing here rounds through torch's or Triton's own conversions: e4m3 is a table of its 127 magnitudes, and the nearest
one is searched for.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
_code = torch.arange(127)
MAGNITUDES = torch.where(
    _code < 8,
    _code.double() * 2.0**-9,
    torch.ldexp(1 + (_code % 8).double() / 8, (_code // 8 - 7).double()),
)
_MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def _power(exponent: Tensor) -> Tensor:
    """Two to an integer power in float64, exact: where exp2 need not be."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.int())


def e4m3(values: Tensor) -> Tensor:
    """Codes (uint8) of the nearest e4m3 values, ties to even, saturated; NaN is 0x7F or 0xFF."""
    values = values.double()
    magnitude, middles = values.abs().contiguous(), _MIDDLES.to(values.device)
    code = torch.searchsorted(middles, magnitude)  # of a tie the lower one
    tie = (code < len(middles)) & (magnitude == middles[code.clamp(max=len(middles) - 1)])
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = torch.where(magnitude.isnan(), 127, code)
    return (code + 128 * torch.signbit(values)).to(torch.uint8)


def decode(payload: Tensor, scale: Tensor) -> Tensor:
    """float64 (..., d) of payload (..., d) and scales (..., d / 32), both of any dtype of one byte."""
    codes, bytes_ = payload.view(torch.uint8).long(), scale.view(torch.uint8).long()
    table = torch.cat([MAGNITUDES, torch.tensor([torch.nan], dtype=torch.float64)]).to(codes.device)
    values = table[codes % 128] * torch.where(codes >= 128, -1.0, 1.0)
    factor = torch.where(bytes_ == 255, torch.nan, _power(bytes_ - 127))
    return values * factor.repeat_interleave(32, -1)


def scale_bytes(x: Tensor, rounding: str = "rceil") -> Tensor:
    """E8M0 bytes (..., d / 32): 0xFF where a NaN is in the block, that of the largest finite value for infinity."""
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    known = torch.where(amax.isnan() | (amax == 0), 1.0, amax).clamp(max=2.0**128 * (1 - 2.0**-24))
    if rounding == "floor":
        exponent = torch.frexp(known).exponent - 1 - 8
    else:
        exponent = torch.frexp(known / LARGEST).exponent - 2
        for _ in range(3):
            exponent = exponent + (known > LARGEST * _power(exponent))
    byte = torch.where(amax == 0, 0, (exponent + 127).clamp(min=0))
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


def quantize(x: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Payload codes (..., d) and scale bytes (..., d / 32) of rows (..., d)."""
    scale = scale_bytes(x, rounding)
    exponent = (scale.double() - 127).repeat_interleave(32, -1)
    factor = torch.where(exponent == 128, torch.nan, _power(-exponent))
    return e4m3(x.double() * factor), scale


def edges(dtype: torch.dtype, columns: int, seed: int = 0) -> Tensor:
    """Rows (row, columns) whose blocks of 32 are the hard ones; the last rows are ordinary."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = (int(torch.tensor(v).double().log2().floor()) for v in (info.smallest_normal, info.max))
    step = info.eps
    tops = [0.0, info.max, info.smallest_normal, info.smallest_normal * step, info.smallest_normal * (1 - step)]
    for e in range(low, high + 1, 1 if high < 100 else 5):
        tops += [2.0**e, 1.75 * 2.0**e, (1.75 - step) * 2.0**e, (1.75 + step) * 2.0**e, 1.125 * 2.0**e]
    tops += [
        top * 2.0**-127 for top in (LARGEST - 256 * step, LARGEST, LARGEST + 256 * step)
    ]  # around the lowest scale
    tops = [t for t in tops if t <= info.max]
    amax = torch.tensor(tops, dtype=torch.float64)
    # Beside the largest element: others a few powers of two below it, multiples of a sixteenth, so that ties occur.
    others = torch.randint(-16, 17, (len(tops), 32), generator=generator).double() / 16
    others = torch.ldexp(others, -torch.randint(0, 16, (len(tops), 32), generator=generator).double())
    blocks = others * amax[:, None]
    at = torch.randint(0, 32, (len(tops),), generator=generator)
    sign = torch.randint(0, 2, (len(tops),), generator=generator).double() * 2 - 1
    blocks[torch.arange(len(tops)), at] = amax * sign
    blocks = blocks.clamp(-info.max, info.max).to(dtype)
    special = torch.zeros(4, 32, dtype=dtype)
    special[1] = -0.0
    special[2, 5], special[2, 6] = torch.nan, 3.0
    special[3, 7], special[3, 8], special[3, 9] = torch.inf, -torch.inf, 1.0
    ordinary = torch.randn(64, 32, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    every = torch.cat([special, blocks, ordinary])
    width = columns // 32
    return torch.cat([every, every[: -len(every) % width]]).reshape(-1, columns)
