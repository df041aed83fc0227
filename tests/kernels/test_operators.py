"""Every kernel as an operator: torch's own checks of it, and the same results inside a compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layoutcheck import LayoutError, kernels
from layoutcheck.kernels import operators
from layoutcheck.testing import calls

SMALL: dict[str, Any] = dict(token=(1, 3), page=(1, 2), head=(1, 2), slot=(1, 256), seq=(1, 2), entry=(1, 3))
# Where torch 2.13 cannot compare what an operator must not change: 8-bit floats that are only read.
SCHEMA = ("test_schema",)
OTHERS = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


def bounds(fn: Any) -> dict[str, Any]:
    names = {*fn.contract.known_names(), *fn.contract.signature.parameters}
    return {n: b for n, b in SMALL.items() if n in names}


def eight_bits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1


def has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.float().isnan().any())


class Handed(Exception):
    """What a wrapper hands to its operator."""


class Catch(TorchDispatchMode):
    """Stops at an operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator:
            raise Handed(*args)
        return func(*args, **(kwargs or {}))


def operands(fn: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    with Catch(fn.op._opoverload), pytest.raises(Handed) as handed:
        fn(**arguments)
    return handed.value.args


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    # clone() would pack a padded view, and a kernel may refuse the view and take the packed copy.
    return {
        n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v)
        if isinstance(v, Tensor)
        else v
        for n, v in arguments.items()
    }


def _run(fn: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A kernel's arguments and results after a call on copies."""
    arguments = _copied(arguments)
    try:
        return arguments, fn(**arguments)
    except LayoutError:  # quantize_mxfp8 has a rule that its contract cannot say
        reject()


@pytest.mark.parametrize("name", kernels.__all__)
def test_opcheck(name):
    fn = getattr(operators, name)

    @settings(max_examples=2, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None)
    @given(calls(getattr(kernels, name), **bounds(fn)))
    def run(call: Any) -> None:
        if any(isinstance(v, Tensor) and v.numel() == 0 for v in call.arguments.values()):
            reject()  # opcheck of torch 2.13 cannot clone an empty slice: it asks for a negative size
        given, result = _run(getattr(kernels, name), call.arguments)
        if any(map(has_nan, [*given.values(), *(result if isinstance(result, tuple) else [result])])):
            reject()  # it also takes NaN for a difference
        handed = operands(fn, call.arguments)
        tests = OTHERS if any(map(eight_bits, handed)) else (*SCHEMA, *OTHERS)
        results = torch.library.opcheck(fn.op, handed, test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}

    run()


def as_bytes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(value.clone(memory_format=torch.contiguous_format).untyped_storage())
    return [as_bytes(v) for v in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", kernels.__all__)
def test_the_same_results_inside_a_graph(name):
    fn, original = getattr(operators, name), getattr(kernels, name)

    @settings(max_examples=2, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None)
    @given(calls(original, **bounds(fn)))
    def run(call: Any) -> None:
        torch._dynamo.reset()
        second = _copied(call.arguments)
        first, wanted = _run(original, call.arguments)
        got = torch.compile(lambda given: fn(**given), backend="aot_eager", fullgraph=True)(second)
        assert as_bytes(got) == as_bytes(wanted)
        for n, value in first.items():
            assert as_bytes(second[n]) == as_bytes(value), n

    run()
