"""Contracts: what binds what, what decoration refuses, and how a decorated callable behaves."""

from __future__ import annotations

import asyncio
import inspect
import linecache
import pickle
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
import torch
from jaxtyping import BFloat16, Float, Float32, Int32, Int64, Shaped
from torch import Tensor

from layoutcheck import (
    BF16,
    E4M3,
    FP32,
    Choose,
    Index,
    Indptr,
    Layout,
    LayoutError,
    Writes,
    contract,
    forbids,
    guard,
    layout,
    mode,
    needs,
    no_overlap,
    together,
    when,
)

if TYPE_CHECKING:
    from nowhere import OnlyForTypeCheckers

CACHE = layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})
PAGES = layout("paged.nhd")(dtype=E4M3, pitch={})
SCALE = layout("mxfp8.interleaved")
FLAT = layout("mxfp8.flat")


def rules(error: LayoutError) -> list[tuple[str, str]]:
    return [(v.argument, v.rule) for v in error.violations]


def broken(fn: Any, *args: Any, **kwargs: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        fn(*args, **kwargs)
    return caught.value


# --- what binds what --------------------------------------------------------------------------------------------------


@contract
def rows(a: Float32[Tensor, "token dim"], b: Float32[Tensor, "token 3"], c: Float32[Tensor, "dim/32 ..."]) -> str:
    return "ran"


def test_plain_sightings_bind_in_signature_order_and_are_compared_later():
    assert rows(torch.zeros(2, 64), torch.zeros(2, 3), torch.zeros(2)) == "ran"
    assert rows(torch.zeros(2, 64), torch.zeros(2, 3), torch.zeros(2, 7, 9)) == "ran"
    assert rules(broken(rows, torch.zeros(2, 64), torch.zeros(4, 3), torch.zeros(2))) == [("b", "shape")]
    assert rules(broken(rows, torch.zeros(2, 64), torch.zeros(2, 3), torch.zeros(3))) == [("c", "shape")]
    assert rules(broken(rows, torch.zeros(64), torch.zeros(2, 3), torch.zeros(2))) == [("a", "shape")]
    error = broken(rows, torch.zeros(2, 65), torch.zeros(2, 3), torch.zeros(2))
    assert "dim % 32" in str(error)
    assert "65 % 32 = 1" in str(error)


def test_an_expression_binds_its_only_unknown():
    @contract("head_dim == 64")
    def f(scale: Float32[Tensor, "row head_dim/32"]) -> None: ...

    f(torch.zeros(1, 2))
    assert rules(broken(f, torch.zeros(1, 3))) == [("scale", "shape")]


def test_variadic_dims_are_one_name():
    @contract
    def f(x: Float[Tensor, "*batch dim"], y: Float[Tensor, "*batch"], z: Float[Tensor, "... dim"]) -> None: ...

    f(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(4))
    f(torch.zeros(4), torch.zeros(()), torch.zeros(5, 4))
    assert rules(broken(f, torch.zeros(2, 3, 4), torch.zeros(2, 4), torch.zeros(4))) == [("y", "shape")]
    assert rules(broken(f, torch.zeros(()), torch.zeros(()), torch.zeros(4)))[0] == ("x", "shape")


def test_underscore_and_fixed_sizes():
    @contract
    def f(x: Float32[Tensor, "_ 4 _named"], y: Float32[Tensor, ""]) -> None: ...

    f(torch.zeros(9, 4, 2), torch.tensor(1.0))
    assert rules(broken(f, torch.zeros(9, 5, 2), torch.tensor(1.0))) == [("x", "shape")]
    assert rules(broken(f, torch.zeros(9, 4, 2), torch.zeros(1))) == [("y", "shape")]


@contract("page_size % 32 == 0", same_device=True)
def store(
    k: BFloat16[Tensor, "token head head_dim"],
    loc: Annotated[Int64[Tensor, "token"], Index("slot", skip="<= 0")],
    k_cache: Annotated[Tensor, CACHE, Writes(at="loc")],
    k_scale: Annotated[Tensor, SCALE, Writes(at="loc")],
    *,
    page_size: int = 128,
) -> str:
    return "stored"


def call(page: int = 3, page_size: int = 128, head: int = 2, head_dim: int = 64, token: int = 5) -> dict[str, Any]:
    dims = dict(page=page, page_size=page_size, head=head, head_dim=head_dim)
    return dict(
        k=torch.zeros(token, head, head_dim, dtype=torch.bfloat16),
        loc=torch.arange(1, token + 1),
        k_cache=CACHE(**dims).empty(),
        k_scale=SCALE(**dims).empty(),
        page_size=page_size,
    )


def test_a_scalar_argument_binds_first_and_scales_never_bind_the_page_size():
    steps = {s.name: s for s in store.contract.steps}
    assert steps["page_size"].kind == "scalar"
    assert steps["slot"].argument == "k_cache"
    assert steps["page"].kind == "derive"
    assert store(**call()) == "stored"
    assert store(**call(page_size=64)) == "stored"
    other = call() | {"k_scale": call(page=6, page_size=64)["k_scale"]}
    assert rules(broken(store, **other)) == [("k_scale", "shape")]


def test_paged_views_bind_page_size_from_the_cache_not_from_the_scales():
    @contract
    def read(k_scale: Annotated[Tensor, SCALE], k_cache: Annotated[Tensor, PAGES]) -> None: ...

    dims = dict(page=3, page_size=64, head=2, head_dim=96)
    read(SCALE(**dims).empty(), PAGES(**dims).empty())
    stale = SCALE(page=2, page_size=64, head=2, head_dim=96).empty()
    other = SCALE(page=3, page_size=128, head=2, head_dim=96).empty()
    assert rules(broken(read, stale, PAGES(**dims).empty()))
    assert ("k_scale", "shape") in rules(broken(read, other, PAGES(**dims).empty()))


def test_both_stale_scales_are_caught_against_the_cache():
    @contract
    def f(
        k_cache: Annotated[Tensor, CACHE],
        k_scale: Annotated[Tensor, SCALE],
        v_scale: Annotated[Tensor, SCALE(head_dim="v_head_dim")],
        v_head_dim: int,
        page_size: int = 128,
    ) -> None: ...

    new, old = call(page=4), call(page=3)
    f(new["k_cache"], new["k_scale"], new["k_scale"], 64)
    error = broken(f, new["k_cache"], old["k_scale"], old["k_scale"], 64)
    assert rules(error) == [("k_scale", "shape"), ("v_scale", "shape")]


def test_optional_arguments_bind_only_their_own():
    @contract(when("given(bias)", "width > 1"))
    def f(x: Float32[Tensor, "row"], bias: Float32[Tensor, "row width"] | None = None) -> str:
        return "ran"

    assert f(torch.zeros(3)) == f(torch.zeros(3), torch.zeros(3, 2)) == "ran"
    assert rules(broken(f, torch.zeros(3), torch.zeros(2, 2))) == [("bias", "shape")]
    assert rules(broken(f, torch.zeros(3), torch.zeros(3, 1))) == [("bias", "shape")]


def test_two_optional_arguments_derive_each_for_itself():
    @contract
    def f(
        k_cache: Annotated[Tensor, CACHE],
        k_scale: Annotated[Tensor, SCALE] | None = None,
        v_scale: Annotated[Tensor, SCALE] | None = None,
        *,
        page_size: int,
    ) -> str:
        return "ran"

    good = call()
    assert f(good["k_cache"], page_size=128) == "ran"
    assert f(good["k_cache"], v_scale=good["k_scale"], page_size=128) == "ran"
    assert rules(broken(f, good["k_cache"], v_scale=call(page=2)["k_scale"], page_size=128)) == [("v_scale", "shape")]


def test_choose_picks_by_the_dims_of_the_call():
    @contract
    def f(
        k_cache: Annotated[Tensor, CACHE],
        k_scale: Annotated[Tensor, Choose({"page_size == 128": SCALE, "page_size == 64": FLAT})],
        *,
        page_size: int,
    ) -> str:
        return "ran"

    good = call()
    assert f(good["k_cache"], good["k_scale"], page_size=128) == "ran"
    small = call(page_size=64)
    flat = FLAT(slot=192, head=2, head_dim=64).empty()
    assert f(small["k_cache"], flat, page_size=64) == "ran"
    assert rules(broken(f, small["k_cache"], small["k_scale"], page_size=64)) == [("k_scale", "shape")]
    error = broken(f, small["k_cache"], flat, page_size=32)
    assert rules(error) == [("k_scale", "relation")]
    assert "page_size == 128 or page_size == 64" in str(error)


def test_a_required_choice_binds_what_every_case_shows():
    @contract
    def f(
        scale: Annotated[Tensor, Choose({"kind == 'paged'": SCALE}, default=FLAT)],
        loc: Annotated[Int64[Tensor, "token"], Index("slot")],
        kind: str,
        page_size: int = 64,
    ) -> str:
        return "ran"

    paged, flat = SCALE(page=2, page_size=64, head=1, head_dim=32).empty(), FLAT(slot=9, head=1, head_dim=32).empty()
    with mode("values"):
        assert f(paged, torch.tensor([127]), "paged") == "ran"
        assert rules(broken(f, paged, torch.tensor([128]), "paged")) == [("loc", "value")]
        assert rules(broken(f, flat, torch.tensor([9]), "flat")) == [("loc", "value")]


# --- what a tensor must keep ------------------------------------------------------------------------------------------


def test_dtypes_and_what_may_carry_them():
    good = call()
    assert store(**good | {"k_scale": good["k_scale"].view(torch.uint8)}) == "stored"
    for name, value, rule in [
        ("k_scale", good["k_scale"].view(torch.uint8).view(torch.int8), "dtype"),
        ("k_cache", good["k_cache"].view(torch.uint8), "dtype"),
        ("k_cache", good["k_cache"].view(torch.uint8).view(torch.float8_e4m3fnuz), "dtype"),
        ("k", good["k"].half(), "dtype"),
        ("loc", good["loc"].int(), "dtype"),
        ("k", good["k"].float().numpy(), "dtype"),
        ("k", None, "presence"),
        ("loc", [1, 2, 3, 4, 5], "dtype"),
    ]:
        error = broken(store, **good | {name: value})
        assert rules(error) == [(name, rule)]
    fnuz = broken(store, **good | {"k_cache": good["k_cache"].view(torch.uint8).view(torch.float8_e4m3fnuz)})
    assert "half the value" in str(fnuz)


def test_free_outer_strides_must_not_overlap_and_inner_ones_are_exact():
    packed = Layout("t.rows", "token head dim -> token head dim", dtype=FP32, dense="dim")

    @contract
    def f(x: Annotated[Tensor, packed]) -> str:
        return "ran"

    wide = torch.zeros(5, 6, 16)
    assert f(wide[:, 1:4, 2:10]) == "ran"
    assert f(wide[:, ::2, :8]) == "ran"
    assert f(wide[:, :1, :8].as_strided((5, 1, 8), (96, 1, 1))) == "ran", "an axis of size 1 may have any stride"
    assert f(wide[:0, :, ::2]) == "ran", "no elements, no strides"
    assert rules(broken(f, wide[:, :, ::2])) == [("x", "stride")]
    assert rules(broken(f, wide[:, :1].expand(5, 6, 16))) == [("x", "stride")]
    assert rules(broken(f, torch.zeros(64).as_strided((5, 3, 8), (8, 8, 1)))) == [("x", "stride")]


def test_a_transposed_cache_is_not_a_cache():
    good = call(head=4)
    hnd = torch.empty(4, 384, 64, dtype=torch.float8_e4m3fn).transpose(0, 1)
    error = broken(store, **good | {"k_cache": hnd})
    assert rules(error) == [("k_cache", "stride")]
    assert "transposed view" in str(error)


def test_hnd_storage_can_be_declared_as_an_nhd_view():
    hnd = layout("paged.hnd")(dtype=BF16, pitch={}, view="page token head head_dim")

    @contract
    def f(x: Annotated[Tensor, hnd]) -> str:
        return "ran"

    stored = torch.zeros(3, 4, 16, 8, dtype=torch.bfloat16)
    assert f(stored.transpose(1, 2)) == "ran"
    assert rules(broken(f, torch.zeros(3, 16, 4, 8, dtype=torch.bfloat16))) == [("x", "stride")]


def test_pitch_alignment_and_overflow():
    padded = Layout("t.padded", "row col -> row col", dtype="uint8", pitch={"row": "align(col, 16) bytes"})
    aligned = Layout("t.aligned", "row col -> row col", dtype=FP32, dense="col", align={"base": 16, "row": 16})
    small = Layout("t.small", "row col -> row col", dtype="uint8", offsets="int32")

    @contract
    def pitch(x: Annotated[Tensor, padded]) -> None: ...

    @contract
    def align(x: Annotated[Tensor, aligned]) -> None: ...

    @contract
    def offsets(x: Annotated[Tensor, small]) -> None: ...

    buffer = torch.zeros(4, 80, dtype=torch.uint8)
    pitch(buffer[:, :72])
    pitch(buffer)
    error = broken(pitch, torch.zeros(4, 72, dtype=torch.uint8))
    assert rules(error) == [("x", "stride")]
    assert "80" in str(error)
    floats = torch.zeros(64)
    align(floats[:48].view(6, 8))
    assert rules(broken(align, floats[1:49].view(6, 8))) == [("x", "alignment")]
    assert rules(broken(align, floats.as_strided((4, 6), (9, 1)))) == [("x", "stride")]
    offsets(torch.empty(2**11, 2**20, dtype=torch.uint8, device="meta")[:-1])
    error = broken(offsets, torch.empty(2**11 + 1, 2**20, dtype=torch.uint8, device="meta"))
    assert rules(error) == [("x", "overflow")]
    assert "2048 rows" in str(error)


def test_one_device():
    good = call()
    error = broken(store, **good | {"k_scale": good["k_scale"].to("meta")})
    assert rules(error) == [("k_scale", "device")]


# --- rules ------------------------------------------------------------------------------------------------------------


@contract(
    together("k_scale", "v_scale"),
    when("dtype(cache) == e4m3", needs("q_scale")),
    when("dtype(cache) != e4m3", forbids("q_scale")),
    "splits in (1, 2, 4) or causal",
)
def attend(
    cache: Annotated[Tensor, Layout("t.cache", "slot dim -> slot dim", dtype=(E4M3, BF16))],
    q_scale: Optional[Float32[Tensor, "slot"]] = None,  # noqa: UP045
    k_scale: Float32[Tensor, "slot"] | None = None,
    v_scale: Float32[Tensor, "slot"] | None = None,
    causal: bool = False,
    splits: int = 1,
) -> str:
    return "ran"


def test_presence_rules():
    bf16, fp8 = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4).to(torch.float8_e4m3fn)
    one = torch.zeros(3)
    assert attend(bf16) == attend(fp8, one) == attend(bf16, None, one, one) == "ran"
    assert rules(broken(attend, fp8)) == [("q_scale", "presence")]
    assert rules(broken(attend, bf16, one)) == [("q_scale", "presence")]
    assert rules(broken(attend, bf16, None, one)) == [("v_scale", "presence")]
    assert rules(broken(attend, bf16, None, None, one)) == [("k_scale", "presence")]
    assert "cache is float8_e4m3fn" in str(broken(attend, fp8))
    assert attend(bf16, causal=True, splits=3) == "ran"
    assert rules(broken(attend, bf16, splits=3)) == [("splits", "relation")]


