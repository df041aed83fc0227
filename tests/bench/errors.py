"""What an error costs: the slow path of a call with ten arguments, for several faults, in milliseconds.

    python tests/bench/errors.py

The guard refuses the call first; what is timed here is only finding every broken rule, its cause and its words.
"""

from __future__ import annotations

import platform
import timeit
from typing import Annotated, Any

import torch
from jaxtyping import BFloat16, Int64
from torch import Tensor

from layoutcheck import E4M3, E8M0, Choose, Index, Layout, Writes, contract, layout, together, when

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = Choose({"page_size == 128": layout("mxfp8.interleaved")}, default=layout("mxfp8.flat"))
ROW_SCALE = Layout("row scales", "token head group -> token head group", dtype=E8M0, head_dim="group * 32")


@contract(
    "page_size % 32 == 0",
    together("k_row_scale", "v_row_scale"),
    when("given(k_row_scale)", "dtype(k) == bf16"),
    same_device=True,
)
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    v: BFloat16[Tensor, "token head v_head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    v_cache: Annotated[Tensor, CACHE(head_dim="v_head_dim"), Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim"), Writes(at="loc")],
    k_row_scale: Annotated[Tensor, ROW_SCALE] | None = None,
    v_row_scale: Annotated[Tensor, ROW_SCALE(head_dim="v_head_dim")] | None = None,
    *,
    page_size: int = 128,
) -> None:
    """Ten arguments: rows, slots, caches, scales of both, and a size."""


def valid(page: int = 64, page_size: int = 128) -> dict[str, Any]:
    """A call that keeps every rule."""
    dims: dict[str, Any] = dict(head=8, page_size=page_size, slot=page * page_size)
    scales = [layout("mxfp8.interleaved")(head_dim=d, **dims).empty() for d in (128, 64)]
    caches = [CACHE(head_dim=d, **dims).empty() for d in (128, 64)]
    rows = [torch.zeros(16, 8, d, dtype=torch.bfloat16) for d in (128, 64)]
    return dict(
        k=rows[0], v=rows[1], loc=torch.arange(16), k_cache=caches[0], v_cache=caches[1],
        k_scale=scales[0], v_scale=scales[1], page_size=page_size,
    )  # fmt: skip


def faults() -> dict[str, dict[str, Any]]:
    """Calls that break one rule, or several."""
    good, older = valid(), valid(page=32)
    unknown = good["k_scale"].clone()
    return {
        "stale scales": good | {"k_scale": older["k_scale"]},
        "both scales stale": good | {"k_scale": older["k_scale"], "v_scale": older["v_scale"]},
        "K and V swapped": good | {"k": good["v"], "v": good["k"]},
        "transposed, untagged": good | {"k_scale": unknown.transpose(0, 1).contiguous()},
        "seven wrong": good | {n: good[n][:-1] for n in good if n not in ("page_size", "k")},
        "wrong dtypes": good | {n: good[n].float() for n in good if n != "page_size"},
        "nothing fits": good | {"k_scale": torch.zeros(3, 5, 7, 11, 13).to(torch.float8_e8m0fnu)},
    }


def main() -> None:
    """Print the table."""
    store(**valid())
    print(
        f"slow path, ten arguments; {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    for name, call in faults().items():
        found = store.contract.violations(**call)
        longest = max(len(str(v)) for v in found)
        seconds = min(timeit.repeat(lambda call=call: store.contract.violations(**call), number=20, repeat=5)) / 20
        print(f"   {name:<24}{seconds * 1e3:7.2f} ms   {len(found)} violations, longest {longest} characters")


if __name__ == "__main__":
    main()
