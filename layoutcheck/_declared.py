"""Rules on what is declared rather than seen, in words: tags of memory, and descriptors that must agree."""

from __future__ import annotations

from collections.abc import Iterator

from layoutcheck import _manifest, _tags
from layoutcheck._call import Call, shown
from layoutcheck._dims import Expr, Op, brief, evaluate, names
from layoutcheck._errors import Rule, Violation

_MOST_FIELDS = 8
_TAG_RULES: dict[str, Rule] = {"layout": "layout", "encoding": "dtype"}


def is_tag(expr: Expr) -> bool:
    """Whether an expression asks for what is known of an argument's memory."""
    return isinstance(expr, Op) and expr.op in ("tag", "tags")


def tagged(call: Call, expr: Expr, op: str, operands: tuple[Expr, ...], why: str) -> Violation:
    """A condition on what is known of a tensor's memory."""
    about = [o for o in operands if isinstance(o, Op) and is_tag(o)]
    (name, fact), *others = [(o.args[0].name, o.args[1].value) for o in about]  # type: ignore[union-attr]
    value = evaluate(about[0], call.values, call.arguments)
    got = f"{name} has {fact} {shown(value)}" if value not in (None, ()) else f"{name} has no tag {fact}"
    if others:
        other, _ = others[0]
        wanted = f"{fact} {shown(_tags.fact(call.arguments.get(other), fact))}, as {other} has"
    elif op == "==":
        wanted = " or ".join(shown(evaluate(o, call.values, call.arguments)) for o in operands if not is_tag(o))
        sources = [n for o in operands for n in names(o)]
        wanted = f"{fact} {wanted}" + (f" ({', '.join(sources)})" if sources else "")
    else:
        wanted = brief(expr)
    cause = None
    if about[0].op == "tags":
        shared = [
            n
            for n in call.contract.tensors
            if n != name and _tags.shared(call.arguments.get(name), call.arguments.get(n))
        ]
        cause = f"{name} shares its memory with {', '.join(shared)}" if shared else None
    fix = (
        f"pass {name} with {wanted}"
        if value is not None
        else f"layoutcheck.tag({name}, {fact}=...) where it is written"
    )
    if others:
        fix = f"write, move or resize {name} and {others[0][0]} in the same step"
    elif about[0].op == "tags":
        fix = f"give {name} memory of its own, or skip the call"
    return Violation(
        name, _TAG_RULES.get(fact, "relation"), wanted, got, cause, fix,
        headline=f"{got}; needed is {wanted}{why}", body=(),
    )  # fmt: skip


def disagreement(call: Call, first: str, second: str, fields: tuple[str, ...]) -> Iterator[Violation]:
    """Every field in which two descriptors differ."""
    found = _manifest.diff(call.arguments.get(first), call.arguments.get(second), fields)
    if not found:
        return
    listed = found[:_MOST_FIELDS]
    width = max(len(d.field) for d in listed)
    rest = [f"and {len(found) - len(listed)} fields more"] if len(found) > len(listed) else []
    lines = [f"{d.field:<{width}}  {d.first} in {first}, {d.second} in {second}" for d in listed]
    yield Violation(
        second, "peer", ", ".join(f"{d.field} = {d.first}" for d in listed),
        ", ".join(f"{d.field} = {d.second}" for d in listed), None,
        f"refuse this {second}: give both sides one configuration, then exchange {first} and {second} again",
        headline=f"{second} differs from {first}", body=(*lines, *rest),
    )  # fmt: skip
