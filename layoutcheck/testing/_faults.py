"""Calls with exactly one fault, each with its name, and what the guard must say of it.

Which changes there are is the business of ``_tensor_faults``, ``_call_faults`` and ``_value_faults``; whether a change
is a fault at all, that of ``_contradiction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from layoutcheck._dims import Inexact
from layoutcheck._errors import LayoutError, Violation
from layoutcheck.testing._call import Call
from layoutcheck.testing._call_faults import several
from layoutcheck.testing._calls import calls
from layoutcheck.testing._candidate import Candidate
from layoutcheck.testing._contents import tag
from layoutcheck.testing._contradiction import contradicts
from layoutcheck.testing._guard import refused
from layoutcheck.testing._tensor_faults import one_tensor
from layoutcheck.testing._value_faults import contents


@dataclass(frozen=True)
class Fault:
    """A call with one fault.

    ``name`` is the kind of fault, ``argument`` what was changed, ``call`` the faulty call and ``valid`` the one that it
    was made from. The guard must report one of ``rules`` on one of ``blamed``, and nothing of any other argument.
    ``launchable`` is false where no kernel may see the call, as for tensors without memory.
    """

    name: str
    argument: str
    call: Call
    valid: Call
    rules: frozenset[str]
    blamed: frozenset[str]
    launchable: bool = True

    def rejected(self) -> tuple[Violation, ...]:
        """What the guard says of the call; nothing is run."""
        return refused(self.call.fn, self.call.arguments)

    def missed(self) -> str | None:
        """Why the guard's answer is not the right one, in words; None where it is."""
        found = self.rejected()
        if not found:
            return f"{self.name} of {self.argument} was accepted"
        shown = ", ".join(f"{v.rule} of {v.argument}" for v in found)
        wanted = f"{' or '.join(sorted(self.rules))} of {' or '.join(sorted(self.blamed))}"
        if not any(v.argument in self.blamed and v.rule in self.rules for v in found):
            return f"{self.name} of {self.argument} was rejected for {shown}, not for {wanted}"
        if strange := [v for v in found if v.argument not in self.blamed]:
            return f"{self.name} of {self.argument}: {strange[0].argument} was blamed too ({shown}), and is right"
        return None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        return f"# {self.name} of {self.argument}\n{self.call!r}"


def faults(fn: Callable[..., Any], *, data: bool = True, **bounds: Any) -> st.SearchStrategy[Fault]:
    """Valid calls of a function with exactly one fault; arguments as for :func:`layoutcheck.testing.calls`."""
    return calls(fn, data=data, **bounds).flatmap(fault_of)


_NUMBERS = st.integers(0, 2**16 - 1)


def _spread(number: int) -> int:
    """Neighbouring numbers far apart: small ones are drawn more often, and should not all mean the first kinds."""
    return number * 2654435761 % 2**32 >> 8


@st.composite
def fault_of(draw: st.DrawFn, valid: Call) -> Fault:
    """One fault of a given call."""
    by_name: dict[str, list[Candidate]] = {}
    for c in candidates(valid):
        by_name.setdefault(c.name, []).append(c)
    options = list(by_name)
    start, which = (_spread(draw(_NUMBERS)) for _ in range(2))
    for i in range(len(options)):
        mine = by_name[options[(start + i) % len(options)]]
        for j in range(len(mine)):
            if (fault := made(valid, mine[(which + j) % len(mine)])) is not None:
                return fault
    return reject()


def every_fault(valid: Call) -> list[Fault]:
    """Every fault of a call, each kind for each argument once."""
    found: dict[tuple[str, str], Fault] = {}
    for candidate in candidates(valid):
        key = candidate.name, candidate.argument
        if key not in found and (fault := made(valid, candidate)) is not None:
            found[key] = fault
    return list(found.values())


def made(valid: Call, candidate: Candidate) -> Fault | None:
    """The fault, or None where the change is one that the contract allows."""
    try:
        changed = candidate.change()
    except (LayoutError, TypeError, Inexact):
        return None
    tag(valid.contract, {n: v for n, v in changed.items() if isinstance(v, torch.Tensor)}, valid.sizes)
    if not candidate.sure and not contradicts(valid, changed):
        return None
    call = valid.with_arguments(**changed)
    return Fault(
        candidate.name, candidate.argument, call, valid, candidate.rules, candidate.blamed, candidate.launchable
    )


def candidates(valid: Call) -> Iterator[Candidate]:
    """Every change that may be a fault of a call."""
    for name, form in valid.forms.items():
        if name in valid.arguments:  # what is reached through another argument is not ours to replace
            yield from one_tensor(valid, name, form)
            yield from contents(valid, name, form)
    yield from several(valid)
