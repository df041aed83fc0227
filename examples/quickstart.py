"""Declare a layout, allocate from it, use its index map in a Triton kernel of your own, and guard the wrapper.

    TRITON_INTERPRET=1 python examples/quickstart.py      # on a CPU; on a GPU leave the variable out

The kernel gathers MXFP8 scales by slot. It knows nothing about how they are interleaved: ``scale_offset`` does.
"""

from __future__ import annotations

from typing import Annotated

import torch
import triton
import triton.language as tl
from torch import Tensor

from layoutcheck import Index, Layout, LayoutError, Writes, contract, layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = layout("mxfp8.interleaved")  # or declare your own: Layout("name", "logical axes -> memory order", ...)
OUT = Layout("gathered scales", "token head group -> token head group", dtype="uint8", head_dim="group * 32")

scale_offset = SCALES.offset_fn("slot", "head", "group", name="scale_offset")
out_offset = OUT.offset_fn("token", "head", "group", name="out_offset")


@triton.jit
def _gather(scale, loc, out, HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(loc + token)
    group = tl.arange(0, GROUP)
    byte = tl.load(scale + scale_offset(slot, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE))
    tl.store(out + out_offset(token, head, group, HEAD=HEAD, HEAD_DIM=HEAD_DIM), byte)


@contract("page_size % 32 == 0", same_device=True)
def gather_scales(
    scale: Annotated[Tensor, SCALES],
    loc: Annotated[Tensor, Layout("loc", "token -> token", dtype="int64"), Index("page * page_size")],
    out: Annotated[Tensor, OUT, Writes()],
    page_size: int,
) -> None:
    """out[token] = the scales of slot loc[token]."""
    token, head, group = out.shape
    sizes = dict(HEAD=head, HEAD_DIM=group * 32, PAGE_SIZE=page_size, GROUP=group)
    _gather[(token, head)](scale.view(torch.uint8), loc, out, **sizes)


def main() -> None:
    """Gather, compare with the layout's own reference, then pass a buffer of another page size."""
    sizes = dict(page=3, page_size=64, head=2, head_dim=128)
    logical = torch.randint(0, 255, (3 * 64, 2, 4), dtype=torch.uint8, device=DEVICE)
    buffer = SCALES(**sizes).pack(logical)
    loc = torch.tensor([5, 70, 191, 0], device=DEVICE)
    out = torch.empty(4, 2, 4, dtype=torch.uint8, device=DEVICE)
    gather_scales(buffer, loc, out, page_size=64)
    assert torch.equal(out, logical[loc])
    print("gathered", out[:, 0].tolist())
    print(gather_scales.contract)
    try:
        gather_scales(buffer, loc, out, page_size=128)
    except LayoutError as error:
        print(error)


if __name__ == "__main__":
    main()
