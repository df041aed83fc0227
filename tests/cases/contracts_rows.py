"""Contracts of the cases about activations, index tensors and launch parameters."""

from __future__ import annotations

from typing import Annotated

from cases.harness import op
from jaxtyping import BFloat16, Float16, Int32, Int64
from torch import Tensor

from layoutcheck import BF16, E4M3, Index, Indptr, Layout, Writes, contract, layout


@op
@contract
def quant_fp8_dense(
    input: Annotated[Tensor, Layout("input", "T N -> T N", dtype=BF16)],
    out: Annotated[Tensor, Layout("output", "T N -> T N", dtype=E4M3), Writes()],
) -> None: ...


@op
@contract
def reshape_and_cache(
    key: BFloat16[Tensor, "T H D"],
    value: BFloat16[Tensor, "T H D"] | None = None,
    slot_mapping: Annotated[Tensor, Layout("slots", "T -> T", dtype="int64")] | None = None,
    key_cache: Annotated[Tensor, layout("paged.nhd")(dtype=BF16, pitch={}, head="H", head_dim="D")] | None = None,
) -> None: ...


@op
@contract
def store_kv_bucket(
    k: BFloat16[Tensor, "R H D"],
    v: BFloat16[Tensor, "R H D"],
    loc: Annotated[Int64[Tensor, "R"], Index(2**62, skip="== 0", unique=True)],
) -> None: ...


@op
@contract("n >= 0")
def paged_plan(
    paged_kv_indptr: Annotated[Int32[Tensor, "entries"], Indptr("n", capacity=True)],
    paged_kv_indices: Int32[Tensor, "n"],
    paged_kv_last_page_len: Annotated[Int32[Tensor, "entries-1"], Index("page_size + 1", start=1)],
    page_size: int,
) -> None: ...


@op
@contract
def varlen_attention(
    q: BFloat16[Tensor, "N H D"],
    cu_seqlens_q: Annotated[
        Tensor, Layout("prefix sums", "entries -> entries", dtype="int32"), Indptr("N", longest="max_seqlen_q")
    ],
    max_seqlen_q: int,
) -> None: ...


@op
@contract
def paged_read(
    k_cache: BFloat16[Tensor, "P page H D"], block_table: Annotated[Int32[Tensor, "B W"], Index("P", skip="== -1")]
) -> None: ...


@op
@contract
def store_kv(
    k: BFloat16[Tensor, "T H D"],
    loc: Annotated[Int64[Tensor, "T"], Index("num_slots", skip="== 0", unique=True)],
    num_slots: int,
) -> None: ...


@op
@contract("hidden % 8 == 0", "hidden / 8 <= 1024")
def silu_quant(x: Annotated[Tensor, Layout("activations", "T hidden -> T hidden", dtype=BF16)]) -> None: ...


@op
@contract("pow2(BLOCK_D)", "BLOCK_D >= D")
def fused_attention(q: Float16[Tensor, "B H T D"], BLOCK_D: int) -> None: ...


@op
@contract
def rope_and_store(
    q: Annotated[Tensor, Layout("rows", "token head dim -> token head dim", dtype=BF16, dense="head dim")],
) -> None: ...
