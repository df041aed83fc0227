"""What an index holds where a contract says that nothing is read makes no difference to a kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from layoutcheck import Index, kernels
from layoutcheck._entries import live
from layoutcheck.testing import calls
from layoutcheck.testing._check import for_each

SMALL = dict(dkv=128, dq=128, width=2, pool=(4, 9), row=(128, 520), q_factor=None, k_scale=None)


def not_read(call: Any) -> dict[str, Tensor]:
    """True for each entry of each index that is not read."""
    tensors, found = call.contract.tensors, {}
    for name, spec in tensors.items():
        for rule in spec.values:
            if isinstance(rule, Index) and rule.live is not None and call.arguments[name] is not None:
                found[name] = ~live(rule, call.arguments[name].shape, tensors, call.sizes, call.everything)
    return found


def outcome(call: Any) -> list[bytes]:
    """The bytes of every result, and of every argument that may be written, afterwards."""
    call = call.copy()
    result = call()
    written = [call.arguments[n] for n in call.forms if call.contract.tensors[n].writes is not None]
    values = [*(result if isinstance(result, tuple) else [result]), *written]
    return [bytes(v.contiguous().view(torch.uint8).flatten().tolist()) for v in values if isinstance(v, Tensor)]


@pytest.mark.parametrize(
    ("name", "bounds", "indices"),
    [
        (
            "paged_attention",
            dict(head=1, q_head=1, page=(1, 2), page_size=(16, 33), head_dim=32, v_head_dim=32),
            {"page_table"},
        ),
        ("sparse_attention_unified_kv", dict(head=1, dim=64, token=(1, 3), entry=(3, 9)), {"indices"}),
        ("fused_prologue_decode", SMALL | dict(token=(1, 3)), {"track_indices"}),
        ("fused_prologue_extend", SMALL | dict(token=(1, 3), seq=(1, 3)), {"track_indices", "track_rows"}),
    ],
)
def test_a_kernel_reads_only_what_its_contract_says(name, bounds, indices):
    seen: Counter[str] = Counter()

    def look(call: Any) -> None:
        dead = {n: mask for n, mask in not_read(call).items() if bool(mask.any())}
        if not dead or (set(seen) == indices and min(seen.values()) >= 4):  # a draw is cheap, a run is not
            return
        seen.update(list(dead))
        garbage = torch.tensor([-1, 2**30])
        others = {n: call.arguments[n].clone() for n in dead}
        for n, mask in dead.items():
            others[n][mask] = garbage.repeat(int(mask.sum()))[: int(mask.sum())].to(others[n].dtype)
        zeros = {n: call.arguments[n].masked_fill(mask, 0) for n, mask in dead.items()}
        assert outcome(call.with_arguments(**others)) == outcome(call.with_arguments(**zeros))

    for_each(calls(getattr(kernels, name), **bounds), look, 60)
    assert set(seen) == indices
