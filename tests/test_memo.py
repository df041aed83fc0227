"""What a guard remembers of calls: never more than it compared, never a tensor, and never much."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layoutcheck import E4M3, Index, Layout, LayoutError, _memo, contract, each, layout, mode, no_overlap, tag, when

ROWS = Layout("rows", "row col -> row col", dtype=(torch.float32, torch.int32), dense="col", align=dict(base=16))
NHD = layout("paged.nhd")(dtype=E4M3, pitch={})


@contract(
    "tag(a, 'version') in (None, 1)", "scale > 0", no_overlap("a", "out"), each("splits", "% group == 0"),
    when("given(bias)", "bias_size == col"), same_device=True,
)  # fmt: skip
def kernel(
    a: Annotated[Tensor, ROWS],
    b: Float32[Tensor, "row col"],
    at: Annotated[Int64[Tensor, "n"], Index("row")],
    out: Annotated[Tensor, ROWS],
    bias: Float32[Tensor, "bias_size"] | None = None,
    *,
    group: int = 2,
    parts: int = 2,
    layer: int = 0,
    scale: float = 1.0,
    splits: tuple[int, ...] = (),
) -> Float32[Tensor, "n"]:
    """Rules of every kind."""
    return torch.zeros(at.shape[0] if layer >= 0 else at.shape[0] + 1)


@contract("col % parts == 0")
def divided(a: Float32[Tensor, "row col"], b: Float32[Tensor, "row col"], c: Float32[Tensor, "col"], parts: int) -> str:
    """A scalar that a rule about sizes uses."""
    return "ran"


@contract
def three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Any tensors at all."""
    return a


def tensors(row: int = 4, col: int = 6) -> list[Tensor]:
    return [torch.zeros(row, col), torch.zeros(row, col), torch.arange(3), torch.zeros(row, col)]


def memo_of(fn: Any) -> _memo.Memo:
    return fn.__globals__["_memo"]


@pytest.fixture(autouse=True)
def forgetful() -> None:
    for fn in (kernel, divided):
        memo_of(fn).__init__()


def known(fn: Callable[..., Any], *arguments: Any, **keywords: Any) -> bool:
    """Call a function; whether its guard found the call in its memo, which earns by it."""
    memo = memo_of(fn)
    memo.credit = before = _memo.FULL - 1
    fn(*arguments, **keywords)
    return memo.credit == before + 1


def warm() -> list[Tensor]:
    """Arguments that the guard knows."""
    call = tensors()
    kernel(*call)
    assert known(kernel, *call)
    return call


def rules(*arguments: Any, **keywords: Any) -> list[tuple[str, str]]:
    """The rules that a call breaks, by argument."""
    with pytest.raises(LayoutError) as error:
        kernel(*arguments, **keywords)
    return [(v.argument, v.rule) for v in error.value.violations]


# --- what torch compares ----------------------------------------------------------------------------------------------


def same(one: Tensor, other: Any) -> bool:
    return _memo._same_metadata((one,))(other)


class Sub(Tensor):
    pass


BASE = torch.zeros(3, 4)
OTHERS = {
    "dtype": BASE.view(torch.int32),
    "size": torch.zeros(3, 5),
    "rank": torch.zeros(3, 4, 1),
    "stride": torch.zeros(3, 8)[:, :4],
    "device": torch.zeros(3, 4, device="meta"),
    "requires_grad": torch.zeros(3, 4, requires_grad=True),
    "Parameter": torch.nn.Parameter(BASE, requires_grad=False),
    "subclass": BASE.as_subclass(Sub),
    "neg bit": torch._neg_view(BASE),
    "zero tensor": torch._efficientzerotensor(3, 4),
    "sparse": BASE.to_sparse(),
    "sparse rows": BASE.to_sparse_csr,
    "sparse columns": BASE.to_sparse_csc,
    "sparse blocks": lambda: BASE.to_sparse_bsr((1, 2)),
    "quantised": lambda: torch.quantize_per_tensor(BASE, 1.0, 0, torch.qint8),
    "mkldnn": BASE.to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    "functional": torch._to_functional_tensor(BASE),
    "no tensor": [[0.0] * 4] * 3,
    "nothing": None,
}


def test_torch_has_what_a_memo_needs():
    assert _memo.AVAILABLE, "try the facts of this file with this torch, then raise _memo._BEFORE"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_metadata_is_not_the_same(name):
    other = OTHERS[name]
    assert same(BASE, BASE)
    assert not same(BASE, other() if callable(other) else other)


