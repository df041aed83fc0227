"""Size expressions and conditions: what is read, what it evaluates to, how it is printed, what is refused."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from layoutcheck import BF16, E4M3
from layoutcheck._dims import (
    Const,
    DimSyntaxError,
    Equation,
    Inexact,
    Name,
    Op,
    arguments,
    brief,
    divisions,
    evaluate,
    is_condition,
    is_size,
    isolate,
    names,
    parse,
    parse_condition,
    plan,
    product,
    source,
    substitute,
)

NAMES = ("a", "b", "c", "page_size")
PYTHON = {"min": min, "max": max, "__builtins__": {}}

# --- Strategies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """An expression as it is meant, next to the module's own: fully parenthesised text, and its value in Fractions."""

    text: str
    op: str = ""
    parts: tuple[Tree, ...] = ()
    leaf: int | str = 0

    def value(self, values: dict[str, int]) -> Fraction:
        """The mathematical value. Raises ``ZeroDivisionError``."""
        if not self.op:
            return Fraction(values[self.leaf] if isinstance(self.leaf, str) else self.leaf)
        a, b = (p.value(values) for p in self.parts)
        match self.op:
            case "+" | "-" | "*" | "/" | "//" | "%":
                return Fraction(eval(f"a {self.op} b", {}, {"a": a, "b": b}))
            case "cdiv":
                return Fraction(-(-a // b))
            case "align":
                return Fraction(-(-a // b) * b)
        return (min if self.op == "min" else max)(a, b)

    def exact(self, values: dict[str, int]) -> bool:
        """Whether no division leaves a remainder or divides by zero, and nothing is rounded up to a negative number."""
        try:
            if self.op in ("cdiv", "align") and self.parts[1].value(values) < 0:
                return False
            return all(p.exact(values) for p in self.parts) and self.value(values).denominator == 1
        except ZeroDivisionError:
            return False


def leaf(value: int | str) -> Tree:
    return Tree(str(value) if isinstance(value, str) or value >= 0 else f"({value})", leaf=value)


def node(op: str, a: Tree, b: Tree) -> Tree:
    return Tree(f"{op}({a.text}, {b.text})" if op.isalpha() else f"({a.text} {op} {b.text})", op, (a, b))


def trees(ops: str = "+ - * / // % cdiv align min max", leaves: tuple[str, ...] = NAMES) -> st.SearchStrategy[Tree]:
    numbers = st.sampled_from((0, 1, 2, 3, 4, 8, 32, -1, -6))
    return st.recursive(
        st.one_of(st.sampled_from(leaves), numbers).map(leaf),
        lambda inner: st.builds(node, st.sampled_from(ops.split()), inner, inner),
        max_leaves=12,
    )


def bindings(low: int = 0) -> st.SearchStrategy[dict[str, int]]:
    sizes = st.one_of(st.integers(low, 12), st.sampled_from((32, 64, 96, 128, 4096)))
    return st.fixed_dictionaries(dict.fromkeys(NAMES, sizes))


def comparisons() -> st.SearchStrategy[str]:
    sizes = trees("+ - * min max").map(lambda t: t.text)
    pairs = st.builds("({} {} {})".format, sizes, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), sizes)
    chains = st.builds("({} {} {} {} {})".format, sizes, st.sampled_from(["<", "=="]), sizes, st.just("<="), sizes)
    lists = st.builds("({} {} ({}, {}, 7))".format, sizes, st.sampled_from(["in", "not in"]), sizes, sizes)
    return st.one_of(pairs, chains, lists)


def conditions() -> st.SearchStrategy[str]:
    return st.recursive(
        comparisons(),
        lambda inner: st.one_of(
            st.builds("(not {})".format, inner),
            st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or", "==", "!="]), inner),
        ),
        max_leaves=5,
    )


def parsed(tree: Tree) -> Any:
    try:
        return parse(tree.text)
    except DimSyntaxError:  # too deep
        assume(False)


# --- Reading and printing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("page_size / 32", "page_size / 32"),
        ("cdiv(row, 128) * 512", "cdiv(row, 128) * 512"),
        ("align(row,128)", "align(row, 128)"),
        ("a + b * c", "a + b * c"),
        ("(a + b) * c", "(a + b) * c"),
        ("a - (b - c)", "a - (b - c)"),
        ("a - b - c", "a - b - c"),
        ("a // b // c", "a // b // c"),
        ("a // (b // c)", "a // (b // c)"),
        ("a % (b * c)", "a % (b * c)"),
        ("a * b % c", "a * b % c"),
        ("-a", "0 - a"),
        ("2 * 3 + a", "6 + a"),
        ("a + 0", "a"),
        ("a // 1", "a"),
        ("32 * (page_size / 32)", "page_size"),
        ("a / 4 * 2", "a / 2"),
        ("0x20 + 1_000", "1032"),
    ],
)
def test_sizes_are_printed_as_they_are_read(text, printed):
    assert brief(parse(text)) == printed
    assert parse(printed) == parse(text)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("page_size % 32 == 0", "page_size % 32 == 0"),
        ("a < b <= c", "a < b and b <= c"),
        ("(a == b) == c", "(a == b) == c"),
        ("a == (b == c)", "a == (b == c)"),
        ("not a == b", "not a == b"),
        ("(not a) == b", "(not a) == b"),
        ("a and (b or c)", "a and (b or c)"),
        ("a and b or c", "a and b or c"),
        ("a in (1,)", "a in (1,)"),
        ("a in [1, 2]", "a in (1, 2)"),
        ("mode == 'mean'", "mode == 'mean'"),
        ("scale is None", "scale == None"),
        ("dtype(k) in (e4m3, torch_bf16)", None),
        ("dtype(k) in ('float8_e4m3fn', bf16)", "dtype(k) in (e4m3, bf16)"),
        ("given(x) and numel(x) > 0", "given(x) and numel(x) > 0"),
        ("causal", "causal"),
    ],
)
def test_conditions_are_printed_as_they_are_read(text, printed):
    if printed is None:
        with pytest.raises(DimSyntaxError, match="'torch_bf16' is no element type"):
            parse_condition(text)
        return
    assert brief(parse_condition(text)) == printed
    assert parse_condition(printed) == parse_condition(text)


