"""The error a caller sees, and how it is worded on the page. What is wrong and why is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Rule = Literal[
    "shape", "dtype", "stride", "alignment", "device", "presence", "relation", "value", "overflow", "layout", "peer"
]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    ``argument`` is the name in the signature, ``rule`` one of :data:`RULES`, ``expected`` and ``got`` the two sides
    with their numbers. ``cause`` is printed only where the numbers prove it possible; ``fix`` is one thing to do.
    ``headline`` says what was broken, ``body`` are the lines that show it (expected and got, unless given).
    """

    argument: str
    rule: Rule
    expected: str
    got: str
    cause: str | None = None
    fix: str | None = None
    headline: str = ""
    body: tuple[str, ...] | None = None

    def lines(self) -> list[str]:
        """The violation as text, without the callable's name."""
        body = (f"expected {self.expected}", f"got      {self.got}") if self.body is None else self.body
        lines = [self.headline or f"{self.argument}: {self.rule}", *(f"   {line}".rstrip() for line in body)]
        if self.cause:
            lines += _labelled("cause", self.cause)
        if self.fix:
            lines += _labelled("fix", self.fix)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


class LayoutError(ValueError):
    """A buffer or argument does not have the layout that was declared for it.

    ``where`` is the callable or layout that was asked, ``violations`` every rule that was broken, in the order of the
    arguments. Nothing was launched or written.
    """

    def __init__(self, where: str, violations: Sequence[Violation]) -> None:
        self.where = where
        self.violations = tuple(violations)
        super().__init__("\n".join(f"{where}: {v}" for v in self.violations))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.violations)


def table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]]) -> tuple[str, ...]:
    """Rows of numbers under their axis names: (label, cells, remark)."""
    widths = [
        max(len(column), *(len(cells[i]) if i < len(cells) else 0 for _, cells, _ in rows))
        for i, column in enumerate(columns)
    ]
    lines = [" " * 11 + "  ".join(c.rjust(w) for c, w in zip(columns, widths, strict=True))]
    for label, cells, remark in rows:
        text = "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=False))
        lines.append(f"{label:<11}{text}" + (f"    {remark}" if remark else ""))
    return tuple(lines)


def _labelled(label: str, text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [f"   {label + ':':<8}{first}", *(f"           {line}" for line in rest)]


def numbers(values: Sequence[Any]) -> str:
    """``(64, 8, 32)``."""
    return "(" + ", ".join(map(str, values)) + ("," if len(values) == 1 else "") + ")"