def test_the_stride_of_one_element_and_of_none_counts():
    assert not same(torch.zeros(1, 4), torch.zeros(1, 8)[:, :4])
    assert not same(torch.zeros(0, 4), torch.zeros(0, 8)[:, :4])
    assert not same(torch.zeros(3, dtype=torch.cfloat), torch.zeros(3, dtype=torch.cfloat).conj())


def test_addresses_offsets_and_history_are_not_compared():
    assert same(BASE, torch.zeros(20)[1:13].view(3, 4))
    leaf = torch.zeros(3, 4, requires_grad=True)
    assert same(leaf, leaf * 1)
    with torch.no_grad():
        assert same(BASE, torch.ones(3, 4))


def test_modes_and_transforms_are_compared():
    with torch.inference_mode():
        made = torch.zeros(3, 4)
        assert not same(BASE, made)
        inside = _memo._same_metadata((made,))
    assert not inside(BASE)
    with FakeTensorMode() as fake:
        assert not same(BASE, fake.from_tensor(BASE))
    seen = []
    torch.vmap(lambda x: (seen.append(same(BASE, x)), x)[1])(torch.zeros(2, 3, 4))
    torch.func.functionalize(lambda x: (seen.append(same(BASE, x)), x)[1])(BASE)
    torch.func.grad(lambda x: (seen.append(same(BASE, x)), x.sum())[1])(BASE)
    assert seen == [False] * 3


def test_changes_in_place_are_seen():
    check = _memo._same_metadata((BASE,))
    for change in (
        lambda x: x.resize_(2, 6),
        lambda x: x.set_(torch.zeros(12).untyped_storage(), 0, (4, 3), (3, 1)),
        lambda x: setattr(x, "data", torch.zeros(3, 4).half()),
        lambda x: x.requires_grad_(),
        lambda x: x.transpose_(0, 1),
    ):
        x = torch.zeros(3, 4)
        assert check(x)
        change(x)
        assert not check(x)


def test_one_tensor_as_two_arguments_is_never_the_same():
    assert not _memo._same_metadata((BASE, BASE))(BASE, BASE)


def test_no_tensor_is_held():
    x = torch.zeros(3, 4)
    alive = weakref.ref(x)
    check = _memo._same_metadata((x,))
    del x
    gc.collect()
    assert alive() is None
    assert check(BASE)


# --- what a known call may not hide -----------------------------------------------------------------------------------


def test_a_known_call_with_other_memory_is_still_known():
    warm()
    assert known(kernel, *tensors())


def test_an_address_is_compared_every_time():
    call = warm()
    off = torch.zeros(25)[1:].view(4, 6)
    assert rules(off, *call[1:]) == [("a", "alignment")]
    assert known(kernel, *call)


def test_overlap_is_compared_every_time():
    call = warm()
    memory = torch.zeros(40)
    a, out = memory[:24].view(4, 6), memory[8:32].view(4, 6)
    assert rules(a, *call[1:3], out) == [("out", "relation")]
    assert [r for _, r in rules(call[0], *call[1:3], call[0])] == ["relation"]
    assert known(kernel, *call)


def test_tags_are_read_every_time():
    call = warm()
    tag(call[0], version=2)
    assert [r for _, r in rules(*call)] == ["relation"]
    tag(call[0], version=1)
    assert known(kernel, *call)


def test_a_twin_is_looked_up_every_time():
    @contract
    def read(cache: Annotated[Tensor, NHD], b: Annotated[Tensor, NHD], c: Annotated[Tensor, NHD]) -> None: ...

    nhd, hnd = (
        layout(name)(dtype=E4M3, page=3, page_size=8, head=8, head_dim=32) for name in ("paged.nhd", "paged.hnd")
    )
    good = [nhd.empty() for _ in "abc"]
    read(*good)
    assert known(read, *good)
    with pytest.raises(LayoutError, match=r"paged\.hnd"):
        read(good[0], good[1], hnd.empty())
    assert known(read, *good)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        (dict(group=3, splits=(4,)), "splits"),
        (dict(splits=(4, 3)), "splits"),
        (dict(scale=0.0), "scale"),
        (dict(scale="1"), "scale"),
        (dict(layer=1.5), "layer"),
        (dict(splits=["4"]), "splits"),
    ],
)
def test_scalars_that_no_size_depends_on_are_compared_every_time(changed, broken):
    call = warm()
    with pytest.raises(LayoutError) as error:
        kernel(*call, **changed)
    assert broken in str(error.value)
    assert known(kernel, *call, layer=7, scale=0.5, splits=(2, 4)), "and others of them are the same call"


