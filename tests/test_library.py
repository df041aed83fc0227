"""Operators made from contracts: schema, mutation, fake kernels, and torch's own checks of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor

from layoutcheck import E4M3, Index, Layout, LayoutError, Writes, contract, layout, library

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
SCALE = layout("mxfp8.interleaved")
PADDED = Layout("padded", "row col -> row col", dtype=torch.float32, pitch=dict(row="align(col, 8)"))
LIST = Layout("list", "token -> token", dtype=torch.int64, dense="")
count = itertools.count()


def named(word: str) -> str:
    """An operator's name, which a process can use once."""
    return f"layoutcheck_tests::{word}_{next(count)}"


@contract("page_size % 32 == 0", same_device=True)
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Tensor, LIST, Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")] | None = None,
    *,
    page_size: int = 128,
    factor: float | None = None,
    rounding: Literal["up", "down"] = "up",
) -> None:
    """Writes where loc says, in torch."""
    k_cache.view(torch.uint8)[loc] = (k * (factor or 1)).to(torch.float8_e4m3fn).view(torch.uint8)
    if k_scale is not None:
        k_scale.view(torch.uint8)[0] = page_size - 1


def call(token: int = 3, page: int = 2) -> dict[str, Any]:
    dims: dict[str, Any] = dict(page=page, page_size=128, head=2, head_dim=64)
    k = torch.randn(token, 2, 64).bfloat16()
    return dict(k=k, loc=torch.arange(1, 1 + token), k_cache=CACHE(**dims).empty(), k_scale=SCALE(**dims).empty())


stored = library.op(named("store"), store)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def same(a: Any, b: Any) -> bool:
    as_bytes = lambda t: t.view(torch.uint8) if t.itemsize == 1 else t  # noqa: E731
    return torch.equal(as_bytes(a), as_bytes(b))