@given(trees())
@example(node("/", leaf("a"), node("/", leaf("b"), leaf(0))))
def test_every_size_can_be_read_back(tree):
    expr = parsed(tree)
    assert parse(source(expr, exact="/")) == expr


@given(conditions())
def test_every_condition_can_be_read_back(text):
    expr = parse_condition(text)
    assert parse_condition(source(expr)) == expr


def test_private_names_lose_their_prefix_in_messages_only():
    expr = Op("/", (Name("k_scale.page_size"), Const(32)))
    assert brief(expr) == "page_size / 32"
    assert list(names(expr)) == ["k_scale.page_size"]


@pytest.mark.parametrize("value", [3, -3, 2**63 - 1, Const(3), Name("a")])
def test_numbers_and_expressions_are_sizes_already(value):
    assert parse(value) == (Const(value) if isinstance(value, int) else value)


# --- Evaluating ------------------------------------------------------------------------------------------------------


@given(trees(), bindings())
def test_the_value_is_that_of_the_text(tree, values):
    assume(tree.exact(values))
    assert evaluate(parsed(tree), values) == tree.value(values)


@given(trees(), bindings())
def test_the_source_has_the_same_value(tree, values):
    assume(tree.exact(values))
    expr = parsed(tree)
    assert eval(source(expr), PYTHON, values) == evaluate(expr, values)


@given(trees("+ - * /"), bindings(1))
def test_no_size_is_ever_rounded(tree, values):
    """Where a division is not exact, either it is said, or the factors cancel and the size is the right one."""
    try:
        actual = evaluate(parsed(tree), values)
        expected = tree.value(values)
    except (Inexact, ZeroDivisionError):
        return
    assert actual == expected


