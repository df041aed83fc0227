"""Size expressions and conditions: parse, evaluate, print, isolate one unknown, emit as source.

A dim is an integer or an expression over named sizes (``page_size / 32``, ``cdiv(row, 128)``); a condition is a
comparison of such expressions (``page_size % 32 == 0``, ``dtype(k_cache) == e4m3``). Text is parsed with ``ast`` into
the three node types below and never evaluated as Python. ``/`` is exact: a remainder is an error that names the rule,
never a rounded size. What the names stand for, and which of them are known, is decided by the callers.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeAlias

from layoutcheck import _dtypes, _tags

MAX_TEXT = 1000
MAX_DEPTH = 40
MAX_INT = 2**63 - 1


class DimSyntaxError(ValueError):
    """A size expression or condition that the grammar does not have."""


class Inexact(ArithmeticError):
    """An exact division left a remainder, or had a zero divisor."""

    def __init__(self, division: Op, numerator: int, denominator: int) -> None:
        self.division, self.numerator, self.denominator = division, numerator, denominator
        if denominator == 0:
            super().__init__(f"{brief(division)} needs {brief(division.args[1])} != 0, got 0")
        else:
            rule, rest = brief(Op("%", division.args)), numerator % denominator
            super().__init__(f"{rule} == 0 is needed, got {numerator} % {denominator} = {rest}")


@dataclass(frozen=True, slots=True)
class Const:
    """A literal: an integer in a size; also a string, a bool, None or an element type in a condition."""

    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    """A named size or, in a condition, an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operator or function of the grammar applied to its operands."""

    op: str
    args: tuple[Expr, ...]


Expr: TypeAlias = Const | Name | Op

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARE = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "==",
    ast.IsNot: "!=",
}
_SIZE_FUNCTIONS = {"cdiv": 2, "align": 2, "min": 2, "max": 2}
ARGUMENT_FUNCTIONS = {"given": 1, "dtype": 1, "numel": 1, "len": 1, "sum": 1, "tag": 2, "tags": 2}
_FUNCTIONS = _SIZE_FUNCTIONS | ARGUMENT_FUNCTIONS | {"pow2": 1}
_MAY_BE_NAMES = ("len", "sum", "tag", "tags")  # words that a size or an argument may well have for a name
_PRECEDENCE = {"or": 1, "and": 2, "not": 3, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6} | dict.fromkeys(
    _COMPARE.values(), 4
)
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "cdiv": lambda a, b: (a + b - 1) // b,
    "align": lambda a, b: (a + b - 1) // b * b,
    "min": min,
    "max": max,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(value: int | str | Expr) -> Expr:
    """A size from an integer, an expression in text, or an expression.

    Raises :class:`DimSyntaxError` for anything that the grammar does not have.
    """
    if isinstance(value, Const | Name | Op):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise DimSyntaxError(f"a size is an integer or an expression in text, not {value!r}")
    if isinstance(value, int):
        if abs(value) > MAX_INT:
            raise DimSyntaxError(f"an integer of {value.bit_length()} bits does not fit in 64")
        return Const(value)
    expr = _parse_text(value)
    if not is_size(expr):
        raise DimSyntaxError(f"{value!r} is a condition, but a size is needed here")
    return expr


def parse_condition(text: str) -> Expr:
    """A condition from text. Raises :class:`DimSyntaxError`."""
    expr = _parse_text(text)
    if not is_condition(expr):
        raise DimSyntaxError(f"{text!r} is no condition, and one is needed here: compare it with something")
    return expr


def parse_either(text: str) -> Expr:
    """A size or a condition from text. Raises :class:`DimSyntaxError`."""
    return _parse_text(text)


@lru_cache(maxsize=4096)
def _parse_text(text: str) -> Expr:
    shown = text if len(text) <= 80 else text[:77] + "..."
    if len(text) > MAX_TEXT:
        raise DimSyntaxError(f"{shown!r} is longer than {MAX_TEXT} characters")
    if not text.isascii():  # Python would normalise names: two spellings, one name
        raise DimSyntaxError(f"{shown!r} has characters that are not ASCII")
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            raise DimSyntaxError(f"{shown!r} is nested more than {MAX_DEPTH} deep")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DimSyntaxError(f"{shown!r} is not an expression: {error.__class__.__name__}") from None
    return _convert(tree, shown, 0)


def _convert(node: ast.expr, text: str, depth: int) -> Expr:
    def fail(what: str) -> DimSyntaxError:
        return DimSyntaxError(
            f"{text!r} has {what}; a size may use names, integers, + - * / // % and "
            "cdiv, align, min, max; a condition also == != < <= > >= in, and, or, not, pow2, and of an argument given, "
            "dtype, numel, len, sum, tag, tags"
        )

    def go(child: ast.expr) -> Expr:
        return _convert(child, text, depth + 1)

    def size(child: ast.expr) -> Expr:
        if is_size(expr := go(child)):
            return expr
        raise fail(f"{brief(expr)!r} where a number is needed")

    def condition(child: ast.expr) -> Expr:
        if is_condition(expr := go(child)):
            return expr
        raise fail(f"{brief(expr)!r} where a condition is needed")

    if depth > MAX_DEPTH:
        raise DimSyntaxError(f"{text!r} is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=value):
            if isinstance(value, int) and not isinstance(value, bool):
                return parse(value)
            if value is None or isinstance(value, bool | str):
                return Const(value)
            raise fail(f"the literal {value!r:.30}")
        case ast.Name(id=name) if name not in _FUNCTIONS or name in _MAY_BE_NAMES:
            return Name(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return op_(_BINARY[type(op)], size(left), size(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return op_("-", Const(0), size(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Op("not", (condition(operand),))
        case ast.BoolOp(op=bool_op, values=values):
            return Op("and" if isinstance(bool_op, ast.And) else "or", tuple(condition(v) for v in values))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            words = [_COMPARE[type(op)] for op in ops]
            operands = [go(left), *(go(r) for r in rights)]
            for word, (a, b) in zip(words, itertools.pairwise(operands), strict=True):
                if word[0] in "<>" and not (is_size(a) and is_size(b)):
                    raise fail(f"{word} between what are not both numbers")
                if word.endswith("in") and not (isinstance(b, Op) and b.op in ("tuple", "tags")):
                    raise fail(f"{word} without a list of values")
            if any(isinstance(o, Op) and o.op == "dtype" for o in operands):
                operands = [_as_element(o, text) for o in operands]
            pairs = [Op(word, pair) for word, pair in zip(words, itertools.pairwise(operands), strict=True)]
            return pairs[0] if len(pairs) == 1 else Op("and", tuple(pairs))
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return Op("tuple", tuple(go(i) for i in items))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            arity = _FUNCTIONS.get(name)
            if arity is None:
                raise fail(f"the function {name!r}")
            if len(args) != arity:
                raise fail(f"{len(args)} arguments for {name}, which takes {arity}")
            if name in ARGUMENT_FUNCTIONS:
                of, *facts = (go(a) for a in args)
                if not isinstance(of, Name):
                    raise fail(f"{name}(...) of something that is not an argument's name")
                if any(not (isinstance(f, Const) and isinstance(f.value, str)) for f in facts):
                    raise fail(f"{name}({of.name}, ...) of something that is not the name of a fact, in quotes")
                return Op(name, (of, *facts))
            return op_(name, *(size(a) for a in args))
    raise fail(f"the name of a function, {node.id}" if isinstance(node, ast.Name) else f"a {type(node).__name__}")


def _as_element(expr: Expr, text: str) -> Expr:
    """In a comparison with dtype(x), a bare name is an element type: ``dtype(k) == e4m3``."""
    if isinstance(expr, Op) and expr.op == "tuple":
        return Op("tuple", tuple(_as_element(a, text) for a in expr.args))
    if isinstance(expr, Name | Const) and not (isinstance(expr, Const) and expr.value is None):
        label = expr.name if isinstance(expr, Name) else str(expr.value)
        try:
            return Const(_dtypes.element(label))
        except ValueError as error:
            raise DimSyntaxError(f"{text!r}: {error}") from None
    return expr


# --- building ---------------------------------------------------------------------------------------------------------


def op_(op: str, *args: Expr) -> Expr:
    """An operation with constants folded and neutral operands dropped."""
    if op == "*":
        return product(args)
    if op == "/":
        return product([args[0]], [args[1]])
    numbers = [a.value for a in args if isinstance(a, Const) and type(a.value) is int]
    if len(numbers) == len(args) == 2 and op in _ARITHMETIC and not (op in _DIVIDES and numbers[1] == 0):
        return Const(_ARITHMETIC[op](*numbers))
    if op in ("+", "-") and args[1] == Const(0):
        return args[0]
    if op == "+" and args[0] == Const(0):
        return args[1]
    if op in ("//", "cdiv", "align") and args[1] == Const(1):
        return args[0]
    return Op(op, args)


_DIVIDES = ("//", "%", "cdiv", "align")


def product(factors: Iterable[Expr], divisors: Iterable[Expr] = ()) -> Expr:
    """The product of factors over the product of divisors, equal factors cancelled.

    Every ``/`` in a size is exact, so ``32 * (page_size / 32)`` is ``page_size``: index maps stay as short as a person
    would write them. Products are rational: ``2 * (p / 4)`` is ``p / 2``, and needs only that to be whole.
    """
    above: list[Expr] = []
    below: list[Expr] = []

    def collect(expr: Expr, into: list[Expr], other: list[Expr]) -> None:
        if isinstance(expr, Op) and expr.op in ("*", "/"):
            collect(expr.args[0], into, other)
            collect(expr.args[1], *((into, other) if expr.op == "*" else (other, into)))
        else:
            into.append(expr)

    for factor in factors:
        collect(factor, above, below)
    for divisor in divisors:
        collect(divisor, below, above)
    top = math.prod(f.value for f in above if isinstance(f, Const))
    bottom = math.prod(f.value for f in below if isinstance(f, Const))
    above = [f for f in above if not isinstance(f, Const)]
    rest = []
    for factor in (f for f in below if not isinstance(f, Const)):
        if factor in above:
            above.remove(factor)
        else:
            rest.append(factor)
    if not above and not rest and (bottom == 0 or top % bottom):
        return Op("/", (Const(top), Const(bottom)))  # kept as it is: the message needs these numbers
    common = math.gcd(top, bottom) or 1
    top, bottom = top // common, bottom // common
    if top == 0 and bottom != 0:
        return Const(0)
    numerator = _chain([*above, *([Const(top)] if top != 1 or not above else [])])
    if not rest and bottom == 1:
        return numerator
    denominator = _chain([*rest, *([Const(bottom)] if bottom != 1 or not rest else [])])
    return Op("/", (numerator, denominator))


def _chain(factors: list[Expr]) -> Expr:
    return reduce(lambda a, b: Op("*", (a, b)), factors)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with names replaced."""
    match expr:
        case Name(name):
            return values.get(name, expr)
        case Op(op, args) if op not in ARGUMENT_FUNCTIONS:
            return op_(op, *(substitute(a, values) for a in args))
    return expr


