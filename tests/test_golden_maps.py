"""Every map of the catalogue against offsets that were not made with it; see ``tests/golden``."""

from __future__ import annotations

import golden_data
import numpy as np
import pytest
import torch
from golden_data import Map, coordinates, cuts, dims, entry, maps, others, vectors

from layoutcheck import Layout, Record, _index
from layoutcheck.layouts import entries, layout

MAPS = maps()
each_map = pytest.mark.parametrize("golden", MAPS, ids=str)
each_record = pytest.mark.parametrize("golden", {m.name: m for m in MAPS if m.section}.values(), ids=lambda m: m.name)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def memory(buffer: torch.Tensor, width: int) -> np.ndarray:
    """All memory of a buffer as integers of its elements' width, from the first byte of its storage."""
    integers = torch.empty(0, dtype=INTEGERS[width])
    return integers.set_(buffer.untyped_storage()).numpy()


def planes(golden: Map) -> list[torch.Tensor]:
    """The number of each element, in as many digits as its width needs: together they tell all elements apart."""
    width, number = golden.element["itemsize"], np.arange(golden.offset.size).reshape(golden.offset.shape)
    digits = []
    while not digits or number.any():
        number, digit = np.divmod(number, 256**width // 2)
        digits.append(torch.from_numpy(digit).to(INTEGERS[width]))
    return digits


# --- What is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("index_map"), ids=lambda v: v["id"])
def test_every_vector_is_compared(vector):
    assert entry(vector) is not None, f"{vector['layout']} is not in the catalogue"
    golden_data.load(vector["id"])
    assert vector["id"] in {m.name for m in MAPS}


# --- Offsets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("golden", "cut"), [(m, c) for m in MAPS for c in cuts(m.open)], ids=str)
def test_offset(golden, cut):
    actual = golden.layout.offset(**coordinates(golden.layout, cut))
    np.testing.assert_array_equal(actual, golden.offset)


@each_map
def test_offset_of_ints_and_of_tensors(golden):
    names, last = [a.name for a in golden.layout.axes], tuple(n - 1 for n in golden.offset.shape)
    assert golden.layout.offset(**dict(zip(names, last, strict=True))) == golden.offset[last]
    grids = [torch.from_numpy(i) for i in np.indices(golden.offset.shape)]
    actual = golden.layout.offset(**dict(zip(names, grids, strict=True)))
    np.testing.assert_array_equal(actual.numpy(), golden.offset)


@each_record
def test_record_offsets_count_bytes(golden):
    for name, section in golden.vector["sections"].items():
        names = [a.name for a in golden.record.section(name).axes]
        stored = golden.arrays[section["array"]]
        actual = golden.record.offset(name, **dict(zip(names, np.indices(stored.shape), strict=True)))
        np.testing.assert_array_equal(actual, stored)


# --- Sizes and padding -----------------------------------------------------------------------------------------------


@each_map
def test_sizes(golden):
    whole = golden.record if golden.section else golden.layout
    shown = golden.vector
    if golden.vector["layout"].startswith("deepgemm."):  # shown as DeepGEMM is handed it, not in memory order
        shown = golden.vector["tensor_view"] | {f"physical_{n}": s for n, s in golden.vector["tensor_view"].items()}
    wanted = [(n, s) for n, s in zip(shown["physical_shape"], shown["physical_strides"], strict=True)]
    if golden.vector["layout"] == "flashmla.v32_656":
        del wanted[2]  # one latent head, which the catalogue does not show
    assert list(zip(whole.shape, whole.strides, strict=True)) == wanted
    assert whole.nbytes == golden.vector["numel"] * (1 if golden.section else golden.element["itemsize"])
    assert golden.layout.elements[0].itemsize == golden.element["itemsize"]
    assert str(golden.layout.elements[0].torch) == f"torch.{golden.element['dtype']}"
    carrier = golden.vector.get("tensor_view", {}).get("dtype", golden.element["dtype"])
    assert str(golden.layout.dtype) == f"torch.{carrier}"
    buffer = whole.empty()
    assert (buffer.shape, buffer.stride()) == (whole.shape, whole.strides)


@each_map
def test_sizes_that_follow(golden):
    for name, size in others(golden.vector).items():
        match name:
            case "group_size":
                assert golden.layout.values_of("group") * size == golden.vector["sizes"]["head_dim"]
            case "page_bytes":
                assert golden.record.nbytes == golden.vector["sizes"]["pages"] * size
            case "x":  # 16 bytes of elements
                assert size * golden.element["itemsize"] == 16
            case _:
                pytest.fail(f"{golden} has no {name}")


@pytest.mark.parametrize("golden", [m for m in MAPS if not m.section], ids=str)
def test_padding(golden):
    assert golden.layout.numel == golden.vector["numel"]
    assert golden.layout.padding == golden.vector["padding_numel"]
    assert _index.padding_ranges(golden.layout) == [tuple(r) for r in golden.arrays["padding"].tolist()]


@each_record
def test_sections_and_padding_cover_a_record_once(golden):
    times = np.zeros(golden.record.nbytes, int)
    for name, section in golden.record.sections.items():
        names = [a.name for a in section.axes]
        shape = golden.arrays[golden.vector["sections"][name]["array"]].shape
        first = golden.record.offset(name, **dict(zip(names, np.indices(shape), strict=True)))
        for byte in range(section.dtype.itemsize):
            np.add.at(times, first + byte, 1)
    for start, end in golden.arrays["padding"]:
        times[start:end] += 1
    assert (times == 1).all()


# --- Pack and unpack -------------------------------------------------------------------------------------------------


@each_map
def test_pack_and_unpack(golden):
    for plane in planes(golden):
        logical = plane.view(golden.layout.elements[0].torch)
        buffer = golden.layout.pack(logical)
        expected = np.zeros(golden.layout.numel, plane.numpy().dtype)
        expected[golden.offset] = plane.numpy()
        np.testing.assert_array_equal(memory(buffer, plane.element_size()), expected)
        back = golden.layout.unpack(buffer)
        assert back.dtype == golden.layout.elements[0].torch
        np.testing.assert_array_equal(back.view(plane.dtype).numpy(), plane.numpy())


@each_record
def test_split_shares_the_record(golden):
    buffer = golden.record.empty()
    assert not buffer.any()
    expected = np.zeros(golden.record.nbytes, np.uint8)
    for name, view in golden.record.split(buffer).items():
        section = Map(golden.name, name)
        values = torch.arange(section.offset.size).remainder(127).add(1).reshape(section.offset.shape).to(view.dtype)
        view.copy_(section.layout.pack(values))
        where = section.offset[..., None] * view.element_size() + np.arange(view.element_size())
        expected[where] = values.contiguous().view(torch.uint8).reshape(where.shape).numpy()
    np.testing.assert_array_equal(memory(buffer, 1), expected)


# --- Same sizes, different bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("map-paged_nhd-p3x16-h2-d64", "map-paged_hnd-p3x16-h2-d64"),
        ("map-paged_nhd-p3x16-h2-d32-gap96", "map-paged_hnd-p3x16-h2-d32-gap96"),
    ],
)
def test_the_same_sizes_in_another_order(one, other):
    a, b = Map(one), Map(other)
    assert a.layout.nbytes == b.layout.nbytes
    assert a.layout.map_fingerprint != b.layout.map_fingerprint
    assert (a.offset != b.offset).any()


@pytest.mark.parametrize("golden", [m for m in MAPS if m.vector["layout"] == "mxfp8.interleaved"], ids=str)
def test_flat_scales_have_the_same_size_as_interleaved_ones(golden):
    flat = layout("mxfp8.flat")
    assert isinstance(flat, Layout)
    flat = flat(slot=golden.layout.values_of("slot"), **{n: dims(golden.vector)[n] for n in ("head", "head_dim")})
    assert flat.nbytes == golden.layout.nbytes
    assert flat.map_fingerprint != golden.layout.map_fingerprint


def test_a_catalogue_has_both_kinds():
    assert {type(e) for e in entries().values()} == {Layout, Record}
