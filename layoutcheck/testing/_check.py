"""Everything at once, for a test of one line: valid calls, faults, red zones, a reference, the probe, and how much the
kernel's own numbers would notice if the guard were off.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from layoutcheck._errors import LayoutError
from layoutcheck.testing._call import Call, clone
from layoutcheck.testing._calls import calls
from layoutcheck.testing._child import in_child
from layoutcheck.testing._faults import Fault, every_fault, faults
from layoutcheck.testing._guard import apply, contract_of, refused
from layoutcheck.testing._probe import _call as telling_call
from layoutcheck.testing._probe import probe
from layoutcheck.testing._redzones import Run, _pairs, observe

T = TypeVar("T")
_ALL = list(HealthCheck)


@dataclass(frozen=True)
class Report:
    """What :func:`check` did. ``str`` is a summary of a few lines.

    ``valid`` and ``faulty`` count the calls that the guard judged, ``kinds`` the faults by name, ``runs`` the calls
    that ran over red zones, ``refused`` those that the function refused itself, ``probed`` the arguments whose layout
    was seen in memory. ``mutants`` are the faults that were run without the guard, ``unnoticed`` says of those that
    changed nothing which they are.
    """

    name: str
    valid: int
    faulty: int
    kinds: dict[str, int]
    runs: int
    refused: int
    probed: tuple[str, ...]
    mutants: int
    unnoticed: tuple[str, ...]

    @property
    def score(self) -> float:
        """The share of the faults that the numbers notice by themselves."""
        return 1.0 if not self.mutants else 1.0 - len(self.unnoticed) / self.mutants

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.valid} valid calls accepted, {self.faulty} faulty calls of {len(self.kinds)} kinds "
            f"rejected for the right reason; {self.runs} calls kept inside of their memory"
            + (f" ({self.refused} more were refused by the function itself)" if self.refused else "")
        ]
        lines += [f"   {line}" for line in self.probed]
        if self.mutants:
            lines.append(
                f"   without the guard, {self.mutants - len(self.unnoticed)} of {self.mutants} faults "
                f"({self.score:.0%}) crash or change a number; unnoticed:"
            )
            lines += [f"      {line}" for line in self.unnoticed]
        return "\n".join(lines)


def check(
    fn: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    *,
    examples: int = 100,
    runs: int = 5,
    mutants: int = 30,
    adjust: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    partial: Iterable[str] = (),
    probes: Iterable[str] | None = None,
    refuses: bool = False,
    isolated: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    **bounds: Any,
) -> Report:
    """Test a function with a contract from the contract alone. Raises ``AssertionError`` with the smallest bad call.

    1. ``examples`` valid calls: the guard accepts each. 2. As many faulty ones: it rejects each for the right reason.
    3. ``runs`` calls run over red zones (:func:`layoutcheck.testing.redzones`, ``partial`` as there), and the result
    and the arguments are what ``reference`` makes of copies of the same arguments: equal bytes for one-byte elements,
    ``torch.testing.assert_close`` with ``rtol`` and ``atol`` otherwise. 4. Every argument of which an index selects the
    rows that are written in a layout is probed (``probes``: only these). 5. ``mutants`` faults run without the guard,
    each in a child process: the report says which of them no number would notice.

    ``adjust`` gets the arguments of a call that will run and returns those to replace: what a contract cannot say, as
    that two index arguments belong together. ``refuses``: the function itself may refuse, with a ``LayoutError``, what
    its contract allows. ``isolated`` runs the calls in child processes too, for a kernel that may crash. ``bounds`` are
    those of :func:`layoutcheck.testing.calls`.
    """
    made = contract_of(fn)
    partial = tuple(partial)
    counted: collections.Counter[str] = collections.Counter()

    def accept(call: Call) -> None:
        if found := refused(fn, call.arguments):
            raise AssertionError(f"a valid call was rejected:\n{found[0]}\n{call!r}")
        counted["valid"] += 1

    def reject(fault: Fault) -> None:
        if why := fault.missed():
            raise AssertionError(f"{why}\n{fault!r}")
        counted[fault.name] += 1

    def run(call: Call) -> None:
        call = adjusted(call, adjust)
        done = _observed(call, partial, isolated)
        if done is None:
            if not refuses:
                raise AssertionError(f"{made.name} refused a call that its contract allows:\n{call!r}")
            counted["refused"] += 1
            return
        wrong = list(done.findings)
        if reference is not None and not wrong:
            wrong += differences(call, done, expected(call, reference), rtol, atol)
        if wrong:
            raise AssertionError("\n".join([f"{made.name} does not do what its contract says:", *wrong, repr(call)]))
        counted["runs"] += 1

    for_each(calls(fn, data=False, **bounds), accept, examples)
    for_each(faults(fn, data=False, **bounds), reject, examples)
    for_each(calls(fn, **bounds), run, runs)
    probed = tuple(_probed(fn, probes, isolated, bounds))
    tried, unnoticed = mutation(fn, reference, mutants, adjust, partial, rtol, atol, bounds) if mutants else (0, ())
    kinds = {n: k for n, k in counted.items() if n not in ("valid", "refused", "runs")}
    return Report(
        made.name, counted["valid"], sum(kinds.values()), kinds, counted["runs"], counted["refused"], probed,
        tried, unnoticed,
    )  # fmt: skip


def for_each(strategy: st.SearchStrategy[T], test: Callable[[T], None], examples: int) -> None:
    """Run a test on examples of a strategy; a failure is that of the smallest example."""
    if not examples:
        return

    @settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=_ALL, print_blob=False,
        phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
    )  # fmt: skip
    @given(strategy)
    def each(example: T) -> None:
        test(example)

    each()


def adjusted(call: Call, adjust: Callable[[dict[str, Any]], dict[str, Any]] | None) -> Call:
    """The call with what a contract cannot say put right."""
    return call if adjust is None else call.with_arguments(**adjust(dict(call.arguments)))


def _observed(call: Call, partial: tuple[str, ...], isolated: bool) -> Run | None:
    """A run over red zones; None where the function refuses the call itself."""
    if not isolated:
        try:
            return observe(call, partial=partial)
        except LayoutError:
            return None
    done = in_child(lambda: observe(call, partial=partial))
    if done.value is not None:
        return done.value  # type: ignore[no-any-return]
    if done.error and done.error.startswith("LayoutError"):
        return None
    return Run((f"the call did not survive: {done.crash or done.error}",), None, {})


def _probed(
    fn: Callable[..., Any], probes: Iterable[str] | None, isolated: bool, bounds: dict[str, Any]
) -> Iterator[str]:
    made = contract_of(fn)
    laid_out = [n for n, s in made.tensors.items() if s.writes and s.writes.at and all(f.layout for _, f in s.forms)]
    for name in laid_out if probes is None else probes:
        if bounds.get(name, 0) is None:
            continue
        found = probe(fn, name, isolated=isolated, **bounds)
        if not found.declared:
            raise AssertionError(f"{contract_of(fn).name}: {found}")
        yield str(found)


# --- against a reference ----------------------------------------------------------------------------------------------


def expected(call: Call, reference: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """What a reference returns for copies of the arguments, and the copies as it leaves them."""
    copies = {n: clone(v) if isinstance(v, torch.Tensor) else v for n, v in call.arguments.items()}
    return apply(reference, call.contract, copies), copies


def differences(
    call: Call, done: Run, wanted: tuple[Any, dict[str, Any]], rtol: float | None, atol: float | None
) -> Iterator[str]:
    """Where results and arguments are not what the reference made of them."""
    result, arguments = wanted
    if isinstance(result, torch.Tensor | tuple | list) and type(result) in (tuple, list, torch.Tensor):
        for name, got, want in _pairs("result", done.result, result):
            yield from _difference(name, got, want, rtol, atol)
    for name, want in arguments.items():
        if isinstance(want, torch.Tensor) and call.contract.tensors[name].writes is not None:
            yield from _difference(name, done.arguments[name], want, rtol, atol)


def _difference(
    name: str, got: torch.Tensor, want: torch.Tensor, rtol: float | None, atol: float | None
) -> Iterator[str]:
    if got.shape != want.shape or got.dtype != want.dtype:
        yield f"{name} is {got.dtype} {tuple(got.shape)}, the reference's is {want.dtype} {tuple(want.shape)}"
        return
    if got.element_size() == 1 and rtol is None and atol is None:
        bad = (got.view(torch.uint8) != want.view(torch.uint8)).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            own, other = (int(t.view(torch.uint8)[at]) for t in (got, want))
            yield f"{name}{list(at)} holds {own:#04x}, the reference's {other:#04x}, and {len(bad) - 1} more differ"
        return
    wide = torch.float64 if got.dtype == torch.float64 else torch.float32
    try:
        if got.dtype.is_floating_point:
            tolerance = _tolerance(got.dtype, rtol, atol)
            torch.testing.assert_close(
                got.to(wide), want.to(wide), equal_nan=True, rtol=tolerance[0], atol=tolerance[1]
            )
        else:
            torch.testing.assert_close(got, want)
    except AssertionError as error:
        yield f"{name} is not the reference's: {' '.join(str(error).split())}"


def _tolerance(dtype: torch.dtype, rtol: float | None, atol: float | None) -> tuple[float, float]:
    """torch's own tolerance for the dtype, where none is given."""
    defaults = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}
    usual = defaults.get(dtype, (1e-7, 1e-7))
    return usual[0] if rtol is None else rtol, usual[1] if atol is None else atol


