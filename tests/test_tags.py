"""Tags: what is known of memory, how long, for whom; and contracts that compare it."""

from __future__ import annotations

import gc
import os
import threading
from typing import Annotated, Any, ClassVar

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from layoutcheck import BF16, E4M3, Choose, Layout, LayoutError, Pool, _tags, _twins, contract, layout, tag

NHD, HND = layout("paged.nhd")(dtype=BF16, pitch={}), layout("paged.hnd")(dtype=BF16, pitch={})
SAME: dict[str, Any] = dict(page=3, page_size=8, head=8, head_dim=16)  # page_size == head: one shape for both


@contract
def read_nhd(cache: Annotated[Tensor, NHD]) -> str:
    return "ran"


def rules(error: LayoutError) -> list[tuple[str, str]]:
    return [(v.argument, v.rule) for v in error.violations]


def broken(fn: Any, *args: Any, **kwargs: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        fn(*args, **kwargs)
    return caught.value


# --- what is remembered, and for how long -----------------------------------------------------------------------------


def test_allocated_memory_knows_its_layout_through_every_view():
    cache = NHD(**SAME).empty()
    views = [
        cache,
        cache[1:],
        cache[1, 2],
        cache.view(torch.uint8),
        cache.view(-1),
        cache.transpose(1, 2),
        cache[:, :, 0],
    ]
    for view in views:
        found = _tags.find(view)
        assert found is not None
        assert found.layout == NHD(**SAME)
    assert _tags.find(cache.clone()) is None, "a copy is other memory"
    assert _tags.find(torch.zeros(3)) is None
    assert _tags.find("no tensor") is None


def test_a_view_over_a_slab_knows_only_its_own_bytes():
    nbytes = NHD(**SAME).nbytes
    slab = torch.zeros(3 * nbytes, dtype=torch.uint8)
    first, second = NHD(**SAME).view(slab), HND(**SAME).view(slab, offset=nbytes)
    assert _tags.find(first) is None, "to look at memory as a layout says nothing of who wrote it"
    tag(first, NHD)
    tag(second, HND)
    assert _tags.fact(first, "layout") == "paged.nhd"
    assert _tags.fact(second[2], "layout") == "paged.hnd"
    assert _tags.find(slab) is None
    assert _tags.find(slab[2 * nbytes :]) is None
    assert set(_tags.facts(slab, "layout")) == {"paged.nhd", "paged.hnd"}


def test_a_new_layout_ends_what_was_declared_of_parts_of_its_bytes():
    raw = torch.zeros(Pages.nbytes(page=4, page_size=8, head=8, head_dim=16), dtype=torch.uint8)
    small = [Pages.over(raw, alignment=1, page=1, page_size=8, head=8, head_dim=16) for _ in range(3)]
    tag(small[-1].v, version=3)
    assert len(_tags._of(raw.untyped_storage())) == 6
    whole = HND(page=8, page_size=8, head=8, head_dim=16).view(raw)
    tag(whole, HND)
    assert len(_tags._of(raw.untyped_storage())) == 1
    assert _tags.fact(small[-1].v, "layout") == "paged.hnd"
    tag(whole[2:4], NHD)
    assert _tags.fact(whole[3], "layout") == "paged.nhd"
    assert _tags.fact(whole[4], "layout") == "paged.hnd"


def test_freeing_the_storage_drops_the_tag():
    gc.collect()
    before = len(_tags._known)
    cache = NHD(**SAME).empty()
    assert len(_tags._known) == before + 1
    kept = cache[1]
    del cache
    gc.collect()
    assert _tags.find(kept) is not None
    del kept
    gc.collect()
    assert len(_tags._known) == before


def test_an_address_that_is_used_again_is_not_tagged():
    for _ in range(50):
        cache = NHD(**SAME).empty()
        address = cache.data_ptr()
        del cache
        again = torch.empty(NHD(**SAME).numel, dtype=torch.bfloat16)
        assert _tags.find(again) is None, address


def test_declared_facts_are_merged_for_one_tensor_and_kept_apart_for_two():
    memory = torch.zeros(64)
    tag(memory, version=1, encoding="a")
    tag(memory, version=2)
    assert _tags.fact(memory, "version") == 2
    assert _tags.fact(memory, "encoding") == "a"
    assert len(_tags._of(memory.untyped_storage())) == 1
    other = memory.view(8, 8)
    tag(other, version=3)
    assert _tags.facts(memory, "version") == (2, 3)
    assert _tags.fact(memory, "version") == 3, "the last declaration of the same bytes"
    assert _tags.fact(memory[:5], "index_space") is None


def test_declaring_the_same_bytes_again_and_again_does_not_grow():
    memory = torch.zeros(64)
    for i in range(100):
        tag(memory[8:16], version=i)
    assert len(_tags._of(memory.untyped_storage())) == 1
    assert _tags.fact(memory[9:10], "version") == 99


def test_a_layout_that_the_tensor_does_not_have_cannot_be_declared():
    memory = torch.zeros(3, 8, 8, 16, dtype=torch.bfloat16)
    tag(memory, HND)
    found = _tags.find(memory)
    assert found is not None
    assert found.layout == HND(**SAME)
    assert rules(broken(tag, memory.float(), HND)) == [("tensor", "dtype")]
    assert rules(broken(tag, memory[0], HND)) == [("tensor", "shape")]


def test_records_are_tagged_as_well():
    record = layout("dsa.index_132")
    rows = record(page=3, page_size=64).empty()
    assert _tags.fact(rows[1:], "layout") == "dsa.index_132"
    foreign = torch.zeros(3, 64 * 132, dtype=torch.uint8)
    tag(foreign, record(page_size=64), version=7)
    assert _tags.fact(foreign, "layout") == "dsa.index_132"
    assert _tags.fact(foreign[2], "version") == 7


def test_threads_may_tag_and_look_up_at_once():
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(150):
                memory = torch.zeros(16)
                tag(memory, version=(seed, i))
                assert _tags.fact(memory[3:], "version") == (seed, i)
        except BaseException as error:
            errors.append(error)

    shared = torch.zeros(64)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=lambda i=i: tag(shared[i : i + 1], version=i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert _tags._of(shared.untyped_storage())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_tags_and_its_own_from_then_on():
    memory = torch.zeros(16)
    tag(memory, version=1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = _tags.fact(memory, "version")
        tag(memory, version=2)
        os.write(write, f"{seen} {_tags.fact(memory, 'version')}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"1 2"
    assert _tags.fact(memory, "version") == 1
    os.close(read)
    os.close(write)


# --- twins ------------------------------------------------------------------------------------------------------------


def test_a_layout_with_the_same_shape_and_other_bytes_is_refused_where_the_memory_is_known():
    assert read_nhd(NHD(**SAME).empty()) == "ran"
    error = broken(read_nhd, HND(**SAME).empty())
    assert rules(error) == [("cache", "layout")]
    assert "laid out as paged.hnd" in str(error)
    assert read_nhd(HND(**SAME).empty().clone()) == "ran", "nothing is known of a copy"
    tagged = torch.zeros(3, 8, 8, 16, dtype=torch.bfloat16)
    assert read_nhd(tagged) == "ran"
    tag(tagged, HND)
    assert rules(broken(read_nhd, tagged)) == [("cache", "layout")]
    tag(tagged, NHD)
    assert read_nhd(tagged) == "ran", "declared anew"
    tag(tagged, "paged.hnd")
    assert rules(broken(read_nhd, tagged)) == [("cache", "layout")], "a name is enough"
    tag(tagged, "somebody's own")
    assert read_nhd(tagged) == "ran", "nothing says that this is another map"


def test_slices_and_views_are_compared_too():
    hnd, nhd = HND(**SAME).empty(), NHD(**SAME).empty()
    assert rules(broken(read_nhd, hnd[1:])) == [("cache", "layout")]
    assert read_nhd(nhd[1:]) == "ran"
    assert rules(broken(read_nhd, hnd.view(torch.uint8).view(torch.bfloat16)[:2])) == [("cache", "layout")]
    flat = layout("paged.nhd")(dtype=BF16, view="slot head head_dim", pitch={}, page_size=8)
    assert read_nhd(flat(page=3, head=8, head_dim=16).empty().view(3, 8, 8, 16)) == "ran", "the same map in other words"


def test_one_head_is_the_same_map_in_both():
    one = dict(page=3, page_size=1, head=1, head_dim=16)
    assert read_nhd(HND(**one).empty()) == "ran"
    assert HND(**one).map_fingerprint == NHD(**one).map_fingerprint


def test_swizzled_and_linear_scales_of_one_shape():
    swizzled, linear = layout("nvfp4_kv.v_scale"), layout("nvfp4_kv.k_scale")

    @contract
    def f(scale: Annotated[Tensor, linear(head_dim=128)], page_size: int = 16) -> str:
        return "ran"

    dims = dict(page=2, page_size=16, head=4, head_dim=128)
    assert f(linear(**dims).empty()) == "ran"
    assert rules(broken(f, swizzled(**dims).empty())) == [("scale", "layout")]


def test_only_arguments_with_a_twin_look_anything_up():
    twin = read_nhd.contract.source

    @contract
    def flat(
        cache: Annotated[Tensor, layout("paged.nhd")(dtype=E4M3, view="slot head head_dim", pitch={})],
        scale: Annotated[Tensor, layout("mxfp8.interleaved")],
        page_size: int,
    ) -> None: ...

    count = [name for name in read_nhd.__globals__ if isinstance(read_nhd.__globals__[name], _twins.Reader)]
    assert len(count) == 1
    assert count[0] in twin
    assert not [v for v in flat.__globals__.values() if isinstance(v, _twins.Reader)]


def test_check_compares_the_map():
    assert NHD.check(NHD(**SAME).empty())["head"] == 8
    assert rules(broken(NHD.check, HND(**SAME).empty())) == [("tensor", "layout")]


def test_optional_and_chosen_arguments_are_compared():
    @contract
    def maybe(x: Float32[Tensor, "n"], cache: Annotated[Tensor, NHD] | None = None) -> str:
        return "ran"

    @contract
    def chosen(cache: Annotated[Tensor, Choose({"kind == 'nhd'": NHD}, default=HND)], kind: str) -> str:
        return "ran"

    nhd, hnd = NHD(**SAME).empty(), HND(**SAME).empty()
    assert maybe(torch.zeros(2)) == maybe(torch.zeros(2), nhd) == "ran"
    assert rules(broken(maybe, torch.zeros(2), hnd)) == [("cache", "layout")]
    assert chosen(nhd, "nhd") == chosen(hnd, "hnd") == "ran"
    assert rules(broken(chosen, hnd, "nhd")) == rules(broken(chosen, nhd, "hnd")) == [("cache", "layout")]


def test_compiled_callers_are_not_looked_up():
    memory = torch.zeros(3, 8, 8, 16, dtype=torch.bfloat16)

    def caller(x: Tensor) -> Tensor:
        read_nhd(x)
        return x + 1

    compiled = torch.compile(caller, fullgraph=True, backend="eager")
    assert torch.equal(compiled(memory), memory + 1)


# --- conditions -------------------------------------------------------------------------------------------------------


def test_conditions_on_facts():
    @contract("tag(scale, 'version') == tag(cache, 'version')", "tag(cache, 'encoding') in (None, 'e4m3')")
    def f(cache: Float32[Tensor, "n"], scale: Float32[Tensor, "n"]) -> str:
        return "ran"

    cache, scale = torch.zeros(3), torch.zeros(3)
    assert f(cache, scale) == "ran", "both untagged"
    tag(cache, version=2)
    assert rules(broken(f, cache, scale)) == [("scale", "relation")]
    tag(scale, version=2)
    assert f(cache, scale) == "ran"
    tag(cache, encoding="e5m2")
    error = broken(f, cache, scale)
    assert rules(error) == [("cache", "dtype")]
    assert "e5m2" in str(error)

    def caller(a: Tensor, b: Tensor) -> Tensor:
        f(a, b)
        return a + b

    assert torch.compile(caller, fullgraph=True, backend="eager")(cache, scale).shape == (3,)


# --- pools ------------------------------------------------------------------------------------------------------------


class Pages(Pool):
    default: ClassVar = {"v_head_dim": "head_dim"}
    k: Annotated[Tensor, NHD]
    v: Annotated[Tensor, NHD(head_dim="v_head_dim")]


@contract
def both(k: Annotated[Tensor, NHD], v: Annotated[Tensor, NHD(head_dim="v_head_dim")]) -> str:
    return "ran"


def test_a_buffer_from_before_a_resize_says_so():
    pool = Pages.allocate(page=2, page_size=8, head=4, head_dim=16)
    old = pool.v
    pool.resize(page=5)
    assert both(pool.k, pool.v) == "ran"
    text = str(broken(both, pool.k, old))
    assert "v is Pages.v from before resize(page=5)" in text
    pool.resize(page=6)
    assert "from before resize(page=5)" in str(broken(both, pool.k, old)), "the resize that left it behind"


def test_layers_and_slabs_are_tagged_one_by_one():
    dims: dict[str, Any] = dict(page=2, page_size=8, head=4, head_dim=16)
    raw = torch.zeros(Pages.nbytes(layers=3, alignment=256, **dims), dtype=torch.uint8)
    pool = Pages.over(raw, layers=3, **dims)
    sources = [(_tags.find(t).source, _tags.find(t).layout.name) for t in [*pool.k, *pool.v]]  # type: ignore[union-attr]
    assert sources == [("Pages.k", "paged.nhd")] * 3 + [("Pages.v", "paged.nhd")] * 3
    other = Pages.allocate(layers=1, page=2, page_size=4, head=4, head_dim=16)
    text = str(broken(both, pool.k[0], other.v[0]))
    assert "v was allocated as Pages.v with slot=8, page_size=4; this call has slot=16, page_size=8" in text


def test_facts_and_layouts_of_one_name_do_not_collide():
    lonely = Layout("t.lonely", "row col -> row col", dtype=BF16)
    memory = lonely(row=2, col=3).empty()
    assert _tags.fact(memory, "layout") == "t.lonely"
    assert _tags.facts(memory, "layout") == ("t.lonely",)
