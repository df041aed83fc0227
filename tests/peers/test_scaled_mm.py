"""The contract of torch's scaled_mm: block scales in tiles have a type, a number and no gaps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from layoutcheck import E4M3, E8M0, LayoutError, layout, peers

TILES = layout("scale.128x4")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    peers.install("torch")
    yield
    peers.uninstall("torch")


def scales(rows: int, cols: int, dtype: object = E8M0) -> torch.Tensor:
    return TILES(row=rows, col=cols, dtype=dtype).empty().flatten()


def call(m: int = 40, n: int = 96, k: int = 160, block: int = 32, **changed: object) -> None:
    fp4 = block == 16
    element, recipe = (E4M3, ScalingType.BlockWise1x16) if fp4 else (E8M0, ScalingType.BlockWise1x32)
    a = torch.zeros(m, k // (1 + fp4), dtype=torch.uint8)
    b = torch.zeros(n, k // (1 + fp4), dtype=torch.uint8)
    dtype = torch.float4_e2m1fn_x2 if fp4 else torch.float8_e4m3fn
    arguments = dict(
        mat_a=a.view(dtype), mat_b=b.view(dtype).t(), scale_a=scales(m, -(-k // block), element), scale_recipe_a=recipe,
        scale_b=scales(n, -(-k // block), element), scale_recipe_b=recipe, swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
    )  # fmt: skip
    try:
        torch.nn.functional.scaled_mm(**arguments | changed)
    except LayoutError:
        raise
    except (RuntimeError, NotImplementedError, ValueError):
        return  # it was let through: what is missing is a GPU


@pytest.mark.parametrize("block", [32, 16])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 96, 160), (128, 128, 128), (1, 1, 32), (300, 17, 4096)])
def test_right_calls_go_through(block, m, n, k):
    call(m, n, k, block)


def test_a_list_of_one_and_other_shapes_of_the_same_bytes_go_through():
    call(scale_a=[scales(40, 5)], scale_recipe_a=[ScalingType.BlockWise1x32], swizzle_a=[SwizzleType.SWIZZLE_32_4_4])
    call(scale_b=scales(96, 5).reshape(32, -1))


def test_recipes_without_tiles_are_left_alone():
    call(
        scale_a=torch.ones(()), scale_b=torch.ones(()), scale_recipe_a=ScalingType.TensorWise,
        scale_recipe_b=ScalingType.TensorWise, swizzle_a=None, swizzle_b=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(scale_a=torch.zeros(40, 5, dtype=torch.float8_e8m0fnu)), "block_scale_a"),
        (dict(scale_b=torch.zeros(128 * 4, dtype=torch.float8_e8m0fnu)), "block_scale_b"),
        (dict(scale_a=scales(40, 5, E4M3)), "block_scale_a"),
        (dict(scale_a=scales(40, 5).repeat(2)[::2]), "packed_a"),
        (dict(mat_b=torch.zeros(96, 128, dtype=torch.float8_e4m3fn).t()), "k_of_b"),
    ],
)
def test_wrong_scales_are_refused(wrong, message):
    with pytest.raises(LayoutError, match=message):
        call(**wrong)


def test_k_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(LayoutError, match="width % 32 == 0"):
        call(k=144)
