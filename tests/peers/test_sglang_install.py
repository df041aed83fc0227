"""The guard in front of the real sglang: its errors come earlier, with cause and fix; calls put right go through."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import peer_calls
import pytest
import torch
from peer_calls import OnDevice, make

from layoutcheck import LayoutError, peers
from layoutcheck.pools import MXFP8KVPool

POOL = "MHATokenToKVPoolMXFP8.set_kv_buffer"


@pytest.fixture
def installed() -> Iterator[dict[str, Any]]:
    peers.install("sglang")
    yield peers.installed("sglang")
    peers.uninstall("sglang")


def run(path: str, kind: str, call: Callable[..., Any] | None = None) -> Any:
    """A call through the guarded function; the prologues stop at the stand-in of their compiled module."""
    case = make(path, kind, 3)
    function = call or peers.installed("sglang")[path]
    arguments = dict(case.arguments)
    if case.runs is not None:
        with peer_calls.mock.patch.object(
            peer_calls.inkling_attn_prologue, "_jit_attn_prologue_module", peer_calls.mock.MagicMock()
        ):
            return function(**arguments)
    return function(**arguments)


def test_every_module_that_holds_a_function_gets_the_guarded_one(installed):
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import paged_decode, runtime

    assert hasattr(paged_decode.sparse_attn_v4_paged_decode, "contract")
    assert runtime.sparse_attn_v4_paged_decode is paged_decode.sparse_attn_v4_paged_decode
    assert peer_calls.to_mxfp8 is installed["to_mxfp8"]
    assert hasattr(peer_calls.MHATokenToKVPoolMXFP8.set_kv_buffer, "contract")
    peers.uninstall("sglang")
    for one in (
        runtime.sparse_attn_v4_paged_decode,
        peer_calls.to_mxfp8,
        peer_calls.MHATokenToKVPoolMXFP8.set_kv_buffer,
    ):
        assert not hasattr(one, "contract")


def test_all_functions_of_the_list_are_guarded(installed):
    assert set(installed) == set(peers.functions("sglang")) >= set(peer_calls.KINDS)


@pytest.mark.parametrize(
    ("path", "kind", "theirs", "ours"),
    [
        (
            "inkling_attn_prologue_decode", "stale scales", "requires interleaved K/V scale buffers with shape",
            ["sfk does not match mxfp8.interleaved", "slot / page_size", "allocated before"],
        ),
        (
            "inkling_attn_prologue_extend", "sfk of another page size", "requires interleaved K/V scale buffers",
            ["sfk does not match mxfp8.interleaved", "page_size"],
        ),
        (
            "_sparse_attn_v4_paged_decode_triton", "stale scales", "does not match expected",
            ["kv_scales", "row", "unified_kv"],
        ),
        (POOL, "fp8 rows without scales", "requires K and V scale tensors", ["k_scale", "v_scale", "cache_k"]),
        (
            "FlashAttentionBackend._mxfp8_sf_kwargs", "no Q scales", "requires per-token Q scales",
            ["q_descale", "kv_cache_is_mxfp8 is True"],
        ),
    ],
)  # fmt: skip
def test_sglangs_errors_come_earlier_and_say_more(request, path, kind, theirs, ours):
    assert theirs in make(path, kind, 3).theirs()
    request.getfixturevalue("installed")
    with pytest.raises(LayoutError) as raised:
        run(path, kind)
    text = str(raised.value)
    for words in (*ours, "fix:"):
        assert words in text, text
    print(f"\n{text}")


@pytest.mark.parametrize("path", peer_calls.KINDS)
def test_the_same_calls_put_right_go_through(installed, path):
    if path == POOL:
        case = make(path, "valid", 3)
        installed[path](**case.arguments)
        assert case.right(None)
    else:
        run(path, "valid")


# --- our pool and theirs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize(("heads", "head_dim", "v_head_dim"), [(2, 128, 128), (3, 64, 64), (1, 96, 32)])
def test_our_pool_has_the_buffers_of_sglangs(page_size, heads, head_dim, v_head_dim):
    theirs = peer_calls.MHATokenToKVPoolMXFP8(
        size=4 * page_size, page_size=page_size, dtype=torch.float8_e4m3fn, head_num=heads, head_dim=head_dim,
        v_head_dim=v_head_dim, layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    ours = MXFP8KVPool.allocate(page=5, page_size=page_size, head=heads, head_dim=head_dim, v_head_dim=v_head_dim)
    pairs = [
        (ours.k, theirs.k_buffer[0]), (ours.v, theirs.v_buffer[0]), (ours.k_scale, theirs.k_scale_buffer[0]),
        (ours.v_scale, theirs.v_scale_buffer[0]),
    ]  # fmt: skip
    for mine, other in pairs:
        flat = mine.view(other.shape)  # pages and slots are one axis there
        assert (flat.shape, flat.stride(), flat.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(flat.view(torch.uint8), other.view(torch.uint8))


def test_our_pool_holds_the_same_bytes_as_sglangs_after_the_same_stores():
    theirs = peer_calls.MHATokenToKVPoolMXFP8(
        size=256, page_size=128, dtype=torch.float8_e4m3fn, head_num=2, head_dim=64, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    ours = MXFP8KVPool.allocate(page=3, page_size=128, head=2, head_dim=64)
    generator = torch.Generator().manual_seed(5)
    for loc in ([0, 1, 383, 128], [127, 2, 255], [1, 200]):
        k, v = (torch.randn(len(loc), 2, 64, generator=generator).bfloat16() for _ in "kv")
        slots = torch.tensor(loc)
        theirs.set_kv_buffer(types.SimpleNamespace(layer_id=0), slots, k, v)
        ours.store(k, v, slots)
    for mine, other in [
        (ours.k, theirs.k_buffer[0]), (ours.v, theirs.v_buffer[0]),
        (ours.k_scale, theirs.k_scale_buffer[0]), (ours.v_scale, theirs.v_scale_buffer[0]),
    ]:  # fmt: skip
        assert other.view(torch.uint8).any()
        assert torch.equal(mine.view(other.shape).view(torch.uint8), other.view(torch.uint8))


def test_a_wrapped_call_leaves_the_tensors_subclass_alone(installed):
    case = make("_sparse_attn_v4_paged_decode_triton", "valid", 1)
    assert type(case.arguments["q"]) is OnDevice
    assert isinstance(run("_sparse_attn_v4_paged_decode_triton", "valid"), torch.Tensor)
    assert "sglang" in sys.modules
