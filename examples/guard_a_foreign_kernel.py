"""Guard somebody else's wrapper from outside: its code is not touched, and its buffers may live on an object.

    python examples/guard_a_foreign_kernel.py

``Engine.store`` stands for a wrapper in another project. It trusts its caller about the shape of ``self.scales``, and
a buffer that was allocated before the cache grew is written out of bounds, or not at all.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Int64
from torch import Tensor

from layoutcheck import E4M3, LayoutError, guard, layout


class Engine:
    """Their code: a cache, its scales, and a store that checks nothing."""

    page_size = 128

    def __init__(self, pages: int) -> None:
        self.cache = torch.zeros(pages * self.page_size, 8, 128, dtype=torch.float8_e4m3fn)
        self.scales = torch.zeros(pages, 8, 32, 4, 4, dtype=torch.uint8)

    def store(self, k: Tensor, loc: Tensor) -> str:
        """A kernel launch, in real life."""
        return f"stored {len(k)} rows"


Engine.store = guard(  # type: ignore[method-assign]
    Engine.store,
    "page_size % 32 == 0",
    derive={
        "page_size": lambda self, **_: self.page_size,
        "cache": lambda self, **_: self.cache,
        "scales": lambda self, **_: self.scales,
    },
    same_device=True,
    k=BFloat16[Tensor, "token head head_dim"],
    loc=Int64[Tensor, "token"],
    cache=layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={}),
    scales=layout("mxfp8.interleaved"),
)


def main() -> None:
    """A call that is right, and the same after only the cache has grown."""
    engine = Engine(pages=4)
    k, loc = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.tensor([1, 2, 3])
    print(engine.store(k, loc))
    engine.cache = torch.cat([engine.cache.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
    try:
        engine.store(k, loc)
    except LayoutError as error:
        print(error)


if __name__ == "__main__":
    main()
