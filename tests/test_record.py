"""Records: sections that share a byte buffer. The maps of the catalogue's records are in test_golden_maps."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from layoutcheck import BF16, E4M3, FP32, UINT8, Layout, LayoutError, Record
from layoutcheck.layouts.indexer import DSA_INDEX_132
from layoutcheck.layouts.records import FLASHMLA_V32_656

# --- A record of this file -------------------------------------------------------------------------------------------


def row(size: int | str = 32, **rules: object) -> Layout:
    return Layout("row", "page byte -> page byte", dtype=UINT8, byte=size, fill=0, **rules)


def part(name: str, dtype: object, size: int | str) -> Layout:
    return Layout(name, f"page {name} -> page {name}", dtype=dtype, **{name: size})


def small(**rules: object) -> Record:
    return Record("small", buffer=row(**rules), x=part("x", E4M3, 12), s=part("s", FP32, 2), r=part("r", BF16, 3))


PAGED = [FLASHMLA_V32_656(page=3, page_size=4), DSA_INDEX_132(page=3, page_size=4)]
each_record = pytest.mark.parametrize("record", [small()(page=3), *PAGED], ids=lambda r: r.name)


# --- Where the sections are ------------------------------------------------------------------------------------------


def test_sections_follow_each_other():
    record = small()(page=3)
    assert [(s.name, s.strides, s.offset(page=1, **{n: 1})) for n, s in record.sections.items()] == [
        ("small.x", (32, 1), 32 + 1),
        ("small.s", (8, 1), 8 + 12 // 4 + 1),
        ("small.r", (16, 1), 16 + 20 // 2 + 1),
    ]
    assert [record.offset(n, page=1, **{n: 1}) for n in "xsr"] == [32 + 1, 32 + 12 + 4, 32 + 20 + 2]
    assert (record.shape, record.strides, record.nbytes) == ((3, 32), (32, 1), 96)


def test_a_section_by_name():
    assert small().section("s").elements == (FP32,)
    with pytest.raises(TypeError, match="small has no section 't'; it has x, s, r"):
        small().section("t")
    with pytest.raises(TypeError, match="has no section 't'"):
        small()(page=3).offset("t", page=0)


def test_sections_cannot_be_changed_through_the_mapping():
    record = small()
    dict(record.sections).clear()
    assert list(record.sections) == ["x", "s", "r"]


@pytest.mark.parametrize(
    ("sizes", "shape", "dims"),
    [
        ({}, None, "page page_size slot"),
        ({"page_size": 64}, None, "page slot"),
        ({"page": 2, "page_size": 64}, (2, 8448), ""),
        ({"page": 2, "slot": 128}, (2, 8448), ""),  # page_size follows in the sections, and sizes the buffer
        ({"slot": 128, "page_size": 64}, (2, 8448), ""),
    ],
    ids=str,
)
def test_sizes_that_follow_in_one_part_hold_in_all(sizes, shape, dims):
    record = DSA_INDEX_132(**sizes)
    assert set(record.dims) <= set(dims.split())
    assert record.concrete == (not record.dims)
    if shape:
        assert record.shape == record.empty().shape == shape
        assert record.section("scale").shape == (2, 64)


def test_private_sizes_of_the_same_name_stay_apart():
    """``group`` is another number in each section, and follows from the same ``head_dim``."""
    record = Record(
        "groups",
        buffer=row(),
        a=Layout("a", "page group -> page group", dtype=UINT8, head_dim="group * 32"),
        b=Layout("b", "page group -> page group", dtype=UINT8, head_dim="group * 64"),
    )(page=2, head_dim=256)
    assert [s.shape for s in record.sections.values()] == [(2, 8), (2, 4)]
    assert record.offset("b", page=1, group=3) == 32 + 8 + 3


def test_a_gap_between_pages_is_everywhere():
    record = FLASHMLA_V32_656(page=3, page_size=4, page_gap_rows=2)
    assert record.strides == (6 * 656, 656, 1)
    assert [s.strides for s in record.sections.values()] == [(3936, 656, 1), (984, 164, 1), (1968, 328, 1)]
    assert record.offset("rope", slot=5, dim=0) == 3936 + 656 + 528


# --- Memory ----------------------------------------------------------------------------------------------------------


@each_record
def test_split_gives_typed_views_of_the_buffer(record):
    buffer = record.empty()
    assert buffer.dtype == torch.uint8
    record.check(buffer)
    parts = record.split(buffer)
    assert list(parts) == list(record.sections)
    for name, view in parts.items():
        section = record.section(name)
        assert (view.dtype, tuple(view.shape), view.stride()) == (section.dtype, section.shape, section.strides)
        view.copy_(torch.ones(view.shape).to(view.dtype))
    for name, view in record.split(buffer).items():
        assert (view.float() == 1).all(), name


def test_split_of_a_buffer_inside_another():
    record = small()(page=3)
    raw = torch.arange(128, dtype=torch.uint8)
    buffer = record.view(raw, offset=16)
    assert buffer[0, 0] == 16
    assert record.split(buffer)["x"].view(torch.uint8)[1].tolist() == list(range(48, 60))
    assert record.split(buffer)["r"].contiguous().view(torch.uint8)[2].tolist() == list(range(100, 106))


def test_the_last_page_may_come_without_its_gap():
    record = FLASHMLA_V32_656(page=2, page_size=4, page_gap_rows=1)
    buffer = torch.zeros((2 * 5 - 1) * 656, dtype=torch.uint8).as_strided((2, 4, 656), (5 * 656, 656, 1))
    record.split(buffer)["rope"][1, 3, 63] = 1.0
    assert buffer[1, 3, -2:].view(torch.bfloat16).item() == 1.0


@each_record
def test_nothing_at_all(record):
    none = {"small": small(), "flashmla.v32_656": FLASHMLA_V32_656, "dsa.index_132": DSA_INDEX_132}[record.name]
    none = none(page=0, **({} if record.name == "small" else {"page_size": 4}))
    assert none.nbytes == 0
    assert all(v.numel() == 0 for v in none.split(none.empty()).values())


@each_record
def test_a_buffer_of_another_shape(record):
    for wrong in (record.empty()[..., :-1], record.empty().to(torch.int32)):
        with pytest.raises(LayoutError) as caught:
            record.split(wrong)
        assert caught.value.where == record.name


def test_memory_that_is_too_small():
    with pytest.raises(LayoutError, match="95 bytes"):
        small()(page=3).view(torch.zeros(95, dtype=torch.uint8))


# --- What is refused -------------------------------------------------------------------------------------------------


def test_sections_that_do_not_fit():
    with pytest.raises(LayoutError, match=r"at least 26 bytes for x, s, r\n +got +25"):
        small(size=25)
    assert small(size=28)(page=1).nbytes == 28


def test_sections_that_do_not_fit_once_the_sizes_are_known():
    record = Record("open", buffer=row("n"), x=part("x", E4M3, "k"))
    assert record(n=12, k=12, page=1).nbytes == 12
    for sizes in ({"n": 12, "k": 13}, {"n": 12, "k": 13, "page": 2}):
        with pytest.raises(LayoutError, match="byte has no room for the sections"):
            record(**sizes)
    with pytest.raises(LayoutError, match="no room"):
        record(n=12)(k=13)


def test_a_section_must_begin_as_the_buffer_does():
    with pytest.raises(TypeError, match="section x must begin with page in memory"):
        Record("r", buffer=row(), x=Layout("x", "page dim -> dim page", dtype=E4M3, dim=4))


def test_a_buffer_holds_bytes():
    with pytest.raises(TypeError, match="holds bytes, not fp32"):
        Record("r", buffer=Layout("r", "page byte -> page byte", dtype=FP32, byte=8), x=part("x", E4M3, 4))


def test_an_unknown_size():
    with pytest.raises(TypeError, match=r"dsa.index_132: 'pages' is no size of this record"):
        DSA_INDEX_132(pages=3)


def test_numbers_that_contradict_each_other():
    with pytest.raises(LayoutError):
        DSA_INDEX_132(page=2, slot=129)
    with pytest.raises(LayoutError):
        DSA_INDEX_132(page=2, slot=128, page_size=32)


# --- Identity --------------------------------------------------------------------------------------------------------


def test_equal_declarations_are_equal():
    assert small() == small()
    assert hash(small()) == hash(small())
    assert small().fingerprint == small().fingerprint
    others = [small(size=33), small(align=16), small()(page=3), DSA_INDEX_132, FLASHMLA_V32_656]
    others.append(Record("small", buffer=row(), s=part("s", FP32, 2), x=part("x", E4M3, 12), r=part("r", BF16, 3)))
    others.append(Record("small", buffer=row(), y=part("x", E4M3, 12), s=part("s", FP32, 2), r=part("r", BF16, 3)))
    assert all(small() != other for other in others)
    assert len({small().fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


def test_the_place_of_a_section_is_part_of_its_map():
    one, two = (Record("r", buffer=row(), a=part("a", UINT8, 4), b=part("b", UINT8, n))(page=2) for n in (4, 8))
    assert one.section("a").map_fingerprint == two.section("a").map_fingerprint
    assert one.section("a").map_fingerprint != one.section("b").map_fingerprint


@each_record
def test_copies_are_equal(record):
    _ = record.fingerprint, record.dims
    for again in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert again == record
        assert hash(again) == hash(record)
        assert repr(again) == repr(record)
        assert again.fingerprint == record.fingerprint
        again.split(again.empty())


def test_a_record_is_frozen():
    record = small()
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)


def test_text():
    assert repr(small()) == "<record small: page byte -> page byte; x: e4m3 | s: fp32 | r: bf16>"