def names(expr: Expr) -> list[str]:
    """Every name in the expression, as often as it occurs, left to right. Arguments of given, dtype, ... excluded."""
    if isinstance(expr, Name):
        return [expr.name]
    if isinstance(expr, Const) or expr.op in ARGUMENT_FUNCTIONS:
        return []
    return [name for arg in expr.args for name in names(arg)]


def arguments(expr: Expr) -> Iterator[str]:
    """The arguments that the expression speaks of: the names inside given(x), dtype(x), numel(x) and their like."""
    for call in calls(expr):
        yield call.args[0].name  # type: ignore[union-attr]


def calls(expr: Expr) -> Iterator[Op]:
    """Every given(x), dtype(x), numel(x), ... in the expression."""
    if isinstance(expr, Op):
        if expr.op in ARGUMENT_FUNCTIONS:
            yield expr
        else:
            for arg in expr.args:
                yield from calls(arg)


def is_size(expr: Expr) -> bool:
    """Whether the expression is a number rather than a truth value."""
    match expr:
        case Const(value):
            return type(value) is int
        case Op(op):
            return op in _BINARY.values() or op in _SIZE_FUNCTIONS or op in ("numel", "len", "sum", "tag")
    return True


def is_condition(expr: Expr) -> bool:
    """Whether the expression is a truth value, or a name that may stand for one."""
    match expr:
        case Const(value):
            return isinstance(value, bool)
        case Op(op):
            return op in ("and", "or", "not", "given", "pow2", "tag") or op in _COMPARE.values()
    return True


