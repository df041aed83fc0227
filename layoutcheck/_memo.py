"""A memo of accepted calls: metadata that a guard has compared once is not compared rule by rule again.

Which shapes, strides, dtypes and devices a call may have depends on these alone, and on the scalars that sizes are
computed from. An engine makes the same call for sixty layers, so a guard first asks whether all of it is as in an
earlier call that it accepted. torch has that question in one C++ call, the one it asks before a compiled graph runs:
``TensorGuards.check`` compares Python type, dispatch keys, dtype, device, ``requires_grad``, sizes and strides. It does
not compare addresses, storage offsets, values, nor what memory is known to hold; rules about those run on every call.

An exception inside ``check`` is no Python exception and ends the process. A nested tensor without strides raises one,
wrapped by ``vmap`` or not, so guards ask before whether there are any. (Not found is one that outlives its ``vmap``,
which nothing can be done with.)

``TensorGuards`` is private to torch. Where it is missing, newer than was tried, or answers otherwise than it must, no
guard has a memo. ``_compile`` writes the questions; what may be skipped because of an answer is its business.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_BEFORE = (2, 14)  # what has not been tried may end the process

_MOST = 4  # calls remembered by one guard
_PRICE = 2  # of a call that is not known: looking for it, and remembering it
_START = _PRICE * (_MOST + 1)  # what a memo may spend before it has been of use
FULL = 32  # what a memo may save up
_TURNS = (*(False,) * 255, True)  # of a memo that has nothing left: when it tries again

_LASTING = frozenset({int, bool, float, str, type(None), torch.dtype})


class Memo:
    """What one guard remembers of calls: ``entries`` of scalars, a function that compares metadata, and dims.

    It must not cost where no call comes twice: what is remembered is paid for by calls that are known. A memo that has
    nothing left forgets everything, and tries again after a while. A guard looks through the ``entries``; a call that
    is known earns 1, and one that is not it compares, and gives to :meth:`remember` if the memo ``learns``, or if it is
    its ``turn()``. Threads may share a memo: an entry is a tuple that is never changed, and a count that is off by one
    does no harm.
    """

    __slots__ = ("credit", "entries", "learns", "turn")

    def __init__(self) -> None:
        self.entries: tuple[tuple[tuple[Any, ...], Callable[..., bool], tuple[Any, ...]], ...] = ()
        self.learns = True
        self.turn = itertools.chain.from_iterable(itertools.repeat(_TURNS)).__next__
        self.credit = _START

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()  # a copy, or what another process gets, remembers nothing

    def remember(self, dims: tuple[Any, ...], scalars: tuple[Any, ...], *tensors: Any) -> None:
        """Remember a call that was accepted, and its dims, if that can be paid and is metadata that can be kept."""
        self.credit = credit = (self.credit if self.learns else _START) - _PRICE
        self.learns = credit > 0
        if not self.learns:
            self.entries = ()
        elif all(map(_plain, tensors)) and _LASTING.issuperset(scalars[::2]) and all(map(_lasting, dims)):
            self.entries = ((scalars, _same_metadata(tensors), dims), *self.entries[: _MOST - 1])


def _lasting(dim: Any) -> bool:
    """Whether a dim is a plain value: no symbol, and not the tensor that a size is while ``torch.jit`` traces."""
    return all(map(_lasting, dim)) if isinstance(dim, tuple) else type(dim) in _LASTING


def _plain(tensor: Any) -> bool:
    """Whether metadata is numbers, and the tensor's own: a subclass may answer anything.

    A type that may be deleted is no good either: ``TensorGuards`` knows it by its address.
    """
    kind = type(tensor)
    if kind is _Absent:
        return True
    if kind is not Tensor and kind is not Parameter:
        return False
    try:
        _ = tensor.shape, tensor.stride()  # what raises here would end the process there
    except RuntimeError:
        return False
    return tensor.layout is torch.strided and not tensor._has_symbolic_sizes_strides


class _Absent(Tensor):
    """Stands for an argument that is None. No argument is of this type."""


def absent(count: int) -> tuple[Tensor, ...]:
    """So many tensors to stand for arguments that are None: different ones, as no tensor may be two arguments."""
    while len(_absent) < count:
        _absent.append(torch.empty(0, device="cpu").as_subclass(_Absent))
    return tuple(_absent[:count])


_absent: list[Tensor] = []


def _same_metadata(tensors: tuple[Any, ...]) -> Callable[..., bool]:
    # Without both keywords the process ends.
    check: Callable[..., bool] = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    return check


def _behaves() -> bool:
    """Whether torch's private functions are there and answer as a memo needs it."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) >= _BEFORE:
        return False
    try:
        a, b = (torch.empty_strided((2, 3), (3, 1), device="cpu") for _ in "ab")
        same = _same_metadata((a, b))
        others = (
            torch.empty_strided((3, 2), (3, 1), device="cpu"),
            torch.empty_strided((2, 3), (4, 1), device="cpu"),
            torch.empty_strided((2, 3), (3, 1), device="cpu", dtype=torch.int32),
            torch.empty_strided((2, 3), (3, 1), device="meta"),
            Parameter(a.detach()),
            a.detach().as_subclass(_Absent),
            None,
        )
        wanted = same(a, b) is True and same(b, a) is True and not any(same(a, other) for other in others)
        return wanted and transforming() is False and a.is_nested is False and _plain(a) is True
    except Exception:
        return False


transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
AVAILABLE = _behaves()
