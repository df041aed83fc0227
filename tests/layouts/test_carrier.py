"""Several elements in one word: four scales in an int32, two e2m1 in a byte."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pytest
import torch
from torch import Tensor

from layoutcheck import E2M1, E4M3, E8M0, FP32, Layout, LayoutError, Pool, Record, contract
from layoutcheck.layouts import layout

FP4 = Layout("fp4", "row col -> row col", dtype=E2M1, carrier="uint8")
WORDS = layout("deepgemm.ue8m0_packed")


def codes(*shape: int, below: int = 16) -> torch.Tensor:
    """Element codes, all different as far as they go."""
    return torch.arange(int(np.prod(shape))).remainder(below).to(torch.uint8).reshape(shape)


def test_the_even_element_is_the_low_nibble():
    packed = FP4(row=3, col=6).pack(codes(3, 6))
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 3)
    assert [f"{b:02x}" for b in packed.flatten().tolist()] == ["10", "32", "54", "76", "98", "ba", "dc", "fe", "10"]
    assert torch.equal(FP4(row=3, col=6).unpack(packed), codes(3, 6))


def test_the_first_of_four_bytes_is_the_lowest():
    made = WORDS(mn=3, k=6)
    packed = made.pack(codes(3, 6, below=256))
    assert packed.dtype == torch.int32
    assert (packed.shape, packed.stride()) == ((3, 2), (1, 4))
    wanted = np.zeros((3, 8), np.uint8)
    wanted[:, :6] = np.arange(18).reshape(3, 6)
    np.testing.assert_array_equal(packed.contiguous().numpy().view("<u4"), wanted.view("<u4"))
    assert torch.equal(made.unpack(packed).view(torch.uint8), codes(3, 6, below=256))


def test_offsets_count_elements_and_shapes_count_words():
    made = FP4(row=5, col=8)
    assert made.offset(row=2, col=5) == 21
    assert (made.shape, made.strides, made.numel, made.nbytes) == ((5, 4), (4, 1), 40, 20)
    made = WORDS(mn=5, k=9)
    assert made.offset(mn=2, k=5) == 1 * 8 * 4 + 2 * 4 + 1
    assert (made.shape, made.strides, made.nbytes) == ((5, 3), (1, 8), 96)


def test_elements_that_do_not_fill_a_word_are_an_error():
    with pytest.raises(LayoutError, match=r"got 7 % 2 = 1"):
        FP4(row=3, col=7).shape  # noqa: B018 - reading it raises


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_any_byte_may_carry_two_nibbles(dtype):
    solved = FP4.check(torch.zeros(3, 5, dtype=torch.uint8).view(dtype))
    assert (solved["row"], solved["col"]) == (3, 10)


def test_words_of_another_width_are_refused():
    with pytest.raises(LayoutError, match="wrong dtype"):
        FP4.check(torch.zeros(3, 5, dtype=torch.int32))
    with pytest.raises(LayoutError, match="wrong dtype"):
        WORDS(mn=10, k=8).check(torch.empty_strided((10, 2), (1, 12), dtype=torch.uint8))
    with pytest.raises(LayoutError, match="wrong strides"):
        WORDS(mn=10, k=8).check(torch.zeros(10, 2, dtype=torch.int32))


def test_without_a_carrier_two_nibbles_share_torchs_own_type():
    bare = Layout("fp4", "row col -> row col", dtype=E2M1)
    assert bare(row=2, col=4).empty().dtype == torch.float4_e2m1fn_x2


def test_new_words_are_filled_element_by_element():
    assert FP4(row=2, col=4, fill=3).empty().tolist() == [[0x33, 0x33], [0x33, 0x33]]
    filled = layout("sglang.group_major_ue8m0")(token=3, group=2, k=5, fill=127).empty()
    assert set(filled.flatten().tolist()) == {0x7F7F7F7F}


def test_a_view_with_free_strides_unpacks():
    free = FP4(dense="col")
    wide = torch.zeros(3, 8, dtype=torch.uint8)
    wide[:, :2] = FP4(row=3, col=4).pack(codes(3, 4))
    assert torch.equal(free(row=3, col=4).unpack(wide[:, :2]), codes(3, 4))


def test_a_carrier_of_the_words_of_a_tensor_whose_last_padding_is_not_there():
    """DeepGEMM allocates ``align(mn, 4) * words - (align(mn, 4) - mn)`` words."""
    whole = WORDS(mn=3, k=6).pack(codes(3, 6, below=256))
    short = torch.empty(7, dtype=torch.int32)
    short.copy_(whole.as_strided((7,), (1,)))
    assert torch.equal(
        WORDS(mn=3, k=6).unpack(short.as_strided((3, 2), (1, 4))).view(torch.uint8), codes(3, 6, below=256)
    )


def test_sections_of_a_record_may_be_words():
    record = layout("dsa.index_fp4_68")(page_size=4, slot=8)
    assert isinstance(record, Record)
    buffer = record.empty()
    parts = record.split(buffer)
    assert (parts["data"].dtype, parts["data"].shape) == (torch.uint8, (2, 4, 64))
    assert (parts["scale"].dtype, parts["scale"].shape) == (torch.int32, (2, 4))
    parts["data"].copy_(record.section("data").pack(codes(8, 128)))
    parts["scale"].copy_(record.section("scale").pack(codes(8, 4, below=256)))
    token = 6
    page, at = divmod(token, 4)
    nibbles = codes(8, 128)[token].numpy()
    np.testing.assert_array_equal(buffer[page, at * 64 : at * 64 + 64].numpy(), nibbles[0::2] | nibbles[1::2] << 4)
    start = 4 * 64 + at * 4
    assert buffer[page, start : start + 4].tolist() == [4 * token, 4 * token + 1, 4 * token + 2, 4 * token + 3]
    assert record.offset("data", slot=token, dim=6) == page * 272 + at * 64 + 3
    assert record.offset("scale", slot=token, group=3) == page * 272 + start + 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(dtype=FP32, carrier="int64"), "only elements of one width, 8 bits or fewer"),
        (dict(dtype=(E8M0, E2M1), carrier="int32"), "only elements of one width"),
        (dict(dtype=E8M0, carrier="int32", pitch={"col": 2}), "col has a pitch"),
        (dict(dtype=E8M0, carrier="int3"), "no element type"),
    ],
)
def test_what_cannot_be_a_carrier(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Layout("wrong", "row col -> row col", **wrong)


def test_the_carrier_is_part_of_the_declaration_and_not_of_the_bytes():
    byte, word = (
        Layout("scales", "row k(kp b) -> row kp b", dtype=E8M0, b=4, **rule) for rule in ({}, {"carrier": "int32"})
    )
    assert byte.fingerprint != word.fingerprint
    assert byte(row=2, k=8).map_fingerprint == word(row=2, k=8).map_fingerprint


def test_words_over_memory_that_somebody_else_allocated():
    made = WORDS(mn=3, k=6)
    raw = torch.arange(made.nbytes + 4, dtype=torch.uint8)
    words = made.view(raw, offset=4)
    assert (words.dtype, words.shape, words.stride()) == (torch.int32, (3, 2), (1, 4))
    assert words[1, 1].item() == int.from_bytes(bytes(range(4 + 20, 4 + 24)), "little")
    with pytest.raises(LayoutError, match="raw cannot hold"):
        made.view(raw, offset=2)


def test_a_contract_counts_words_and_speaks_of_elements():
    @contract
    def gemm(
        a: Annotated[Tensor, Layout("a", "mn width -> mn width", dtype=E4M3)],
        scale: Annotated[Tensor, WORDS(k="width / 32")],
    ) -> None: ...

    a = torch.zeros(10, 224).to(torch.float8_e4m3fn)
    gemm(a, WORDS(mn=10, k=7).empty())
    with pytest.raises(LayoutError, match=r"scale does not match deepgemm\.ue8m0_packed"):
        gemm(a, WORDS(mn=10, k=9).empty())
    with pytest.raises(LayoutError, match="strides"):
        gemm(a, torch.zeros(10, 2, dtype=torch.int32))
    with pytest.raises(LayoutError, match="dtype"):
        gemm(a, torch.zeros(10, 7, dtype=torch.uint8))


def test_a_pool_resizes_and_moves_words():
    class Fp4Pool(Pool):
        rows: Annotated[Tensor, Layout("rows", "slot head dim -> slot head dim", dtype=E2M1, carrier="uint8", fill=0)]

    pool = Fp4Pool.allocate(slot=4, head=2, dim=6)
    made = FP4(row=8, col=6)
    pool.rows.copy_(made.pack(codes(8, 6)).view(4, 2, 3))
    before = pool.rows.clone()
    pool.move(src=torch.tensor([3]), dst=torch.tensor([0]))
    assert torch.equal(pool.rows[0], before[3])
    assert torch.equal(pool.rows[1:], before[1:])
    pool.resize(slot=6)
    assert torch.equal(pool.rows[1:4], before[1:])
    assert not pool.rows[4:].any()
