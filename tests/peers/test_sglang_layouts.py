"""Catalogue entries without a golden vector, against sglang's own writers, strides and page sizes."""

from __future__ import annotations

from unittest import mock

import peer_sglang  # noqa: F401 - stands in for what sglang imports: before it
import pytest
import torch

from layoutcheck import Layout, layout


@pytest.mark.parametrize("page8", [False, True])
def test_the_split_fp4_index_cache_is_written_as_the_catalogue_says(page8):
    from sglang.kernels.ops.kvcache import dsv4_fp4_index_k_cache_hip as writer

    slot = 128
    codes = torch.randint(0, 16, (slot, 128), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    words = torch.randint(0, 2**31 - 1, (slot,), generator=torch.Generator().manual_seed(2)).int()
    payload, scale = torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(2, 1, 4, 64, dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    writer._store_fp4_index_k_split_kernel[(slot,)](
        packed, words, payload, scale, torch.arange(slot), 64, BLOCK=64, PAGE8=page8
    )
    names = ("aiter.page8_payload", "aiter.page8_scale") if page8 else ("flydsl.index_payload", "flydsl.index_scale")
    sizes = {} if page8 else {"page_size": 64}
    assert torch.equal(layout(names[0])(slot=slot, **sizes).pack(codes), payload)
    groups = words.view(torch.uint8).reshape(slot, 4)
    assert torch.equal(layout(names[1])(slot=slot).pack(groups), scale)


def test_the_packed_fp4_index_cache_is_written_as_the_catalogue_says():
    from sglang.kernels.ops.kvcache import dsv4_fp4_index_k_cache as writer

    slot, page_size = 96, 32
    record = layout("dsa.index_fp4_68")(slot=slot, page_size=page_size)
    codes = torch.randint(0, 16, (slot, 128), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    words = torch.randint(0, 2**31 - 1, (slot,), generator=torch.Generator().manual_seed(2)).int()
    cache = record.empty()
    writer._store_fp4_index_k_cache_kernel[(slot,)](
        codes[:, 0::2] | codes[:, 1::2] << 4, words, cache, torch.arange(slot), page_size, cache.stride(0), BLOCK=64
    )
    parts = record.split(cache)
    assert torch.equal(record.section("data").unpack(parts["data"]), codes)
    groups = record.section("scale").unpack(parts["scale"]).view(torch.uint8)
    assert torch.equal(groups, words.view(torch.uint8).reshape(slot, 4))


def test_the_words_of_utccp_are_transposed_as_the_catalogue_says():
    from sglang.srt.layers.moe.mega_moe import _transpose_mega_moe_sf_for_utccp

    sizes = dict(batch=2, mn=256, k=11)
    scales = torch.randint(0, 255, (2, 256, 11), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    plain = layout("deepgemm.ue8m0_packed.batched")(**sizes).pack(scales)
    theirs = _transpose_mega_moe_sf_for_utccp(plain)
    ours = layout("deepgemm.utccp")(**sizes).pack(scales)
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert torch.equal(ours, theirs)


def test_rows_of_the_packed_pool_are_split_as_the_catalogue_says():
    from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import msa_v1_page_row_bytes

    main, index = (layout(f"minimax_m3.{n}_row") for n in ("main", "index"))
    rows = msa_v1_page_row_bytes(4, 128, 128, 128)
    assert (main(page=1, head=4, head_dim=128).nbytes, index(page=1, head_dim=128).nbytes) == rows


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
@pytest.mark.parametrize("name", ["v4", "v41", "v41_fp4", "uniform_fp8", "v41_new", "v41_fp4_new"])
def test_pages_of_the_main_cache_have_the_bytes_of_sglangs(name, page_size):
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    theirs = KVLayout(name)
    ours = layout("dsv4.v4_584" if name == "v4" else f"dsv4.{name}")(slot=3 * page_size, page_size=page_size)
    assert ours.nbytes == 3 * theirs.page_bytes(page_size)
    if isinstance(ours, Layout):
        assert (theirs.scale_bytes, ours.offset(slot=page_size - 1, dim=511)) == (0, page_size * 512 - 1)
        return
    data_stride, scale_base, scale_stride = theirs.row_addressing(page_size)
    for token in {0, page_size // 2, page_size - 1}:
        slot = 2 * page_size + token
        start = 2 * theirs.page_bytes(page_size)
        assert ours.offset(next(iter(ours.sections)), slot=slot, dim=0) == start + token * data_stride
        assert ours.offset("scale", slot=slot, group=0) == start + scale_base + token * scale_stride
    used = {n: s.values_of(s.axes[-1].name) * s.elements[0].bits // 8 for n, s in ours.sections.items()}
    scales = used.pop("scale")
    assert sum(used.values()) == theirs.data_bytes
    assert scales == theirs.scale_bytes - (name == "v4")  # the eighth belongs to nobody


def test_group_major_scales_have_the_shape_and_strides_of_sglangs():
    from sglang.kernels.ops.quantization import fp8_group_major_quant_ue8m0 as quantiser

    with mock.patch.object(quantiser, "fp8_wo_a_group_major_quant_ue8m0"):
        _, theirs = quantiser.sglang_per_token_group_quant_fp8_dsv4_wo_a(torch.zeros(10, 3, 640, dtype=torch.bfloat16))
    ours = layout("sglang.group_major_ue8m0")(token=10, group=3, k=5)
    assert (ours.shape, ours.strides, ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    ours.check(theirs)


def test_a_row_of_the_two_pools_has_the_bytes_of_sglangs():
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import layout as theirs

    row = layout("dsv4.two_pool_nope")(slot=1)
    assert row.nbytes == theirs.DSV4_FP8_NOPE_ROW_BYTES
    assert row.section("latent").values_of("dim") / theirs.DSV4_FP8_QUANT_TILE == row.section("scale").values_of(
        "group"
    )
    theirs.check_two_pool_pair(
        row.empty(dtype="e4m3"), layout("dsv4.two_pool_rope")(slot=1).empty(), rope_width=64, rope_dtype=torch.bfloat16
    )