@given(conditions(), bindings())
def test_the_truth_is_that_of_the_text(text, values):
    expr = parse_condition(text)
    expected = bool(eval(text, PYTHON, values))
    assert bool(evaluate(expr, values)) == expected
    assert bool(eval(source(expr), PYTHON, values)) == expected


@given(st.lists(trees("+ *"), min_size=1, max_size=4), st.lists(trees("+ *"), max_size=3), bindings(1))
def test_cancelling_changes_no_value(factors, divisors, values):
    bottom = math.prod(int(d.value(values)) for d in divisors)
    top = math.prod(int(f.value(values)) for f in factors)
    assume(bottom != 0 and top % bottom == 0)
    expr = product([parsed(f) for f in factors], [parsed(d) for d in divisors])
    assert evaluate(expr, values) == top // bottom


@given(trees(), bindings())
def test_known_names_can_be_put_in_first(tree, values):
    assume(tree.exact(values))
    some = {n: Const(values[n]) for n in NAMES[:2]}
    rest = {n: values[n] for n in NAMES[2:]}
    assert evaluate(substitute(parsed(tree), some), rest) == tree.value(values)


def test_names_are_replaced_all_at_once():
    assert brief(substitute(parse("a - b"), {"a": Name("b"), "b": Name("a")})) == "b - a"


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        ("page_size / 32", {"page_size": 48}, "page_size % 32 == 0 is needed, got 48 % 32 = 16"),
        ("(a + 1) / b", {"a": 4, "b": 2}, "(a + 1) % b == 0 is needed, got 5 % 2 = 1"),
        ("a / b", {"a": 4, "b": 0}, "a / b needs b != 0, got 0"),
        ("a // b", {"a": 4, "b": 0}, "a // b needs b != 0, got 0"),
        ("a % b", {"a": 4, "b": 0}, "a % b needs b != 0, got 0"),
        ("cdiv(a, b)", {"a": 4, "b": 0}, "cdiv(a, b) needs b != 0, got 0"),
        ("align(a, b)", {"a": 4, "b": 0}, "align(a, b) needs b != 0, got 0"),
        ("7 / 2", {}, "7 % 2 == 0 is needed, got 7 % 2 = 1"),
        ("7 / 0", {}, "7 / 0 needs 0 != 0, got 0"),
    ],
)
def test_a_division_that_is_not_exact_names_the_rule_and_the_numbers(text, values, message):
    with pytest.raises(Inexact) as caught:
        evaluate(parse(text), values)
    assert str(caught.value) == message


def test_a_name_without_a_value():
    with pytest.raises(KeyError, match="page"):
        evaluate(parse("page * 2"), {})


def test_conditions_on_arguments():
    k = torch.zeros(3, 2, dtype=torch.float8_e4m3fn)
    holds = lambda text, **args: evaluate(parse_condition(text), {"n": 8}, args)  # noqa: E731
    assert holds("given(k)", k=k)
    assert not holds("given(k)", k=None)
    assert not holds("given(k)")
    assert holds("dtype(k) == e4m3", k=k)
    assert holds("dtype(k) != bf16 and numel(k) == 6", k=k)
    assert holds("dtype(k) == dtype(q)", k=k, q=k)
    assert not holds("dtype(k) in (bf16, fp16)", k=k)
    assert holds("dtype(k) == None", k=None)


@pytest.mark.parametrize(("n", "expected"), [(0, False), (1, True), (2, True), (6, False), (64, True), (-2, False)])
def test_powers_of_two(n, expected):
    assert evaluate(parse_condition("pow2(n)"), {"n": n}) is expected


# --- What an expression speaks of ------------------------------------------------------------------------------------


def test_names_come_as_often_as_they_occur_and_arguments_apart():
    expr = parse_condition("a * b + a == c and given(x) and dtype(y) == e4m3 and numel(z) < a")
    assert list(names(expr)) == ["a", "b", "a", "c", "a"]
    assert list(arguments(expr)) == ["x", "y", "z"]


def test_element_types_are_not_names():
    expr = parse_condition("dtype(k) in (e4m3, bf16)")
    assert list(names(expr)) == []
    assert expr == Op("in", (Op("dtype", (Name("k"),)), Op("tuple", (Const(E4M3), Const(BF16)))))


