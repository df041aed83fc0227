"""What a declaration means: names, sizes, views, memory, checks, identity. For the maps see test_golden_maps."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layoutcheck import BF16, E4M3, E8M0, FP32, INT8, UINT8, Layout, LayoutError, _index
from layoutcheck._dims import DimSyntaxError, parse
from layoutcheck._pattern import PatternError
from layoutcheck.layouts import entries, layout
from layoutcheck.layouts.mxfp8 import MXFP8_SCALE_FLAT, MXFP8_SCALE_INTERLEAVED
from layoutcheck.layouts.paged import MLA_LATENT, PAGED_HND, PAGED_NHD
from layoutcheck.layouts.rows import ROWS_THD
from layoutcheck.layouts.scale import SCALE_128X4, SCALE_LINEAR
from layoutcheck.layouts.unified_kv import UNIFIED_KV_ROWS, UNIFIED_KV_SCALE

LAYOUTS = (
    MXFP8_SCALE_INTERLEAVED, MXFP8_SCALE_FLAT, PAGED_NHD, PAGED_HND, MLA_LATENT, ROWS_THD, SCALE_LINEAR, SCALE_128X4,
    UNIFIED_KV_ROWS, UNIFIED_KV_SCALE,
)  # fmt: skip
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda e: e.name)

# Pairwise different sizes: a swap of two axes must show.
SIZES = {
    "page": 3, "page_size": 32, "head": 2, "head_dim": 64, "slot": 96, "token": 5, "row": 130, "col": 6, "dim": 128,
    "latent": 24, "rope": 8,
}  # fmt: skip
PAGED = {"page": 3, "page_size": 16, "head": 2, "head_dim": 32}


ROWS = Layout("rows", "token head head_dim -> token head head_dim", dtype=FP32, dense="head_dim")

# What no tensor of these shows.
HIDDEN = {"scale.128x4": ("row", "col"), "mla.latent": ("latent",), "unified_kv.rows": ("page_size",)}


def known(open_layout: Layout) -> Layout:
    return open_layout(**{n: SIZES[n] for n in open_layout.dims})


def plain(**rules: object) -> Layout:
    return Layout("plain", "row col -> row col", dtype=FP32, **rules)


def storage(rows: int, stride: int, cols: int, start: int = 0) -> torch.Tensor:
    """A float32 matrix with that row stride, ``start`` elements into memory that is aligned."""
    return torch.zeros(start + rows * stride + cols).as_strided((rows, cols), (stride, 1), start)


# --- The numbers of the design ---------------------------------------------------------------------------------------


def test_a_concrete_layout():
    sf = MXFP8_SCALE_INTERLEAVED(slot=8192, head=8, head_dim=128, page_size=128)
    assert sf.shape == (64, 8, 32, 4, 4)
    assert sf.strides == (4096, 512, 16, 4, 1)
    assert (sf.nbytes, sf.numel, sf.padding) == (262144, 262144, 0)
    assert (sf.concrete, sf.dims, sf.dtype) == (True, (), torch.float8_e8m0fnu)
    assert sf.offset(slot=517, head=3, group=1) == 4 * 4096 + 3 * 512 + 5 * 16 + 0 * 4 + 1
    assert {a: sf.values_of(a) for a in ("slot", "page", "token", "chunk", "lane", "group")} == {
        "slot": 8192, "page": 64, "token": 128, "chunk": 4, "lane": 32, "group": 4,
    }  # fmt: skip
    assert repr(sf) == "<mxfp8.interleaved (64, 8, 32, 4, 4) e8m0>"


@pytest.mark.parametrize(
    ("row", "col", "shape", "padding"), [(200, 6, (2, 2, 32, 4, 4), 848), (1, 1, (1, 1, 32, 4, 4), 511)]
)
def test_a_padded_layout(row, col, shape, padding):
    tiles = SCALE_128X4(row=row, col=col)
    assert (tiles.shape, tiles.padding, tiles.numel) == (shape, padding, int(np.prod(shape)))


# --- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "dims", "visible"),
    [
        (MXFP8_SCALE_INTERLEAVED, "slot head head_dim page_size", "slot head head_dim page_size page"),
        (MXFP8_SCALE_FLAT, "slot head head_dim", "slot head head_dim"),
        (PAGED_NHD, "slot head head_dim page_size", "slot head head_dim page_size page_gap page"),
        (SCALE_128X4, "row col", "row col"),
        (ROWS_THD, "token head head_dim", "token head head_dim"),
        (MLA_LATENT, "slot latent rope", "slot latent rope"),
        (PAGED_NHD(head_dim="v_head_dim"), "slot head v_head_dim page_size", None),
        (PAGED_NHD(head_dim="latent + rope", head=1), "slot latent rope page_size", None),
        (PAGED_NHD(slot="n * 2", page_size=16), "n head head_dim", None),
        (PAGED_NHD(head_dim="64 + 64"), "slot head page_size", None),
        (PAGED_NHD(page_gap="gap"), "slot head head_dim page_size gap", None),
    ],
    ids=repr,
)
def test_open_and_visible_names(layout, dims, visible):
    assert set(layout.dims) == set(dims.split())
    if visible is not None:
        assert set(layout.visible) == set(visible.split())


def test_names_are_substituted_all_at_once():
    swapped = SCALE_LINEAR(row="col", col="row")
    assert swapped(row=3, col=5).shape == (5, 3)


def test_substitution_in_steps_is_the_same_declaration():
    at_once, in_steps = PAGED_HND(**PAGED), PAGED_HND(page=3)(head=2)(head_dim=32)(page_size=16)
    assert at_once.shape == in_steps.shape == (3, 2, 16, 32)
    assert at_once.strides == in_steps.strides
    assert at_once.map_fingerprint == in_steps.map_fingerprint


@pytest.mark.parametrize(
    "sizes",
    [
        {"slot": 48, "page_size": 16},
        {"slot": 48, "page": 3},
        {"page": 3, "page_size": 16},
        {"page": 3, "token": 16},
        {"slot": 48, "page": 3, "page_size": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [PAGED_NHD, PAGED_HND], ids=lambda e: e.name)
def test_any_two_of_slot_page_and_page_size_are_enough(layout, sizes):
    made, expected = layout(**sizes, head=2, head_dim=32), layout(**PAGED)
    assert made.concrete
    assert (made.shape, made.strides, made.nbytes) == (expected.shape, expected.strides, expected.nbytes)


@pytest.mark.parametrize("size", ["chunk", "token", "lane"])
def test_a_part_may_be_sized(size):
    sizes = {"chunk": 2, "token": 64, "lane": 32}
    made = MXFP8_SCALE_INTERLEAVED(slot=192, page_size=64, head=2, head_dim=96, **{size: sizes[size]})
    assert made.shape == (3, 2, 32, 2, 3)


def test_solve():
    solved = MXFP8_SCALE_INTERLEAVED.solve(slot=192, page_size=64, head=2, head_dim=96)
    assert {"page": 3, "group": 3, "chunk": 2}.items() <= solved.items()
    with pytest.raises(TypeError, match=r"head.* must be given"):
        MXFP8_SCALE_INTERLEAVED.solve(slot=192, page_size=64, head_dim=96)
    with pytest.raises(TypeError, match=r"'slots' .*did you mean 'slot'"):
        MXFP8_SCALE_INTERLEAVED.solve(slots=3)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("headdim", "head_dim"), ("pages", "page"), ("page_sise", "page_size"), ("zzz", None), ("viev", "view")],
)
def test_an_unknown_keyword(keyword, hint):
    with pytest.raises(TypeError, match=f"{keyword!r} is neither a rule nor a size of this layout") as caught:
        PAGED_NHD(**{keyword: 3})
    assert ("did you mean" in str(caught.value)) == (hint is not None)
    assert hint is None or f"did you mean {hint!r}?" in str(caught.value)


@pytest.mark.parametrize("value", [1.5, True, None, "a +", "a.b", "a == b"])
def test_a_size_that_is_none(value):
    with pytest.raises(DimSyntaxError):
        PAGED_NHD(head_dim=value)


@pytest.mark.parametrize(
    ("layout", "sizes", "numbers"),
    [
        (MXFP8_SCALE_INTERLEAVED, {"head_dim": 100}, "100 % 32 = 4"),
        (MXFP8_SCALE_INTERLEAVED, {"page_size": 48}, "48 % 32 = 16"),
        (MXFP8_SCALE_INTERLEAVED, {"slot": 8190, "page_size": 128}, "8190 % 128 = 126"),
        (MXFP8_SCALE_INTERLEAVED, {"slot": 8192, "page_size": 128, "page": 63}, "8192 and 8064"),
        (MXFP8_SCALE_INTERLEAVED, {"lane": 16}, "32 and 16"),
        pytest.param(MXFP8_SCALE_INTERLEAVED, {"page_size": 128, "token": 64}, "128 and 64"),
        pytest.param(MLA_LATENT, {"dim": 100, "latent": 64, "rope": 32}, "96 and 100"),
    ],
)
def test_numbers_that_contradict_each_other(layout, sizes, numbers):
    with pytest.raises(LayoutError, match=numbers) as caught:
        layout(**sizes)
    assert [v.rule for v in caught.value.violations] == ["relation"]


def test_an_open_layout_has_no_numbers():
    for read in ("shape", "strides", "nbytes", "numel", "padding", "map_fingerprint"):
        with pytest.raises(TypeError, match=r"slot|page_size"):
            getattr(PAGED_NHD, read)
    with pytest.raises(TypeError, match="page_size must be known"):
        PAGED_NHD.offset(slot=17, head=0, head_dim=3)


def test_an_offset_needs_only_the_sizes_inside():
    assert PAGED_NHD(page_size=16, head=2, head_dim=32).offset(slot=17, head=0, head_dim=3) == 1091


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        ({"slot": 1, "head": 0}, "leave out head_dim"),
        ({"slot": 1, "page": 0, "head": 0, "head_dim": 0}, "give page more than once"),
        ({"slot": 1, "heads": 0, "head_dim": 0}, "no axis 'heads'; it has slot, page, token, head, head_dim"),
        ({}, "no coordinates leave out"),
    ],
)
def test_coordinates_that_are_no_cut(coordinates, message):
    with pytest.raises(TypeError, match=message):
        PAGED_NHD(**PAGED).offset(**coordinates)


# --- Declarations that are refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"pad": {"rwo": 4}}, "pad names 'rwo'"),
        ({"pitch": {"rwo": 4}}, "pitch names 'rwo'"),
        ({"align": {"rwo": 4}}, "align names 'rwo'"),
        ({"offsets": "int16"}, "neither 'int32' nor 'int64'"),
        ({"view": "row"}, "must show every part"),
        ({"view": "row row col"}, "view"),
        ({"dense": "row"}, "must name the innermost axes, col"),
        ({"lane": 3}, "'lane' is neither a rule nor a size"),
        ({"filll": 3}, "did you mean 'fill'"),
    ],
    ids=str,
)
def test_a_rule_about_what_is_not_there(rules, message):
    with pytest.raises(TypeError, match=message):
        plain(**rules)


def test_an_element_type_or_a_view_that_is_not_there():
    with pytest.raises(ValueError, match="'fp33' is no element type"):
        Layout("x", "row -> row", dtype="fp33")
    with pytest.raises(PatternError, match="no axis 'cl'"):
        plain(view="row cl")


@pytest.mark.parametrize(
    ("declare", "error"),
    [
        pytest.param(lambda: SCALE_LINEAR(row=-1, col=2).shape, LayoutError, id="negative size"),
        pytest.param(lambda: Layout("x", "fill c -> fill c", dtype=FP32), TypeError, id="axis named as a rule"),
        pytest.param(lambda: plain(pitch={"row": 4})(row=3, col=5).shape, LayoutError, id="pitch under its row"),
        pytest.param(lambda: SCALE_128X4(view=("row", "col"))(row=5, col=6).shape, LayoutError, id="declared bytes"),
        pytest.param(lambda: plain(public="nope"), TypeError, id="public name"),
        pytest.param(lambda: plain(default={"nope": 1}), TypeError, id="default of no size"),
    ],
)
def test_what_cannot_be_meant(declare, error):
    with pytest.raises(error):
        declare()


# --- Views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        (PAGED_HND(**PAGED), (3, 2, 16, 32), (1024, 512, 32, 1)),
        (PAGED_HND(view="page token head head_dim", **PAGED), (3, 16, 2, 32), (1024, 32, 512, 1)),
        (PAGED_HND(view="head_dim token page head", **PAGED), (32, 16, 3, 2), (1, 32, 1024, 512)),
        (PAGED_NHD(view="slot (head head_dim)", pitch={}, **PAGED), (48, 64), (64, 1)),
        (PAGED_NHD(view="(page token) head head_dim", pitch={}, **PAGED), (48, 2, 32), (64, 32, 1)),
        (UNIFIED_KV_ROWS(page=3, page_size=16, dim=8), (48, 8), (8, 1)),
        (UNIFIED_KV_ROWS(page=3, page_size=16, dim=8, view=None), (3, 16, 8), (128, 8, 1)),
        (SCALE_128X4(view=("cdiv(row, 128) * 32", "cdiv(col, 4) * 16"))(row=200, col=6), (64, 32), (32, 1)),
        (SCALE_128X4(view=("align(row, 128) * align(col, 4)",))(row=200, col=6), (2048,), (1,)),
        (Layout("mn", "mn k -> k mn", dtype=FP32, pad={"mn": 4}, view="mn k", mn=10, k=7), (10, 7), (1, 12)),
    ],
    ids=repr,
)
def test_a_view(layout, shape, strides):
    assert (layout.shape, layout.strides) == (shape, strides)
    made = layout.empty(dtype=layout.dtype)
    assert (tuple(made.shape), made.stride()) == (shape, strides)
    layout.check(made)
    sizes = [layout.values_of(a.name) for a in layout.axes]
    logical = torch.arange(int(np.prod(sizes))).remainder(127).reshape(sizes).to(layout.dtype)
    back = layout.unpack(layout.pack(logical))
    assert torch.equal(back.view(torch.uint8), logical.view(torch.uint8))


@pytest.mark.parametrize(
    "rules", [{"view": ("row * col",)}, {"pitch": {"row": "col + 4"}}, {"align": {"row": "col * 4"}}], ids=str
)
def test_rules_and_dims_in_one_call(rules):
    at_once, in_steps = plain()(row=3, col=5, **rules), plain()(**rules)(row=3, col=5)
    assert (at_once.shape, at_once.strides) == (in_steps.shape, in_steps.strides)
    assert at_once == in_steps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAGED_HND(view="slot head head_dim"), "page and token are not adjacent"),
        (lambda: PAGED_NHD(view="slot head head_dim"), "page and token are not adjacent"),  # there may be a gap
        (lambda: PAGED_HND(view="page (head head_dim) token"), "head and head_dim are not adjacent"),
        (lambda: PAGED_HND(view="page (token head) head_dim"), "token and head are not adjacent"),
        (lambda: SCALE_128X4(view="row col"), "are not adjacent"),
    ],
)
def test_a_view_that_no_strides_show(make, message):
    with pytest.raises(TypeError, match=message):
        make()


# --- Strides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "strides", "numel", "padding"),
    [
        ({}, (5, 1), 15, 0),
        ({"pitch": {"row": "col + 3"}}, (8, 1), 24, 9),
        ({"pitch": {"row": "64 bytes"}}, (16, 1), 48, 33),
        ({"pitch": {"row": "align(col, 4)"}}, (8, 1), 24, 9),
        ({"pad": {"row": 4}}, (5, 1), 20, 5),
        ({"pad": {"col": 4}}, (8, 1), 24, 9),
    ],
    ids=str,
)
def test_pitch_and_padding(rules, strides, numel, padding):
    made = plain(**rules)(row=3, col=5)
    assert (made.strides, made.numel, made.padding) == (strides, numel, padding)
    assert sum(end - start for start, end in _index.padding_ranges(made)) == padding
    made.check(made.empty())


def test_base_is_where_the_first_element_is():
    made = plain(pitch={"row": "64 bytes"}, base="16 bytes", fill=0)(row=3, col=5)
    assert made.offset(row=0, col=0) == 4
    buffer = made.empty()
    assert (buffer.storage_offset(), buffer.stride()) == (4, (16, 1))
    logical = torch.arange(15.0).reshape(3, 5)
    packed = made.pack(logical)
    assert torch.equal(made.unpack(packed), logical)
    whole = torch.empty(0).set_(packed.untyped_storage())
    assert whole[made.offset(row=2, col=3)] == 13


@pytest.mark.parametrize(
    ("tensor", "accepted"),
    [
        (lambda: torch.zeros(3, 2, 4), True),
        (lambda: torch.zeros(3, 2, 8)[..., 4:], True),
        (lambda: torch.zeros(3, 6, 4)[:, 1:3], True),
        (lambda: torch.zeros(2, 3, 4).transpose(0, 1), True),
        (lambda: torch.zeros(3, 2, 8)[..., ::2], False),
        (lambda: torch.zeros(3, 4, 2).transpose(1, 2), False),
        (lambda: torch.zeros(1, 2, 4).expand(3, 2, 4), False),
        (lambda: torch.zeros(80).as_strided((3, 2, 4), (4, 2, 1)), False),
    ],
)
def test_dense_leaves_outer_strides_free(tensor, accepted):
    x = tensor()
    if accepted:
        assert ROWS.check(x) == {"token": 3, "head": 2, "head_dim": 4}
    else:
        with pytest.raises(LayoutError) as caught:
            ROWS.check(x)
        assert {v.rule for v in caught.value.violations} == {"stride"}


def test_unpack_reads_free_strides_from_the_tensor():
    wide = torch.arange(48.0).reshape(3, 2, 8)
    rows = ROWS(token=3, head=2, head_dim=4)
    for part in (wide[..., :4], wide[..., 4:], torch.cat([wide, wide], 1)[:, ::2, 2:6]):
        assert torch.equal(rows.unpack(part), part)


def test_the_last_page_may_come_without_its_gap():
    gapped = PAGED_NHD(**PAGED, page_gap=96, dtype=FP32)
    assert gapped.numel == 3 * 1120
    buffer = torch.arange(2 * 1120 + 1024.0).as_strided(gapped.shape, gapped.strides)
    gapped.check(buffer)
    assert torch.equal(gapped.unpack(buffer), buffer.reshape(48, 2, 32))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: storage(3, 16, 16), None),
        (lambda: storage(3, 32, 16), "stride"),
        (lambda: storage(3, 17, 17), "68 % 64 = 4"),
        (lambda: storage(3, 16, 16, start=4), None),
        (lambda: storage(3, 16, 16, start=1), "base address % 16 == 0"),
    ],
)
def test_alignment(tensor, message):
    aligned = plain(align={"base": 16, "row": 64})
    if message is None:
        assert aligned.check(tensor()) == {"row": 3, "col": 16}
    else:
        with pytest.raises(LayoutError, match=message):
            aligned.check(tensor())


@pytest.mark.parametrize(("stride", "fits"), [(2**31 - 4, True), (2**31, False)])
def test_offsets_in_32_bits(stride, fits):
    narrow = Layout("narrow", "a b -> a b", dtype=INT8, dense="b", offsets="int32")
    tensor = torch.empty(stride + 4, dtype=torch.int8, device="meta").as_strided((2, 4), (stride, 1))
    assert narrow(offsets="int64").check(tensor) == {"a": 2, "b": 4}
    if fits:
        assert narrow.check(tensor) == {"a": 2, "b": 4}
    else:
        with pytest.raises(LayoutError, match=f"got +{stride + 3}") as caught:
            narrow.check(tensor)
        assert [v.rule for v in caught.value.violations] == ["overflow"]


# --- Memory ----------------------------------------------------------------------------------------------------------


@each_layout
def test_what_a_layout_makes_passes_its_own_check(layout):
    made = known(layout)
    buffer = made.empty()
    made.check(buffer)
    solved = layout.check(buffer, **{n: SIZES[n] for n in HIDDEN.get(layout.name, ())})
    assert solved.items() >= {n: SIZES[n] for n in layout.dims if n in solved}.items()
    assert set(layout.dims) <= set(solved)
    if layout.rules.fill is not None:
        assert not buffer.untyped_storage().tolist() or not any(buffer.untyped_storage().tolist())


@each_layout
def test_packing_comes_back_in_every_element_type(layout):
    for element in layout.elements:
        made = known(layout)(dtype=element)
        sizes = [made.values_of(a.name) for a in made.axes]
        codes = torch.arange(int(np.prod(sizes)) * element.itemsize).remainder(251).to(torch.uint8)
        logical = codes.view(element.torch).reshape(sizes)
        back = made.unpack(made.pack(logical))
        assert back.dtype == element.torch
        assert torch.equal(back.view(torch.uint8), logical.view(torch.uint8))


@each_layout
def test_nothing_at_all(layout):
    outer = layout.axes[0].name
    sizes = {n: SIZES[n] for n in layout.dims} | {outer: 0}
    made = layout(**sizes)
    assert made.nbytes == 0
    buffer = made.empty()
    assert (buffer.numel(), tuple(buffer.shape)) == (0, made.shape)
    made.check(buffer)
    logical = torch.zeros([made.values_of(a.name) for a in made.axes]).to(made.dtype)
    assert made.unpack(made.pack(logical)).shape == logical.shape
    assert _index.padding_ranges(made) == []


@pytest.mark.parametrize(("dtype", "fill", "value"), [(FP32, 1, 1.0), (BF16, 2, 2.0), (UINT8, 127, 127), (INT8, 3, 3)])
def test_fill_is_the_same_in_new_and_in_packed_memory(dtype, fill, value):
    made = Layout("filled", "row col -> row col", dtype=dtype, pad={"row": 4}, pitch={"row": 8}, fill=fill)(
        row=3, col=5
    )
    for buffer in (made.empty(), made.pack(torch.full((3, 5), 9).to(dtype.torch))):
        whole = torch.empty(0, dtype=dtype.torch).set_(buffer.untyped_storage()).tolist()
        assert len(whole) == made.numel == 32
        assert {whole[i] for start, end in _index.padding_ranges(made) for i in range(start, end)} == {value}


def test_fill_counts_codes_of_narrow_elements():
    made = Layout("codes", "row -> row", dtype=E8M0, fill=127)(row=3)
    assert made.empty().view(torch.uint8).tolist() == [127] * 3
    assert made.empty().float().tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.bfloat16), ("e4m3", torch.float8_e4m3fn), (E4M3, torch.float8_e4m3fn)]
)
def test_the_first_element_type_is_allocated_unless_another_is_asked_for(dtype, expected):
    assert PAGED_NHD(**PAGED).empty(dtype=dtype).dtype == expected


def test_storage_that_may_carry_the_elements():
    scales = SCALE_LINEAR(row=2, col=3, dtype=E8M0)
    assert scales.empty(dtype="uint8").dtype == torch.uint8
    scales.check(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(LayoutError):
        scales.check(torch.zeros(2, 3, dtype=torch.int8))
    scales(accept="int8").check(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(TypeError, match="holds e8m0, not bf16"):
        scales.empty(dtype="bf16")


@pytest.mark.parametrize("raw", [torch.uint8, torch.float32, torch.float8_e4m3fn, torch.int64])
def test_a_view_over_memory_of_another(raw):
    made = plain(pitch={"row": 8})(row=3, col=5)
    memory = torch.zeros(128 + 8, dtype=torch.uint8).view(raw)
    x = made.view(memory, offset=8)
    assert (x.shape, x.stride(), x.dtype) == ((3, 5), (8, 1), torch.float32)
    x[1, 2] = 1.0
    assert memory.view(torch.uint8).view(torch.float32)[2 + 8 + 2] == 1.0
    assert memory.view(torch.uint8).count_nonzero() == 2  # 0x3f800000
    made.check(x)


@pytest.mark.parametrize(
    ("raw", "offset", "rule", "message"),
    [
        (lambda: torch.zeros(95, dtype=torch.uint8), 0, "shape", "95 bytes"),
        (lambda: torch.zeros(100, dtype=torch.uint8), 8, "shape", "92 bytes"),
        (lambda: torch.zeros(100, dtype=torch.uint8), 200, "shape", "got +0 bytes"),
        (lambda: torch.zeros(100, dtype=torch.uint8), -4, "shape", "from byte -4"),
        (lambda: torch.zeros(100, dtype=torch.uint8), 2, "alignment", "start % 4 == 0"),
        (lambda: torch.zeros(400, dtype=torch.uint8)[::2], 0, "stride", "dense memory"),
        (lambda: torch.zeros(20, 20, dtype=torch.uint8).t(), 0, "stride", "dense memory"),
        (lambda: torch.zeros(101, dtype=torch.uint8)[1:], 0, "alignment", "raw cannot hold plain"),
    ],
)  # fmt: skip
def test_memory_that_cannot_hold_a_layout(raw, offset, rule, message):
    made = plain(pitch={"row": 8})(row=3, col=5)
    assert made.nbytes == 96
    with pytest.raises(LayoutError, match=message) as caught:
        made.view(raw(), offset=offset)
    assert [v.rule for v in caught.value.violations] == [rule]


@pytest.mark.parametrize(
    ("logical", "error"),
    [
        (lambda: torch.zeros(5, 3), ValueError),
        (lambda: torch.zeros(3, 5, 1), ValueError),
        (lambda: torch.zeros(3, 5, dtype=torch.float64), TypeError),
    ],
)
def test_what_cannot_be_packed(logical, error):
    with pytest.raises(error, match="plain"):
        plain()(row=3, col=5).pack(logical())


def test_what_cannot_be_unpacked():
    with pytest.raises(LayoutError):
        plain()(row=3, col=5).unpack(torch.zeros(5, 3))


# --- Checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("stride", [0, 1, 7, 4096])
def test_an_axis_of_size_one_may_have_any_stride(axis, stride):
    sizes = [3, 16, 2, 32]
    sizes[axis] = 1
    made = PAGED_NHD(**dict(zip(("page", "page_size", "head", "head_dim"), sizes, strict=True)), dtype=FP32)
    strides = list(made.strides)
    strides[axis] = stride
    buffer = torch.arange(float(made.numel)).as_strided(made.shape, strides)
    made.check(buffer)
    assert torch.equal(made.unpack(buffer).reshape(-1), torch.arange(float(made.numel)))


@pytest.mark.parametrize(
    ("tensor", "rules"),
    [
        (lambda: torch.zeros(3, 16, 2, 32), {"dtype"}),
        (lambda: torch.zeros(3, 16, 2, 31, dtype=torch.bfloat16), {"shape"}),
        (lambda: torch.zeros(3, 2, 16, 32, dtype=torch.bfloat16), {"shape"}),
        (lambda: torch.zeros(48, 2, 32, dtype=torch.bfloat16), {"shape"}),
        (lambda: torch.zeros(3, 2, 16, 32, dtype=torch.bfloat16).transpose(1, 2), {"stride"}),
        (lambda: torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16)[..., :32], {"stride"}),
    ],
)
def test_a_tensor_of_another_layout(tensor, rules):
    with pytest.raises(LayoutError) as caught:
        PAGED_NHD(**PAGED).check(tensor())
    assert {v.rule for v in caught.value.violations} <= rules | {"relation"}
    assert {v.rule for v in caught.value.violations} & rules
    assert {v.argument for v in caught.value.violations} == {"tensor"}


def test_check_takes_what_the_tensor_does_not_show():
    buffer = SCALE_128X4(row=200, col=6).empty()
    solved = SCALE_128X4.check(buffer, row=200, col=6)
    assert {"row": 200, "col": 6}.items() <= solved.items()
    with pytest.raises(LayoutError):
        SCALE_128X4.check(buffer, row=300, col=6)


# --- Padding that must hold the fill ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E8M0, E4M3])
def test_wrong_padding(dtype):
    tiles = SCALE_128X4(row=5, col=6, dtype=dtype)
    buffer = tiles.pack(torch.full((5, 6), 0x7F, dtype=torch.uint8).view(dtype.torch))
    assert _index.wrong_padding(tiles, buffer) == (None, 0)
    whole = tiles(row=128, col=8, pad={}) if tiles.dims else SCALE_128X4(row=128, col=8, dtype=dtype)
    buffer.view(torch.uint8).view(-1)[whole.offset(row=4, col=7)] = 0xFF
    assert _index.wrong_padding(tiles, buffer) == ({"row": 4, "col": 7}, 0xFF)


def test_wrong_padding_of_wide_elements_is_told_by_value():
    made = plain(pad={"col": 4}, fill=2)(row=2, col=3)
    buffer = made.pack(torch.zeros(2, 3))
    assert _index.wrong_padding(made, buffer) == (None, 0)
    torch.empty(0).set_(buffer.untyped_storage())[7] = 5.5
    assert _index.wrong_padding(made, buffer) == ({"row": 1, "col": 3}, 5.5)


# --- Identity --------------------------------------------------------------------------------------------------------

BASE = {"pattern": "row col -> row col", "dtype": FP32}
# Every keyword, changed.
OTHERS = {
    "pattern": {"pattern": "row col -> col row"},
    "axis name": {"pattern": "row column -> row column"},
    "dtype": {"dtype": BF16},
    "more dtypes": {"dtype": (FP32, BF16)},
    "size": {"col": 4},
    "equation": {"width": "col * 32"},
    "view": {"view": "col row"},
    "declared view": {"view": ("row * col",)},
    "dense": {"dense": "col"},
    "pitch": {"pitch": {"row": "col + 4"}},
    "pitch in bytes": {"pitch": {"row": "64 bytes"}},
    "pitch in elements": {"pitch": {"row": 64}},
    "base": {"base": "16 bytes"},
    "align": {"align": {"row": 128}},
    "align of the base": {"align": 16},
    "pad": {"pad": {"row": 128}},
    "offsets": {"offsets": "int32"},
    "fill": {"fill": 0},
    "accept": {"accept": "uint8"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_equal_declarations_are_equal(other):
    declare = lambda: Layout("x", **(BASE | OTHERS[other]))  # noqa: E731
    one, two = declare(), declare()
    assert one == two
    assert hash(one) == hash(two)
    assert one.fingerprint == two.fingerprint
    assert one != Layout("x", **BASE)


def test_different_declarations_have_different_fingerprints():
    prints = {other: Layout("x", **(BASE | change)).fingerprint for other, change in OTHERS.items()}
    prints["nothing"] = Layout("x", **BASE).fingerprint
    if prints["align"] == prints["pad"]:
        raise AssertionError("align and pad look alike")
    assert len(set(prints.values())) == len(prints)


@pytest.mark.parametrize("change", [{"public": "row"}, {"default": {"gap": 1}}], ids=str)
def test_a_fingerprint_covers_what_others_see(change):
    one = plain(pitch={"row": "col + gap"}, default={"gap": 0})
    two = plain(**{"pitch": {"row": "col + gap"}, "default": {"gap": 0}} | change)
    if one.fingerprint == two.fingerprint:
        raise AssertionError("public and default are left out")
    assert one != two


def test_a_name_is_no_part_of_a_fingerprint():
    renamed = SCALE_LINEAR(name="other")
    assert (renamed.name, renamed.fingerprint) == ("other", SCALE_LINEAR.fingerprint)
    assert renamed != SCALE_LINEAR


HEADS = {"page": 3, "page_size": 128, "head_dim": 128}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (PAGED_NHD(head=1, **HEADS), PAGED_HND(head=1, **HEADS), True),
        (PAGED_NHD(head=2, **HEADS), PAGED_HND(head=2, **HEADS), False),
        (PAGED_NHD(head=2, **HEADS), PAGED_NHD(head=2, **HEADS, page_gap=8), False),
        (PAGED_NHD(head=2, **HEADS), PAGED_NHD(head=2, **HEADS, dtype=E4M3), False),
        (PAGED_NHD(head=2, **HEADS), PAGED_NHD(head=2, **HEADS, name="x", fill=None, public=()), True),
        (MXFP8_SCALE_INTERLEAVED(head=1, **HEADS), SCALE_128X4(row=384, col=4, dtype=E8M0), True),
        (
            MXFP8_SCALE_INTERLEAVED(head=1, **HEADS | {"head_dim": 256}),
            SCALE_128X4(row=384, col=8, dtype=E8M0),
            False,
        ),
        (MXFP8_SCALE_INTERLEAVED(head=1, **HEADS), MXFP8_SCALE_FLAT(slot=384, head=1, head_dim=128), False),
        (MXFP8_SCALE_INTERLEAVED(head=2, **HEADS), MXFP8_SCALE_FLAT(slot=384, head=2, head_dim=128), False),
        (MXFP8_SCALE_FLAT(slot=384, head=1, head_dim=128), SCALE_LINEAR(row=384, col=4, dtype=E8M0), True),
        (SCALE_128X4(row=5, col=4), SCALE_128X4(row=6, col=4), False),
        (plain()(row=3, col=5), plain(base="16 bytes")(row=3, col=5), False),
        (plain()(row=3, col=5), plain(pad={"row": 4})(row=3, col=5), False),
        (plain()(row=3, col=5), plain(pitch={"row": 5})(row=3, col=5), True),
        (plain()(row=3, col=5), plain(view="col row")(row=3, col=5), True),
        (plain()(row=15, col=1), plain()(row=1, col=15), True),
    ],
)  # fmt: skip
def test_the_fingerprint_of_a_map(one, other, same):
    assert (one.map_fingerprint == other.map_fingerprint) == same
    if same:
        count = int(np.prod([one.values_of(a.name) for a in one.axes]))
        offsets = [
            np.asarray(e.offset(**dict(zip(names, np.indices(shape), strict=True)))).reshape(-1)
            for e in (one, other)
            for names, shape in [([a.name for a in e.axes], [e.values_of(a.name) for a in e.axes])]
        ]
        assert offsets[0].size == count
        np.testing.assert_array_equal(*offsets)


@st.composite
def matrices(draw: st.DrawFn) -> Layout:
    """A small matrix, in one of several layouts that sometimes are the same bytes."""
    text = draw(st.sampled_from(("row col", "col row", "ra col rb", "ra rb col")))
    sizes = {"ra": draw(st.integers(1, 3)), "rb": draw(st.integers(1, 3)), "col": draw(st.integers(1, 3))}
    return Layout("matrix", f"row(ra rb) col -> {text}", dtype=INT8)(**sizes)


@given(matrices(), matrices())
def test_maps_have_equal_fingerprints_exactly_if_they_are_equal(one, other):
    def bytes_of(e: Layout) -> tuple[tuple[int, ...], list[int]]:
        shape = [e.values_of("row"), e.values_of("col")]
        row, col = np.indices(shape)
        return tuple(n for n in shape if n > 1), e.offset(row=row, col=col).ravel().tolist()

    assert (one.map_fingerprint == other.map_fingerprint) == (bytes_of(one) == bytes_of(other))


@pytest.mark.parametrize("entry", entries().values(), ids=lambda e: e.name)
def test_copies_are_equal(entry):
    _ = entry.fingerprint, entry.dims  # what is cached travels too
    for again in (pickle.loads(pickle.dumps(entry)), copy.deepcopy(entry), copy.copy(entry)):
        assert again == entry
        assert hash(again) == hash(entry)
        assert again.fingerprint == entry.fingerprint
        assert again.dims == entry.dims
        assert repr(again) == repr(entry)


@each_layout
def test_a_layout_is_frozen(layout):
    for field in dataclasses.fields(layout):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, field.name, None)


def test_a_call_leaves_the_layout_as_it_was():
    before, text = PAGED_NHD.fingerprint, repr(PAGED_NHD)
    PAGED_NHD(**PAGED, pitch={}, dtype=E4M3, name="other")
    assert (PAGED_NHD.fingerprint, repr(PAGED_NHD)) == (before, text)


def test_text():
    assert str(MXFP8_SCALE_INTERLEAVED) == ("slot(page token(chunk lane)) head group -> page head lane chunk group")
    assert repr(SCALE_128X4) == ("<scale.128x4: row(rt rc rl) col(ct c) -> rt ct rl rc c; e8m0|e4m3; open: row, col>")
    assert repr(SCALE_128X4(row=200, col=6)) == "<scale.128x4 (2, 2, 32, 4, 4) e8m0|e4m3>"


# --- The catalogue ---------------------------------------------------------------------------------------------------


def test_entries_are_found_by_name():
    assert layout("mxfp8.interleaved") is MXFP8_SCALE_INTERLEAVED
    with pytest.raises(KeyError, match=r"did you mean 'mxfp8.interleaved'"):
        layout("mxfp8.interleave")
    with pytest.raises(KeyError, match="there are"):
        layout("?")


@pytest.mark.parametrize("name", list(entries()))
def test_every_size_of_an_entry_can_be_named(name):
    entry = entries()[name]
    assert entry.name == name
    for dim in entry.dims:
        assert parse(dim)
