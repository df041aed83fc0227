"""Tensors that are not plain strided memory: each is checked by a stated rule, and handed on as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from layoutcheck import E4M3, Layout, LayoutError, contract, layout, mode, no_overlap, tag

ROWS = Layout("rows", "row col -> row col", dtype=torch.float32, dense="col", align=dict(base=16))
NARROW = Layout("narrow", "row col -> row col", dtype=torch.uint8, dense="", offsets="int32")


@contract(no_overlap("x", "out"), same_device=True)
def kernel(x: Annotated[Tensor, ROWS], out: Annotated[Tensor, ROWS]) -> tuple[Tensor, Tensor]:
    """Rules about shape, dtype, strides, address and overlap."""
    return x, out


def test_subclasses_and_parameters_pass_as_themselves():
    class Mine(Tensor):
        pass

    x, out = torch.zeros(3, 4).as_subclass(Mine), torch.nn.Parameter(torch.zeros(3, 4))
    got = kernel(x, out)
    assert got[0] is x
    assert got[1] is out
    with pytest.raises(LayoutError, match="out does not match rows"):
        kernel(x, torch.nn.Parameter(torch.zeros(4, 4)))
    with pytest.raises(LayoutError, match="x has the wrong dtype"):
        kernel(x.double(), out)
    with pytest.raises(LayoutError, match="out overlaps x"):
        kernel(x, x)


def test_a_subclass_that_wraps_tensors_has_no_address():
    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls, inner: Tensor) -> Wrapper:
            made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"a guard computes nothing, and called {func}")

    both = [Wrapper(torch.zeros(3, 4)) for _ in "ab"]
    kernel(*both)
    with pytest.raises(LayoutError, match="out does not match rows"):
        kernel(both[0], Wrapper(torch.zeros(2, 5)))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda *a: f(*a).sum())])
def test_functorchs_tensors_are_checked_as_they_look(transform):
    def run(x: Tensor, out: Tensor) -> Tensor:
        return kernel(x, out)[0] * 2

    def wrong(x: Tensor, out: Tensor) -> Tensor:
        return kernel(x, out[:2])[0] * 2

    x = torch.randn(3, 4)
    arguments = (torch.stack([x] * 5),) * 2 if transform is torch.vmap else (x, x.clone())
    assert transform(run)(*arguments).shape == arguments[0].shape
    with pytest.raises(LayoutError, match="out does not match rows"):
        transform(wrong)(*arguments)


def test_functionalized_tensors_and_tags():
    nhd = layout("paged.nhd")(dtype=E4M3, pitch={})

    @contract
    def read(cache: Annotated[Tensor, nhd]) -> Tensor:
        return cache

    def run(cache: Tensor) -> Tensor:
        tag(cache, quantised=True)
        return read(cache)

    cache = nhd(page=3, page_size=8, head=8, head_dim=32).empty()
    for transform in (torch.func.functionalize, torch.vmap):
        assert transform(run)(torch.stack([cache] * 2) if transform is torch.vmap else cache) is not None


def test_inference_mode_and_requires_grad():
    with torch.inference_mode():
        x = torch.zeros(3, 4)
        kernel(x, torch.zeros(3, 4))
        with pytest.raises(LayoutError):
            kernel(x, torch.zeros(3, 5))
        with mode("values"):
            kernel(x, torch.zeros(3, 4))
    y = torch.zeros(3, 4, requires_grad=True)
    assert kernel(y * 1, y)[0].grad_fn is not None


def test_zero_size_tensors_have_any_stride_and_overlap_nothing():
    for shape in ((0, 4), (3, 0), (0, 0)):
        x = torch.zeros(6, 8)[: shape[0], : shape[1]].t().contiguous().t()
        kernel(x, x)
    with pytest.raises(LayoutError, match="out does not match rows"):
        kernel(torch.zeros(0, 4), torch.zeros(0, 5))


def test_storage_past_32_bits():
    @contract
    def wide(x: Annotated[Tensor, ROWS]) -> None: ...

    @contract
    def narrow(x: Annotated[Tensor, NARROW]) -> None: ...

    wide(torch.empty(2**20, 2**13, device="meta"))
    wide(torch.empty(3, 2**40, device="meta")[:, : 2**39])
    narrow(torch.empty(2**18, 2**13, dtype=torch.uint8, device="meta"))
    with pytest.raises(LayoutError) as error:
        narrow(torch.empty(2**18 + 1, 2**13, dtype=torch.uint8, device="meta"))
    assert [v.rule for v in error.value.violations] == ["overflow"]


def test_a_sparse_tensor_is_no_buffer():
    with pytest.raises(LayoutError, match="wrong strides"):
        kernel(torch.ones(3, 4).to_sparse(), torch.zeros(3, 4))


def test_what_is_no_tensor_is_named():
    with pytest.raises(LayoutError, match=r"x must be a torch.Tensor, got builtins.list"):
        kernel([[0.0] * 4] * 3, torch.zeros(3, 4))


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    destroy_process_group()


def test_of_a_dtensor_the_local_shard_is_checked(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def made(rows: int, placement: object) -> DTensor:
        return DTensor.from_local(torch.zeros(rows, 4), mesh, [placement])

    whole, half = made(6, Replicate()), made(3, Shard(0))
    assert whole.shape == half.shape
    assert kernel(half, torch.zeros(3, 4))[0] is half
    with pytest.raises(LayoutError, match="out does not match rows"):
        kernel(half, whole)  # one global shape, but a kernel would run over the end of the shard
    with pytest.raises(LayoutError, match="out does not match rows"):
        kernel(half, torch.zeros(6, 4))


def test_a_dtensors_shard_in_values_mode(mesh):
    from torch.distributed.tensor import DTensor, Shard

    from layoutcheck import Finite

    @contract
    def finite(x: Annotated[Tensor, ROWS, Finite()]) -> None: ...

    shard = DTensor.from_local(torch.full((2, 4), torch.nan), mesh, [Shard(0)])
    finite(shard)
    with mode("values"), pytest.raises(LayoutError):
        finite(shard)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_is_on_the_cpu():
    x = torch.zeros(3, 4).pin_memory()
    kernel(x, torch.zeros(3, 4))
    with pytest.raises(LayoutError, match="cuda"):
        kernel(x, torch.zeros(3, 4, device="cuda"))


def test_jaxtypings_any_float_and_scalars():
    @contract
    def half(x: Float[Tensor, "n"], y: Float32[Tensor, ""]) -> None: ...

    half(torch.zeros(3, dtype=torch.bfloat16), torch.tensor(1.0))
    with pytest.raises(LayoutError):
        half(torch.zeros(3, dtype=torch.int32), torch.tensor(1.0))
    with pytest.raises(LayoutError):
        half(torch.zeros(3), torch.zeros(1))