def test_memory_that_must_be_apart():
    @contract(no_overlap("x", "out"))
    def f(x: Float32[Tensor, "n"], out: Float32[Tensor, "n"]) -> None: ...

    memory = torch.zeros(10)
    f(memory[:5], memory[5:])
    assert rules(broken(f, memory[:5], memory[4:9])) == [("out", "relation")]


def test_value_rules_run_in_values_mode_only():
    @contract
    def f(
        loc: Annotated[Int32[Tensor, "n"], Index(10, skip="== -1", unique=True)],
        indptr: Annotated[Int32[Tensor, "m"], Indptr("n")],
    ) -> str:
        return "ran"

    good, ptr = torch.tensor([3, -1, 4, -1, 9], dtype=torch.int32), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    bad_calls = [
        (torch.tensor([3, 10, 4, -1, 9], dtype=torch.int32), ptr, "loc"),
        (torch.tensor([3, -2, 4, -1, 9], dtype=torch.int32), ptr, "loc"),
        (torch.tensor([3, 4, 4, -1, 9], dtype=torch.int32), ptr, "loc"),
        (good, torch.tensor([1, 2, 5], dtype=torch.int32), "indptr"),
        (good, torch.tensor([0, 3, 2, 5], dtype=torch.int32), "indptr"),
        (good, torch.tensor([0, 3, 4], dtype=torch.int32), "indptr"),
    ]
    with mode("values"):
        assert f(good, ptr) == "ran"
    for loc, indptr, argument in bad_calls:
        assert f(loc, indptr) == "ran"
        with mode("values"):
            assert rules(broken(f, loc, indptr)) == [(argument, "value")]


