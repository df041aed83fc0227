"""What a contract may say beyond the shape of its arguments. Each is a small frozen value; checking is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from layoutcheck._dims import Expr, Name, brief, names, parse, parse_condition, parse_either


@dataclass(frozen=True, init=False)
class Index:
    """The values of an index tensor: each in ``[start, stop)``, or skipped.

    ``stop`` is a size, usually a dim's name: ``Index("slot")``. ``skip`` is a comparison that marks values the kernel
    ignores: ``skip="<= 0"``, ``skip="== -1 and skip_negative"``. ``unique``: no value that is not skipped may occur
    twice. ``apart_from`` names another index of which no value may be one of this. Checked in ``values`` mode.

    ``live`` says which entries the kernel reads, from other arguments and sizes; the others may hold anything. It is a
    condition on tensors that have a value for each row, ``live="mask"`` or ``live="mask and slot >= 0"``; or how many
    entries are read from the start of a row, ``live="cdiv(seq_lens, page_size)"`` or ``live="token"``, where a tensor
    has a value for each row, and one with an :class:`Indptr` rule stands for its last value: ``live="indptr"``. Where
    something of which it speaks is not given, all are read.

    ``segment_of`` names a prefix sum: row t must hold the segment in which t lies, the s with
    ``indptr[s] <= t < indptr[s + 1]``. Segments may be empty; rows behind the last one may hold anything.
    """

    stop: Expr
    start: Expr
    skip: str | None
    unique: bool
    apart_from: str | None
    live: Expr | None
    segment_of: str | None

    def __init__(
        self,
        stop: str | int,
        *,
        start: str | int = 0,
        skip: str | None = None,
        unique: bool = False,
        apart_from: str | None = None,
        live: str | None = None,
        segment_of: str | None = None,
    ) -> None:
        if skip is not None:
            parse_condition(f"index {skip}")
        values: dict[str, Any] = dict(stop=parse(stop), start=parse(start), skip=skip, unique=unique)
        values |= dict(apart_from=apart_from, segment_of=segment_of)
        values |= dict(live=None if live is None else parse_either(live))
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What the rule is computed from; ``index`` stands for a value."""
        skip = () if self.skip is None else (parse_condition(f"index {self.skip}"),)
        live = () if self.live is None else (self.live,)
        others = (Name(n) for n in (self.apart_from, self.segment_of) if n is not None)
        return (self.start, self.stop, *skip, *live, *others)


@dataclass(frozen=True, init=False)
class Indptr:
    """A prefix sum: starts at 0, never decreases, ends at ``stop`` (at most there, if ``capacity``).

    ``capacity=True`` is for buffers that are longer than what is live, as under CUDA graphs. ``longest`` is a size that
    no difference of neighbours may pass, or a tensor with such a size for each. Checked in ``values`` mode.
    """

    stop: Expr
    capacity: bool
    longest: Expr | None

    def __init__(self, stop: str | int, *, capacity: bool = False, longest: str | int | None = None) -> None:
        values = dict(stop=parse(stop), capacity=capacity, longest=None if longest is None else parse(longest))
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What the rule is computed from."""
        return (self.stop,) if self.longest is None else (self.stop, self.longest)


@dataclass(frozen=True, init=False)
class Finite:
    """No element is NaN or infinite, where ``at`` says: ``Finite(slot=0)`` is for the slot that padded tokens read.

    ``at`` fixes coordinates of the layout; the others run over all they have. Checked in ``values`` mode.
    """

    at: tuple[tuple[str, Expr], ...]

    def __init__(self, **at: str | int) -> None:
        object.__setattr__(self, "at", tuple((axis, parse(value)) for axis, value in at.items()))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose coordinate is fixed."""
        return tuple(axis for axis, _ in self.at)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What the rule is computed from."""
        return tuple(e for _, e in self.at)


ValueRule = Index | Indptr | Finite


@dataclass(frozen=True)
class Writes:
    """The callable changes this argument: the whole buffer, or only the rows that the index argument ``at`` selects.

    An argument without it must come back untouched. A buffer that is written must not share an element with itself.
    """

    at: str | None = None


@dataclass(frozen=True)
class Condition:
    """A comparison of dims and arguments that must hold."""

    expr: Expr

    def __str__(self) -> str:
        return brief(self.expr)


@dataclass(frozen=True)
class Needs:
    """Arguments that must be given."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Forbids:
    """Arguments that must be None."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Together:
    """Arguments that are given all, or none of them."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class NoOverlap:
    """Tensors that must not share memory."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Each:
    """A comparison that every value of an argument must keep."""

    arguments: tuple[str]
    expr: Expr

    @property
    def names(self) -> Iterator[str]:
        """The dims and scalars that the comparison uses besides the value itself."""
        return (n for n in names(self.expr) if n != VALUE)

    def __str__(self) -> str:
        return brief(self.expr)


@dataclass(frozen=True)
class Agree:
    """Two descriptors, such as those of two processes, that must say the same in the named fields (all, if none)."""

    arguments: tuple[str, str]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class When:
    """Rules that hold only where a condition does."""

    condition: Condition
    rules: tuple[Rule, ...]


Rule = Condition | Needs | Forbids | Together | NoOverlap | Each | Agree | When
VALUE = "value"


def needs(*arguments: str) -> Needs:
    """These arguments must be given; mostly inside :func:`when`."""
    return Needs(_names(arguments))


def forbids(*arguments: str) -> Forbids:
    """These arguments must be None: given and ignored is a mistake as well."""
    return Forbids(_names(arguments))


def together(*arguments: str) -> Together:
    """These arguments are given all, or none of them."""
    return Together(_names(arguments))


def no_overlap(*arguments: str) -> NoOverlap:
    """These tensors must not share memory."""
    return NoOverlap(_names(arguments))


def each(argument: str, comparison: str) -> Each:
    """Every value of a sequence, or of a tensor, keeps a comparison: ``each("m_splits", "% 128 == 0")``.

    A sequence is checked on every call, a tensor in ``values`` mode.
    """
    return Each(_names((argument,)), parse_condition(f"{VALUE} {comparison}"))  # type: ignore[arg-type]


def agree(first: str, second: str, *fields: str) -> Agree:
    """Two descriptors say the same: ``agree("local", "peer", "kv_dtype", "page_size")``.

    Each is a mapping (a pool's manifest, the record of a first contact) and may come from outside: whatever it holds, a
    difference is a violation that names every field that differs. Without ``fields`` all are compared.
    """
    return Agree(_names((first, second)), fields)  # type: ignore[arg-type]


def when(condition: str, *rules: str | Rule) -> When:
    """Rules that hold where ``condition`` does: ``when("dtype(k_cache) == e4m3", needs("q_scale"))``."""
    if not rules:
        raise TypeError(f"when({condition!r}) has no rules: say what must hold then")
    return When(Condition(parse_condition(condition)), tuple(as_rule(r) for r in rules))


def as_rule(rule: str | Rule) -> Rule:
    """A rule from text or a rule."""
    return Condition(parse_condition(rule)) if isinstance(rule, str) else rule


def flatten(rules: tuple[Rule, ...], under: tuple[Condition, ...] = ()) -> Iterator[tuple[tuple[Condition, ...], Rule]]:
    """Each rule that is not a ``when``, with the conditions under which it holds."""
    for rule in rules:
        if isinstance(rule, When):
            yield from flatten(rule.rules, (*under, rule.condition))
        else:
            yield under, rule


def _names(arguments: tuple[str, ...]) -> tuple[str, ...]:
    for name in arguments:
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"{name!r} is not the name of an argument")
    return arguments
