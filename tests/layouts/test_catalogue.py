"""The catalogue: which entries there are, what is said of each, and that the page is what they say now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layoutcheck import Layout, Record, layouts
from layoutcheck.layouts import _page, entries, layout

PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"
NAMES = [
    "paged.nhd",
    "paged.hnd",
    "paged.nhd.kv",
    "paged.hnd.kv",
    "vectorized_5d.k",
    "vectorized_5d.v",
    "x_packed.k",
    "x_packed.v",
    "vllm.lbhnc",
    "vllm.lbnhc",
    "vllm.lhbnc",
    "vllm.blhnc",
    "vllm.blnhc",
    "vllm.bhlnc",
    "flashinfer.nhd",
    "flashinfer.hnd",
    "trtllm.block",
    "mla.latent",
    "flashmla.v32_656",
    "dsa.index_132",
    "dsa.index_132_preshuffle",
    "aiter.page8_payload",
    "aiter.page8_scale",
    "flydsl.index_payload",
    "flydsl.index_scale",
    "dsa.index_fp4_68",
    "dsv4.v4_584",
    "dsv4.v41",
    "dsv4.v41_fp4",
    "dsv4.uniform_fp8",
    "dsv4.v41_new",
    "dsv4.v41_fp4_new",
    "unified_kv.rows",
    "unified_kv.kv_scale",
    "dsv4.two_pool_nope",
    "dsv4.two_pool_rope",
    "nvfp4_kv.k_scale",
    "nvfp4_kv.v_scale",
    "minimax_m3.main_row",
    "minimax_m3.index_row",
    "vllm.nvfp4_ds_mla",
    "mxfp8.interleaved",
    "mxfp8.flat",
    "scale.128x4",
    "scale.8x4",
    "scale.linear",
    "deepgemm.fp32_mn_major",
    "deepgemm.ue8m0_packed",
    "deepgemm.utccp",
    "sglang.group_major_ue8m0",
    "scale.block_128x128",
    "triton_kernels.blackwell",
    "triton_kernels.hopper",
    "triton_kernels.cdna4",
    "triton_kernels.gfx1250",
    "kv_scale.per_head",
    "kv_scale.per_token_head",
]
TWICE = ("vectorized_5d.k", "x_packed.k")  # two projects, one order
ENTRIES = list(entries().values())
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=[e.name for e in ENTRIES])


def flat(entry: Layout | Record) -> list[tuple[Layout, int]]:
    """The layouts that map elements, made at small sizes, and how many bits of one are counted as 1."""
    made = entry(**_page.example(entry))
    if isinstance(made, Record):
        return [(s, 8) for s in made.sections.values()]
    return [(made, made.elements[0].bits)]


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_of_the_list_is_there(name):
    assert layout(name).name == name


def test_an_unknown_name_is_answered_with_close_ones():
    with pytest.raises(KeyError, match=r"did you mean 'mxfp8.interleaved'"):
        layout("mxfp8.interleave")


def test_the_page_is_current():
    assert PAGE.read_text() == _page.page(), "run `make catalogue`"


@each_entry
def test_an_entry_says_what_it_is_who_uses_it_and_where_it_comes_from(entry):
    words = _page.words()[entry.name]
    assert words.what
    assert words.under["Users"]
    assert words.under["Source"]


@each_entry
def test_elements_of_an_entry_do_not_overlap(entry):
    """Every element of a record, or of a layout, has bits of its own, inside the buffer."""
    made = entry(**_page.example(entry))
    taken = np.zeros(made.nbytes * 8 + 1, np.int8)
    for section, _ in flat(entry):
        bits = section.elements[0].bits
        grids = np.indices([section.values_of(a.name) for a in section.axes])
        first = section.offset(**dict(zip([a.name for a in section.axes], grids, strict=True))).reshape(-1) * bits
        assert first.min() >= 0
        assert first.max() + bits <= made.nbytes * 8
        np.add.at(taken, first, 1)
        np.add.at(taken, first + bits, -1)
    assert np.cumsum(taken).max() == 1


@each_entry
def test_a_new_buffer_is_what_the_entry_accepts(entry):
    made = entry(**_page.example(entry))
    buffer = made.empty()
    made.check(buffer)
    assert (tuple(buffer.shape), tuple(buffer.stride())) == (made.shape, made.strides)


@each_entry
def test_no_two_entries_are_one_declaration(entry):
    same = [e.name for e in ENTRIES if e.fingerprint == entry.fingerprint and type(e) is type(entry)]
    assert same == (list(TWICE) if entry.name in TWICE else [entry.name])


def test_a_picture_says_where_an_element_stands():
    lines = list(_page.picture(layout("mxfp8.interleaved"), dict(slot=128, head=1, head_dim=128, page_size=128)))
    assert [" ".join(line.split()) for line in lines[:5]] == [
        "0 .. 3 slot 0, head 0, group 0 to 3",
        "4 .. 7 slot 32, head 0, group 0 to 3",
        "8 .. 11 slot 64, head 0, group 0 to 3",
        "12 .. 15 slot 96, head 0, group 0 to 3",
        "16 .. 19 slot 1, head 0, group 0 to 3",
    ]


def test_adding_a_layout_takes_one_declaration(tmp_path, monkeypatch):
    (tmp_path / "ours.py").write_text(
        "from layoutcheck import FP32, Layout\n"
        "OURS = Layout('ours.rows', 'row col -> col row', dtype=FP32)\n"
        '"""Column-major rows.\n\nUsers: us.\nSource: ours 1.0.\n"""\n'
    )
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path)])
    entries.cache_clear()
    _page.words.cache_clear()
    try:
        assert layout("ours.rows")(row=2, col=3).shape == (3, 2)
        assert "## ours.rows\n\nColumn-major rows.\n" in _page.page()
    finally:
        monkeypatch.undo()
        entries.cache_clear()
        _page.words.cache_clear()