def test_divisions_are_found_innermost_first():
    assert [brief(d) for d in divisions(parse("cdiv(a / 2 + 1, 3) / b"))] == ["a / 2", "cdiv(a / 2 + 1, 3) / b"]


@pytest.mark.parametrize(
    ("text", "size", "condition"),
    [("a + 1", True, False), ("a == 1", False, True), ("a", True, True), ("pow2(a)", False, True), ("3", True, False)],
)
def test_sizes_and_conditions(text, size, condition):
    expr = parse_condition(text) if condition else parse(text)
    assert (is_size(expr), is_condition(expr)) == (size, condition)


# --- Isolating one unknown -------------------------------------------------------------------------------------------


@st.composite
def equations(draw: st.DrawFn) -> Tree:
    """A side in which ``u`` occurs once, under operations that can be inverted."""
    tree = leaf("u")
    for _ in range(draw(st.integers(0, 4))):
        op, other = draw(st.sampled_from("+-*/")), draw(trees("+ *"))
        tree = node(op, tree, other) if draw(st.booleans()) else node(op, other, tree)
    return tree


@given(equations(), trees("+ * -"), bindings(1), st.booleans())
def test_the_isolated_unknown_satisfies_the_equation(side, other, values, swap):
    left, right = parsed(side), parsed(other)
    assume("u" in names(left))
    inverse = isolate(right, left, "u") if swap else isolate(left, right, "u")
    assert inverse is not None
    assert "u" not in names(inverse)
    try:
        found = evaluate(inverse, values)
        actual = evaluate(left, values | {"u": found})
    except Inexact:
        return
    assert actual == evaluate(right, values)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("slot", "page * page_size", "slot / page"),
        ("cap - page_size", "b", "cap - b"),
        ("cap / page_size", "b", "cap / b"),
        ("page_size / 32", "chunk", "chunk * 32"),
        ("page_size + page_size", "b", None),
        ("page_size", "page_size * 2", None),
        ("align(page_size, 4)", "b", None),
        ("page_size // 4", "b", None),
        ("page_size % 4", "b", None),
        ("min(page_size, 4)", "b", None),
        ("a", "b", None),
    ],
)
def test_isolate(left, right, expected):
    found = isolate(parse(left), parse(right), "page_size")
    assert (None if found is None else brief(found)) == expected


def test_plan_goes_as_far_as_it_can():
    texts = [("group * 32", "head_dim"), ("slot", "page * page_size"), ("page_size", "chunk * 32"), ("x", "y + z")]
    steps = plan(["slot", "page", "head_dim"], [Equation(parse(a), parse(b)) for a, b in texts])
    assert [(name, brief(expr)) for name, expr, _ in steps] == [
        ("group", "head_dim / 32"),
        ("page_size", "slot / page"),
        ("chunk", "page_size / 32"),
    ]