def test_scalars_that_sizes_depend_on_are_remembered_by_value_and_type():
    a, b, c = torch.zeros(2, 6), torch.zeros(2, 6), torch.zeros(6)
    for parts in (3, 1, 2):
        divided(a, b, c, parts)
        assert known(divided, a, b, c, parts)
    for wrong in (4, 3.0, 1.0, "3", None, torch.tensor(3)):
        with pytest.raises(LayoutError):
            divided(a, b, c, wrong)
    assert not known(divided, a, b, c, True), "True is 1, and an int, but another type"
    assert known(divided, a, b, c, 1)


@pytest.mark.parametrize(
    ("index", "made"),
    [
        (1, lambda: torch.zeros(4, 6, dtype=torch.int32)),
        (1, lambda: torch.zeros(4, 6, dtype=torch.float64)),
        (2, lambda: torch.arange(3, dtype=torch.int32)),
        (2, lambda: torch.zeros(3)),
        (1, lambda: torch.zeros(6, 4).t()),
        (0, lambda: torch.zeros(4, 12)[:, ::2]),
        (0, lambda: torch.zeros(4, 6, device="meta")),
        (1, lambda: torch.zeros(5, 6)),
        (1, lambda: None),
        (2, lambda: [0, 1, 2]),
        (4, lambda: torch.zeros(5)),
        (4, lambda: torch.zeros(())),
        (4, lambda: 3),
    ],
)
def test_other_tensors_are_no_known_call(index, made):
    call = [*warm(), None]
    if index == 1 and made() is not None and made().shape == (4, 6) and made().dtype is torch.float32:
        assert not known(kernel, *(made() if i == 1 else x for i, x in enumerate(call)))  # any strides will do for b
    else:
        wrong = [made() if i == index else x for i, x in enumerate(call)]
        assert rules(*wrong)
    assert known(kernel, *call)


def test_swapped_tensors_are_no_known_call():
    @contract
    def attend(q: Float32[Tensor, "n d"], k: Float32[Tensor, "m d"], v: Float32[Tensor, "m e"]) -> None: ...

    q, k, v = torch.zeros(2, 8), torch.zeros(5, 8), torch.zeros(5, 4)
    attend(q, k, v)
    assert known(attend, q, k, v)
    with pytest.raises(LayoutError):
        attend(q, v, k)


def test_what_stands_for_none_is_no_tensor_of_anybody():
    call = warm()
    bias = torch.zeros(6)
    assert not known(kernel, *call, bias)
    assert known(kernel, *call, bias)
    assert known(kernel, *call, None)
    for strange in (torch.empty(0), _memo.absent(1)[0].as_subclass(Tensor)):
        assert rules(*call, strange)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(5, 6),
        lambda x: x.set_(torch.zeros(24).untyped_storage(), 0, (6, 4), (4, 1)),
        lambda x: setattr(x, "data", torch.zeros(4, 7)),
        lambda x: x.transpose_(0, 1),
    ],
)
def test_a_tensor_changed_in_place_is_compared_again(change):
    call = warm()
    change(call[1])
    assert rules(*call)


def test_requires_grad_subclasses_and_inference_mode_pass_as_before():
    call = warm()
    for other in (call[1].requires_grad_(), torch.nn.Parameter(torch.zeros(4, 6)), torch.zeros(4, 6).as_subclass(Sub)):
        kernel(call[0], other, *call[2:])
    with torch.inference_mode():
        kernel(*tensors())
        assert rules(*tensors()[:3], torch.zeros(4, 5))
    kernel(*tensors())


def test_a_subclass_is_never_known():
    call = tensors()
    call[1] = call[1].as_subclass(Sub)
    for _ in range(4):
        assert not known(kernel, *call)
    assert not memo_of(kernel).entries


def test_results_are_checked_after_a_known_call():
    call = warm()
    for _ in range(2):
        with pytest.raises(LayoutError, match="return does not match"):
            kernel(*call, layer=-1)


def test_modes_are_obeyed_in_a_known_call():
    call = warm()
    with mode("values"), pytest.raises(LayoutError, match="at has 1 of 3 values out of range"):
        kernel(*call[:2], torch.tensor([0, 1, 4]), call[3])
    kernel(*call[:2], torch.tensor([0, 1, 4]), call[3])
    with mode("warn"), pytest.warns(UserWarning, match="overlaps"):
        kernel(call[0], *call[1:3], call[0])


