"""Every cause that an error prints is true: each is undone, by what the text itself says, and the call passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import BFloat16, Float32, Int32, Int64
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    E8M0,
    FP32,
    UINT8,
    Choose,
    Layout,
    LayoutError,
    Violation,
    Writes,
    contract,
    layout,
)

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE, FLAT = layout("mxfp8.interleaved"), layout("mxfp8.flat")


@contract
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    v: BFloat16[Tensor, "token head v_head_dim"],
    k_cache: Annotated[Tensor, CACHE],
    k_scale: Annotated[Tensor, SCALE],
    v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim")],
    page_size: int = 128,
) -> str:
    return "ran"


def plain(tensor: Tensor) -> Tensor:
    """The same contents in memory of which nothing is known."""
    return tensor.clone()


def valid(
    slot: int = 384, page_size: int = 128, head: int = 2, head_dim: int = 96, v_head_dim: int = 64
) -> dict[str, Any]:
    dims: dict[str, Any] = dict(slot=slot, page_size=page_size, head=head)
    return dict(
        k=torch.zeros(5, head, head_dim, dtype=torch.bfloat16),
        v=torch.zeros(5, head, v_head_dim, dtype=torch.bfloat16),
        k_cache=plain(CACHE(head_dim=head_dim, **dims).empty()),
        k_scale=plain(SCALE(head_dim=head_dim, **dims).empty()),
        v_scale=plain(SCALE(head_dim=v_head_dim, **dims).empty()),
        page_size=page_size,
    )


def violations(fn: Any, *args: Any, **kwargs: Any) -> tuple[Violation, ...]:
    with pytest.raises(LayoutError) as caught:
        fn(*args, **kwargs)
    assert all(len(str(v)) <= 700 for v in caught.value.violations), str(caught.value)
    return caught.value.violations


def only(fn: Any, *args: Any, **kwargs: Any) -> Violation:
    (violation,) = violations(fn, *args, **kwargs)
    return violation


def code(violation: Violation, value: Tensor) -> Any:
    """The expression on the argument that the fix prints, computed."""
    found = re.search(rf"\b{violation.argument}(\.\w+\([^()]*(?:\([^()]*\)[^()]*)*\))", violation.fix or "")
    assert found, violation.fix
    return eval(f"x{found[1]}", {"x": value, "torch": torch})


# --- one size different -----------------------------------------------------------------------------------------------


def test_another_page_size():
    good = valid()
    scale = plain(SCALE(slot=384, page_size=64, head=2, head_dim=96).empty())
    found = only(store, **good | {"k_scale": scale})
    assert "k_scale fits page_size = 64; this call has page_size = 128" in str(found)
    assert store(**valid(page_size=64) | {"k_scale": scale}) == "ran"


@settings(max_examples=40)
@given(
    changed=st.sampled_from(["slot", "head", "head_dim", "page_size"]),
    factor=st.sampled_from([2, 3, 4]),
    head=st.integers(1, 5),
    group=st.integers(1, 4),
    page=st.integers(1, 4),
)
def test_whatever_size_is_said_to_fit_does_fit(changed: str, factor: int, head: int, group: int, page: int):
    dims: dict[str, Any] = dict(slot=page * 384, page_size=96, head=head, head_dim=group * 32)
    other = dict(dims, **{changed: dims[changed] * factor})
    if other["slot"] % other["page_size"]:
        return
    scale = plain(SCALE(**other).empty())
    if scale.shape == SCALE(**dims).shape:
        return
    found = only(store, **valid(v_head_dim=64, **dims) | {"k_scale": scale})
    texts = [t for t in (found.cause or "").split("\nor: ") if " fits " in t]
    assert texts, found
    for text in texts:
        name, value = re.match(r"k_scale fits (\w+) = (\d+);", text).groups()  # type: ignore[union-attr]
        assert store(**valid(**{**dims, "v_head_dim": 64, name: int(value)}) | {"k_scale": scale}) == "ran", text


def test_only_one_of_two_buffers_is_stale():
    found = only(store, **valid() | {"v_scale": valid(slot=256)["v_scale"]})
    assert found.argument == "v_scale"
    assert "v_scale fits slot = 256; this call has slot = 384 (k_cache)" in str(found)


# --- counts, axes -----------------------------------------------------------------------------------------------------


def test_one_entry_per_slot_instead_of_one_per_page():
    good = valid()
    scale = good["k_scale"][:1].expand(384, -1, -1, -1, -1).contiguous()
    found = only(store, **good | {"k_scale": scale})
    assert "page counts pages (3); 384 is the number of slots" in str(found)
    assert store(**good | {"k_scale": scale[:3]}) == "ran"


def test_one_entry_per_page_instead_of_one_per_slot():
    @contract
    def f(
        k_cache: Annotated[Tensor, CACHE], scale: Annotated[Tensor, FLAT], page: Int32[Tensor, "page"], page_size: int
    ) -> str:
        return "ran"

    good = dict(k_cache=valid()["k_cache"], page=torch.zeros(3, dtype=torch.int32), page_size=128)
    scale = plain(FLAT(slot=384, head=2, head_dim=96).empty())
    assert f(scale=scale, **good) == "ran"
    found = only(f, scale=scale[:3], **good)
    assert "slot counts slots (384); 3 is the number of pages" in str(found)


CUBE = Layout("cube", "a b c d -> a b c d", dtype=FP32)


@contract
def cube(x: Annotated[Tensor, CUBE(a=2, b=3, c=5, d=7)]) -> str:
    return "ran"


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 2, 3, 0)])
def test_axes_in_another_order(order):
    wrong = torch.zeros(2, 3, 5, 7).permute(order).contiguous()
    found = only(cube, wrong)
    assert "are swapped" in str(found) or "the axes are in another order" in str(found)
    assert cube(code(found, wrong).contiguous()) == "ran"


@pytest.mark.parametrize("gone", range(4))
def test_an_axis_is_missing(gone):
    wrong = torch.zeros(2, 3, 5, 7).select(gone, 0).contiguous()
    found = only(cube, wrong)
    (label,) = re.findall(r"the axis (\w) is missing", str(found))
    at = "abcd".index(label)
    size = (2, 3, 5, 7)[at]
    assert cube(wrong.unsqueeze(at).repeat_interleave(size, at)) == "ran"


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((210,), "x is flat: 210 = 2 * 3 * 5 * 7"),
        ((6, 5, 7), "a and b are merged into one dimension: 2 * 3 = 6"),
        ((2, 15, 7), "b and c are merged"),
        ((2, 105), "b and c and d are merged"),
        ((2, 3, 5, 7, 1), "an extra dimension of 1 at position 4"),
        ((2, 3, 5, 1, 7), "an extra dimension of 1 at position 3"),
        ((1, 2, 3, 5, 7), "an extra dimension of 1 at position 0"),
    ],
)
def test_axes_merged_flat_or_extra(shape, text):
    wrong = torch.zeros(shape)
    found = only(cube, wrong)
    assert text in str(found)
    if "extra" in text:
        assert cube(wrong.squeeze(int(text[-1]))) == "ran"
    else:
        assert cube(code(found, wrong)) == "ran"


def test_an_axis_is_split():
    wide = Layout("wide", "row col -> row col", dtype=FP32)

    @contract
    def f(x: Annotated[Tensor, wide(row=4, col=30)]) -> str:
        return "ran"

    for shape, text in [((4, 6, 5), "col is split into 2 dimensions: 6 * 5 = 30"), ((2, 2, 30), "row is split")]:
        wrong = torch.zeros(shape)
        found = only(f, wrong)
        assert text in str(found)
        assert f(code(found, wrong)) == "ran"


# --- padding, packing -------------------------------------------------------------------------------------------------


def test_padded_and_unpadded():
    padded = layout("scale.linear")(dtype=E8M0, row=100, col=6, pad={"row": 128, "col": 4}, name="padded")
    bare = layout("scale.linear")(dtype=E8M0, row=100, col=6)

    @contract
    def wants_padding(x: Annotated[Tensor, padded]) -> str:
        return "ran"

    @contract
    def wants_none(x: Annotated[Tensor, bare]) -> str:
        return "ran"

    found = only(wants_padding, plain(bare.empty()))
    assert "logical, unpadded shape; needed is the padded one" in str(found)
    assert wants_padding(padded.pack(bare.unpack(bare.empty()))) == "ran"
    wrong = plain(padded.empty())
    found = only(wants_none, wrong)
    assert "row 128 is 100 rounded up to a multiple of 128, col 8 is 6 rounded up to a multiple of 8" in str(found)
    assert wants_none(wrong[:100, :6].contiguous()) == "ran"


def test_two_values_to_a_byte_or_one():
    row = Layout("codes", "row col -> row col", dtype=UINT8)

    @contract
    def f(x: Annotated[Tensor, row(row=4, col=64)]) -> str:
        return "ran"

    found = only(f, torch.zeros(4, 32, dtype=torch.uint8))
    assert "two values to a byte: 64 of col in 32 bytes" in str(found)
    found = only(f, torch.zeros(4, 128, dtype=torch.uint8))
    assert "one value to a byte" in str(found)
    codes = torch.zeros(4, 128, dtype=torch.uint8)
    assert f(codes[:, ::2] | codes[:, 1::2] << 4) == "ran"


def test_several_elements_in_one_word():
    good = valid(head_dim=128)
    packed = good["k_scale"].view(torch.int32)
    found = only(store, **good | {"k_scale": packed})
    assert "4 float8_e8m0fnu are packed into each int32: 1 * 4 = 4" in str(found)
    assert store(**good | {"k_scale": code(found, packed)}) == "ran"


# --- another case, argument, layout -----------------------------------------------------------------------------------


@contract
def chosen(
    k_cache: Annotated[Tensor, CACHE],
    scale: Annotated[Tensor, Choose({"page_size == 128": SCALE}, default=FLAT)],
    page_size: int,
) -> str:
    return "ran"


@pytest.mark.parametrize(("page_size", "made"), [(64, SCALE), (128, FLAT)])
def test_another_case_of_the_choice(page_size, made):
    cache = valid()["k_cache"]
    sizes = dict(slot=384, head=2, head_dim=96)
    scale = plain(made(**sizes, **({"page_size": 128} if made is SCALE else {})).empty())
    found = only(chosen, cache, scale, page_size)
    assert f"scale fits {made.name}" in str(found)
    wanted = 128 if made is SCALE else 64
    if made is SCALE:
        assert f"with page_size = {wanted}; this call has page_size = {page_size}" in str(found)
    assert chosen(cache, scale, wanted) == "ran"


def test_arguments_that_are_swapped():
    good = valid()
    for a, b in [("k", "v"), ("k_scale", "v_scale")]:
        wrong = good | {a: good[b], b: good[a]}
        for violation in violations(store, **wrong):
            assert violation.cause == f"{a} and {b} are swapped: exchanged, every rule of this call holds"
        assert store(**wrong | {a: wrong[b], b: wrong[a]}) == "ran"


def test_swapped_and_something_else_wrong_is_not_called_an_exchange():
    good = valid()
    wrong = good | {"k": good["v"], "v": good["k"], "k_scale": good["k_scale"][:1]}
    assert all("exchanged" not in (v.cause or "") for v in violations(store, **wrong))


def test_one_argument_alone_disagrees_with_the_rest():
    good = valid()
    wrong = good | {"k": good["k"][:, :, :32].contiguous()}
    found = violations(store, **wrong)
    assert {v.argument for v in found} == {"k_cache", "k_scale"}
    for violation in found:
        assert violation.cause == "k alone has head_dim = 32; k_cache, k_scale agree on head_dim = 96"
    assert store(**wrong | {"k": torch.zeros(5, 2, 96, dtype=torch.bfloat16)}) == "ran"


def test_a_scalar_that_does_not_fit_the_rest():
    wrong = valid(page_size=64) | {"page_size": 96}
    for violation in violations(store, **wrong):
        assert violation.cause == (
            "page_size = 96 does not fit the rest: with page_size = 64 every rule of this call holds"
        )
    assert store(**wrong | {"page_size": 64}) == "ran"
    two = wrong | {"v_scale": valid(page_size=128)["v_scale"]}
    assert all("every rule" not in (v.cause or "") for v in violations(store, **two)), "no one number is right"


def test_axes_swapped_in_the_argument_that_the_others_are_measured_by():
    wrong = valid() | {"k": valid()["k"].transpose(0, 1).contiguous()}
    for violation in violations(store, **wrong):
        assert violation.cause == (
            "token and head are swapped in k, (2, 5, 96): exchanged, every rule of this call holds"
        )
        assert "k.transpose(0, 1)" in (violation.fix or "")
    assert store(**wrong | {"k": wrong["k"].transpose(0, 1)}) == "ran"


def test_all_scales_stale_is_not_the_fault_of_the_cache_that_grew():
    old = valid(slot=256)
    for violation in violations(store, **valid() | {n: old[n] for n in ("k_scale", "v_scale")}):
        assert f"{violation.argument} fits slot = 256; this call has slot = 384 (k_cache)" in str(violation)
        assert "alone" not in str(violation)


def test_another_layout_of_the_catalogue():
    good = valid()
    flat = FLAT(slot=384, head=2, head_dim=96)
    wrong = plain(flat.empty())
    found = only(store, **good | {"k_scale": wrong})
    assert f"k_scale has the shape of mxfp8.flat ({FLAT})" in str(found)
    right = SCALE(slot=384, page_size=128, head=2, head_dim=96).pack(flat.unpack(wrong))
    assert store(**good | {"k_scale": right}) == "ran"


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "dtype", "text", "undo"),
    [
        ("k_cache", torch.float8_e4m3fnuz, "half the value", lambda x: x.float().to(torch.float8_e4m3fn)),
        ("k", torch.float8_e4m3fn, "k is quantised already", lambda x: x.to(torch.bfloat16)),
        ("k_cache", torch.bfloat16, "not encoded as float8_e4m3fn yet", lambda x: x.to(torch.float8_e4m3fn)),
        ("k", torch.float16, "the same width as bfloat16", lambda x: x.to(torch.bfloat16)),
    ],
)
def test_dtypes(argument: str, dtype: torch.dtype, text: str, undo: Callable[[Tensor], Tensor]):
    good = valid()
    wrong = good[argument].float().to(dtype)
    found = only(store, **good | {argument: wrong})
    assert found.rule == "dtype"
    assert text in str(found)
    assert store(**good | {argument: undo(wrong)}) == "ran"


def test_integers_of_another_width():
    @contract
    def f(loc: Int32[Tensor, "n"]) -> str:
        return "ran"

    wrong = torch.arange(3)
    found = only(f, wrong)
    assert "read as int32, each int64 is 2 entries" in str(found)
    assert f(code(found, wrong)) == "ran"
    assert len(wrong.view(torch.int32)) == 2 * len(wrong)


# --- strides, addresses -----------------------------------------------------------------------------------------------


ROWS = Layout("rows", "row col -> row col", dtype=BF16)


@contract
def read(x: Annotated[Tensor, ROWS]) -> str:
    return "ran"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.zeros(4, 6, dtype=torch.bfloat16).T, "a transposed view: in memory its axes are (col row)"),
        (
            torch.zeros(4, 9, dtype=torch.bfloat16)[:, 2:8],
            "row steps over 9 elements where 6 are its own, starting at",
        ),
        (torch.zeros(1, 6, dtype=torch.bfloat16).expand(4, 6), "an expanded view: elements share memory"),
        (torch.zeros(4, 12, dtype=torch.bfloat16)[:, ::2], "col steps over 2 elements where 1 are its own"),
    ],
)
def test_views(wrong, text):
    found = only(read, wrong)
    assert (found.rule, text in str(found)) == ("stride", True), str(found)
    assert read(code(found, wrong)) == "ran"


def test_a_written_argument_is_never_told_to_be_copied():
    @contract
    def write(x: Annotated[Tensor, ROWS, Writes()]) -> str:
        return "ran"

    found = only(write, torch.zeros(4, 6, dtype=torch.bfloat16).T)
    assert "allocate x in this layout" in str(found)


def test_a_stride_that_counts_at_size_one():
    tma = Layout(
        "tma", "row head col -> row head col", dtype=BF16, dense="col", align={"row": 16, "head": 16}, strict="row head"
    )

    @contract
    def f(x: Annotated[Tensor, tma]) -> str:
        return "ran"

    good = torch.zeros(4, 1, 8, dtype=torch.bfloat16)
    assert f(good) == "ran"
    wrong = good.as_strided((4, 1, 8), (8, 1, 1))
    assert wrong.is_contiguous()
    found = only(f, wrong)
    assert "1 * 2 = 2, and 2 % 16 = 2" in str(found)
    assert f(code(found, wrong)) == "ran"
    exact = Layout("exact", "row head col -> row head col", dtype=BF16, strict="head")

    @contract
    def g(x: Annotated[Tensor, exact]) -> str:
        return "ran"

    found = only(g, wrong)
    assert g(code(found, wrong)) == "ran"


def test_addresses_and_offsets():
    aligned = Layout("aligned", "n -> n", dtype=FP32, align=16)
    small = Layout("small", "row col -> row col", dtype=UINT8, offsets="int32")
    row_only = small(offsets={"row": "int32"})

    @contract
    def load(x: Annotated[Tensor, aligned]) -> str:
        return "ran"

    @contract
    def whole(x: Annotated[Tensor, small]) -> str:
        return "ran"

    @contract
    def rows(x: Annotated[Tensor, row_only]) -> str:
        return "ran"

    wrong = torch.zeros(9)[1:]
    found = only(load, wrong)
    assert "x starts 4 bytes into its storage" in str(found)
    assert load(code(found, wrong)) == "ran"
    for fn, most in ((whole, 2048), (rows, 2048)):
        found = only(fn, torch.empty(most + 2, 2**20, dtype=torch.uint8, device="meta"))
        assert found.rule == "overflow"
        (safe,) = re.findall(r"use at most (\d+) rows", str(found))
        assert fn(torch.empty(int(safe), 2**20, dtype=torch.uint8, device="meta")) == "ran"
        assert violations(fn, torch.empty(int(safe) + 1, 2**20, dtype=torch.uint8, device="meta"))
    last = torch.empty(2049, 2**20 - 1, dtype=torch.uint8, device="meta")
    assert rows(last) == "ran", "the last row may reach beyond"
    assert violations(whole, last)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_where_a_wrong_number_comes_from():
    @contract("rows == n", "width == k")
    def f(
        x: Float32[Tensor, "n k"],
        scale: Annotated[Tensor, layout("scale.128x4")(row="n", col="k", view=("align(n, 128)", "align(k, 4)"))],
        rows: int,
        width: int,
    ) -> str:
        return "ran"

    x, scale = torch.zeros(100, 9), torch.zeros(128, 12).to(torch.float8_e8m0fnu)
    assert f(x, scale, 100, 9) == "ran"
    found = only(f, x, scale, 128, 9)
    assert found.cause == "128 is the padded size of align(n, 128) in scale: align(n, 128)"
    assert found.fix == "pass rows = 100"
    found = only(f, x, scale, 100, 100)
    assert found.cause == "100 is the size of n in x"
    assert found.fix == "pass width = 9"


def test_numbers_that_prove_nothing_are_not_called_a_cause():
    good = valid()
    found = only(store, **good | {"k_scale": torch.zeros(3, 5, 7, 11, 13).to(torch.float8_e8m0fnu)})
    assert found.cause is None
    found = only(store, **good | {"v_scale": torch.zeros(3, 2, 31, 4, 2).to(torch.float8_e8m0fnu)})
    assert found.cause is None


def test_index_tensors_of_another_length():
    @contract
    def f(k: BFloat16[Tensor, "token head dim"], loc: Int64[Tensor, "token"]) -> str:
        return "ran"

    found = only(f, torch.zeros(5, 2, 3, dtype=torch.bfloat16), torch.arange(4))
    assert "loc fits token = 4; this call has token = 5 (k)" in str(found)
    assert f(torch.zeros(4, 2, 3, dtype=torch.bfloat16), torch.arange(4)) == "ran"


# --- any mistakes -----------------------------------------------------------------------------------------------------

TENSORS = ("k", "v", "k_cache", "k_scale", "v_scale")
MISTAKES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "doubled": lambda x, i, j: torch.cat([x.view(torch.uint8)] * 2, i % (x.dim() - 1)).view(x.dtype),
    "halved": lambda x, i, j: x.narrow(i % x.dim(), 0, max(1, x.shape[i % x.dim()] // 2)).contiguous(),
    "transposed": lambda x, i, j: x.transpose(i % x.dim(), j % x.dim()).contiguous(),
    "an axis less": lambda x, i, j: x.select(i % x.dim(), 0).contiguous(),
    "an axis more": lambda x, i, j: x.unsqueeze(i % x.dim()),
    "merged": lambda x, i, j: x.flatten(i % (x.dim() - 1), i % (x.dim() - 1) + 1),
    "as bytes": lambda x, i, j: x.view(torch.uint8),
}


def sizes_of(call: dict[str, Any]) -> dict[str, int] | None:
    """The sizes that the contract binds in a call, with ``store``'s rules for where each comes from."""
    if any(call[n].dim() != 3 for n in ("k", "v", "k_cache")):
        return None
    return dict(
        slot=call["k_cache"].shape[0], page_size=call["page_size"], head=call["k"].shape[1],
        head_dim=call["k"].shape[2], v_head_dim=call["v"].shape[2],
    )  # fmt: skip


