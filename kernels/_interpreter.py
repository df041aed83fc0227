"""Makes Triton's CPU interpreter compute low precision as compiled kernels do.

With ``TRITON_INTERPRET=1`` a kernel runs in numpy, which has no bfloat16 and no float8: the interpreter holds their
bits in unsigned integers. Its conversions from and to them are wrong (31.75 becomes 16 in e4m3, bf16 truncates), and
its arithmetic takes the bits for integers. Here conversions and the operands of dot products become exact, and
arithmetic on bits an error: a kernel computes element-wise in float32, interpreted or compiled.

The corrections replace methods of the interpreter's builder, through which ``triton.language`` makes every operation.
So they reach all interpreted kernels of the process, and no compiled one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

# Not numpy: only the interpreter needs it, and where kernels are compiled it may be absent.
import torch
import triton
import triton.language as tl

_FORMATS = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and below 0 in the same order
_IN_NUMPY = (tl.float16, tl.float32, tl.float64)
_CASTS = ("create_fp_ext", "create_fp_trunc", "create_fp_to_fp", "create_si_to_fp", "create_ui_to_fp")
# The operations that may take or give bits. Any other is refused, also one that a later version of Triton adds.
_MAY_HOLD_BITS = re.compile(
    "create_(fp_ext|fp_trunc|fp_to_fp|si_to_fp|ui_to_fp|dot|dot_scaled"  # corrected below
    r"|\w*load|\w*store|\w*gather|\w*scatter|atomic_cas|bitcast|select"  # these only move values
    "|reshape|trans|expand_dims|broadcast|splat|unsplat|cat|join|split|print)"
)


def correct_interpreter() -> bool:
    """Correct the interpreter's low precision if kernels are interpreted; return whether they are.

    Call it once ``TRITON_INTERPRET`` is set and before a kernel runs. Further calls change nothing.

    Raises:
        RuntimeError: this version of Triton has another interpreter than expected, so its results would stay wrong.
    """
    if not triton.knobs.runtime.interpret:
        return False
    from triton.runtime import interpreter

    try:
        builder, reductions = interpreter.InterpreterBuilder, interpreter.ReduceScanOpInterface
        if hasattr(builder, "corrected_by_layoutcheck"):
            return True
        replacements = _replacements(builder)
        attrgetter("binary_op", "get_fp32", *replacements)(builder)
        check_tensor, patch_core = reductions.check_tensor, interpreter._patch_lang_core
    except AttributeError as error:
        raise RuntimeError(
            f"cannot correct the interpreter of triton {triton.__version__}: it has no {error.name!r}. Its bfloat16 "
            "and float8 would be silently wrong: run on a GPU, or with a version of Triton that layoutcheck knows."
        ) from error

    def patch_core_for_fp8(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir
        scope.set_attr(lang.dtype, "to_ir", lambda self, builder: self if self.is_fp8() else to_ir(self, builder))

    for name, replacement in replacements.items():
        setattr(builder, name, replacement)
    for name, method in list(vars(builder).items()):
        if name.startswith("create_") and not _MAY_HOLD_BITS.fullmatch(name):
            setattr(builder, name, _without_bits(name.removeprefix("create_"), method))
    reductions.check_tensor = _without_bits("reduce or scan", check_tensor)
    interpreter._patch_lang_core = patch_core_for_fp8  # Before Triton 3.8 it does not know the fnuz formats.
    if not hasattr(builder, "get_bf16"):  # Before Triton 3.9 a kernel could hold no bf16 constant but 0.
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)
    builder.corrected_by_layoutcheck = True
    return True


def _replacements(builder: Any) -> dict[str, Callable[..., Any]]:
    import numpy as np

    clampf = builder.create_clampf

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan.name != "NONE":
            return clampf(self, x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    replacements: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_CASTS, _cast),
        "create_dot": _dot,
        # Compiled code takes the other operand of a NaN unless told to propagate it; Triton 3.6 always propagates.
        "create_maxnumf": lambda self, x, y: self.binary_op(x, y, np.fmax),
        "create_minnumf": lambda self, x, y: self.binary_op(x, y, np.fmin),
        "create_clampf": clamp,
    }
    if hasattr(builder, "create_dot_scaled"):  # Before Triton 3.8 it fails for want of it.
        replacements["create_dot_scaled"] = _dot_scaled
    return replacements


def _cast(self: Any, source: Any, dst_type: Any, rounding: Any = None) -> Any:
    values, dtype = _values(source), dst_type.scalar
    toward_zero = rounding is not None and rounding.name == "RTZ"
    if dtype.primitive_bitwidth >= 32 and not toward_zero:
        result = values.to(_FORMATS[dtype])  # Rounds once, to nearest even, if at all.
    else:
        result = _narrow(values.double(), dtype, toward_zero)
    if _is_bits(dtype):
        result = result.view(torch.uint8 if result.itemsize == 1 else torch.uint16)
    return type(source)(result.numpy(), dtype)


def _dot(self: Any, a: Any, b: Any, c: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    return _multiply_add(_values(a), _values(b), c)


def _dot_scaled(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any) -> Any:
    _, a_along_k, b_along_k, c = rest  # after fast_math; e2m1 may be packed along the other axis
    left = _pairs(a, -1 if a_along_k else -2) if a_format.name == "E2M1" else _values(a).float()
    right = _pairs(b, -2 if b_along_k else -1) if b_format.name == "E2M1" else _values(b).float()
    return _multiply_add(_scaled(left, a_scale, -1), _scaled(right, b_scale, -2), c)


def _pairs(operand: Any, axis: int) -> torch.Tensor:
    """The e2m1 numbers of bytes that hold two along an axis, the lower half first."""
    packed = torch.from_numpy(operand.data.copy()).view(torch.uint8).movedim(axis, -1)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    values = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device="cpu")
    return values[codes.long()].movedim(-1, axis)


def _scaled(values: torch.Tensor, scale: Any, k_axis: int) -> torch.Tensor:
    if scale is None:
        return values
    factors = _values(scale)  # [M or N, groups of K], whichever the operand
    if not _is_bits(scale.dtype):
        factors = factors.view(torch.float8_e8m0fnu).float()
    factors = factors.repeat_interleave(values.shape[k_axis] // factors.shape[-1], dim=-1)
    return values * factors.transpose(-1, k_axis)


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: Any) -> Any:
    start = _values(c)
    wide = torch.float32 if start.dtype == torch.float16 else start.dtype
    result = a.to(wide) @ b.to(wide) + start.to(wide)
    return type(c)(result.to(start.dtype).numpy(), c.dtype.scalar)


def _values(handle: Any) -> torch.Tensor:
    """What a handle's numpy array stands for: bits as float32, which holds them exactly, numbers as they are."""
    # A copy, as upstream hands over read-only views too; [...] makes an array of a numpy scalar.
    data = torch.from_numpy(handle.data[...].copy())
    return data.view(_FORMATS[handle.dtype.scalar]).float() if _is_bits(handle.dtype) else data