def test_nested_tensors_end_no_process():
    """Inside ``TensorGuards.check`` an exception is nobody's: a guard must not ask it about such tensors."""
    code = """
import sys; sys.path.insert(0, "tests")
import torch, test_memo as t
nested = torch.nested.nested_tensor([torch.zeros(4, 6)] * 2)
def wrong(x):
    try:
        t.kernel(x, *call[1:])
    except RuntimeError as error:
        print("refused:", error)
    return x
call = t.warm()
wrong(nested)
torch.vmap(wrong)(nested)
call = t.warm()
call[0] = torch.nested.nested_tensor([torch.zeros(4, 6)] * 2, layout=torch.jagged)
try:
    t.kernel(*call)
except Exception as error:
    print("refused:", type(error))
for x in (torch.zeros(4), nested, nested, torch.zeros(4)):
    t.three(x, torch.zeros(2), torch.zeros(3))
    t.three(torch.zeros(2), torch.zeros(2), x)
torch.vmap(lambda x: t.three(x, torch.zeros(2), torch.zeros(3)))(nested)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 3


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    destroy_process_group()


def test_a_dtensors_shard_is_checked_after_a_known_call(mesh):
    from torch.distributed.tensor import DTensor, Shard

    call = warm()
    shard = DTensor.from_local(torch.zeros(4, 6), mesh, [Shard(0)])
    kernel(call[0], shard, *call[2:])
    with pytest.raises(LayoutError):
        kernel(call[0], DTensor.from_local(torch.zeros(2, 6), mesh, [Shard(0)]), *call[2:])
    assert known(kernel, *call)


# --- what is traced ---------------------------------------------------------------------------------------------------


def test_torch_compile_neither_sees_the_memo_nor_fills_it():
    def graphs(fn: Callable[..., Any], counter: CompileCounter) -> tuple[int, int]:
        torch._dynamo.reset()
        traced = torch.compile(fn, backend=counter, fullgraph=True)
        for row in (4, 4, 5, 5, 9, 4):
            memo_of(divided).__init__()
            if row == 5:
                divided(*eager, 2)
            traced(torch.zeros(row, 6), torch.zeros(row, 6), torch.zeros(6), 2)
        return counter.frame_count, counter.op_count

    eager = torch.zeros(7, 6), torch.zeros(7, 6), torch.zeros(6)
    bare = divided.__wrapped__

    def outer(*arguments: Any) -> Tensor:
        divided(*arguments)
        return arguments[0] + arguments[2]

    def outer_bare(*arguments: Any) -> Tensor:
        bare(*arguments)
        return arguments[0] + arguments[2]

    assert graphs(outer, CompileCounter()) == graphs(outer_bare, CompileCounter())
    assert not memo_of(divided).entries
    divided(*eager, 2)
    before = memo_of(divided).entries
    torch.compile(outer, backend="eager", fullgraph=True)(torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(6), 2)
    assert memo_of(divided).entries is before
    with pytest.raises(torch._dynamo.exc.Unsupported, match="c does not match"):
        torch.compile(outer, backend="eager", fullgraph=True)(*eager[:2], torch.zeros(5), 2)
    torch._dynamo.reset()


def test_fake_and_symbolic_tensors_are_compared_and_not_remembered():
    real = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(6)
    divided(*real, 2)
    before = memo_of(divided).entries

    def run(*given: Any) -> Tensor:
        divided(*given, 2)
        return given[0] + given[2]

    graph = make_fx(run, tracing_mode="symbolic")(*real)
    assert graph(torch.zeros(9, 6), torch.zeros(9, 6), torch.zeros(6)).shape == (9, 6)
    with pytest.raises(LayoutError):
        make_fx(run, tracing_mode="symbolic")(*real[:2], torch.zeros(5))
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(x) for x in real]
        run(*given)
        with pytest.raises(LayoutError):
            run(*given[:2], torch.zeros(5))
    program = torch.export.export(Running(), real, dynamic_shapes=({0: ROW}, {0: ROW}, None), strict=False)
    assert program.module()(torch.zeros(9, 6), torch.zeros(9, 6), torch.zeros(6)).shape == (9, 6)
    assert memo_of(divided).entries == before


ROW = torch.export.Dim("row", min=2, max=64)


class Running(torch.nn.Module):
    """What torch.export takes."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        divided(a, b, c, 2)
        return a + c


def test_transforms_are_compared_and_not_found():
    real = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(6)
    divided(*real, 2)

    def run(a: Tensor) -> Tensor:
        assert not known(divided, a, *real[1:], 2)
        return a.sum()

    torch.vmap(run)(torch.zeros(3, 4, 6))
    torch.func.grad(run)(real[0])
    torch.func.functionalize(run)(real[0])


