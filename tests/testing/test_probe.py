"""The probe: functions that write in some layout, and what they are said to write."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Int64
from torch import Tensor

from layoutcheck import E8M0, Index, Layout, Writes, contract, layout
from layoutcheck.testing import probe
from layoutcheck.testing._probe import _split

SCALE = layout("mxfp8.interleaved")
ROWS = Layout("b", "token head group -> token head group", dtype=E8M0, head_dim="group * 32")


def writer(place: Any) -> Any:
    """A function that stores scale bytes where ``place(slot, head, group, sizes)`` says, in elements."""

    @contract
    def store(
        rows: Annotated[Tensor, ROWS],
        loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0", unique=True)],
        cache: Annotated[Tensor, SCALE, Writes(at="loc")],
        page_size: int,
    ) -> None:
        flat = cache.view(torch.uint8).as_strided((cache.numel(),), (1,), cache.storage_offset())
        head, group = torch.arange(rows.shape[1])[:, None], torch.arange(rows.shape[2])
        for row, slot in zip(rows.view(torch.uint8), loc.tolist(), strict=True):
            if slot > 0:
                flat[place(slot, head, group, page_size, rows.shape[1], rows.shape[2])] = row

    return store


def declared(slot: int, head: Tensor, group: Tensor, page_size: int, heads: int, groups: int) -> Tensor:
    page, token = divmod(slot, page_size)
    chunk, lane = divmod(token, 32)
    return (((page * heads + head) * 32 + lane) * (page_size // 32) + chunk) * groups + group


def linear(slot: int, head: Tensor, group: Tensor, page_size: int, heads: int, groups: int) -> Tensor:
    return (slot * heads + head) * groups + group


def lane_major(slot: int, head: Tensor, group: Tensor, page_size: int, heads: int, groups: int) -> Tensor:
    page, token = divmod(slot, page_size)
    return ((page * heads + head) * groups + group) * page_size + token


def chaos(slot: int, head: Tensor, group: Tensor, page_size: int, heads: int, groups: int) -> Tensor:
    return (slot * slot * 7 + head * groups + group) % (page_size * heads * groups)


SIZES = dict(page_size=96, page=2, head=2, head_dim=96, token=5)


def test_the_declared_layout_is_recognised():
    found = probe(writer(declared), "cache", **SIZES)
    assert found.declared
    assert found.name == "mxfp8.interleaved"
    assert str(found) == "cache is written as mxfp8.interleaved, as declared"


def test_another_layout_of_the_catalogue_is_named():
    found = probe(writer(linear), "cache", **SIZES)
    assert not found.declared
    assert found.name == "mxfp8.flat"
    assert "was found at element" in found.example


def test_a_layout_that_nobody_declared_is_searched_for():
    found = probe(writer(lane_major), "cache", page_size=32, page=3, head=2, head_dim=64, token=70)
    assert not found.declared
    assert found.name is None
    assert found.pattern is not None
    _, memory = found.pattern.split(" -> ")
    assert memory.split(" (")[0].split() == ["slot0", "head", "group", "slot1"]
    assert "slot1=32" in memory


def test_no_layout_is_none():
    found = probe(writer(chaos), "cache", **SIZES)
    assert not found.declared
    assert found.name is None
    assert found.pattern is None
    assert "in no layout" in str(found)


def test_a_kernel_that_writes_nothing_or_crashes_is_an_error():
    import os

    @contract
    def nothing(
        rows: Annotated[Tensor, ROWS],
        loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0", unique=True)],
        cache: Annotated[Tensor, SCALE, Writes(at="loc")],
        page_size: int,
    ) -> None: ...

    with pytest.raises(AssertionError, match="nothing that was passed"):
        probe(nothing, "cache", **SIZES)

    def crash(*_: Any) -> Tensor:
        os._exit(139)

    with pytest.raises(AssertionError, match="did not survive"):
        probe(writer(crash), "cache", isolated=True, **SIZES)
    with pytest.raises(TypeError, match="no argument that is declared as written"):
        probe(writer(declared), "rows")


def test_an_axis_is_split_where_its_strides_change():
    line = {i: i // 12 * 500 + i % 12 // 4 * 10 + i % 4 * 100 for i in range(1, 24)}
    assert _split(line, 24) == [(2, 500), (3, 10), (4, 100)]
    assert _split({i: 3 * i for i in range(24)}, 24) == [(24, 3)]
    assert _split({i: i * i for i in range(24)}, 24) is None
