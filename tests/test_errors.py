"""The text of every kind of error, as snapshots: ``tests/snapshots/errors.txt`` is what callers read.

``UPDATE_SNAPSHOTS=1 pytest tests/test_errors.py`` writes it anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from jaxtyping import BFloat16, Float, Float32, Int32, Int64
from torch import Tensor

from layoutcheck import (
    E4M3,
    FP32,
    Choose,
    Index,
    Indptr,
    Layout,
    LayoutError,
    Writes,
    contract,
    forbids,
    layout,
    mode,
    needs,
    no_overlap,
    together,
    when,
)
from layoutcheck.pools import MXFP8KVPool, UnifiedKVPool

SNAPSHOTS = Path(__file__).parent / "snapshots" / "errors.txt"
CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")
FLAT = layout("mxfp8.flat")
TILES = layout("scale.128x4")
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(call: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[call.__name__] = call
    return call


# --- a store, whose buffers are wrong in every way --------------------------------------------------------------------


@contract("page_size % 32 == 0", same_device=True)
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0", unique=True)],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim"), Writes(at="loc")],
    v_head_dim: int,
    *,
    page_size: int = 128,
) -> None: ...


def scales(page: int = 8, page_size: int = 128, head: int = 4, head_dim: int = 96) -> Tensor:
    return SCALE(page=page, page_size=page_size, head=head, head_dim=head_dim).empty()


def stored(**changes: Any) -> None:
    arguments: dict[str, Any] = dict(
        k=torch.zeros(5, 4, 96, dtype=torch.bfloat16),
        loc=torch.arange(1, 6),
        k_cache=CACHE(page=8, page_size=128, head=4, head_dim=96).empty(),
        k_scale=scales(),
        v_scale=scales(head_dim=64),
        v_head_dim=64,
    )
    store(**arguments | changes)


@scenario
def stale_scales_one_of_two() -> None:
    stored(k_scale=scales(page=6))


@scenario
def stale_scales_both() -> None:
    stored(k_scale=scales(page=6), v_scale=scales(page=6, head_dim=64))


@scenario
def scales_for_another_page_size() -> None:
    stored(k_scale=scales(page=16, page_size=64))


@scenario
def scales_of_another_layer_width() -> None:
    stored(k_scale=scales(head=2))


@scenario
def k_and_v_scales_swapped() -> None:
    stored(k_scale=scales(head_dim=64), v_scale=scales())


@scenario
def one_entry_per_slot_instead_of_per_page() -> None:
    stored(k_scale=torch.empty(1024, 4, 32, 4, 3, dtype=torch.uint8))


@scenario
def a_missing_axis() -> None:
    stored(k_scale=scales()[:, :, :, 0])


@scenario
def flat_scales() -> None:
    stored(k_scale=scales().view(-1))


@scenario
def merged_axes() -> None:
    stored(k_scale=scales().flatten(3, 4))


@scenario
def transposed_scales() -> None:
    stored(k_scale=scales().transpose(2, 3))


@scenario
def transposed_view_of_the_right_shape() -> None:
    stored(k_cache=torch.empty(4, 1024, 96, dtype=torch.float8_e4m3fn).transpose(0, 1))


@scenario
def sliced_view_of_a_wider_cache() -> None:
    stored(k_cache=torch.empty(1024, 8, 96, dtype=torch.float8_e4m3fn)[:, :4])


@scenario
def heads_as_tokens() -> None:
    stored(k=torch.zeros(4, 5, 96, dtype=torch.bfloat16))


@scenario
def page_size_that_does_not_divide() -> None:
    stored(page_size=96)


@scenario
def page_size_that_is_no_multiple_of_32() -> None:
    stored(page_size=16)


@scenario
def fnuz_codes() -> None:
    stored(k_cache=torch.empty(1024, 4, 96, dtype=torch.float8_e4m3fnuz))


@scenario
def fp8_bytes_as_uint8() -> None:
    stored(k_cache=torch.empty(1024, 4, 96, dtype=torch.uint8))


@scenario
def int32_slots() -> None:
    stored(loc=torch.arange(1, 6, dtype=torch.int32))


@scenario
def a_list_for_a_tensor() -> None:
    stored(loc=[1, 2, 3, 4, 5])


@scenario
def none_for_a_tensor() -> None:
    stored(k_scale=None)


@scenario
def another_device() -> None:
    stored(v_scale=scales(head_dim=64).to("meta"))


@scenario
def a_float_for_an_integer() -> None:
    stored(page_size=128.0)


@scenario
def slots_out_of_range() -> None:
    with mode("values"):
        stored(loc=torch.tensor([1, 2, 1024, 4, -7]))


@scenario
def slots_twice() -> None:
    with mode("values"):
        stored(loc=torch.tensor([1, 2, 0, 0, 2]))


# --- rules between arguments ------------------------------------------------------------------------------------------


@contract(
    together("k_scale", "v_scale"),
    when("dtype(cache) == e4m3", needs("q_scale")),
    when("dtype(cache) != e4m3", forbids("q_scale")),
    when("causal", "window > 0"),
    no_overlap("cache", "out"),
)
def attend(
    cache: Annotated[Tensor, Layout("cache", "slot dim -> slot dim", dtype=(E4M3, FP32))],
    out: Float[Tensor, "slot dim"],
    q_scale: Float32[Tensor, "slot"] | None = None,
    k_scale: Float32[Tensor, "slot"] | None = None,
    v_scale: Float32[Tensor, "slot"] | None = None,
    causal: bool = False,
    window: int = 0,
    kind: Literal["paged", "flat"] = "paged",
) -> None: ...


@scenario
def q_scales_missing_over_an_fp8_cache() -> None:
    attend(torch.zeros(3, 4).to(torch.float8_e4m3fn), torch.zeros(3, 4))


@scenario
def q_scales_given_over_another_cache() -> None:
    attend(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3))


@scenario
def one_scale_of_two() -> None:
    attend(torch.zeros(3, 4), torch.zeros(3, 4), None, torch.zeros(3))


@scenario
def a_condition_under_a_condition() -> None:
    attend(torch.zeros(3, 4), torch.zeros(3, 4), causal=True)


@scenario
def an_output_in_the_cache() -> None:
    memory = torch.zeros(6, 4)
    attend(memory[:3], memory[2:5])


@scenario
def a_word_that_is_none_of_the_choices() -> None:
    attend(torch.zeros(3, 4), torch.zeros(3, 4), kind="page")


@contract
def chosen(
    cache: Annotated[Tensor, CACHE],
    scale: Annotated[Tensor, Choose({"page_size == 128": SCALE, "page_size == 64": FLAT})],
    page_size: int,
) -> None: ...


@scenario
def no_layout_for_this_page_size() -> None:
    cache = CACHE(page=2, page_size=32, head=1, head_dim=32).empty()
    chosen(cache, torch.zeros(64, 1, 1, dtype=torch.uint8), 32)


# --- single rules -----------------------------------------------------------------------------------------------------

PADDED = Layout("padded rows", "row col -> row col", dtype="uint8", pitch={"row": "align(col, 16) bytes"})
ALIGNED = Layout("aligned rows", "row col -> row col", dtype=FP32, dense="col", align={"base": 16, "row": 16})
SMALL = Layout("small offsets", "row col -> row col", dtype="uint8", offsets="int32")


@contract
def pitch(x: Annotated[Tensor, PADDED]) -> None: ...


@contract
def aligned(x: Annotated[Tensor, ALIGNED]) -> None: ...


@contract
def small(x: Annotated[Tensor, SMALL]) -> None: ...


@scenario
def rows_without_their_padding() -> None:
    pitch(torch.zeros(4, 72, dtype=torch.uint8))


@scenario
def rows_that_overlap() -> None:
    aligned(torch.zeros(1, 8).expand(4, 8))


@scenario
def rows_at_odd_bytes() -> None:
    aligned(torch.zeros(64).as_strided((4, 6), (9, 1)))


@scenario
def offsets_past_32_bits() -> None:
    small(torch.empty(4096, 2**20, dtype=torch.uint8, device="meta"))


@contract
def ragged(indptr: Annotated[Int32[Tensor, "rows"], Indptr("total")], x: Float32[Tensor, "total"]) -> None: ...


def ragged_values(*values: int) -> None:
    with mode("values"):
        ragged(torch.tensor(values, dtype=torch.int32), torch.zeros(5))


@scenario
def indptr_that_does_not_start_at_zero() -> None:
    ragged_values(1, 5)


@scenario
def indptr_that_decreases() -> None:
    ragged_values(0, 4, 3, 5)


@scenario
def indptr_that_ends_early() -> None:
    ragged_values(0, 4)


@contract
def serve(
    seq_index: Annotated[Int32[Tensor, "token"], Index("seq", segment_of="cu_seqlens")],
    cu_seqlens: Annotated[Int32[Tensor, "seq+1"], Indptr("token")],
    page_table: Annotated[Int32[Tensor, "seq width"], Index("page", live="cdiv(seq_lens, page_size)")],
    seq_lens: Int32[Tensor, "seq"],
    *,
    page: int = 4,
    page_size: int = 128,
) -> None: ...


def serve_values(seq_index: list[int], page_table: list[list[int]], seq_lens: list[int]) -> None:
    given = (torch.tensor(v, dtype=torch.int32) for v in (seq_index, [0, 1, 3], page_table, seq_lens))
    with mode("values"):
        serve(*given)


@scenario
def the_segment_of_another_entry() -> None:
    serve_values([0, 1, 0], [[0], [1]], [5, 7])


@scenario
def segments_that_begin_one_too_late() -> None:
    serve_values([0, 0, 1], [[0], [1]], [5, 7])


@scenario
def a_page_that_is_read_and_not_there() -> None:
    serve_values([0, 1, 1], [[0, 1, -1], [2, -1, -1]], [130, 129])


@contract
def tiles(x: Float32[Tensor, "row k"], scale: Annotated[Tensor, TILES(col="k/32")]) -> None: ...


@scenario
def nan_in_the_padding() -> None:
    scale = TILES(row=7, col=3).empty()
    scale.view(torch.uint8)[0, 0, 7, 0, 0] = 0xFF
    with mode("values"):
        tiles(torch.zeros(7, 96), scale)


@contract
def returned(x: Float32[Tensor, "n d"]) -> Float32[Tensor, "n"]:
    return x


@scenario
def a_wrong_result() -> None:
    returned(torch.zeros(3, 2))


# --- pools and layouts ------------------------------------------------------------------------------------------------


@scenario
def pool_sizes_that_do_not_divide() -> None:
    MXFP8KVPool.allocate(page=2, page_size=128, head=2, head_dim=100)


@scenario
def pool_sizes_that_contradict() -> None:
    UnifiedKVPool.allocate(page=2, slot=9, page_size=4, dim=64, kv_dtype="fp8")


@scenario
def a_slab_that_is_too_small() -> None:
    MXFP8KVPool.over(torch.empty(1000, dtype=torch.uint8), page=2, page_size=128, head=2, head_dim=64)


@scenario
def moving_a_slot_that_is_not_there() -> None:
    pool = MXFP8KVPool.allocate(page=2, page_size=128, head=2, head_dim=64)
    pool.move(torch.tensor([1, 256]), torch.tensor([2, 3]))


@scenario
def rows_that_are_quantised_already() -> None:
    pool = MXFP8KVPool.allocate(page=2, page_size=128, head=2, head_dim=64)
    rows = torch.zeros(5, 2, 64).to(torch.float8_e4m3fn)
    pool.store(rows, rows, torch.arange(1, 6))


@scenario
def scales_for_rows_that_are_not_quantised() -> None:
    pool = MXFP8KVPool.allocate(page=2, page_size=128, head=2, head_dim=64)
    rows, scale = torch.zeros(5, 2, 64).bfloat16(), torch.zeros(5, 2, 2, dtype=torch.uint8)
    pool.store(rows, rows, torch.arange(1, 6), scale, scale)


@scenario
def a_tensor_against_a_layout() -> None:
    SCALE.check(torch.empty(3, 4, 16, 4, 3, dtype=torch.uint8))


@scenario
def memory_that_is_too_small() -> None:
    SCALE(page=3, page_size=128, head=2, head_dim=64).view(torch.empty(100, dtype=torch.uint8))


def text_of(call: Callable[[], Any]) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def recorded() -> dict[str, str]:
    entries = SNAPSHOTS.read_text().split("=== ")[1:]
    return {name: text.rstrip("\n") for name, _, text in (e.partition("\n") for e in entries)}


def test_snapshots_are_of_these_scenarios():
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.parent.mkdir(exist_ok=True)
        SNAPSHOTS.write_text("\n\n".join(f"=== {name}\n{text_of(call)}" for name, call in SCENARIOS.items()) + "\n")
    assert list(recorded()) == list(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_text(name):
    assert text_of(SCENARIOS[name]) == recorded()[name]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_violation_says_what_to_do_in_few_words(name):
    with pytest.raises(LayoutError) as caught:
        SCENARIOS[name]()
    for violation in caught.value.violations:
        assert violation.argument
        assert violation.fix or violation.argument in ("raw", "return"), "one fix"
        assert len(str(violation)) <= 700


def test_the_tensor_that_a_fix_names_is_accepted():
    with pytest.raises(LayoutError) as caught:
        SCENARIOS["rows_without_their_padding"]()
    (violation,) = caught.value.violations
    assert violation.fix
    made = eval(violation.fix.removeprefix("copy x into "), {"torch": torch})
    pitch(made)
