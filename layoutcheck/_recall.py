"""The lines of a guard that ask its memo, and what a memo's answer stands for.

A test may be skipped where a call is known if it depends on nothing but the tensors' metadata and on scalars that are
remembered with it. Everything else is made on every call: addresses, overlap, tags, the values of a sequence, what
beartype says of a type. So is a test of scalars alone, unless sizes are computed from them as well: a layer's number
differs in each of sixty calls that are otherwise the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from layoutcheck import _memo
from layoutcheck._dims import calls
from layoutcheck._rules import Agree, Condition, Each, NoOverlap, Rule
from layoutcheck._write import Writer

FEWEST = 3  # tensors for which a memo is faster than the comparisons
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")
_TARGETS = re.compile(r"^( *)((?:\w+, ?)*\w+),? = ")
_MORE = ("tag", "tags", "len", "sum")  # what a condition may ask that is neither metadata nor a scalar


def asks_more(under: tuple[Condition, ...], rule: Rule) -> bool:
    """Whether a rule depends on more than metadata and scalars."""
    if isinstance(rule, Each | Agree | NoOverlap):
        return True
    exprs = [r.expr for r in (*under, rule) if isinstance(r, Condition)]
    return any(call.op in _MORE for e in exprs for call in calls(e))


def _names(texts: Iterable[str]) -> set[str]:
    return {name for text in texts for name in _NAME.findall(text)}


def _scalars(w: Writer) -> list[str]:
    """The variables that hold what is passed or derived and is no tensor."""
    c = w.contract
    return [w.local(n) for n in (*c.signature.parameters, *c.derive) if n not in c.tensors]


def _assigned(lines: Iterable[str]) -> dict[str, bool]:
    """The variables that lines assign, and whether they do so in every call."""
    found: dict[str, bool] = {}
    for line in lines:
        if match := _TARGETS.match(line):
            indent, targets = match.groups()
            found |= {name: not indent or found.get(name, False) for name in targets.replace(" ", "").split(",")}
    return found


def settle(w: Writer, tests: list[str], at: int) -> None:
    """Write the tests that every call makes as line ``at``, and decide whether the guard gets a memo.

    It does not where the case of a ``Choose`` depends on memory, or decides what memory must be: such tests are not for
    ``torch.compile`` either. Tests of scalars that are not remembered are made always.
    """
    speaks = {test: _names([test]) for test in tests}
    kept = _names(w.lines)
    w.remembers = (
        _memo.AVAILABLE
        and len(w.contract.tensors) >= FEWEST
        and not any("_compiling" in names for names in (kept, *speaks.values()))
    )
    apart = {}
    if w.remembers:
        w.assigned = _assigned(w.lines)
        computed = {*w.assigned, *w.contract.tensors}
        kept = kept.union(*(names for names in speaks.values() if names & computed))
        scalars = _scalars(w)
        w.kept = [s for s in scalars if s in kept]
        others = {*scalars} - kept
        apart = {test: None for test, names in speaks.items() if names & others}
    w.always[:0] = apart
    w.lines.insert(at, f"_ok = {' and '.join(test for test in speaks if test not in apart) or 'True'}")


def guarded(w: Writer, lines: list[str], results: list[str]) -> list[str]:
    """The lines that set ``_ok``, from those that compare, with the memo's answer in their place where there is one."""
    c = w.contract
    w.globals |= {"_memo": _memo.Memo(), "_transforming": _memo.transforming}
    scalars = "".join(f"type({s}), {s}, " for s in w.kept).rstrip(" ")
    optional = [n for n, s in c.tensors.items() if s.optional]
    absent = {n: f"_no_{n}" for n in optional}
    w.globals |= zip(absent.values(), _memo.absent(len(optional)), strict=True)
    tensors = ", ".join(f"{absent[n]} if {n} is None else {n}" if n in absent else n for n in c.tensors)
    nested = " or ".join(f"{n} is not None and {n}.is_nested" if n in absent else f"{n}.is_nested" for n in c.tensors)
    needed = _names([*w.always, *results])
    dims = [n for n in w.assigned if n in needed and n not in ("_ok", "_", "_s")]
    unsure = [n for n in dims if not w.assigned[n]]
    together = "".join(f"{n}, " for n in dims).rstrip(" ")
    return [
        "_known = None",
        "if _eager and _memo.entries and not _transforming():",
        "    try:",
        f"        if not ({nested}):",
        "            for _scalars, _same, _dims in _memo.entries:",
        f"                if _scalars == ({scalars}) and _same({tensors}):",
        "                    _known = _dims",
        f"                    if _memo.credit < {_memo.FULL}:",
        "                        _memo.credit += 1",
        "                    break",
        "    except AttributeError:",
        "        pass",
        "if _known is None:",
        *(f"    {n} = None" for n in unsure),
        *(f"    {line}" for line in lines),
        "    if _eager and _ok and (_memo.learns or _memo.turn()):",
        f"        _memo.remember(({together}), ({scalars}), {tensors})",
        "else:",
        "    _ok = True",
        *([f"    {together} = _known"] if dims else []),
    ]