# --- What is refused -------------------------------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').system('touch executed')",
    "eval('1')",
    "open('executed', 'w')",
    "print(a)",
    "a.b",
    "a.__class__",
    "a[0]",
    "lambda: 1",
    "(lambda: 1)()",
    "[x for x in a]",
    "{x for x in a}",
    "(x for x in a)",
    "f'{a}'",
    "f'{open(1)}' == 'a'",
    "(a := 1)",
    "a ** 2",
    "9 ** 9 ** 9 ** 9",
    "a << 60",
    "a & b",
    "a | b",
    "a ^ b",
    "a @ b",
    "~a",
    "+a",
    "a if b else c",
    "await a",
    "yield",
    "*a",
    "{a: b}",
    "{**a}",
    "min(*a)",
    "min(*a, b)",
    "min(a, b=2)",
    "min(a)",
    "min(a, b, c)",
    "cdiv(a)",
    "min(a, b)(c)",
    "sum(a, b)",
    "1.5",
    "1e3",
    "1j",
    "b'a'",
    "...",
    "",
    "   ",
    "a b",
    "a; b",
    "a\nb",
    "a = 1",
    "import os",
    "class",
    "lambda",
    "None",
    "True",
    "'a'",
    "a == b",
    "(a, b)",
    "'a' + a",
    "True + 1",
    "(a == b) + 1",
    "dtype(k) + 1",
    "given(k) * 2",
    "-(a == b)",
    "min((a, b), 2)",
    "min",
    "dtype",
    "9223372036854775808",
    "9" * 900,
    "9" * 5000,
    "a" * 10_000,
    "a + " * 2500 + "a",
    "(" * 5000 + "a" + ")" * 5000,
    "(" * 200 + "a" + ")" * 200,
    "(" * 900,
    "[" * 900,
    ")" * 900,
    "-" * 2000 + "a",
    "-" * 900 + "a",
    "not " * 200 + "a",
    "a+" * 400 + "a",
    "a" + ".a" * 400,
    "min(a, " * 100 + "a" + ")" * 100,
    "a\0b",
    "\0",
    "ñ",
    "\ufb01x",  # the ligature fi: Python would read it as fix
    "page_\uff53ize",  # a full-width s: Python would read it as page_size
    "\u200ba",
    "a\u2028b",
    "\ud800",
    "'\\N{BULLET}' == a",
]


def first(text: str) -> str:
    return ascii(text if len(text) <= 24 else f"{text[:20]}, {len(text)} characters")


@pytest.mark.parametrize("text", HOSTILE, ids=first)
def test_anything_else_is_refused_at_once_and_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with pytest.raises(DimSyntaxError) as caught:
        parse(text)
    assert time.process_time() - start < 0.1
    assert not list(tmp_path.iterdir())
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a + 1", "is no condition"),
        ("numel(k)", "is no condition"),
        ("3", "is no condition"),
        ("'a'", "is no condition"),
        ("None", "is no condition"),
        ("dtype(k)", "is no condition"),
        ("(a == b,)", "is no condition"),  # a comma too many: it would always hold
        ("(a, b)", "is no condition"),
        ("a + 1 and b", "'a [+] 1' where a condition is needed"),
        ("not (a, b)", "'[(]a, b[)]' where a condition is needed"),
        ("a in 5", "in without a list of values"),
        ("'a' in b", "in without a list of values"),
        ("a not in min(b, c)", "not in without a list of values"),
        ("a < 'b'", "< between what are not both numbers"),
        ("a < (b == c)", "< between what are not both numbers"),
        ("dtype(k) > bf16", "> between what are not both numbers"),
        ("dtype(k) == fp3", "'fp3' is no element type"),
        ("dtype(k) in (bf16, 3)", "'3' is no element type"),
        ("dtype(k + 1) == bf16", "dtype[(]...[)] of something that is not an argument's name"),
        ("given(3)", "given[(]...[)] of something that is not an argument's name"),
        ("given(a.b)", "a Attribute"),
        ("pow2(a == b)", "'a == b' where a number is needed"),
    ],
)
def test_what_is_no_condition(text, message):
    with pytest.raises(DimSyntaxError, match=message):
        parse_condition(text)


@pytest.mark.parametrize(
    "value", [1.5, None, True, [1], b"a", 2**63, -(2**64), 10**5000], ids=lambda v: type(v).__name__
)
def test_what_is_no_size(value):
    with pytest.raises(DimSyntaxError):
        parse(value)


@pytest.mark.parametrize("name", ["len", "id", "int", "print", "__name__", "match", "type", "_", "tl", "self"])
def test_other_names_of_python_are_names(name):
    expr = parse(f"{name} * 2")
    assert list(names(expr)) == [name]
    assert evaluate(expr, {name: 3}) == 6


@given(st.text(alphabet="abc_019 +-*/%()[]{},.<>=!'\"\\#:\n\t\0é", max_size=30))
def test_any_text_is_refused_or_can_be_read_back(text):
    for read in (parse, parse_condition):
        try:
            expr = read(text)
        except DimSyntaxError:
            continue
        assert read(source(expr, exact="/")) == expr