def _is_bits(dtype: Any) -> bool:
    return dtype.scalar.is_floating() and dtype.scalar not in _IN_NUMPY


def _narrow(values: torch.Tensor, dtype: Any, toward_zero: bool) -> torch.Tensor:
    """Round float64 once to a narrower format.

    Float8 saturates, infinity included, whatever torch's own cast does. Toward zero no finite value overflows, and
    float8_e5m2 keeps infinity, as GPUs then cut it from float16.
    """
    target = _FORMATS[dtype]
    info = torch.finfo(target)
    if dtype.is_fp8() and not (toward_zero and dtype == tl.float8e5):
        values = values.clamp(-info.max, info.max)
    # A value's exponent field alone is the largest power of two in it. That gives the distance of the format's
    # neighbours there, a power of two as well: dividing by it and multiplying with it are exact.
    power = (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    # Not info.eps, which is wrong for float8_e5m2fnuz (torch 2.13).
    step = power.clamp(min=info.smallest_normal) * 2.0**-dtype.fp_mantissa_width
    if toward_zero:
        rounded = ((values / step).trunc() * step).clamp(-info.max, info.max)
    else:
        rounded = (values / step).round() * step  # Ties to even; what overflows becomes infinity in the cast below.
    return torch.where(values.isinf(), values, rounded).to(target)


def _without_bits(operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, refusing to take or give values that are held as bits."""

    def check(*values: Any) -> None:
        for value in values:
            dtype = getattr(value, "dtype", None)
            if isinstance(value, tuple):  # the tensors of a reduction or a scan
                check(*value)
            elif isinstance(dtype, tl.dtype) and _is_bits(dtype):
                raise TypeError(
                    f"{operation} on {dtype.scalar}: Triton's interpreter would compute on its bits. "
                    "Compute in float32: convert the operands with .to(tl.float32)."
                )

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args, *kwargs.values())
        result = method(self, *args, **kwargs)
        check(result)
        return result

    return checked
