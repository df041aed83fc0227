"""Guards on a GPU: CUDA graphs, streams, devices that are not current, and no synchronisation."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from jaxtyping import BFloat16
from torch import Tensor

from layoutcheck import E4M3, Index, Layout, LayoutError, Writes, contract, layout, mode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
LOC = Layout("loc", "token -> token", dtype=torch.int64, dense="", align=dict(base=8))


def bare(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    *,
    page_size: int = 16,
) -> None:
    """A store in torch: two kernels."""
    k_cache.view(torch.uint8).index_copy_(0, loc, k.to(torch.float8_e4m3fn).view(torch.uint8))


guarded = contract(same_device=True)(bare)


def call(device: str = "cuda", token: int = 5) -> dict[str, Tensor]:
    k = torch.randn(token, 2, 64, device=device).bfloat16()
    cache = CACHE(page=4, page_size=16, head=2, head_dim=64).empty(device=device)
    cache.view(torch.uint8).zero_()
    return dict(k=k, loc=torch.arange(1, token + 1, device=device), k_cache=cache)


def captured(fn: Any, given: dict[str, Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of one call, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(**given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        fn(**given)
    return graph


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """How many nodes a captured graph has, from the CUDA runtime."""
    import ctypes

    runtime = ctypes.CDLL("libcudart.so." + str(torch.version.cuda).partition(".")[0])
    count = ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    return count.value


@pytest.mark.parametrize("value", ["warn", "raise", "values"])
def test_capture_and_replay(value):
    given = call()
    with mode(value):
        graph = captured(guarded, given)
    graph.instantiate()
    given["k"].fill_(3.0)
    given["k_cache"].view(torch.uint8).zero_()
    graph.replay()
    torch.cuda.synchronize()
    wanted = call() | {"k": given["k"]}
    bare(**wanted)
    assert torch.equal(given["k_cache"].view(torch.uint8), wanted["k_cache"].view(torch.uint8))


def test_a_captured_guard_adds_no_node():
    assert nodes(captured(guarded, call())) == nodes(captured(bare, call())) > 0


def test_a_violation_while_capturing_is_a_layout_error_and_leaves_the_device_usable():
    given = call()
    with pytest.raises(LayoutError, match="loc "), torch.cuda.graph(torch.cuda.CUDAGraph()):
        guarded(**given | {"loc": given["loc"][:3]})
    torch.cuda.synchronize()
    guarded(**given)


def test_no_synchronisation_and_no_allocation_outside_values_mode():
    given = call()
    check = contract(same_device=True)(_nothing)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            check(**given)
        with mode("values"), pytest.raises(RuntimeError, match="synchroniz"):
            check(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        check(**given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def _nothing(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Tensor, LOC, Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    *,
    page_size: int = 16,
) -> None:
    """No kernel at all."""


def test_values_mode_reads_on_the_stream_of_the_call():
    given = call()
    side = torch.cuda.Stream()
    with mode("values"), torch.cuda.stream(side):
        loc = given["loc"].clone()
        torch.cuda._sleep(50_000_000)
        loc[2] = 64  # written on this stream only, late
        with pytest.raises(LayoutError, match="loc"):
            guarded(**given | {"loc": loc})


def test_a_cpu_tensor_among_others_is_named():
    given = call()
    with pytest.raises(LayoutError, match="loc"):
        guarded(**given | {"loc": given["loc"].cpu()})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current():
    given = call("cuda:1")
    with torch.cuda.device(0):
        guarded(**given)
        with mode("values"):
            guarded(**given)
        assert torch.cuda.current_device() == 0
        with pytest.raises(LayoutError, match="cuda:0"):
            guarded(**given | {"loc": given["loc"].to("cuda:0")})
    assert given["k_cache"].view(torch.uint8)[1:6].any()


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}])
def test_a_compiled_guard_on_the_gpu(options):
    given = call()
    traced = torch.compile(guarded, fullgraph=True, **options)
    for _ in range(3):
        traced(**given)
    wanted = call() | {"k": given["k"]}
    bare(**wanted)
    assert torch.equal(given["k_cache"].view(torch.uint8), wanted["k_cache"].view(torch.uint8))


def test_a_known_call_is_compared_again_on_another_device():
    def refused(given: dict[str, Tensor]) -> bool:
        try:
            guarded(**given)
        except LayoutError:
            return True
        return False

    memo = guarded.__globals__["_memo"]
    memo.__init__()
    given = call()
    assert not refused(given)
    assert memo.entries
    for other in ("cpu", "meta", *(f"cuda:{i}" for i in range(1, torch.cuda.device_count()))):
        for name in given:
            assert refused({**given, name: given[name].to(other)}), (name, other)
    assert not refused(given)
    for i in range(1, torch.cuda.device_count()):
        assert not refused(call(f"cuda:{i}"))