def test_padding_of_padded_scales_is_checked():
    tiles = layout("scale.128x4")

    @contract
    def f(x: Float32[Tensor, "row k"], scale: Annotated[Tensor, tiles(col="k/32")]) -> str:
        return "ran"

    x, scale = torch.zeros(7, 96), tiles(row=7, col=3).empty()
    with mode("values"):
        assert f(x, scale) == "ran"
        tiles(row=7, col=3).unpack(scale)
        scale.view(torch.uint8)[0, 0, 6, 0, 2] = 127  # row 6, column 2: data
        assert f(x, scale) == "ran"
        scale.view(torch.uint8)[0, 0, 7, 0, 0] = 255  # row 7: padding
        error = broken(f, x, scale)
    assert rules(error) == [("scale", "value")]
    assert "row 7, col 0" in str(error)
    assert "NaN" in str(error)


# --- decoration -------------------------------------------------------------------------------------------------------


def refused(*rules_: Any, **annotations: Any) -> str:
    def f(x, y=None, *, n: int = 3): ...

    with pytest.raises((TypeError, ValueError)) as caught:
        contract(*rules_, **annotations)(f)
    return str(caught.value)


def test_decoration_refuses_what_cannot_be_decided():
    plain = Float32[Tensor, "row"]
    assert "nothing determines" in refused(x=Annotated[Tensor, SCALE])
    assert "page_size: int" in refused(x=Annotated[Tensor, CACHE])
    assert "did you mean 'row'" in refused("rwo == 3", x=plain)
    assert "neither a dim nor an argument" in refused(when("given(z)", "row == 1"), x=plain)
    assert "'z'" in refused(needs("z"), x=plain)
    assert "Writes(at=...)" in refused(x=Annotated[plain, Writes(at="loc")])
    assert "Index" in refused(x=Annotated[Int64[Tensor, "row"], Index("slots")])
    assert "'q'" in refused(q=plain)
    assert "write when('given(y)'" in refused("width == 2", x=plain, y=Float32[Tensor, "width"] | None)
    assert "without spaces" in refused(x=Float32[Tensor, "a / b"])
    assert "not supported" in refused(x=Float32[Tensor, "#row"])
    assert "needs a tensor" in refused(n=Annotated[int, Writes()])
    assert "use Choose" in refused(x=Annotated[Tensor, FLAT, SCALE])
    assert "__import__" in refused("__import__('os') == 1", x=plain)


