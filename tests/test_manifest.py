"""Manifests: what a pool says of itself, and every field in which two differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layoutcheck import Difference, LayoutError, agree, contract, diff
from layoutcheck._manifest import MAX_BYTES, load
from layoutcheck.pools import MXFP8KVPool, PagedKVPool, UnifiedKVPool

DIMS: dict[str, Any] = dict(page=3, page_size=128, head=2, head_dim=64)


def fields(a: Any, b: Any, *names: str) -> list[str]:
    return [d.field for d in diff(a, b, names)]


def test_a_manifest_is_json_and_says_everything():
    pool = MXFP8KVPool.allocate(device="meta", **DIMS)
    made = json.loads(json.dumps(pool.manifest()))
    assert made == pool.manifest()
    assert made["pool"] == "MXFP8KVPool"
    assert made["dims"]["slot"] == 384
    assert made["buffers"]["k_scale"] == {
        "layout": "mxfp8.interleaved",
        "dtype": "float8_e8m0fnu",
        "shape": [3, 2, 32, 4, 2],
        "strides": [512, 256, 8, 2, 1],
        "nbytes": 1536,
        "fingerprint": made["buffers"]["k_scale"]["fingerprint"],
        "map_fingerprint": made["buffers"]["k_scale"]["map_fingerprint"],
    }
    assert load(json.dumps(made)) == made


def test_pools_of_one_declaration_and_one_size_agree():
    a, b = (MXFP8KVPool.allocate(device=d, **DIMS).manifest() for d in ("cpu", "meta"))
    assert diff(a, b) == []
    by_slot = MXFP8KVPool.allocate(device="meta", **{**DIMS, "page": 4} | {"page": 3})
    assert diff(a, by_slot.manifest()) == []


def test_every_field_that_differs_is_named():
    a = MXFP8KVPool.allocate(device="meta", **DIMS).manifest()
    b = MXFP8KVPool.allocate(device="meta", **{**DIMS, "page_size": 64}).manifest()
    names = fields(a, b)
    assert {"dims.page_size", "dims.slot", "buffers.k_scale.layout", "buffers.k_scale.shape"} <= set(names)
    assert all("head" not in n for n in names)
    by_field = {d.field: d for d in diff(a, b)}
    assert by_field["buffers.k_scale.layout"] == Difference("buffers.k_scale.layout", "mxfp8.interleaved", "mxfp8.flat")
    assert str(by_field["dims.page_size"]) == "dims.page_size: 128 and 64"


def test_layers_are_compared_one_by_one():
    dims = {k: v for k, v in DIMS.items() if k != "head_dim"}
    a = PagedKVPool.allocate(device="meta", layers=3, head_dim=[64, 64, 64], **dims).manifest()
    b = PagedKVPool.allocate(device="meta", layers=3, head_dim=[64, 32, 64], **dims).manifest()
    assert {"dims.head_dim", "buffers.k[1].shape", "buffers.v[1].shape"} <= set(fields(a, b))
    assert not [n for n in fields(a, b) if "[0]" in n or "[2]" in n]
    c = PagedKVPool.allocate(device="meta", layers=2, head_dim=64, **dims).manifest()
    assert "buffers.k[2]" in fields(a, c)


def test_a_pool_without_a_buffer_and_pools_of_other_kinds():
    dims = dict(page=3, page_size=1, dim=512)
    plain = UnifiedKVPool.allocate(device="meta", kv_dtype="bf16", **dims).manifest()
    quantised = UnifiedKVPool.allocate(device="meta", kv_dtype="fp8", **dims).manifest()
    assert "buffers.kv_scale" in fields(plain, quantised)
    assert "pool" in fields(plain, PagedKVPool.allocate(device="meta", **DIMS).manifest())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": 1}, {"x": True}, ["x"]),
        ({"x": 1}, {"x": 1.0}, []),
        ({"x": None}, {}, ["x"]),
        ({"x": [1, 2]}, {"x": [1, 2, 3]}, ["x"]),
        ({"x": [{"y": 1}]}, {"x": [{"y": 2}, {"y": 1}]}, ["x[0].y", "x[1]"]),
        ({"x": float("nan")}, {"x": float("nan")}, ["x"]),
        ({"x": {"y": 1}}, {"x": 3}, ["x"]),
        ({}, [], [""]),
        ("a", "a", []),
        (None, {"x": 1}, [""]),
    ],
)
def test_values_are_compared_as_they_are(a, b, expected):
    assert fields(a, b) == expected


def test_named_fields_only_and_absent_on_both_sides_is_no_agreement():
    assert fields({"x": 1, "y": 2}, {"x": 1, "y": 3}, "x") == []
    assert fields({"x": 1}, {"x": 1}, "x", "z") == ["z"]
    assert fields({"x": 1}, "nonsense", "x") == ["x"]


def deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_comes_from_outside_cannot_do_harm():
    mine = PagedKVPool.allocate(device="meta", **DIMS).manifest()
    for theirs in (
        deep(5000),
        nested(5000),
        {"dims": nested(5000)},
        {"x" * 100_000: 1},
        {"pool": "\x1b[31m" * 1000},
        3,
        None,
    ):
        for d in diff(mine, theirs):
            assert len(str(d)) < 500
            assert "\x1b" not in str(d)
    assert diff(deep(5000), deep(5000)), "what is too deep to compare is no agreement"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": "other"}', b"\xff\xfe{", '{"a":' * 100_000, "NaN", " " * (MAX_BYTES + 1)]
)
def test_text_that_is_no_manifest(text):
    with pytest.raises(ValueError, match="manifest"):
        load(text)


def test_a_contract_refuses_a_peer_and_names_the_fields():
    @contract(agree("local", "peer"))
    def connect(local: dict[str, Any], peer: Any) -> str:
        return "connected"

    a = MXFP8KVPool.allocate(device="meta", **DIMS).manifest()
    b = MXFP8KVPool.allocate(device="meta", **{**DIMS, "head_dim": 32}).manifest()
    assert connect(a, dict(a)) == "connected"
    with pytest.raises(LayoutError) as caught:
        connect(a, b)
    (violation,) = caught.value.violations
    assert (violation.argument, violation.rule) == ("peer", "peer")
    assert "dims.head_dim" in str(violation)
    assert "fields more" in str(violation)
    for hostile in (None, "x", deep(3000), {"pool": nested(3000)}):
        with pytest.raises(LayoutError):
            connect(a, hostile)
