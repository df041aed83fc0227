"""The generated offset functions, run in Triton's interpreter, against the golden vectors; and their text."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from golden_data import Map, coordinates, cuts, dims, maps

from layoutcheck import FP32, INT8, Layout, Record, _index, layouts
from layoutcheck._index import offset_source
from layoutcheck.layouts import entries

MAPS = maps()
each_cut = pytest.mark.parametrize(("golden", "cut"), [(m, c) for m in MAPS for c in cuts(m.open)], ids=str)
_files = count()


def keywords(function: Any) -> list[str]:
    """The sizes and strides that an offset function asks for: what is upper-case in its signature."""
    return [name for name in inspect.signature(function.fn).parameters if name.isupper()]


def run(function: Any, at: dict[str, np.ndarray], sizes: dict[str, int], *, constexpr: bool = False) -> np.ndarray:
    """The offsets of coordinates, from a kernel made for this function."""
    assert sorted(sizes) == sorted(keywords(function))
    loads = [f"tl.load({name}_at + i, i < count_, 0)" for name in at]
    given = [f"{k}={k}" for k in sizes]
    parameters = [f"{name}_at" for name in at] + [k + ": tl.constexpr" * constexpr for k in sizes]
    text = (
        f"def kernel(out, {', '.join(parameters)}, count_, BLOCK_: tl.constexpr):\n"
        "    i = tl.arange(0, BLOCK_)\n"
        f"    tl.store(out + i, function({', '.join(loads + given)}), i < count_)\n"
    )
    filename = f"<kernel {next(_files)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace: dict[str, Any] = {"tl": tl, "function": function}
    exec(compile(text, filename, "exec"), namespace)
    arrays = [torch.from_numpy(a.reshape(-1)) for a in at.values()]
    out = torch.full((arrays[0].numel(),), -1, dtype=torch.int64)
    block = triton.next_power_of_2(out.numel())
    triton.jit(namespace["kernel"])[(1,)](out, *arrays, *sizes.values(), out.numel(), block)
    return out.numpy()


def int32(at: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: a.astype(np.int32) for name, a in at.items()}


def upper(golden: Map) -> dict[str, int]:
    """Every size of a vector, as an offset function calls it."""
    given = {n: s for n, s in dims(golden.vector).items() if n in golden.open._names}
    return {n.upper(): s for n, s in (given | golden.open.solve(**given)).items()}


# --- Against the golden vectors --------------------------------------------------------------------------------------


@each_cut
@pytest.mark.parametrize("constexpr", [True, False], ids=["constexpr", "runtime"])
def test_offsets(golden, cut, constexpr):
    function = golden.open.offset_fn(*cut, name="golden_offset")
    sizes = {k: upper(golden)[k] for k in keywords(function)}
    actual = run(function, int32(coordinates(golden.layout, cut)), sizes, constexpr=constexpr)
    np.testing.assert_array_equal(actual.reshape(golden.offset.shape), golden.offset)


@pytest.mark.parametrize("golden", MAPS, ids=str)
def test_offsets_of_a_concrete_layout_ask_for_nothing(golden):
    names = tuple(a.name for a in golden.layout.axes)
    function = golden.layout.offset_fn(*names, name="concrete_offset")
    assert keywords(function) == []
    actual = run(function, int32(coordinates(golden.layout, names)), {})
    np.testing.assert_array_equal(actual.reshape(golden.offset.shape), golden.offset)


def gapped() -> Iterator[tuple[Map, tuple[str, ...]]]:
    """The maps whose pages may have gaps between them, and the cuts that name a page."""
    for golden in MAPS:
        if "page" in {axis for axis, _, _ in golden.open.rules.pitch}:
            yield from ((golden, cut) for cut in cuts(golden.open))


@pytest.mark.parametrize(("golden", "cut"), list(gapped()), ids=str)
@pytest.mark.parametrize("constexpr", [True, False], ids=["constexpr", "runtime"])
def test_the_stride_of_a_page_as_an_argument(golden, cut, constexpr):
    function = golden.open.offset_fn(*cut, name="strided_offset", strides=("page",))
    stride = golden.vector["physical_strides"][0] // (golden.element["itemsize"] if golden.section else 1)
    known = upper(golden) | {"PAGE_STRIDE": stride}
    assert "PAGE_GAP" not in keywords(function)
    sizes = {k: known[k] for k in keywords(function)}
    actual = run(function, int32(coordinates(golden.layout, cut)), sizes, constexpr=constexpr)
    np.testing.assert_array_equal(actual.reshape(golden.offset.shape), golden.offset)


# --- Width -----------------------------------------------------------------------------------------------------------

FAR = Layout("far", "row col -> row col", dtype=INT8)


@pytest.mark.parametrize("constexpr", [True, False], ids=["constexpr", "runtime"])
def test_the_outermost_term_does_not_wrap(constexpr):
    function = FAR.offset_fn("row", "col", name="far_offset")
    at = {"row": np.array([0, 1, 2**11, 2**31 - 1], np.int32), "col": np.array([3, 2, 1, 2**20 - 1], np.int32)}
    actual = run(function, at, {"COL": 2**20}, constexpr=constexpr)
    assert actual.tolist() == [FAR(row=2**31, col=2**20).offset(row=int(r), col=int(c)) for r, c in zip(*at.values())]  # noqa: B905
    assert actual.max() == 2**51 - 1


def test_a_stride_argument_does_not_wrap_either():
    function = FAR.offset_fn("row", "col", name="far_strided", strides=("row",))
    actual = run(function, {"row": np.array([7], np.int32), "col": np.array([1], np.int32)}, {"ROW_STRIDE": 2**30})
    assert actual.tolist() == [7 * 2**30 + 1]


def test_a_layout_may_ask_for_32_bits():
    wide, narrow = (offset_source(FAR(offsets=o), ("row", "col"), "f") for o in ("int64", "int32"))
    assert "tl.int64" in wide
    assert "cast" not in narrow
    function = FAR(offsets="int32").offset_fn("row", "col", name="narrow_offset")
    assert run(function, {"row": np.array([5], np.int32), "col": np.array([1], np.int32)}, {"COL": 7}).tolist() == [36]


# --- The text --------------------------------------------------------------------------------------------------------


def body(name: str, *coordinates: str, section: str | None = None, strides: tuple[str, ...] = (), **sizes: int) -> str:
    entry = entries()[name]
    layout = entry.section(section) if isinstance(entry, Record) else entry
    text = offset_source(layout(**sizes), coordinates, "f", strides)
    head, result = text.splitlines()
    return head.removeprefix("def f(").removesuffix("):") + " -> " + result.strip().removeprefix("return ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            body("mxfp8.flat", "slot", "head", "group", head=8, head_dim=128),
            "slot, head, group -> tl.cast(slot, tl.int64) * 32 + head * 4 + group",
        ),
        (
            body("mxfp8.interleaved", "slot", "head", "group", page_size=128, head_dim=256),
            "slot, head, group, HEAD -> tl.cast(slot // 128, tl.int64) * (HEAD * 1024) + (slot // 32 % 4) * 8 + "
            "(slot % 32) * 32 + head * 1024 + group",
        ),
        (
            body("mxfp8.interleaved", "page", "token", "head", "group"),
            "page, token, head, group, HEAD, HEAD_DIM, PAGE_SIZE -> "
            "tl.cast(page, tl.int64) * (HEAD_DIM * PAGE_SIZE * HEAD // 32) + head * (HEAD_DIM * PAGE_SIZE // 32) + "
            "(token // 32) * (HEAD_DIM // 32) + (token % 32) * (HEAD_DIM * PAGE_SIZE // 1024) + group",
        ),
        (
            body("paged.nhd", "page", "token", "head", "head_dim", strides=("page",)),
            "page, token, head, head_dim, HEAD, HEAD_DIM, PAGE_STRIDE -> "
            "tl.cast(page, tl.int64) * PAGE_STRIDE + token * (HEAD_DIM * HEAD) + head * HEAD_DIM + head_dim",
        ),
        (
            body("scale.128x4", "row", "col"),
            "row, col, COL -> tl.cast(row // 128, tl.int64) * ((COL + 4 - 1) // 4 * 4 * 128) + "
            "(row // 32 % 4) * 4 + (row % 32) * 16 + (col // 4) * 512 + col % 4",
        ),
        (
            body("unified_kv.rows", "slot", "dim"),  # page and token are adjacent, and so not split
            "slot, dim, DIM -> tl.cast(slot, tl.int64) * DIM + dim",
        ),
        (
            body("unified_kv.rows", "slot", "dim", strides=("page",)),  # apart, since pages may have gaps
            "slot, dim, DIM, PAGE_SIZE, PAGE_STRIDE -> "
            "tl.cast(slot // PAGE_SIZE, tl.int64) * PAGE_STRIDE + (slot % PAGE_SIZE) * DIM + dim",
        ),
        (
            body("mla.latent", "slot", "head", "dim", strides=("slot", "head")),  # one head: equal strides, two names
            "slot, head, dim, SLOT_STRIDE, HEAD_STRIDE -> "
            "tl.cast(slot, tl.int64) * SLOT_STRIDE + head * HEAD_STRIDE + dim",
        ),
        (
            body("dsa.index_132", "page", "token", section="scale"),
            "page, token, PAGE_SIZE -> tl.cast(page, tl.int64) * (PAGE_SIZE * 33) + token + PAGE_SIZE * 32",
        ),
    ],
)
def test_text(text, expected):
    assert text == expected


def test_all_parts_adjacent_are_one_term():
    tiles = Layout("tiles", "row(a b c) col -> a b c col", dtype=FP32, b=4, c=8, col=3)
    assert offset_source(tiles, ("row", "col"), "f").endswith("return tl.cast(row, tl.int64) * 3 + col\n")
    split = offset_source(tiles, ("row", "col"), "f", ("b",))
    assert split.endswith(
        "return tl.cast(row // 32, tl.int64) * 96 + (row // 8 % 4) * B_STRIDE + (row % 8) * 3 + col\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("slot", "dim"), "not a name"), "cannot be the name of a function"),
        ((("slot", "dim"), "lambda"), "cannot be the name of a function"),
        ((("slot",), "f"), "leave out dim"),
        ((("slot", "page", "dim"), "f"), "give page more than once"),
        ((("slot", "dims"), "f"), "no axis 'dims'"),
        ((("slot", "dim"), "f", ("head",)), "no axis 'head'"),
        ((("page", "token", "dim"), "f", ("slot",)), "slot has no stride of its own in page, token, dim"),
    ],
)
def test_what_cannot_be_a_function(arguments, message):
    with pytest.raises(TypeError, match=message):
        offset_source(layouts.layout("unified_kv.rows"), *arguments)


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("top Row row -> top Row row", {}, "row and Row would both be written ROW"),
        ("row COL -> row COL", {"COL": "col"}, "cannot be called COL"),
        ("tl col -> tl col", {}, "cannot be called tl"),
    ],
)
def test_names_that_would_collide_in_a_kernel(pattern, sizes, message):
    layout = Layout("collision", pattern, dtype=FP32, **sizes)
    with pytest.raises(TypeError, match=message):
        offset_source(layout, tuple(a.name for a in layout.axes), "f")


# --- The function ----------------------------------------------------------------------------------------------------


def test_a_function_has_its_name_and_its_source():
    function = FAR.offset_fn("row", "col", name="named_offset")
    assert function.fn.__name__ == "named_offset"
    assert inspect.getsource(function.fn) == offset_source(FAR, ("row", "col"), "named_offset")


def test_functions_of_one_name_are_kept_apart():
    """The interpreter reads the source when a function first runs: another of the same name may have come since."""
    tiles = Layout("tiles", "row(a b) col -> a col b", dtype=FP32, b=4)
    first = tiles.offset_fn("row", "col", name="same_name")
    second = tiles(col=5).offset_fn("row", "col", name="same_name")
    at = {"row": np.arange(12, dtype=np.int32), "col": np.arange(12, dtype=np.int32) % 3}
    assert run(first, at, {"COL": 3}).tolist() == _index.offset(tiles(row=12, col=3), at).tolist()
    assert run(second, at, {}).tolist() == _index.offset(tiles(row=12, col=5), at).tolist()