def test_a_traced_module_leaves_no_tensor_in_the_memo():
    def run(a: Tensor) -> Tensor:
        kernel(a, *call[1:])
        return a * 2

    call = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(run, call[0])
    for _, _, dims in memo_of(kernel).entries:
        assert all(type(d) is int for d in dims)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_alternating_calls_are_all_known():
    calls = [tensors(row) for row in (4, 5, 6)]
    for _ in range(3):
        for call in calls:
            kernel(*call)
    assert all(known(kernel, *call) for call in calls)


def test_where_no_call_comes_twice_the_memo_rests_and_tries_again():
    memo = memo_of(divided)
    learnt, spared = 0, 0
    for row in range(1, 2_001):
        learns = memo.learns
        divided(torch.zeros(row, 2), torch.zeros(row, 2), torch.zeros(2), 2)
        assert len(memo.entries) <= _memo._MOST
        learnt += learns
        spared += not memo.entries
    assert learnt < 40
    assert spared > 1_900
    same = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2)
    for _ in range(2 * len(_memo._TURNS)):
        divided(*same, 2)
    assert known(divided, *same, 2)


def test_calls_that_cannot_be_kept_cost_little():
    memo = memo_of(kernel)
    call = tensors()
    call[1] = call[1].as_subclass(Sub)
    with mock.patch.object(_memo, "_plain", wraps=_memo._plain) as asked:
        for _ in range(1_000):
            kernel(*call)
    assert asked.call_count < 100
    assert not memo.entries


def test_a_million_calls_leave_nothing_behind():
    calls = [(torch.zeros(row, 2), torch.zeros(row, 2), torch.zeros(2), 2) for row in range(1, 9)]

    def run(times: int) -> None:
        for _ in range(times):  # the same call again and again, then ever other ones
            for _ in range(8):
                divided(*calls[0])
            for call in calls:
                divided(*call)

    run(100)
    gc.collect()
    before = sys.getallocatedblocks()
    run(1_000_000 // 16)
    gc.collect()
    assert sys.getallocatedblocks() - before < 200
    assert len(memo_of(divided).entries) <= _memo._MOST


def test_a_memo_keeps_no_argument_alive():
    call = warm()
    alive = [weakref.ref(x) for x in call]
    del call
    gc.collect()
    assert [r() for r in alive] == [None] * 4


def test_threads_share_a_memo():
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for i in range(400):
            row = 1 + (seed + i // 10) % 5
            good = torch.zeros(row, 4), torch.zeros(row, 4), torch.zeros(4)
            if divided(*good, 2) != "ran":
                wrong.append((seed, i))
            try:
                divided(good[0], torch.zeros(row + 1, 4), good[2], 2)
                wrong.append((seed, i))
            except LayoutError:
                pass

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_contracts_pickle_without_a_memo():
    divided(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(4), 2)
    assert memo_of(divided).entries
    twin = pickle.loads(pickle.dumps(divided.contract))
    assert twin.source == divided.contract.source
    assert not pickle.loads(pickle.dumps(memo_of(divided))).entries


# --- without torch's private functions --------------------------------------------------------------------------------


class Agreeing:
    """A ``TensorGuards`` that finds everything the same."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def check(self, *_: Any) -> bool:
        return True


def _refusing(*_: Any, **__: Any) -> None:
    raise TypeError("missing another keyword")


@pytest.mark.parametrize("instead", [None, Agreeing, _refusing])
def test_without_what_a_memo_needs_there_is_none(instead, monkeypatch):
    if instead is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", instead)
    assert not _memo._behaves()


@pytest.mark.parametrize("version", ["2.14.0", "3.0", "2.14.0a0+git0123", "unknown"])
def test_a_torch_that_was_not_tried_gets_no_memo(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert not _memo._behaves()


def test_a_guard_without_a_memo_judges_the_same():
    with mock.patch.object(_memo, "AVAILABLE", False):
        plain = contract("col % parts == 0")(divided.__wrapped__)
    assert "_memo" not in plain.contract.source
    a, c = torch.zeros(2, 6), torch.zeros(6)
    for _ in range(3):
        assert plain(a, a.clone(), c, 3) == "ran"
        for wrong in ((a, a.clone(), c, 4), (a, torch.zeros(3, 6), c, 3), (a, None, c, 3), (a, a.clone(), c, True)):
            judged = []
            for fn in (plain, divided):
                try:
                    judged.append(fn(*wrong))
                except LayoutError as error:
                    judged.append(str(error))
            assert judged[0] == judged[1]