def written(fn: Callable[..., Any], given: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {n: v.clone() for n, v in given.items()}
    assert fn(**given, **more) is None
    return given


def test_the_schema_says_what_is_mutated():
    schema = str(stored.op._opoverload._schema)
    assert schema.partition("(")[2] == (
        "Tensor k, Tensor loc, Tensor(a2!) k_cache, Tensor(a3!)? k_scale, SymInt page_size, float? factor, "
        "str rounding, ScalarType? k_cache_dtype, ScalarType? k_scale_dtype) -> ()"
    )


def test_the_operator_does_what_the_function_does():
    given = call()
    for more in ({}, {"factor": 2.0}, {"page_size": 64, "rounding": "down"}):
        if "page_size" in more:
            given["k_scale"] = SCALE(page=4, page_size=64, head=2, head_dim=64).empty()
        wanted, got = written(store, given, **more), written(stored, given, **more)
        assert all(same(wanted[n], got[n]) for n in given)
    without = {n: given[n] for n in ("k", "loc", "k_cache")}
    assert same(written(stored, without)["k_cache"], written(store, without)["k_cache"])
    stored(*given.values(), page_size=64)  # by position as well


def test_it_is_guarded_and_looks_like_the_function():
    with pytest.raises(LayoutError, match=r"k_scale does not match mxfp8\.interleaved"):
        stored(**call() | {"k_scale": call(page=1)["k_scale"]})
    assert (stored.__name__, stored.__doc__) == (store.__name__, store.__doc__)
    assert stored.contract is store.contract


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_and_writes_its_buffers(backend, dynamic):
    given = call()
    if backend == "inductor":  # it has no E8M0 inputs: their bytes are taken outside the graph
        given["k_scale"] = given["k_scale"].view(torch.uint8)
    traced = torch.compile(lambda **kw: stored(**kw), backend=backend, fullgraph=True, dynamic=dynamic)
    wanted, got = written(store, given), written(traced, given)
    assert all(same(wanted[n], got[n]) for n in given)
    assert not same(got["k_cache"], given["k_cache"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="k_scale does not match"):
        traced(**given | {"k_scale": call(page=1)["k_scale"]})


def operands(given: dict[str, Any]) -> tuple[Any, ...]:
    """What the wrapper hands to its operator."""
    raw = [t.view(torch.uint8) if n in ("k_cache", "k_scale") else t for n, t in given.items()]
    return *raw, 128, None, "up", given["k_cache"].dtype, given["k_scale"].dtype


def test_opcheck():
    results = torch.library.opcheck(stored.op, operands(call()))
    assert set(results.values()) == {"SUCCESS"}
    assert "test_schema" in results


def test_opcheck_finds_a_write_that_the_contract_does_not_declare():
    @contract
    def sly(x: Float32[Tensor, "n"], y: Annotated[Tensor, LIST(token="n"), Writes()]) -> None:
        x.add_(1)

    made = library.op(named("sly"), sly)
    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError, match="mutat"):
        torch.library.opcheck(made.op, (torch.zeros(3), torch.zeros(3, dtype=torch.int64)))


class Pair(NamedTuple):
    """Two results."""

    first: Annotated[Tensor, PADDED]
    second: Tensor | None


@contract
def padded(x: Float32[Tensor, "row col"], *, double: bool = False) -> Annotated[Tensor, PADDED]:
    """Rows with a pitch of whole eights."""
    return PADDED(row=x.shape[0], col=x.shape[1]).empty().copy_(x * (2 if double else 1))


def test_results_are_allocated_from_their_layouts():
    made = library.op(named("padded"), padded)
    x = torch.randn(3, 5)
    assert made(x).stride() == (8, 1)
    fake = torch.empty(3, 5, device="meta")
    assert made(fake).stride() == (8, 1)
    results = torch.library.opcheck(made.op, (x, True))
    assert set(results.values()) == {"SUCCESS"}
    traced = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, cols in ((3, 5), (4, 9), (7, 2)):
        y = torch.randn(rows, cols)
        got = traced(y)
        assert torch.equal(got, y)
        assert got.stride() == padded(y).stride()


def test_several_results_and_results_that_may_be_none():
    @contract
    def split(x: Float32[Tensor, "n m"]) -> tuple[Float32[Tensor, "n"], Int64[Tensor, "m n"]]:
        return x.sum(1), x.T.long().contiguous()

    made = library.op(named("split"), split)
    x = torch.ones(2, 3)
    assert [t.shape for t in made(x)] == [(2,), (3, 2)]
    assert [t.shape for t in made(x.to("meta"))] == [(2,), (3, 2)]
    assert set(torch.library.opcheck(made.op, (x,)).values()) == {"SUCCESS"}

    def pair(x: Float32[Tensor, "row col"], both: bool = False) -> Pair:
        return Pair(x * 2, x * 3 if both else None)

    made = library.op(named("pair"), contract(pair), fake=lambda x, both=False: Pair(x * 2, x * 3 if both else None))
    assert made(x).second is None
    assert isinstance(made(x), Pair)
    assert torch.equal(made(x, True).second, x * 3)
    traced = torch.compile(lambda x: made(x, True), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(x).second, x * 3)


def test_what_no_operator_can_say_is_an_error_that_names_it():
    @contract
    def plain(x: Float32[Tensor, "n"]) -> Tensor:
        return x * 2

    @contract
    def hook(x: Float32[Tensor, "n"], after: Callable[[], None]) -> None: ...

    @contract
    def more(x: Float32[Tensor, "n"], *rest: Tensor) -> None: ...

    with pytest.raises(TypeError, match="pass fake="):
        library.op(named("plain"), plain)
    with pytest.raises(TypeError, match="no schema can say the argument after"):
        library.op(named("hook"), hook)
    with pytest.raises(TypeError, match=r"no schema can say the argument \*rest"):
        library.op(named("more"), more)
    with pytest.raises(TypeError, match="has no contract"):
        library.op(named("bare"), lambda x: None)
    made = library.op(named("plain"), plain, fake=lambda x: torch.empty_like(x))
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))


def test_import_is_light():
    import subprocess
    import sys

    code = "import sys, layoutcheck.library; assert 'triton' not in sys.modules and 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