def divisions(expr: Expr) -> Iterator[Op]:
    """The exact divisions inside, each of which is a rule of its own."""
    if isinstance(expr, Op):
        for arg in expr.args:
            yield from divisions(arg)
        if expr.op == "/":
            yield expr


@lru_cache(maxsize=4096)
def isolate(left: Expr, right: Expr, unknown: str) -> Expr | None:
    """``unknown`` as an expression of the rest, from ``left == right``; None where it cannot be isolated.

    Only ``+ - * /`` are inverted, and only where the unknown occurs once.
    """
    count = list(names(left)).count(unknown), list(names(right)).count(unknown)
    if sum(count) != 1:
        return None
    if count[1]:
        left, right = right, left
    while isinstance(left, Op):
        if left.op not in ("+", "-", "*", "/"):
            return None
        a, b = left.args
        in_first = unknown in names(a)
        match left.op, in_first:
            case "+", True:
                left, right = a, op_("-", right, b)
            case "+", False:
                left, right = b, op_("-", right, a)
            case "-", True:
                left, right = a, op_("+", right, b)
            case "-", False:
                left, right = b, op_("-", a, right)
            case "*", True:
                left, right = a, op_("/", right, b)
            case "*", False:
                left, right = b, op_("/", right, a)
            case "/", True:
                left, right = a, op_("*", right, b)
            case "/", False:
                left, right = b, op_("/", a, right)
    return right


