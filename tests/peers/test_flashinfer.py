"""The contracts of FlashInfer's wrappers and of appending, on stand-in selves: a GPU is not needed to be refused."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import flashinfer
import pytest
import torch
from flashinfer import page
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as Decode
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as Prefill

from layoutcheck import LayoutError, mode, peers


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    peers.install("flashinfer")
    yield
    peers.uninstall("flashinfer")


def tables(prefix: str = "", dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """Three sequences over 2, 0 and 3 pages."""
    return {
        f"{prefix}indptr": torch.tensor([0, 2, 2, 5], dtype=dtype),
        f"{prefix}indices": torch.tensor([4, 1, 0, 2, 5], dtype=dtype),
        f"{prefix}last_page_len": torch.tensor([3, 0, 8], dtype=dtype),
    }


def let_through(call: Any, **arguments: Any) -> bool:
    """Whether FlashInfer's own code is reached."""
    try:
        call(**arguments)
    except LayoutError:
        return False
    except Exception:
        return True
    return True


WRONG_TABLES = {
    "int64": lambda t: dict(indptr=t["indptr"].long()),
    "int64 indices": lambda t: dict(indices=t["indices"].long()),
    "int64 lengths": lambda t: dict(last_page_len=t["last_page_len"].long()),
    "indptr without the end": lambda t: dict(indptr=t["indptr"][:-1]),
    "2-D indices": lambda t: dict(indices=t["indices"][None]),
    "one length too many": lambda t: dict(last_page_len=torch.cat([t["last_page_len"], t["last_page_len"][:1]])),
    "float lengths": lambda t: dict(last_page_len=t["last_page_len"].float()),
}
WRONG_VALUES = {
    "indptr that falls": lambda t: dict(indptr=torch.tensor([0, 3, 2, 5], dtype=torch.int32)),
    "indptr past the indices": lambda t: dict(indptr=torch.tensor([0, 2, 2, 6], dtype=torch.int32)),
    "lengths instead of a prefix sum": lambda t: dict(indptr=torch.tensor([2, 0, 3, 0], dtype=torch.int32)),
    "more in a page than it holds": lambda t: dict(last_page_len=torch.tensor([3, 0, 9], dtype=torch.int32)),
}


def plan_arguments(which: str) -> tuple[Any, dict[str, Any], str]:
    if which == "decode":
        arguments = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=8)
        return Decode.plan, arguments | dict(self=types.SimpleNamespace(_backend="fa2")), ""
    arguments = dict(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, page_size=8)
    arguments |= dict(
        self=types.SimpleNamespace(_backend="fa2"), qo_indptr=torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    )
    return Prefill.plan, arguments, "paged_kv_"


@pytest.mark.parametrize("which", ["decode", "prefill"])
class TestPlan:
    def test_right_tables_go_through(self, which):
        plan, arguments, prefix = plan_arguments(which)
        with mode("values"):
            assert let_through(plan, **arguments, **tables(prefix))
            longer = tables(prefix)
            longer[f"{prefix}indices"] = torch.cat(
                [longer[f"{prefix}indices"], torch.full((7,), -1, dtype=torch.int32)]
            )
            assert let_through(plan, **arguments, **longer)
            strided = tables(prefix)
            strided[f"{prefix}indices"] = torch.stack([strided[f"{prefix}indices"]] * 2, 1)[:, 0]
            assert let_through(plan, **arguments, **strided)

    @pytest.mark.parametrize("wrong", WRONG_TABLES)
    def test_wrong_tables_are_refused(self, which, wrong):
        plan, arguments, prefix = plan_arguments(which)
        changed = {f"{prefix}{n}": t for n, t in WRONG_TABLES[wrong](tables()).items()}
        with pytest.raises(LayoutError, match=next(iter(changed))):
            plan(**arguments, **tables(prefix) | changed)

    @pytest.mark.parametrize("wrong", WRONG_VALUES)
    def test_wrong_values_are_refused_in_values_mode(self, which, wrong):
        plan, arguments, prefix = plan_arguments(which)
        changed = {f"{prefix}{n}": t for n, t in WRONG_VALUES[wrong](tables()).items()}
        assert let_through(plan, **arguments, **tables(prefix) | changed)
        with mode("values"), pytest.raises(LayoutError, match=next(iter(changed))):
            plan(**arguments, **tables(prefix) | changed)

    def test_query_heads_that_are_no_multiple_are_refused(self, which):
        plan, arguments, prefix = plan_arguments(which)
        with pytest.raises(LayoutError, match=r"num_qo_heads % num_kv_heads"):
            plan(**arguments | dict(num_qo_heads=7), **tables(prefix))


def test_cudnn_may_have_wide_query_offsets():
    plan, arguments, prefix = plan_arguments("prefill")
    wide = arguments | dict(qo_indptr=arguments["qo_indptr"].long())
    assert not let_through(plan, **wide, **tables(prefix))
    assert let_through(plan, **wide | dict(self=types.SimpleNamespace(_backend="cudnn")), **tables(prefix))