def test_names_that_only_type_checkers_know_do_not_break_the_rest():
    @contract
    def f(batch: OnlyForTypeCheckers, x: Float32[Tensor, "3"]) -> OnlyForTypeCheckers:
        return batch

    assert f("anything", torch.zeros(3)) == "anything"
    assert rules(broken(f, None, torch.zeros(4))) == [("x", "shape")]
    assert f.contract.unresolved == ("batch",)
    assert "batch is not checked" in str(f.contract)

    with pytest.raises(TypeError, match="only under TYPE_CHECKING"):

        @contract
        def g(x: Annotated[Tensor, OnlyForTypeCheckers]) -> None: ...


def test_string_annotations_see_the_enclosing_function():
    local = Layout("t.local", "a b -> b a", dtype=FP32)

    @contract
    def f(x: Annotated[Tensor, local]) -> str:
        return f"{local.name}"

    assert f(torch.zeros(2, 3)) == "t.local"
    assert rules(broken(f, torch.zeros(6))) == [("x", "shape")]


def test_scalars():
    @contract
    def f(
        n: int,
        x: float,
        flag: bool,
        name: str,
        which: Literal["a", "b"],
        many: list[int],
        maybe: Optional[int] = None,  # noqa: UP045
    ) -> str:
        return "ran"

    good = dict(n=1, x=2, flag=True, name="s", which="a", many=[1])
    assert f(**good) == f(**good, maybe=3) == "ran"
    for name, value in dict(n=1.5, x="2", flag=1, name=3, which="c", many=["1"], maybe="3").items():
        assert rules(broken(f, **good | {name: value})) == [(name, "value")]


