"""One call: its arguments, the sizes for which it was made, and how it prints as code that makes it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layoutcheck import _dtypes
from layoutcheck._contract import Contract
from layoutcheck._layout import Layout
from layoutcheck._specs import Form
from layoutcheck.testing import _memory
from layoutcheck.testing._guard import apply, contract_of


@dataclass(frozen=True)
class Recipe:
    """How one tensor of a call is made; the arguments of :func:`layoutcheck.testing.tensor`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    data: int | tuple[int, ...] | None = 0
    holds: _dtypes.Element | None = None
    padding: Layout | None = None
    device: Any = None

    def build(self) -> torch.Tensor:
        return _memory.tensor(
            self.shape, self.strides, self.dtype, offset=self.offset, data=self.data, holds=self.holds,
            padding=self.padding, device=self.device,
        )  # fmt: skip

    def __str__(self) -> str:
        text = f"tensor({self.shape}, {self.strides}, {self.dtype}"
        if self.offset:
            text += f", offset={self.offset}"
        if self.data != 0:
            text += f", data={list(self.data) if isinstance(self.data, tuple) else self.data}"
        if self.holds is not None:
            text += f", holds={self.holds.name!r}"
        if self.padding is not None:
            sizes = ", ".join(f"{a.name}={self.padding.values_of(a.name)}" for a in self.padding.axes)
            text += f", padding=layout({self.padding.name!r})({sizes})"
        if self.device is not None:
            text += f", device={str(self.device)!r}"
        return text + ")"


@dataclass(frozen=True)
class Call:
    """A valid call: its arguments by name, and the sizes for which it was made. ``repr`` is code that repeats it.

    ``arguments`` are those of the signature; ``everything`` has the derived ones too, ``recipes`` how each tensor was
    made, ``forms`` which form of its spec each has.
    """

    fn: Callable[..., Any] = field(repr=False)
    arguments: dict[str, Any]
    everything: dict[str, Any]
    sizes: dict[str, Any]
    recipes: dict[str, Recipe]
    forms: dict[str, Form]

    @property
    def contract(self) -> Contract:
        """The contract that the call keeps."""
        return contract_of(self.fn)

    def __call__(self) -> Any:
        """Run it."""
        return apply(self.fn, self.contract, self.arguments)

    def with_arguments(self, **changed: Any) -> Call:
        """The same call with some arguments replaced, and code for them where they are tensors."""
        recipes = {n: r for n, r in self.recipes.items() if n not in changed}
        arguments = self.arguments | {n: v for n, v in changed.items() if n in self.arguments}
        return replace(self, arguments=arguments, everything=self.everything | changed, recipes=recipes)

    def copy(self) -> Call:
        """The same call with tensors of its own, equal in contents, strides and offsets."""
        made = {n: clone(v) for n, v in self.arguments.items() if isinstance(v, torch.Tensor)}
        return replace(self, arguments=self.arguments | made, everything=self.everything | made)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print the fields

    def __repr__(self) -> str:
        lines = [f"    {n}={self._shown(n, v)}," for n, v in self.arguments.items()]
        return f"{self.contract.name}(\n" + "\n".join(lines) + "\n)"

    def _shown(self, name: str, value: Any) -> str:
        if name in self.recipes:
            return str(self.recipes[name])
        return shown(value) if isinstance(value, torch.Tensor) else repr(value)


def shown(value: torch.Tensor) -> str:
    """Code for a tensor that was not made from a recipe; its contents only where they are few integers."""
    data = None
    if not value.dtype.is_floating_point and 0 < value.numel() <= 64 and value.device.type != "meta":
        data = tuple(value.flatten().tolist())
    device = None if value.device.type == "cpu" else value.device
    return str(
        Recipe(tuple(value.shape), value.stride(), value.dtype, int(value.storage_offset()), data, device=device)
    )


def clone(value: torch.Tensor) -> torch.Tensor:
    """A tensor over a copy of the whole storage: strides, offset and the bytes between its elements are kept."""
    storage = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    return made.set_(storage, value.storage_offset(), value.shape, value.stride())
