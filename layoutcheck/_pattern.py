"""The layout pattern: named axes in logical order, an arrow, and the order of their parts in memory.

``slot(page token(chunk lane)) head group -> page head lane chunk group`` reads: a slot is a page and a token, a token
is a chunk and a lane; in memory the page comes first and the group last. On the right and in a view, unnamed
parentheses join adjacent parts into one dimension: ``(mt w) k``. This module knows text and trees, not sizes.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[()])")


class PatternError(ValueError):
    """A pattern that cannot be read, or whose two sides do not name the same parts."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis and, if it is composite, the parts it is split into, outermost first."""

    name: str
    parts: tuple[Axis, ...] = ()

    def walk(self) -> Iterator[Axis]:
        """This axis and everything below it, parents first."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def leaves(self) -> tuple[str, ...]:
        """The names of the undivided parts, outermost first."""
        return tuple(a.name for a in self.walk() if not a.parts)

    def __str__(self) -> str:
        return f"{self.name}({' '.join(map(str, self.parts))})" if self.parts else self.name


Group = tuple[str, ...]


def parse_pattern(text: str) -> tuple[tuple[Axis, ...], tuple[Group, ...]]:
    """The logical axes and the memory order of a pattern. Raises :class:`PatternError`."""
    logical, arrow, memory = text.partition("->")
    if not arrow or "->" in memory:
        raise PatternError(f"{text!r} needs one '->' between the logical axes and their order in memory")
    axes = _parse_axes(logical, text)
    nodes = [a for axis in axes for a in axis.walk()]
    seen = [a.name for a in nodes]
    if twice := sorted({n for n in seen if seen.count(n) > 1}):
        raise PatternError(f"{text!r} names {', '.join(twice)} more than once on the left")
    groups = expand(parse_groups(memory, text), axes, text)
    left = {leaf for axis in axes for leaf in axis.leaves()}
    right = [leaf for group in groups for leaf in group]
    if twice := sorted({n for n in right if right.count(n) > 1}):
        raise PatternError(f"{text!r} names {', '.join(twice)} more than once in memory")
    if missing := sorted(left - set(right)):
        raise PatternError(f"{text!r} does not say where {', '.join(missing)} is in memory")
    return axes, groups


def parse_groups(text: str, context: str | None = None) -> tuple[Group, ...]:
    """``a (b c) d`` as groups of axis names. Raises :class:`PatternError`."""
    context = context or text
    groups: list[Group] = []
    inside: list[str] | None = None
    for token in _tokens(text, context):
        if token == "(":
            if inside is not None:
                raise PatternError(f"{context!r} nests parentheses where only 'a (b c) d' is meant")
            inside = []
        elif token == ")":
            if not inside:
                raise PatternError(f"{context!r} closes a parenthesis that holds nothing")
            groups.append(tuple(inside))
            inside = None
        elif inside is None:
            groups.append((token,))
        else:
            inside.append(token)
    if inside is not None:
        raise PatternError(f"{context!r} leaves a parenthesis open")
    return tuple(groups)


def expand(groups: tuple[Group, ...], axes: tuple[Axis, ...], context: str) -> tuple[Group, ...]:
    """The groups with every composite axis replaced by its undivided parts."""
    nodes = {a.name: a for axis in axes for a in axis.walk()}
    for name in (n for g in groups for n in g):
        if name not in nodes:
            raise PatternError(f"{context!r} has no axis {name!r}; it has {', '.join(nodes)}")
    return tuple(tuple(leaf for name in group for leaf in nodes[name].leaves()) for group in groups)


def _parse_axes(text: str, context: str) -> tuple[Axis, ...]:
    tokens = list(_tokens(text, context))
    position = 0

    def parse_list(depth: int) -> tuple[Axis, ...]:
        nonlocal position
        axes: list[Axis] = []
        while position < len(tokens) and tokens[position] != ")":
            name = tokens[position]
            position += 1
            if name == "(":
                raise PatternError(f"{context!r} has unnamed parentheses on the left: give the whole a name, slot(a b)")
            parts: tuple[Axis, ...] = ()
            if position < len(tokens) and tokens[position] == "(":
                position += 1
                parts = parse_list(depth + 1)
                if position == len(tokens):
                    raise PatternError(f"{context!r} leaves a parenthesis open")
                position += 1
                if len(parts) < 2:
                    raise PatternError(f"{context!r} splits {name} into fewer than two parts")
            axes.append(Axis(name, parts))
        if depth == 0 and position < len(tokens):
            raise PatternError(f"{context!r} closes a parenthesis that was not opened")
        return tuple(axes)

    if text.count("(") > 32:
        raise PatternError(f"{context[:60]!r}... is nested too deep")
    return parse_list(0)


def _tokens(text: str, context: str) -> Iterator[str]:
    text = text.strip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PatternError(f"{context!r} has {text[position:].split()[0]!r}, which is neither a name nor ( or )")
        if keyword.iskeyword(match[1]):
            raise PatternError(f"{context!r} names an axis {match[1]}, which is a word of Python's own")
        yield match[1]
        position = match.end()
