"""Defects of the core that drawn calls and faults have found: each as the smallest call that showed it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from layoutcheck import E4M3, Finite, LayoutError, contract, layout, mode, needs, when

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")


def violations(fn: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    with pytest.raises(LayoutError) as caught:
        fn(*args, **kwargs)
    return [(v.argument, v.rule) for v in caught.value.violations]


@contract
def store(
    cache: Annotated[Tensor, CACHE], other: Annotated[Tensor, CACHE], scale: Annotated[Tensor, SCALE], page_size: int
) -> None: ...


def test_sizes_that_contradict_each_other_are_still_explained():
    """Saying what would be right must not fail where no layout is right for the numbers of the call."""
    cache = torch.zeros(191, 2, 32, dtype=torch.float8_e4m3fn)
    other = torch.zeros(192, 2, 32, dtype=torch.float8_e4m3fn)
    scale = SCALE(page=2, page_size=96, head=2, head_dim=32).empty()
    found = violations(store, cache, other, scale, 96)
    assert found
    assert {argument for argument, _ in found} <= {"cache", "other", "scale"}


def test_a_page_size_of_0_is_explained():
    cache = torch.zeros(96, 1, 128, dtype=torch.float8_e4m3fn)
    scale = SCALE(page=3, page_size=32, head=1, head_dim=128).empty()
    assert violations(store, cache, cache.clone(), scale, 0)


def test_a_missing_argument_is_not_blamed_for_its_element_too():
    @contract(
        "dtype(rows) == dtype(cache)",
        when("dtype(cache) != e4m3", needs("extra")),
    )
    def f(
        rows: Float32[Tensor, "n d"], cache: Float32[Tensor, "m d"], extra: Float32[Tensor, "n"] | None = None
    ) -> None: ...

    rows = torch.zeros(2, 3)
    f(rows, rows, torch.zeros(2))
    assert violations(f, rows, None, torch.zeros(2)) == [("cache", "presence")]
    assert violations(f, rows, None) == [("cache", "presence")]
    assert violations(f, rows, rows) == [("extra", "presence")]


def test_a_renamed_public_part_may_become_a_number():
    """``page="pages"`` and then ``pages=3``: the part keeps no name that another argument could share."""
    renamed = SCALE(page="pages", head="h", head_dim="d", page_size=128)
    concrete = renamed(pages=3, h=2, d=64)
    assert concrete.shape == SCALE(page=3, head=2, head_dim=64, page_size=128).shape
    assert renamed(pages="2 * n").dims == ("h", "d", "n")
    assert renamed.visible == ("h", "d", "pages")


def test_a_finite_slot_of_a_pool_without_slots_is_nothing_to_check():
    @contract
    def read(loc: Int64[Tensor, "token"], scale: Annotated[Tensor, SCALE, Finite(slot=0)], page_size: int) -> str:
        return "ran"

    none = SCALE(page=0, page_size=64, head=1, head_dim=32).empty()
    with mode("values"):
        assert read(torch.zeros(0, dtype=torch.int64), none, 64) == "ran"
        some = SCALE(page=1, page_size=64, head=1, head_dim=32).empty()
        some.view(torch.uint8)[0, 0, 0, 0, 0] = 0xFF
        assert violations(read, torch.zeros(0, dtype=torch.int64), some, 64) == [("scale", "value")]


def test_check_refuses_a_size_that_the_layout_does_not_have():
    scale = layout("mxfp8.interleaved")
    tensor = scale(page=2, page_size=64, head=1, head_dim=32).empty()
    assert scale.check(tensor, page_size=64)["slot"] == 128
    with pytest.raises(TypeError, match="did you mean 'page_size'"):
        scale.check(tensor, pgsize=64)


def test_a_pool_takes_no_other_word_for_its_dtype():
    from layoutcheck.pools import UnifiedKVPool

    with pytest.raises(LayoutError, match="kv_dtype"):
        UnifiedKVPool.allocate(page=2, page_size=1, dim=64, kv_dtype="fp9")


def test_a_negative_size_that_no_given_tensor_shows_is_refused():
    @contract
    def read(
        cache: Annotated[Tensor, CACHE],
        rows: Float32[Tensor, "n"] | None = None,
        *,
        n: int,
        page_size: int = 128,
        left: int = 0,
    ) -> str:
        return "ran"

    cache = torch.zeros(256, 1, 32, dtype=torch.float8_e4m3fn)
    assert read(cache, n=0) == read(cache, torch.zeros(2), n=2, left=-1) == "ran"
    for changed, wrong in ((dict(n=-3), "n"), (dict(n=0, page_size=-128), "page_size")):
        with pytest.raises(LayoutError, match=f"{wrong} >= 0 is needed"):
            read(cache, **changed)
