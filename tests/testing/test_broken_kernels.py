"""Ten kernels that are wrong in one place each, and which part of the toolkit says so.

Each is the kernel as it is now with one piece of its text replaced, so that a later change of the kernel cannot leave
behind a copy that is broken no longer.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import references
import torch
from hypothesis import HealthCheck, Phase, find, settings

from layoutcheck.testing import Call, calls, probe
from layoutcheck.testing._check import differences, expected
from layoutcheck.testing._child import in_child
from layoutcheck.testing._redzones import observe

_number = itertools.count()


def broken(folder: Path, name: str, old: str, new: str) -> ModuleType:
    """A kernel's module with one piece of its text replaced."""
    source = inspect.getsource(importlib.import_module(f"layoutcheck.kernels.{name}"))
    assert source.count(old) == 1, f"{name}.py has no longer this text once: write the broken kernel anew\n{old}"
    path = folder / f"broken_{name}_{next(_number)}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some(fn: Any, wanted: Any, **bounds: Any) -> Call:
    """The first valid call of that kind."""
    quick = settings(
        max_examples=500, phases=[Phase.generate], database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return find(calls(fn, **bounds), wanted, settings=quick)


def findings(call: Call, reference: Any) -> str:
    """What red zones and the reference say of a call, which runs in a child process."""

    def job() -> str:
        done = observe(call)
        said = [f"red zones: {f}" for f in done.findings]
        said += [f"reference: {d}" for d in differences(call, done, expected(call, reference), None, None)]
        return "\n".join(said)

    outcome = in_child(job)
    assert outcome.error is None, outcome.error
    return outcome.value if outcome.crash is None else f"crash: {outcome.crash}"


STORE = dict(scale_layout="interleaved", page_size=64, page=(2, 2), head=2, head_dim=64, v_head_dim=96, token=(3, 5))


def live_slots(call: Call) -> list[int]:
    return [slot for slot in call.arguments["loc"].tolist() if slot > 0]


def store_call(fn: Any) -> Call:
    return some(
        fn, lambda c: len(live := c.arguments["loc"][c.arguments["loc"] > 0]) > 2 and int(live.max()) > 64, **STORE
    )


SLOT_AT = (
    "at = interleaved_offset(slot[:, None], head[:, None], group, HEAD=HEAD, HEAD_DIM=HEAD_DIM, PAGE_SIZE=PAGE_SIZE)"
)
STORE_KERNELS = {
    # name: text, replacement, what the probe is asked, and what the message must name
    "offset_off_by_one_row": (
        "at = cache_offset(slot[:, None], head[:, None], d, HEAD=HEAD",
        "at = cache_offset(slot[:, None] + 1, head[:, None], d, HEAD=HEAD",
        "k_cache", ("red zones: k_cache", "left unwritten"),
    ),
    "page_and_slot_mixed": (
        SLOT_AT, SLOT_AT.replace("slot[:, None]", "slot[:, None] // PAGE_SIZE"), None, ("k_scale", "left unwritten"),
    ),
    "chunk_and_lane_swapped": (
        'interleaved_offset = MXFP8_SCALE_INTERLEAVED.offset_fn("slot", "head", "group", name="interleaved_offset")',
        'interleaved_offset = Layout('
        '"swapped", "slot(page token(chunk lane)) head group -> page head chunk lane group", '
        'dtype="e8m0", token="page_size", lane=32, head_dim="group * 32")'
        '.offset_fn("slot", "head", "group", name="interleaved_offset")',
        "k_scale", ("k_scale", "was changed"),
    ),
    "scales_written_linear": (
        "tl.store(scale + at, byte, live",
        "at = flat_offset(slot[:, None], head[:, None], group, HEAD=HEAD, HEAD_DIM=HEAD_DIM)\n"
        "    tl.store(scale + at, byte, live",
        "k_scale", ("k_scale", "was changed"),
    ),
    "last_partial_tile_unmasked": (
        "tl.store(cache + at, values, live[:, None] & (d < HEAD_DIM)",
        "tl.store(cache + at, values, live[:, None]",
        None, ("v_cache",),
    ),
    "head_stride_of_the_wrong_tensor": (
        "k.stride(0), k.stride(1), v.stride(0), v.stride(1), loc.stride(0),",
        "k.stride(0), k.stride(1), v.stride(0), k.stride(1), loc.stride(0),",
        None, ("reference: v_",),
    ),
    "slot_0_written": (
        "live = slot > 0  # slot 0 is the sink of padded tokens, negative slots are padding\n",
        "live = slot >= 0\n",
        None, ("k_cache[0", "was changed"),
    ),
    "v_scales_in_the_buffer_of_k": (
        "_store(v_rows, v_cache, v_scale, slot, head, live, HEAD, V_HEAD_DIM, PAGE_SIZE, INTERLEAVED)",
        "_store(v_rows, v_cache, k_scale, slot, head, live, HEAD, V_HEAD_DIM, PAGE_SIZE, INTERLEAVED)",
        None, ("red zones: v_scale", "left unwritten"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORE_KERNELS)
def test_a_broken_store_is_caught(name, tmp_path):
    old, new, argument, words = STORE_KERNELS[name]
    fn = broken(tmp_path, "quantize", old, new).quantize_store_kv_mxfp8
    if name == "slot_0_written":
        call = some(fn, lambda c: 0 in c.arguments["loc"].tolist(), **STORE)
    elif name == "head_stride_of_the_wrong_tensor":
        call = some(
            fn,
            lambda c: c.arguments["k"].stride(1) != c.arguments["v"].stride(1) and bool((c.arguments["loc"] > 0).any()),
            **STORE,
        )
    else:
        call = store_call(fn)
    said = findings(call, references.quantize_store_kv_mxfp8)
    for word in words:
        assert word in said, said
    if argument is not None:
        found = probe(fn, argument, call=call, isolated=True)
        assert not found.declared
        assert argument in str(found)
        if name == "scales_written_linear":
            assert found.name == "mxfp8.flat"
            assert "written as mxfp8.flat" in str(found)
        if name == "chunk_and_lane_swapped":
            assert found.name is None


def test_the_kernel_itself_is_not_caught():
    from layoutcheck.kernels.quantize import quantize_store_kv_mxfp8 as fn

    call = store_call(fn)
    assert not findings(call, references.quantize_store_kv_mxfp8)
    assert probe(fn, "k_scale", call=call).declared


def test_a_write_through_a_copy_is_caught(tmp_path):
    """``reshape`` of a cache that is a slice of a wider buffer copies it, and the writes are lost."""
    old = "    block = next_power_of_2(dim)"
    fn = broken(tmp_path, "move", old, f"    cache = cache.reshape(-1).view(cache.shape)\n{old}").store_rows

    def wanted(call: Call) -> bool:
        live = call.arguments["loc"] > 0
        return not call.arguments["cache"].is_contiguous() and bool(live.any()) and call.arguments["cache"].numel() > 1

    said = findings(
        some(fn, wanted, head=2, dim=3, slot=5, rows=torch.float32, cache=torch.float32), references.store_rows
    )
    assert "red zones: cache" in said, said
    assert "left unwritten" in said


def test_padding_that_is_left_unwritten_is_caught(tmp_path):
    fn = broken(
        tmp_path,
        "quantize",
        "scale_rows, cols = row_tiles * rl * rc, col_tiles * c\n",
        "scale_rows = row_tiles * rl * rc\n",
    ).quantize_mxfp8

    def unpadded(call: Call) -> bool:
        x = call.arguments["x"]
        return x.numel() > 0 and x.is_contiguous() and x.shape[-1] // 32 % 4 != 0

    call = some(fn, unpadded, scale_layout="128x4")
    outcome = in_child(lambda: observe(call).findings)
    assert outcome.value, outcome
    assert any("result[1]" in f and "left unwritten" in f for f in outcome.value), outcome.value


def test_text_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="write the broken kernel anew"):
        broken(tmp_path, "quantize", "no such text", "")
