"""Starting a kernel: on the device of its tensors, in Triton's CPU interpreter, or not at all with a clear word."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton

__all__ = ["TRITON", "aligned", "cdiv", "interpreted", "launch", "next_power_of_2", "raw"]

TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])


def interpreted(kernel: Any) -> bool:
    """Whether a kernel was defined under ``TRITON_INTERPRET=1``."""
    return not isinstance(kernel, triton.JITFunction)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, *args: Any, **meta: Any) -> None:
    """Start ``kernel`` over ``grid`` on the device of the tensor ``on``, whichever device is current.

    Raises ``RuntimeError`` for a tensor that no compiled kernel can read, and says what to set.
    """
    device = on.device
    if device.type not in ("cuda", "xpu") and not interpreted(kernel):
        name = getattr(kernel, "__name__", "the kernel")
        raise RuntimeError(
            f"{name} got tensors on {device}: a compiled Triton kernel needs a GPU. To run it on a CPU, set "
            "TRITON_INTERPRET=1 in the environment before layoutcheck.kernels is imported"
        )
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*args, **meta)


def aligned(tensor: torch.Tensor, to: int) -> bool:
    """Whether a tensor is known to begin at a multiple of ``to`` bytes. What torch.compile traces has no address."""
    return not torch.compiler.is_compiling() and tensor.data_ptr() % to == 0


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own costs 2 us a call on a host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1. Triton's own costs 2 us a call on a host."""
    return 1 << max(n - 1, 0).bit_length()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of an E8M0 tensor, which Triton has no type for."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor
