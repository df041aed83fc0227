"""torchao's to_blocked: the same bytes as ours, with its contract in front of it."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats import utils

from layoutcheck import LayoutError, layout, peers


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 11), (128, 4), (200, 6), (129, 5), (300, 90)])
def test_to_blocked_packs_as_the_catalogue_says(rows, cols):
    scales = torch.randint(0, 255, (rows, cols), generator=torch.Generator().manual_seed(rows), dtype=torch.uint8)
    peers.install("torchao")
    try:
        assert hasattr(utils.to_blocked, "contract")
        theirs = utils.to_blocked(scales)
        with pytest.raises(LayoutError, match="input_matrix"):
            utils.to_blocked(scales[None])
        with pytest.raises(LayoutError, match="row > 0"):
            utils.to_blocked(scales[:0])
    finally:
        peers.uninstall("torchao")
    assert torch.equal(theirs, layout("scale.128x4")(row=rows, col=cols).pack(scales).flatten())
    assert torch.equal(utils.from_blocked(theirs, rows, cols), scales)
