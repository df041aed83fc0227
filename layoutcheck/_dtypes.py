"""Element types: their names, widths, NaN codes, and the storage that may carry them.

An element type is what the kernel takes the bits for. Storage may be another torch dtype of the same width where a
layout accepts it (E8M0 bytes in uint8, as sglang's and FlashInfer's pools keep them), but e4m3fn and e4m3fnuz are never
taken for each other: the same bits mean half the value (OCP MX v1.0; torch/csrc headeronly Float8_e4m3fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_dtype = torch.dtype  # inside Element, torch is a field


@dataclass(frozen=True, slots=True)
class Element:
    """One element type.

    ``bits`` is its width, ``nan`` the codes that are not a number (None where there are too many to list, as in 16-bit
    floats), ``carriers`` the other torch dtypes that may hold the same bits without a layout having to say so.
    """

    name: str
    torch: _dtype
    bits: int
    nan: tuple[int, ...] | None = ()
    carriers: tuple[_dtype, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of one element. Raises ``ValueError`` for elements narrower than a byte."""
        if self.bits % 8:
            raise ValueError(f"{self.name} has {self.bits} bits: several share a byte")
        return self.bits // 8

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name.upper()


E4M3 = Element("e4m3", torch.float8_e4m3fn, 8, (0x7F, 0xFF))
E4M3FNUZ = Element("e4m3fnuz", torch.float8_e4m3fnuz, 8, (0x80,))
E5M2 = Element("e5m2", torch.float8_e5m2, 8, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))
E2M1 = Element("e2m1", torch.float4_e2m1fn_x2, 4, (), (torch.uint8, torch.int8))
E8M0 = Element("e8m0", torch.float8_e8m0fnu, 8, (0xFF,), (torch.uint8,))
BF16 = Element("bf16", torch.bfloat16, 16, None)
FP16 = Element("fp16", torch.float16, 16, None)
FP32 = Element("fp32", torch.float32, 32, None)
FP64 = Element("fp64", torch.float64, 64, None)
UINT8 = Element("uint8", torch.uint8, 8)
INT8 = Element("int8", torch.int8, 8)
INT32 = Element("int32", torch.int32, 32)
INT64 = Element("int64", torch.int64, 64)
BOOL = Element("bool", torch.bool, 8)

ELEMENTS = (E4M3, E4M3FNUZ, E5M2, E2M1, E8M0, BF16, FP16, FP32, FP64, UINT8, INT8, INT32, INT64, BOOL)
_BY_NAME = {e.name: e for e in ELEMENTS} | {str(e.torch).removeprefix("torch."): e for e in ELEMENTS}
_BY_TORCH = {e.torch: e for e in ELEMENTS}


def element(value: Element | torch.dtype | str) -> Element:
    """The element type of a name (``"e4m3"``, ``"float8_e4m3fn"``), a torch dtype or an element type.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(value, Element):
        return value
    found: Any = _BY_TORCH.get(value) if isinstance(value, torch.dtype) else _BY_NAME.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is no element type; there are {', '.join(e.name for e in ELEMENTS)}")
    return found  # type: ignore[no-any-return]


def of(dtype: torch.dtype) -> Element:
    """The element type that a torch dtype stands for by itself."""
    return _BY_TORCH.get(dtype) or Element(str(dtype).removeprefix("torch."), dtype, dtype.itemsize * 8)


def short(dtype: torch.dtype) -> str:
    """``float8_e8m0fnu`` for ``torch.float8_e8m0fnu``, as messages print it."""
    return str(dtype).removeprefix("torch.")