def test_methods_static_and_class_methods():
    class Kernel:
        width = 3

        @contract("width == n", derive={"width": lambda self, **_: self.width})
        def method(self, x: Float32[Tensor, "n"]) -> int:
            return len(x) + self.width

        @staticmethod
        @contract
        def static(x: Float32[Tensor, "3"]) -> str:
            return "static"

        @contract
        @classmethod
        def cls(cls, x: Float32[Tensor, "3"]) -> str:
            return cls.__name__

    kernel = Kernel()
    assert kernel.method(torch.zeros(3)) == 6
    assert rules(broken(kernel.method, torch.zeros(4)))[0][1] == "relation"
    assert Kernel.static(torch.zeros(3)) == kernel.static(torch.zeros(3)) == "static"
    assert Kernel.cls(torch.zeros(3)) == "Kernel"
    assert rules(broken(Kernel.cls, torch.zeros(4))) == [("x", "shape")]


def test_derived_buffers_are_checked_like_arguments():
    class Pool:
        def __init__(self, slots: int) -> None:
            self.buffer = torch.zeros(slots, 4)

        @contract(derive={"buffer": lambda self, **_: self.buffer}, buffer=Float32[Tensor, "slot dim"])
        def store(self, x: Float32[Tensor, "n dim"]) -> str:
            return "ran"

    assert Pool(3).store(torch.zeros(2, 4)) == "ran"
    assert rules(broken(Pool(3).store, torch.zeros(2, 5))) == [("buffer", "shape")]


