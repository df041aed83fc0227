"""Guards under torch.compile, torch.export, fake and meta tensors: same graphs as the bare callable, and our text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import BFloat16, Float, Int64
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layoutcheck import E4M3, Index, Layout, LayoutError, Writes, contract, guard, layout, mode, no_overlap

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")
ALIGNED = Layout("aligned", "row col -> row col", dtype=torch.float32, align=dict(base=64))


def bare(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    *,
    page_size: int = 128,
) -> Tensor:
    """Reads every argument, as a kernel would."""
    return k.float().sum() + loc.sum() + k_cache.view(torch.uint8).sum() + k_scale.view(torch.uint8).sum()


guarded = contract("page_size % 32 == 0", same_device=True)(bare)


def call(token: int = 16, page: int = 6, head: int = 5, head_dim: int = 96) -> tuple[Tensor, ...]:
    """A valid call; no two sizes of it are equal, or Dynamo would take them for one."""
    dims: dict[str, Any] = dict(page=page, page_size=128, head=head, head_dim=head_dim)
    rows = torch.zeros(token, head, head_dim, dtype=torch.bfloat16)
    return rows, torch.arange(token), CACHE(**dims).empty(), SCALE(**dims).empty()


def stale() -> tuple[Tensor, ...]:
    """A call whose scales are of half the slots."""
    return *call()[:3], call(page=2)[3]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], dynamic: bool | None) -> tuple[int, int]:
    """How many graphs some calls of different sizes take, and how many operations are in them."""
    torch._dynamo.reset()
    counter = CompileCounter()
    traced = torch.compile(fn, backend=counter, fullgraph=True, dynamic=dynamic)
    for sizes in ((16, 6), (16, 6), (17, 6), (33, 9), (7, 21)):
        assert torch.equal(traced(*call(*sizes)), bare(*call(*sizes)))
    return counter.frame_count, counter.op_count


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_as_many_graphs_and_operations_as_the_bare_callable(dynamic):
    assert compiled(guarded, dynamic) == compiled(bare, dynamic)


def test_one_graph_serves_all_sizes():
    assert compiled(guarded, True)[0] == 1


@pytest.mark.parametrize("values", ["warn", "raise", "values"])
def test_the_mode_does_not_break_the_graph(values):
    with mode(values):
        assert compiled(guarded, True) == compiled(bare, True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_violation_in_a_full_graph_is_in_dynamos_error(dynamic):
    with pytest.raises(LayoutError) as eager:
        guarded(*stale())
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(guarded, backend="eager", fullgraph=True, dynamic=dynamic)(*stale())
    text = [line.strip() for line in str(error.value).splitlines()]
    for line in str(eager.value).splitlines()[:4]:  # the table; the cause may not speak of memory while tracing
        assert any(t.endswith(line.strip()) for t in text), line


def test_symbols_are_shown_as_numbers():
    def outer(k: Tensor, *rest: Tensor, n: int) -> Tensor:
        return guarded(k * 1, *rest, page_size=n)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="page = slot / page_size = 768 / 96"):
        torch.compile(outer, backend="eager", fullgraph=True, dynamic=True)(*call(), n=96)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_violation_without_a_full_graph_is_a_layout_error(dynamic):
    with pytest.raises(LayoutError, match=r"k_scale does not match mxfp8\.interleaved"):
        torch.compile(guarded, backend="eager", dynamic=dynamic)(*stale())


def test_without_a_full_graph_warn_mode_lets_the_call_go_on_once():
    def writing(x: Float[Tensor, "n n"], y: Float[Tensor, "n n"]) -> Tensor:
        return x.add_(y[:2])

    lenient = contract(mode="warn")(writing)

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return lenient(x.add_(1), y)

    x = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match="y does not match"):
        torch.compile(outer, backend="eager")(x, torch.ones(3, 2))
    assert torch.equal(x, torch.full((2, 2), 2.0))  # explaining has not computed x.add_(1) a second time


def test_a_return_value_is_checked_while_tracing():
    @contract
    def half(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x[: x.shape[0] // 2]

    with pytest.raises(torch._dynamo.exc.Unsupported, match="return does not match"):
        torch.compile(half, backend="eager", fullgraph=True)(torch.zeros(8))


def test_aot_autograd_and_inductor_take_a_guarded_function():
    @contract
    def scaled(x: Float[Tensor, "n m"], w: Float[Tensor, "m"]) -> Float[Tensor, "n m"]:
        return (x * w).sin()

    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    wanted = torch.autograd.grad(scaled(x, w).sum(), (x, w))
    traced = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for got, want in zip(torch.autograd.grad(traced(x, w).sum(), (x, w)), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_guards_share_no_frame_that_dynamo_would_compile_again():
    """jaxtyping's issue 384: one wrapper's code for all functions, whose recompilations reach Dynamo's limit."""

    def broken(size: int) -> Callable[[Tensor], Tensor]:
        def plus(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()  # what follows, and the guard around it, are frames of their own
            return x + size

        plus.__code__ = plus.__code__.replace(co_firstlineno=size)  # different functions
        return guard(plus, x=Float[Tensor, str(size)])

    count = torch._dynamo.config.recompile_limit + 4
    guards = [broken(size) for size in range(2, 2 + count)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size, fn in enumerate(guards, 2):
            result = torch.compile(fn, backend="eager")(torch.zeros(size))
            assert torch.equal(result, torch.full((size,), float(size)))


def test_a_guarded_method_of_a_module_compiles():
    """jaxtyping's issue 235: a module whose methods are checked does not compile."""

    class Store(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.page_size = 128

        @contract("page_size % 32 == 0", derive={"page_size": lambda self, **_: self.page_size})
        def forward(self, k_cache: Annotated[Tensor, CACHE], k_scale: Annotated[Tensor, SCALE]) -> Tensor:
            return k_cache.view(torch.uint8).sum() + k_scale.view(torch.uint8).sum()

    traced = torch.compile(Store(), backend="eager", fullgraph=True)
    traced(*call()[2:])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="k_scale does not match"):
        traced(*stale()[2:])


class Guarded(torch.nn.Module):
    """What torch.export takes."""

    def forward(self, k: Tensor, loc: Tensor, k_cache: Tensor, k_scale: Tensor) -> Tensor:
        return guarded(k, loc, k_cache, k_scale)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    token = torch.export.Dim("token", min=2, max=1024)
    shapes = ({0: token}, {0: token}, None, None)
    program = torch.export.export(Guarded(), call(), dynamic_shapes=shapes, strict=strict)
    assert torch.equal(program.module()(*call(token=33)), bare(*call(token=33)))
    expected = torch._dynamo.exc.Unsupported if strict else LayoutError
    with pytest.raises(expected, match=r"k_scale does not match mxfp8\.interleaved"):
        torch.export.export(Guarded(), stale(), strict=strict)


def test_a_relation_between_symbols_becomes_one_of_the_program():
    token = torch.export.Dim("token", min=2, max=1024)
    with pytest.raises(torch._dynamo.exc.UserError, match="token"):  # k and loc must have one size
        torch.export.export(Guarded(), call(), dynamic_shapes=({0: token}, {0: torch.export.Dim("other")}, None, None))


def test_fake_and_meta_tensors():
    @contract(no_overlap("a", "b"))
    def both(a: Annotated[Tensor, ALIGNED], b: Annotated[Tensor, ALIGNED]) -> None:
        """Rules about memory, which these tensors do not have."""

    meta = [torch.empty(3, 4, device="meta") for _ in "ab"]
    both(*meta)
    with FakeTensorMode() as fake:
        tensors = [torch.empty(3, 4) for _ in "ab"]
        both(*tensors)
        with pytest.raises(LayoutError, match="b does not match aligned"):
            both(tensors[0], torch.empty(4, 5))
        guarded(*(fake.from_tensor(t) for t in call()))
        with pytest.raises(LayoutError, match="k_scale does not match"):
            guarded(*(fake.from_tensor(t) for t in stale()))
    with pytest.raises(LayoutError, match="b does not match aligned"):
        both(meta[0], meta[1][:, :2])


def test_make_fx_with_symbols():
    graph = make_fx(lambda *tensors: guarded(*tensors), tracing_mode="symbolic")(*call())
    assert torch.equal(graph(*call(page=9)), bare(*call(page=9)))
    with pytest.raises(LayoutError, match=r"k_scale does not match mxfp8\.interleaved"):
        make_fx(lambda *tensors: guarded(*tensors), tracing_mode="symbolic")(*stale())


def test_guards_of_one_name_do_not_collide_in_a_graph():
    first = guard(lambda x: x + 1, x=Float[Tensor, "n"])
    second = guard(lambda x: x * 3, x=Float[Tensor, "n"])
    traced = torch.compile(lambda x: second(first(x)), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 6.0))
