"""torch: scaled_mm with block scales in 128x4 tiles.

torch itself looks at them on a GPU only, and then at their number: a linear buffer that was padded has as many. Left
unchecked: recipes other than 1x32 and 1x16 with tiles, and a second level of scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from layoutcheck._rules import when
from layoutcheck.peers._install import Peer

PEER = Peer("torch", "torch", since="2.11", before="2.14")

_TILES = "SWIZZLE_32_4_4"


def _first(name: str) -> Callable[..., Any]:
    def read(**arguments: Any) -> Any:
        value = arguments[name]
        return value[0] if isinstance(value, list | tuple) else value

    return read


def _named(name: str) -> Callable[..., str]:
    """The name of the first recipe or swizzle of an argument."""
    first = _first(name)
    return lambda **arguments: getattr(first(**arguments), "name", "NO_SWIZZLE")


def _packed(side: str) -> Callable[..., bool]:
    return lambda **arguments: bool(_first(f"scale_{side}")(**arguments).is_contiguous())


def _width(mat_a: Tensor, **_: Any) -> int:
    """Elements along K: two e2m1 share an element of the tensor."""
    return mat_a.shape[1] * (2 if mat_a.dtype is torch.float4_e2m1fn_x2 else 1)


def _tiled(side: str, rows: str) -> tuple[Any, ...]:
    return tuple(
        when(
            f"recipe_{side} == '{recipe}' and tiles_{side} == '{_TILES}'",
            f"dtype(block_scale_{side}) == {element}",
            f"width % {block} == 0",
            f"numel(block_scale_{side}) == align({rows}, 128) * align(cdiv(width, {block}), 4)",
            f"packed_{side}",
        )
        for recipe, element, block in (("BlockWise1x32", "e8m0", 32), ("BlockWise1x16", "e4m3", 16))
    )


PEER.guard(
    "torch.nn.functional:scaled_mm",
    *_tiled("a", "m"),
    *_tiled("b", "n"),
    "k == k_of_b",
    same_device=True,
    derive={
        "width": _width,
        **{f"block_scale_{s}": _first(f"scale_{s}") for s in "ab"},
        **{f"recipe_{s}": _named(f"scale_recipe_{s}") for s in "ab"},
        **{f"tiles_{s}": _named(f"swizzle_{s}") for s in "ab"},
        **{f"packed_{s}": _packed(s) for s in "ab"},
    },
    mat_a=Shaped[Tensor, "m k"],
    mat_b=Shaped[Tensor, "k_of_b n"],
    block_scale_a=Tensor,
    block_scale_b=Tensor,
    **dict.fromkeys(("recipe_a", "recipe_b", "tiles_a", "tiles_b"), str),
    **dict.fromkeys(("packed_a", "packed_b"), bool),
)