# --- what the numbers would notice ------------------------------------------------------------------------------------


def mutation(
    fn: Callable[..., Any],
    reference: Callable[..., Any] | None,
    most: int,
    adjust: Callable[[dict[str, Any]], dict[str, Any]] | None,
    partial: tuple[str, ...],
    rtol: float | None,
    atol: float | None,
    bounds: dict[str, Any],
) -> tuple[int, tuple[str, ...]]:
    """How many faults were run without the guard, and of those that nothing noticed: which, and why."""
    written = [n for n, s in contract_of(fn).tensors.items() if s.writes is not None and bounds.get(n, 0) is not None]
    valid = adjusted(telling_call(fn, written[0], bounds) if written else _any_call(fn, bounds), adjust)
    unguarded = _unguarded(fn)
    wanted = expected(valid, reference or unguarded)
    tried = [f for f in every_fault(valid) if f.launchable]
    step = max(1, -(-len(tried) // most))
    unnoticed = []
    for fault in tried[::step]:
        outcome = in_child(functools.partial(_noticed, fault, unguarded, wanted, rtol, atol))
        if outcome.value == "":
            unnoticed.append(
                f"{fault.name} of {fault.argument}: every result and every byte written is the valid call's. "
                "Only the guard tells them apart"
            )
    return len(tried[::step]), tuple(unnoticed)


def _any_call(fn: Callable[..., Any], bounds: dict[str, Any]) -> Call:
    found: list[Call] = []
    for_each(calls(fn, **bounds), found.append, 20)
    return max(found, key=lambda c: sum(v.numel() for v in c.arguments.values() if isinstance(v, torch.Tensor)))


def _unguarded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, below its guard."""
    inner = getattr(fn, "__wrapped__", fn)
    return inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner


def _noticed(
    fault: Fault,
    unguarded: Callable[..., Any],
    wanted: tuple[Any, dict[str, Any]],
    rtol: float | None,
    atol: float | None,
) -> str:
    """What a comparison of numbers says of a fault; empty where it says nothing. Runs in a child."""
    open_ = _free(unguarded, fault)
    done = observe(open_, partial=tuple(fault.call.contract.tensors))
    if outside := [f for f in done.findings if "outside of every element" in f]:
        return outside[0]
    result, arguments = wanted
    for name, got, want in _pairs("result", done.result, result):
        for text in _difference(name, got, want, rtol, atol):
            return text
    if type(done.result) is not type(result):
        return "the result is of another type"
    for name, spec in fault.call.contract.tensors.items():
        right, left = arguments.get(name), done.arguments.get(name)
        if spec.writes is None or not isinstance(right, torch.Tensor):
            continue
        if not isinstance(left, torch.Tensor):
            return f"{name} is gone"
        if name in fault.argument.split(" and "):
            left, right = _flat(left, right.dtype), _flat(right, right.dtype)
        for text in _difference(name, left, right, rtol, atol):
            return text
    return ""


def _flat(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements in row-major order: what a test that only compares bytes would see."""
    flat = value.contiguous().reshape(-1)
    return flat.view(dtype) if flat.element_size() == dtype.itemsize else flat


def _free(unguarded: Callable[..., Any], fault: Fault) -> Call:
    """The faulty call of the function below its guard, with the contract for what it says of writing."""

    @functools.wraps(unguarded)
    def call(*args: Any, **kwargs: Any) -> Any:
        return unguarded(*args, **kwargs)

    call.contract = fault.call.contract  # type: ignore[attr-defined]
    return replace(fault.call, fn=call)
