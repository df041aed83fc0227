"""torchao 0.18: the swizzle of block scales that tensor cores read."""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor

from layoutcheck.peers._install import Peer

PEER = Peer("torchao", "torchao", since="0.18.0", before="0.19.0")

PEER.guard(
    "torchao.prototype.mx_formats.utils:to_blocked",
    "row > 0",
    "col > 0",
    input_matrix=Shaped[Tensor, "row col"],
    return_=Shaped[Tensor, "align(row,128)*align(col,4)"],
)