@dataclass(frozen=True, slots=True)
class Equation:
    """``left == right``, with the words to print where the two sides alone do not say it."""

    left: Expr
    right: Expr
    source: str = ""

    def __str__(self) -> str:
        return f"{brief(self.left)} == {brief(self.right)}"


def plan(known: Iterable[str], equations: Iterable[Equation]) -> list[tuple[str, Expr, Equation]]:
    """What follows from the known names, in an order in which it can be computed: (name, expression, equation)."""
    known = set(known)
    waiting = [(e, frozenset((*names(e.left), *names(e.right)))) for e in equations]
    steps = []
    progress = True
    while progress:
        progress = False
        for i, (equation, about) in enumerate(waiting):
            unknown = about - known
            if len(unknown) != 1:
                continue
            (name,) = unknown
            expr = isolate(equation.left, equation.right, name)
            if expr is not None:
                steps.append((name, expr, equation))
                known.add(name)
                del waiting[i]
                progress = True
                break
    return steps


# --- evaluating and printing ------------------------------------------------------------------------------------------


def evaluate(expr: Expr, values: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression; ``args`` are the arguments that given, dtype, numel and their like speak of.

    Raises :class:`Inexact` for an exact division with a remainder, ``KeyError`` for a name without a value.
    """
    match expr:
        case Const(value):
            return value
        case Name(name):
            return values[name]
        case Op("given", (Name(name),)):
            return (args or {}).get(name) is not None
        case Op("dtype", (Name(name),)):
            value = (args or {}).get(name)
            return None if value is None else _dtypes.of(value.dtype)
        case Op("numel", (Name(name),)):
            return (args or {})[name].numel()
        case Op("len", (Name(name),)):
            return len((args or {})[name])
        case Op("sum", (Name(name),)):
            return sum((args or {})[name])
        case Op("tag", (Name(name), Const(fact))):
            return _tags.fact((args or {}).get(name), fact)
        case Op("tags", (Name(name), Const(fact))):
            return _tags.facts((args or {}).get(name), fact)
        case Op("and", parts):
            return all(evaluate(p, values, args) for p in parts)
        case Op("or", parts):
            return any(evaluate(p, values, args) for p in parts)
        case Op("not", (part,)):
            return not evaluate(part, values, args)
        case Op("tuple", parts):
            return tuple(evaluate(p, values, args) for p in parts)
        case Op("pow2", (part,)):
            value = evaluate(part, values, args)
            return value > 0 and value & (value - 1) == 0
        case Op(op, (left, right)):
            a, b = evaluate(left, values, args), evaluate(right, values, args)
            if op == "/":
                if b == 0 or a % b != 0:
                    raise Inexact(expr, a, b)
                return a // b
            if op in _DIVIDES and b == 0:
                raise Inexact(expr, a, b)
            return _ARITHMETIC[op](a, b)
    raise AssertionError(f"no such operation: {expr!r}")


def brief(expr: Expr) -> str:
    """The expression as a person would write it; private names lose their prefix."""
    return source(expr, lambda name: name.rpartition(".")[2], exact="/")


def source(expr: Expr, name: Callable[[str], str] = str, *, exact: str = "//") -> str:
    """The expression as Python or Triton source: exact divisions as ``//``, everything else in words that both have.

    What speaks of an argument (``given``, ``dtype``, ...) is printed as it was written; compiling it is the guard's
    business.
    """

    def show(e: Expr, level: int) -> str:
        match e:
            case Const(value):
                return str(value) if isinstance(value, _dtypes.Element) else repr(value)
            case Name(n):
                return name(n)
            case Op("tuple", args):
                return "(" + ", ".join(show(a, 0) for a in args) + ("," if len(args) == 1 else "") + ")"
            case Op("not", (a,)):
                text, own = f"not {show(a, 3)}", 3
            case Op("and" | "or" as op, args):
                own = _PRECEDENCE[op]
                text = f" {op} ".join(show(a, own + 1) for a in args)
            case Op("cdiv", (a, b)) if exact == "//":
                text, own = f"({show(a, 5)} + {show(b, 6)} - 1) // {show(b, 7)}", 6
            case Op("align", (a, b)) if exact == "//":
                text, own = f"({show(a, 5)} + {show(b, 6)} - 1) // {show(b, 7)} * {show(b, 7)}", 6
            case Op(op, (a, b)) if op in _PRECEDENCE:
                own = _PRECEDENCE[op]
                word = exact if op == "/" else op
                text = f"{show(a, own + (op in _COMPARE.values()))} {word} {show(b, own + 1)}"  # a == b == c is a chain
            case Op(op, args):
                return f"{op}({', '.join(show(a, 0) for a in args)})"
        return f"({text})" if own < level else text

    return show(expr, 0)
