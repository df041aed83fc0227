"""Lists of integers of whose values, sum or number a contract speaks, such as the rows of each group of a GEMM.

The sum and the number are sizes like any other: they are chosen with the dims that they must equal, and the list is
made from them, of values that each keep their rule.
"""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layoutcheck._contract import Contract
from layoutcheck._dims import Const, Expr, Name, Op, evaluate
from layoutcheck._dims import arguments as mentioned
from layoutcheck._rules import VALUE, Condition, Each
from layoutcheck._specs import ScalarSpec
from layoutcheck.testing._sizes import Impossible

_MOST = 4
_HIGHEST = 512


def spoken_of(contract: Contract) -> list[str]:
    """The arguments that are such lists."""
    said: set[str] = set()
    for under, rule in contract.conditions:
        said |= {rule.arguments[0]} if isinstance(rule, Each) else set()
        said |= {n for r in (*under, rule) if isinstance(r, Condition) for n in mentioned(r.expr)}
    return [n for n, s in contract.scalars.items() if n in said and _is_list(s)]


def _is_list(spec: ScalarSpec) -> bool:
    kind = typing.get_origin(spec.type) or spec.type
    values = [a for a in typing.get_args(spec.type) if a is not Ellipsis]
    return kind in (list, tuple, Sequence) and values in ([], [int])


def total(name: str) -> str:
    """The size that is the sum of a list."""
    return f"{name}.sum"


def number(name: str) -> str:
    """The size that is the number of its values."""
    return f"{name}.len"


def with_sizes(expr: Expr, lists: Sequence[str]) -> Expr:
    """The expression with the sum and the number of each list as sizes."""
    match expr:
        case Op("sum", (Name(name),)) if name in lists:
            return Name(total(name))
        case Op("len", (Name(name),)) if name in lists:
            return Name(number(name))
        case Op(op, args):
            return Op(op, tuple(with_sizes(a, lists) for a in args))
    return expr


def divisible(contract: Contract, lists: Sequence[str]) -> Iterator[Expr]:
    """What follows for a sum where every value is a multiple of something."""
    for _, rule in contract.conditions:
        match rule:
            case Each((name,), Op("==", (Op("%", (Name(value), unit)), Const(0)))) if name in lists and value == VALUE:
                yield Op("==", (Op("%", (Name(total(name)), unit)), Const(0)))


def values(contract: Contract, name: str, sizes: Mapping[str, Any], rnd: random.Random) -> Any:
    """A list with the sum and the number that were chosen, if they were, of values that keep every rule about one."""
    rules = [r.expr for _, r in contract.conditions if isinstance(r, Each) and r.arguments == (name,)]
    whole, count = sizes.get(total(name)), sizes.get(number(name))
    highest = _HIGHEST if whole is None else whole
    kept = [v for v in range(highest + 1) if all(evaluate(e, {**sizes, VALUE: v}) for e in rules)]
    counts = range(_MOST + 1) if count is None else [count]
    if whole is None:
        count = rnd.choice(counts)
        if count and not kept:
            raise Impossible(f"{name} has no value that it may have")
        made = [rnd.choice(kept) for _ in range(count)]
    else:
        made = _split(whole, counts, kept, rnd)
    return tuple(made) if (typing.get_origin(_type(contract, name)) or _type(contract, name)) is tuple else made


def _type(contract: Contract, name: str) -> Any:
    return contract.scalars[name].type


def _split(whole: int, counts: Sequence[int], kept: Sequence[int], rnd: random.Random) -> list[int]:
    """So many of the values, as often as wanted, that their sum is ``whole``."""
    within = (1 << (whole + 1)) - 1
    reached = [1]  # bit s of the nth: n values can have the sum s
    for _ in range(max(counts)):
        last = reached[-1]
        following = 0
        for value in kept:
            following |= last << value
        reached.append(following & within)
    fitting = [n for n in counts if reached[n] >> whole & 1]
    if not fitting:
        raise Impossible(f"no values have the sum {whole}")
    made: list[int] = []
    for left in range(rnd.choice(fitting) - 1, -1, -1):
        rest = whole - sum(made)
        made.append(rnd.choice([v for v in kept if v <= rest and reached[left] >> (rest - v) & 1]))
    return made