def cache(layout: str, pages: int = 6, page_size: int = 8, heads: int = 2, dim: int = 64) -> torch.Tensor:
    shape = (pages, 2, page_size, heads, dim) if layout == "NHD" else (pages, 2, heads, page_size, dim)
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("wrapper", [Decode, Prefill], ids=["decode", "prefill"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
class TestRun:
    def self(self, layout: str) -> Any:
        return types.SimpleNamespace(_kv_layout=layout, _num_kv_heads=2, _num_qo_heads=8)

    def test_right_caches_go_through(self, wrapper, layout):
        q, both = torch.zeros(3, 8, 64, dtype=torch.bfloat16), cache(layout)
        for given in (both, tuple(both.unbind(1)), cache(layout, dim=128)[..., :64]):
            assert let_through(wrapper.run, self=self.self(layout), q=q, paged_kv_cache=given)

    @pytest.mark.parametrize(
        ("change", "argument"),
        [
            (lambda c, n: cache("HND" if n == "NHD" else "NHD"), "head"),
            (lambda c, n: cache(n, heads=4), "head"),
            (lambda c, n: cache(n, dim=32), "q_dim"),
            (lambda c, n: (c[:, 0], c[:-1, 1]), "v_cache"),
            (lambda c, n: torch.stack([c, c], -1)[..., 0], "k_cache"),
        ],
        ids=["the other layout", "other heads", "another head_dim", "fewer V pages", "head_dim with a stride"],
    )
    def test_wrong_caches_are_refused(self, wrapper, layout, change, argument):
        q = torch.zeros(3, 8, 64, dtype=torch.bfloat16)
        with pytest.raises(LayoutError, match=argument):
            wrapper.run(self.self(layout), q, change(cache(layout), layout))


def append_arguments(layout: str) -> dict[str, Any]:
    rows = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    return dict(
        append_key=rows, append_value=rows, batch_indices=torch.tensor([0, 0, 2, 2]),
        positions=torch.tensor([9, 10, 22, 23]), paged_kv_cache=cache(layout), kv_layout=layout, **tables("kv_"),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["NHD", "HND"])
class TestAppend:
    def test_a_right_call_reaches_the_kernel(self, layout):
        with mock.patch.object(page, "_append_paged_kv_cache_kernel") as kernel, mode("values"):
            flashinfer.append_paged_kv_cache(**append_arguments(layout))
            assert kernel.call_count == 1

    def test_what_lies_behind_the_last_page_is_not_read(self, layout):
        arguments = append_arguments(layout)
        longer = torch.cat([arguments["kv_indices"], torch.tensor([-1, 2**30], dtype=torch.int32)])
        with mock.patch.object(page, "_append_paged_kv_cache_kernel") as kernel, mode("values"):
            flashinfer.append_paged_kv_cache(**arguments | dict(kv_indices=longer))
            assert kernel.call_count == 1

    @pytest.mark.parametrize(
        ("change", "argument"),
        [
            (lambda a: dict(append_value=a["append_value"][:3]), "append_value"),
            (lambda a: dict(append_key=a["append_key"][..., :32]), "k_cache|append_value"),
            (lambda a: dict(batch_indices=a["batch_indices"][:3]), "batch_indices"),
            (lambda a: dict(positions=a["positions"].float()), "positions"),
            (lambda a: dict(kv_indptr=a["kv_indptr"][1:]), "kv_indptr"),
            (lambda a: dict(paged_kv_cache=a["paged_kv_cache"].transpose(2, 3)), "k_cache"),
            (lambda a: dict(kv_layout="HDN"), "kv_layout"),
            (lambda a: dict(paged_kv_cache=(a["paged_kv_cache"][:, 0], a["paged_kv_cache"][:, 1].clone())), "strides"),
        ],
        ids=["fewer values", "half a head", "short batch", "float positions", "short indptr", "the other layout",
             "no layout", "unequal strides"],
    )  # fmt: skip
    def test_wrong_calls_are_refused(self, layout, change, argument):
        arguments = append_arguments(layout)
        with pytest.raises(LayoutError, match=argument):
            flashinfer.append_paged_kv_cache(**arguments | change(arguments))

    @pytest.mark.parametrize(
        "change",
        [
            dict(batch_indices=torch.tensor([0, 0, 3, 2])),
            dict(kv_indices=torch.tensor([4, 1, 0, 2, 6])),
            dict(positions=torch.tensor([9, -1, 22, 23])),
        ],
        ids=["a sequence that is not there", "a page that is not there", "a position before the first"],
    )
    def test_wrong_values_are_refused_in_values_mode(self, layout, change):
        with mode("values"), pytest.raises(LayoutError, match=next(iter(change))):
            flashinfer.append_paged_kv_cache(**append_arguments(layout) | change)
