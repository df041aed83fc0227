"""What indices and prefix sums hold, so that every rule about values is kept; and tags that rules ask for."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from typing import Any

import torch

from layoutcheck import _entries, _tags
from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Name, Op, evaluate
from layoutcheck._rules import Condition, Forbids, Index, Indptr, Needs, Together
from layoutcheck.testing._sizes import Impossible

_MANY = 4096


def live_values(rule: Index, sizes: Mapping[str, Any]) -> list[int]:
    """The values of an index that select something."""
    start, stop = int(evaluate(rule.start, sizes)), int(evaluate(rule.stop, sizes))
    every = torch.arange(start, max(start, min(stop, start + _MANY)))
    if stop > start + _MANY:  # the last one too
        every = torch.cat([every, torch.tensor([stop - 1])])
    return every[~_entries.skipped(rule, every, sizes)].tolist()


def skipped_values(rule: Index, sizes: Mapping[str, Any]) -> list[int]:
    """Some values that the callable ignores."""
    options = torch.tensor((-1, 0, -2))
    return options[_entries.skipped(rule, options, sizes)].tolist()


def index_values(
    rule: Index,
    read: torch.Tensor,
    sizes: Mapping[str, Any],
    rnd: random.Random,
    unique: bool,
    mixed: bool,
    taken: Container[int] = (),
    indptr: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """Values that keep an index rule, one for each entry; ``read`` is true for those that the callable reads.

    None is one of ``taken``; ``indptr`` is the prefix sum whose segments they name, if they do. Where ``mixed``,
    skipped values are among them, and what is not read may be out of range.
    """
    if indptr is None:
        chosen = iter(_read_values(rule, int(read.sum()), sizes, rnd, unique, mixed, taken))
    else:
        chosen = iter(_segment_values(rule, read, sizes, indptr))
    dead = (-1, int(evaluate(rule.stop, sizes)), 2**30, 0) if mixed else (0,)
    return tuple(next(chosen) if r else rnd.choice(dead) for r in read.reshape(-1).tolist())


def _read_values(
    rule: Index,
    count: int,
    sizes: Mapping[str, Any],
    rnd: random.Random,
    unique: bool,
    mixed: bool,
    taken: Container[int],
) -> tuple[int, ...]:
    live, ignored = [v for v in live_values(rule, sizes) if v not in taken], skipped_values(rule, sizes)
    if not count:
        return ()
    if not live and not ignored:
        raise Impossible("an index without a value that it may have")
    if not mixed and len(live) >= count:
        return tuple(live[:count])
    if unique or not live:
        values = rnd.sample(live, min(count, len(live)))
    else:
        values = [rnd.choice((live[0], live[-1], rnd.choice(live))) for _ in range(count)]
    if len(values) < count and not ignored:
        raise Impossible("more rows than places for them")
    result: list[int] = [*values, *(rnd.choice(ignored) for _ in range(count - len(values)))]
    if ignored:
        result = [rnd.choice(ignored) if rnd.random() < 0.2 else v for v in result]
    rnd.shuffle(result)
    return tuple(result)


def _segment_values(rule: Index, read: torch.Tensor, sizes: Mapping[str, Any], indptr: torch.Tensor) -> tuple[int, ...]:
    own = _entries.segments(len(read), indptr).reshape(-1, *[1] * (read.dim() - 1)).expand(read.shape)[read].tolist()
    if not set(own) <= set(live_values(rule, sizes)):
        raise Impossible("more segments than the index may name")
    return tuple(own)


def indptr_values(
    rule: Indptr, count: int, sizes: Mapping[str, Any], rnd: random.Random, longest: Any = None
) -> tuple[int, ...]:
    """``count`` values of a prefix sum; no step is above ``longest``, a number or a tensor with one for each step."""
    stop = int(evaluate(rule.stop, sizes))
    if count == 0 or (count == 1 and stop and not rule.capacity):
        raise Impossible("a prefix sum needs a first entry and a last one")
    each = longest.tolist() if isinstance(longest, torch.Tensor) else [longest] * (count - 1)
    most = [stop if n is None else min(n, stop) for n in each]
    if not rule.capacity and sum(most) < stop:
        raise Impossible("too few steps of a prefix sum")
    result = [0]
    for i, step in enumerate(most):
        left = stop - result[-1]
        least = 0 if rule.capacity else max(0, left - sum(most[i + 1 :]))
        result.append(result[-1] + rnd.randint(least, min(step, left)))
    return tuple(result)


def tag(contract: Contract, built: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Declare of each tensor's memory what a rule ``tag(x, "fact") == ...`` asks for."""
    for _, rule in contract.conditions:
        match rule:
            case Condition(Op("==", (Op("tag", (Name(n), Const(fact))), Const() | Name() as wanted))) if n in built:
                value = evaluate(wanted, sizes) if isinstance(wanted, Const) or wanted.name in sizes else None
                if fact == "layout" and isinstance(value, str):
                    _tags.tag(built[n], value)
                elif value is not None:
                    _tags.tag(built[n], **{fact: value})


def wrong_presence(rule: Any, given: Container[str]) -> set[str]:
    """The arguments that a rule asks for and are not given, or refuses and are given."""
    match rule:
        case Needs(args):
            return {a for a in args if a not in given}
        case Forbids(args):
            return {a for a in args if a in given}
        case Together(args) if any(a in given for a in args):
            return {a for a in args if a not in given}
    return set()