def test_guard_leaves_the_function_as_it_was():
    def theirs(x, *args, y=2, **more):
        return x, args, y, more

    ours = guard(theirs, "n > 1", x=Float32[Tensor, "n"])
    x = torch.zeros(2)
    assert ours(x, 1, 2, y=3, z=4) == (x, (1, 2), 3, {"z": 4})
    assert rules(broken(ours, torch.zeros(1)))[0][1] == "shape"
    assert theirs(torch.zeros(1))[2] == 2
    assert not hasattr(theirs, "contract")


def test_a_decorated_function_keeps_what_it_was():
    def f(a, b: int = 2, /, c=3, *args, d, e: str = "x", **kwargs) -> int:
        """Doc."""
        return a, b, c, args, d, e, kwargs

    g = contract(f)
    assert (g.__name__, g.__doc__, g.__qualname__, g.__module__) == (
        f.__name__,
        f.__doc__,
        f.__qualname__,
        f.__module__,
    )
    assert inspect.signature(g) == inspect.signature(f)
    assert g.__annotations__ == f.__annotations__
    assert g.__wrapped__ is f
    assert g(1, d=4) == f(1, d=4)
    assert g(1, 5, 6, 7, 8, d=4, z=9) == f(1, 5, 6, 7, 8, d=4, z=9)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'd'"):
        g(1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        g(d=4)
    assert linecache.getlines(g.__code__.co_filename), "a debugger can show the guard"
    assert "def f(" in g.contract.source


def test_exceptions_of_the_function_are_its_own():
    @contract
    def f(x: Float32[Tensor, "n"]) -> None:
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine"):
        f(torch.zeros(2))


def test_coroutines():
    @contract
    async def f(x: Float32[Tensor, "3"]) -> str:
        await asyncio.sleep(0)
        return "ran"

    assert inspect.iscoroutinefunction(f)
    assert asyncio.run(f(torch.zeros(3))) == "ran"
    with pytest.raises(LayoutError):
        asyncio.run(f(torch.zeros(4)))


def test_return_annotations_are_a_contract():
    @contract
    def f(x: Float32[Tensor, "n d"], out: Any) -> Float32[Tensor, "n"]:
        return out

    @contract
    def g(
        x: Float32[Tensor, "n d"], out: Any
    ) -> tuple[Annotated[Tensor, FLAT(slot="n", head=1, head_dim="d*32")], int]:
        return out

    x = torch.zeros(2, 3)
    f(x, torch.zeros(2))
    assert rules(broken(f, x, torch.zeros(3))) == [("return", "shape")]
    assert rules(broken(f, x, None)) == [("return", "presence")]
    right = torch.zeros(2, 1, 3, dtype=torch.uint8)
    g(x, (right, 1))
    assert rules(broken(g, x, (right[:1], 1))) == [("return[0]", "shape")]
    assert rules(broken(g, x, (right[..., :2].clone(), 1))) == [("return[0]", "shape")], "group follows from d"
    assert rules(broken(g, x, right)) == [("return", "presence")]


# --- modes ------------------------------------------------------------------------------------------------------------


def test_warn_mode_lets_the_call_go_on():
    good = call()
    bad = good | {"loc": good["loc"].int()}
    with mode("warn"), pytest.warns(UserWarning, match="loc has the wrong dtype"):
        assert store(**bad) == "stored"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mode("warn"):
            assert store(**good) == "stored"
    assert rules(broken(store, **bad)) == [("loc", "dtype")]


def test_modes_belong_to_a_thread_a_contract_or_the_process():
    seen: dict[str, str] = {}
    with mode("warn"):
        thread = threading.Thread(target=lambda: seen.update(other=mode.get()))
        thread.start()
        thread.join()
        seen["here"] = mode.get()
    assert seen == {"other": "raise", "here": "warn"}

    @contract(mode="warn")
    def f(x: Float32[Tensor, "3"]) -> str:
        return "ran"

    with pytest.warns(UserWarning, match="x does not match"):
        assert f(torch.zeros(4)) == "ran"
    mode.set("warn")
    try:
        with pytest.warns(UserWarning, match="loc does not match"):
            store(**call() | {"loc": torch.arange(1, 7)})
    finally:
        mode.set("raise")
    with pytest.raises(ValueError, match="warn, raise, values"):
        mode("off")


def test_off_returns_the_function_itself():
    code = (
        "from layoutcheck import contract, guard\n"
        "def f(x): ...\n"
        "assert contract(f) is f and contract('n == 1')(f) is f and guard(f, 'n == 1') is f\n"
        "assert not hasattr(f, 'contract')\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"LAYOUTCHECK": "off", "PATH": ""}, check=True)


def test_a_wrong_setting_in_the_environment_is_an_error():
    done = subprocess.run(
        [sys.executable, "-c", "import layoutcheck"],
        env={"LAYOUTCHECK": "of", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "LAYOUTCHECK='of'" in done.stderr


def test_errors_can_be_pickled():
    error = broken(store, **call() | {"k": None})
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.violations == error.violations


def test_printing_a_contract_shows_where_dims_come_from():
    text = str(store.contract)
    assert "slot" in text
    assert "bound by k_cache" in text
    assert "= slot / page_size" in text

    @contract
    def once(x: Shaped[Tensor, "lonely"]) -> None: ...

    assert "seen once only" in str(once.contract)
