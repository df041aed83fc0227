"""Every kernel of the repo through the toolkit: red zones, a reference where it is a matter of indexing, the probe."""

from __future__ import annotations

from typing import Any

import pytest
import references
import torch
from torch import Tensor

from layoutcheck.kernels import (
    fused_prologue_decode,
    fused_prologue_extend,
    fused_prologue_verify,
    load_scales,
    move_slots,
    paged_attention,
    quantize_mxfp8,
    quantize_store_kv_mxfp8,
    store_rows,
    store_scales,
)
from layoutcheck.kernels.unified_kv import quantize_store_unified_kv, sparse_attention_unified_kv
from layoutcheck.testing import check


@pytest.mark.parametrize(
    ("fn", "reference", "options"),
    [
        (store_scales, references.store_scales, dict(mutants=30)),
        (load_scales, references.load_scales, dict()),
        (store_rows, references.store_rows, dict(mutants=30)),
        (
            move_slots,
            references.move_slots,
            # A pair of which one slot is skipped is skipped, which no rule about one of the two can say.
            # What is moved is read from the same buffers, so what is written depends on what was there.
            dict(
                adjust=lambda a: dict(dst=torch.where(a["src"] > 0, a["dst"], 0)),
                probes=(),
                partial=["k_cache", "v_cache", "k_scale", "v_scale"],
            ),
        ),
        (
            quantize_store_kv_mxfp8,
            references.quantize_store_kv_mxfp8,
            dict(mutants=30, probes=["k_scale", "v_cache"], token=(0, 4), head=(1, 2), page=(1, 2), head_dim=(32, 64)),
        ),
        (quantize_mxfp8, None, dict(refuses=True, runs=40)),  # about half of what is drawn it refuses itself
        (quantize_store_unified_kv, None, dict()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_that_moves_or_stores(fn, reference, options):
    report = check(fn, reference, **dict(examples=5, runs=8, mutants=0) | options)
    assert report.runs + report.refused >= 8
    assert report.runs > 2
    if report.mutants:
        assert report.score > 0.7, report


SMALL = dict(head=(1, 2), page=(1, 2), page_size=(1, 48), max_pages=(1, 2), token=(1, 3))
PROLOGUE = dict(
    examples=2, runs=2, mutants=0, probes=(), partial=["k_conv", "v_conv", "k_window", "v_window"],
    dkv=128, dq=128, width=(2, 3), pool=(2, 3), row=(128, 520),
)  # fmt: skip


def prologue(a: dict[str, Any]) -> dict[str, Tensor]:
    """Padding, of which the cache index is -1, stores no K and V."""
    indices = a["cache_indices"]
    if "seq_index" in a:
        of_token = indices[a["seq_index"].long()]
    else:
        of_token = indices.repeat_interleave(a.get("draft_tokens", 1))
    return dict(loc=torch.where(of_token < 0, -1, a["loc"]))


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (paged_attention, dict(examples=2, runs=3, mutants=0, probes=()) | SMALL),
        (sparse_attention_unified_kv, dict(examples=2, runs=4, mutants=0, probes=(), token=(1, 3), head=(1, 3))),
        (fused_prologue_decode, PROLOGUE | dict(adjust=prologue, token=(1, 3))),
        (fused_prologue_verify, PROLOGUE | dict(adjust=prologue, seq=(1, 2), draft_tokens=(1, 2))),
        (fused_prologue_extend, PROLOGUE | dict(adjust=prologue, seq=(1, 2), token=(1, 3))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_that_computes_keeps_to_its_memory(fn, options):
    assert check(fn, **options).runs == options["runs"]
