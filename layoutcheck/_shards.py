"""DTensors: what a kernel gets of one is this process's shard, so that is what is checked, on the slow path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layoutcheck._contract import Contract

MODULE = "torch.distributed.tensor"  # a second to import: only where somebody else has done it can there be a DTensor


def _kind() -> Any:
    return getattr(sys.modules[MODULE], "DTensor", ())


def any_sharded(*values: Any) -> bool:
    """Whether a DTensor is among the arguments; asked only where :data:`MODULE` is imported."""
    kind = _kind()
    return any(isinstance(value, kind) for value in values)


def check(contract: Contract, values: Mapping[str, Any]) -> None:
    """Check a call with every DTensor's local shard in its place; the callable gets the DTensors themselves."""
    from layoutcheck import _explain

    kind = _kind()
    local = {name: value.to_local() if isinstance(value, kind) else value for name, value in values.items()}
    if found := _explain.explain(contract, local):
        contract.report(found)
    contract.check_values(local)
