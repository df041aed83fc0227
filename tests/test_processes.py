"""Threads, forked processes, pickles and copies; every kind of callable; what a decorated function keeps."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import linecache
import multiprocessing
import pickle
import threading
import tracemalloc
from typing import Annotated, Any, overload

import pytest
import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor

from layoutcheck import E4M3, Choose, Layout, LayoutError, Record, Writes, contract, diff, guard, layout, layouts
from layoutcheck.pools import MXFP8KVPool

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})


@contract("page_size % 32 == 0", same_device=True)
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    k_cache: Annotated[Tensor, CACHE, Writes()],
    k_scale: Annotated[Tensor, layout("mxfp8.interleaved"), Writes()],
    *,
    page_size: int = 128,
) -> tuple[int, ...]:
    """Stores."""
    return tuple(k.shape)


def call(token: int = 3, page: int = 2) -> tuple[Tensor, ...]:
    dims: dict[str, Any] = dict(page=page, page_size=128, head=2, head_dim=64)
    scale = layout("mxfp8.interleaved")(**dims).empty()
    return torch.zeros(token, 2, 64, dtype=torch.bfloat16), CACHE(**dims).empty(), scale


def errors(*arguments: Tensor) -> str:
    with pytest.raises(LayoutError) as error:
        store(*arguments)
    return str(error.value)


# --- threads and processes --------------------------------------------------------------------------------------------


def test_threads_share_no_state():
    wrong = []

    def work(seed: int) -> None:
        for i in range(40):
            token, page = 1 + (seed + i) % 7, 1 + (seed * i) % 5
            good, other = call(token, page), call(token, page + 1)
            if store(*good) != (token, 2, 64):
                wrong.append((seed, i))
            try:
                store(*good[:2], other[2])
                wrong.append((seed, i))
            except LayoutError as error:
                if [v.argument for v in error.violations] != ["k_scale"] or f"{page + 1} " not in str(error):
                    wrong.append((seed, i, str(error)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def child(results: Any, arguments: tuple[Tensor, ...], wrong: tuple[Tensor, ...]) -> None:
    try:
        store(*wrong)
    except LayoutError as error:
        results.put((store(*arguments), str(error)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_guards_as_its_parent_does(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    wrong = tuple(t.clone() for t in (*call()[:2], call(page=1)[2]))  # memory that is tagged nowhere
    # A spawned child makes its tensors itself: to travel they would need shared memory.
    target, arguments = (child, (results, call(), wrong)) if method == "fork" else (spawned, (results,))
    process = context.Process(target=target, args=arguments)
    process.start()
    ran, text = results.get()
    process.join(60)
    assert process.exitcode == 0
    assert ran == (3, 2, 64)
    assert text == errors(*wrong)


def spawned(results: Any) -> None:
    """The same calls, made in the child."""
    child(results, call(), tuple(t.clone() for t in (*call()[:2], call(page=1)[2])))


# --- pickles and copies -----------------------------------------------------------------------------------------------


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", sorted(layouts.entries()))
def test_every_layout_of_the_catalogue_survives_a_pickle(name):
    entry = layouts.entries()[name]
    for twin in (again(entry), copy.copy(entry), copy.deepcopy(entry)):
        assert twin == entry
        assert hash(twin) == hash(entry)
        assert twin.fingerprint == entry.fingerprint
        assert str(twin) == str(entry)
        assert isinstance(twin, Layout | Record | Choose)


def test_concrete_layouts_survive_a_pickle():
    sf = layout("mxfp8.interleaved")(slot=512, head=2, head_dim=64, page_size=128)
    twin = again(sf)
    assert twin == sf
    assert (twin.shape, twin.map_fingerprint) == (sf.shape, sf.map_fingerprint)
    twin.check(sf.empty())


def test_errors_survive_a_pickle():
    with pytest.raises(LayoutError) as error:
        store(*call()[:2], call(page=1)[2])
    twin = again(error.value)
    assert (str(twin), twin.where, twin.violations) == (str(error.value), error.value.where, error.value.violations)
    assert again(error.value.violations[0]) == error.value.violations[0]


def test_pools_survive_a_pickle():
    pool = MXFP8KVPool.allocate(page=2, page_size=128, head=2, head_dim=64)
    pool.k.view(torch.uint8).fill_(7)
    twin = again(pool)
    assert type(twin) is MXFP8KVPool
    assert torch.equal(twin.k.view(torch.uint8), pool.k.view(torch.uint8))
    twin.resize(page=3)
    store(call()[0], twin.k, twin.k_scale)


def test_guarded_functions_pickle_by_name_and_copy_as_themselves():
    assert again(store) is store
    assert copy.deepcopy(store) is store


def test_contracts_survive_a_pickle():
    twin = again(store.contract)
    assert str(twin) == str(store.contract)
    assert twin.source == store.contract.source
    bad = (*call()[:2], call(page=1)[2])
    assert [str(v) for v in twin.violations(*bad)] == [str(v) for v in store.contract.violations(*bad)]


# --- callables --------------------------------------------------------------------------------------------------------


def test_async_functions_and_methods():
    class Server:
        page_size = 128

        @contract
        async def run(self, x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
            await asyncio.sleep(0)
            return x * self.page_size

    assert inspect.iscoroutinefunction(Server.run)
    assert asyncio.run(Server().run(torch.ones(2))).tolist() == [128, 128]
    with pytest.raises(LayoutError, match="x has the wrong dtype"):
        asyncio.run(Server().run(torch.ones(2, dtype=torch.int32)))


def test_generators_are_checked_when_they_are_made():
    @contract
    def rows(x: Float32[Tensor, "n"]):
        yield from x.tolist()

    assert list(rows(torch.ones(2))) == [1.0, 1.0]
    with pytest.raises(LayoutError):
        rows(torch.ones(2, 2))


@pytest.mark.parametrize("inside", [True, False])
def test_classmethods_and_staticmethods(inside):
    def checked(kind: Any) -> Any:
        return (lambda f: kind(contract(f))) if inside else (lambda f: contract(kind(f)))

    class K:
        @checked(classmethod)
        def made(cls, x: Float32[Tensor, "n"]) -> type:
            return cls

        @checked(staticmethod)
        def plain(x: Float32[Tensor, "n"]) -> int:
            return x.shape[0]

    assert K.made(torch.zeros(2)) is K
    assert K().plain(torch.zeros(2)) == 2
    for method in (K.made, K.plain):
        with pytest.raises(LayoutError, match="x does not match"):
            method(torch.zeros(2, 2))


def test_partials_both_ways():
    def scaled(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"], *, by: int = 1) -> Tensor:
        return x * y * by

    outside = functools.partial(contract(scaled), torch.ones(3), by=2)
    inside = guard(functools.partial(scaled, torch.ones(3), by=2), y=Float32[Tensor, "n"])
    for fn in (outside, inside):
        assert fn(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(LayoutError, match="y "):
            fn(torch.ones(3, 2))
    with pytest.raises(LayoutError):
        outside(torch.ones(4))


def test_callable_objects():
    class Kernel:
        def __call__(self, x: Float32[Tensor, "n"]) -> int:
            return x.shape[0]

    fn = guard(Kernel())
    assert fn(torch.zeros(2)) == 2
    with pytest.raises(LayoutError, match="x does not match"):
        fn(torch.zeros(2, 2))


def test_overloads_are_declarations_only():
    @overload
    def f(x: Float32[Tensor, "n"]) -> int: ...
    @overload
    def f(x: None) -> None: ...
    @contract
    def f(x: Float32[Tensor, "n"] | None) -> int | None:
        return None if x is None else x.shape[0]

    assert f(None) is None
    assert f(torch.zeros(3)) == 3
    with pytest.raises(LayoutError):
        f(torch.zeros(3, 3))


def test_every_kind_of_parameter():
    @contract
    def f(a: Float32[Tensor, "n"], /, b: int = 2, *rest: int, c: float = 0.5, d: Any, **more: Any) -> Any:
        return a.shape[0], b, rest, c, d, more

    x = torch.zeros(3)
    assert f(x, d=1) == (3, 2, (), 0.5, 1, {})
    assert f(x, 4, 5, 6, c=1.0, d=[], e=7) == (3, 4, (5, 6), 1.0, [], {"e": 7})
    with pytest.raises(TypeError, match="required keyword-only argument: 'd'"):
        f(x)
    with pytest.raises(LayoutError, match="b must be int"):
        f(x, "4", d=1)


def test_a_decorated_function_is_still_itself_to_tools():
    def original(x: Float32[Tensor, "n"], *, by: int = 3) -> Tensor:
        """Doc."""
        return x * by

    fn = contract(original)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__"):
        assert getattr(fn, attribute) == getattr(original, attribute), attribute
    assert fn.__kwdefaults__ == {"by": 3}
    assert inspect.signature(fn) == inspect.signature(original)
    assert inspect.unwrap(fn) is original
    assert inspect.getsource(fn) == inspect.getsource(original)
    code = fn.__code__
    assert "".join(linecache.getlines(code.co_filename)) == fn.contract.source
    linecache.checkcache()
    assert linecache.getlines(code.co_filename), "a debugger still finds the source of the guard"


# --- cost that grows --------------------------------------------------------------------------------------------------


def test_calls_leave_nothing_behind():
    arguments = call()
    tracemalloc.start()
    try:
        for _ in range(2_000):
            store(*arguments)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50_000):
            store(*arguments)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 2_000, f"{grown} bytes after 50,000 calls: more than a byte in 25 calls"


def test_layouts_of_different_declarations_still_differ_after_a_pickle():
    a, b = layout("paged.nhd"), layout("paged.hnd")
    assert again(a) != b
    assert diff(again(a), b) == diff(a, b)