def undone(call: dict[str, Any], violation: Violation, text: str) -> dict[str, Any] | None:
    """The call in which a cause does not hold any more; None for a cause that this test cannot undo by itself."""
    if found := re.search(r"with (\w+) = (\d+) every rule", text):
        return call | {found[1]: int(found[2])}
    if found := re.match(r"(\w+) and (\w+) are swapped: exchanged", text):
        return call | {found[1]: call[found[2]], found[2]: call[found[1]]}
    if found := re.match(r"\w+ and \w+ are swapped in (\w+),", text):
        axes = map(int, re.findall(r"transpose\((\d), (\d)\)", violation.fix or "")[0])
        return call | {found[1]: call[found[1]].transpose(*axes).contiguous()}
    if (found := re.match(r"(\w+) fits (\w+) = (\d+); this call", text)) and (sizes := sizes_of(call)):
        sizes[found[2]] = int(found[3])
        divides = sizes["slot"] % sizes["page_size"] == 0 and sizes["page_size"] % 32 == 0
        if divides and sizes["head_dim"] % 32 == 0 and sizes["v_head_dim"] % 32 == 0 and found[2] != "token":
            return valid(**sizes) | {found[1]: call[found[1]]}
    return None


@settings(max_examples=150)
@given(
    dims=st.fixed_dictionaries(
        dict(page=st.integers(1, 5), page_size=st.sampled_from([32, 64, 128]), head=st.integers(1, 4))
        | dict.fromkeys(("head_dim", "v_head_dim"), st.sampled_from([32, 64, 96]))
    ),
    mistakes=st.lists(
        st.tuples(
            st.sampled_from(TENSORS), st.sampled_from([*MISTAKES, *TENSORS]), st.integers(0, 3), st.integers(0, 3)
        ),
        max_size=2,
    ),
    page_size=st.sampled_from([None, None, 16, 64, 96, 128]),
)
def test_whatever_cause_is_printed_for_any_mistakes_is_true(dims, mistakes, page_size):
    page = dims.pop("page")
    call = valid(slot=page * dims["page_size"], **dims)
    for name, what, i, j in mistakes:
        if what in TENSORS:
            call[name], call[what] = call[what], call[name]
        elif call[name].dim() > 1 and not (what == "as bytes" and call[name].element_size() > 1):
            call[name] = MISTAKES[what](call[name], i, j)
    if page_size is not None:
        call["page_size"] = page_size
    for violation in store.contract.violations(**call):
        assert len(str(violation)) <= 700, str(violation)
        for text in (violation.cause or "").split("\nor: "):
            if (better := undone(call, violation, text)) is None:
                continue
            left = store.contract.violations(**better)
            if " fits " in text:  # speaks of one argument's shape only; its dtype may be wrong as well
                left = [v for v in left if (v.argument, v.rule) == (violation.argument, "shape")]
            assert not left, (text, str(violation), list(map(str, left)))
