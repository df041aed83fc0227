"""Choose: one of several layouts, by a condition on the dims of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layoutcheck._dims import brief, evaluate, parse, parse_condition, substitute
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._keywords import RULES
from layoutcheck._layout import Layout


class Choose:
    """One of several layouts, by a condition on the dims of the call.

    ``Choose({"page_size == 128": MXFP8_SCALE_INTERLEAVED}, default=MXFP8_SCALE_FLAT)``: the first condition that holds
    decides. Without a default, a call for which none holds breaks a relation.
    """

    def __init__(self, cases: Mapping[str, Layout], default: Layout | None = None) -> None:
        self.cases = tuple((parse_condition(text), layout) for text, layout in cases.items())
        self.default = default

    def pick(self, values: Mapping[str, Any]) -> Layout:
        """The layout for these dims. Raises :class:`LayoutError` where no condition holds."""
        for condition, layout in self.cases:
            if evaluate(condition, values):
                return layout
        if self.default is None:
            wanted = " or ".join(brief(c) for c, _ in self.cases)
            raise LayoutError("Choose", [Violation("", "relation", wanted, str(dict(values)))])
        return self.default

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout that may be picked."""
        own = tuple(layout for _, layout in self.cases)
        return own if self.default is None else (*own, self.default)

    def __call__(self, **keywords: Any) -> Choose:
        """The same choice between layouts with dims or rules replaced."""
        new = object.__new__(Choose)
        values = {k: parse(v) for k, v in keywords.items() if k not in RULES and k not in ("dtype", "name")}
        new.cases = tuple((substitute(c, values), layout(**keywords)) for c, layout in self.cases)
        new.default = None if self.default is None else self.default(**keywords)
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choose) and (self.cases, self.default) == (other.cases, other.default)

    def __hash__(self) -> int:
        return hash((self.cases, self.default))

    def __repr__(self) -> str:
        cases = ", ".join(f"{brief(c)!r}: {layout.name}" for c, layout in self.cases)
        return f"Choose({{{cases}}}" + (f", default={self.default.name})" if self.default else ")")
