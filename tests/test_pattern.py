"""The layout pattern: what is read, and that every error names the pattern and the part that offends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutcheck._pattern import Axis, PatternError, expand, parse_groups, parse_pattern

# --- Strategies ------------------------------------------------------------------------------------------------------


@st.composite
def axis_trees(draw: st.DrawFn) -> tuple[Axis, ...]:
    """Trees of axes with names that are all different."""
    names = iter(f"n{i}" for i in range(100))

    def axis(depth: int) -> Axis:
        name = next(names)
        parts = draw(st.integers(2, 3)) if depth < 3 and draw(st.booleans()) else 0
        return Axis(name, tuple(axis(depth + 1) for _ in range(parts)))

    return tuple(axis(0) for _ in range(draw(st.integers(1, 3))))


# --- What is read ----------------------------------------------------------------------------------------------------


def test_a_pattern():
    axes, memory = parse_pattern("slot(page token(chunk lane)) head group -> page head lane chunk group")
    token = Axis("token", (Axis("chunk"), Axis("lane")))
    assert axes == (Axis("slot", (Axis("page"), token)), Axis("head"), Axis("group"))
    assert memory == (("page",), ("head",), ("lane",), ("chunk",), ("group",))
    assert axes[0].leaves() == ("page", "chunk", "lane")
    assert [a.name for a in axes[0].walk()] == ["slot", "page", "token", "chunk", "lane"]


@pytest.mark.parametrize(
    "text",
    [
        "m(mt w) k -> (mt w) k",
        "  m ( mt w )k->( mt w)k  ",
        "m(mt\tw)\n k -> (mt w) k",
    ],
)
def test_unnamed_parentheses_join_and_spaces_do_not_matter(text):
    axes, memory = parse_pattern(text)
    assert [str(a) for a in axes] == ["m(mt w)", "k"]
    assert memory == (("mt", "w"), ("k",))


def test_a_composite_axis_in_memory_stands_for_its_parts():
    _, memory = parse_pattern("slot(page token(chunk lane)) dim -> slot dim")
    assert memory == (("page", "chunk", "lane"), ("dim",))
    _, memory = parse_pattern("slot(page token(chunk lane)) dim -> dim (page token)")
    assert memory == (("dim",), ("page", "chunk", "lane"))


def test_no_axes_at_all():
    assert parse_pattern(" -> ") == ((), ())


@given(axis_trees(), st.randoms(use_true_random=False))
def test_every_order_of_the_parts_can_be_read(axes, random):
    leaves = [leaf for axis in axes for leaf in axis.leaves()]
    random.shuffle(leaves)
    text = f"{' '.join(map(str, axes))} -> {' '.join(leaves)}"
    assert parse_pattern(text) == (axes, tuple((leaf,) for leaf in leaves))


@pytest.mark.parametrize(
    ("text", "groups"),
    [("slot head", (("slot",), ("head",))), ("(page token) head", (("page", "token"), ("head",))), ("", ())],
)
def test_groups_of_a_view(text, groups):
    assert parse_groups(text) == groups


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs one '->'"),
        ("a b", "needs one '->'"),
        ("a -> a -> a", "needs one '->'"),
        ("a => a", "needs one '->'"),
        ("a a -> a", "names a more than once on the left"),
        ("a b(a c) -> b", "names a more than once on the left"),
        ("a b -> a b a", "names a more than once in memory"),
        ("s(a b) c -> s c b", "names b more than once in memory"),
        ("a b c -> a", "does not say where b, c is in memory"),
        ("s(a b) c -> a c", "does not say where b is in memory"),
        ("a b -> a b c", "has no axis 'c'; it has a, b"),
        ("a b -> a (b c)", "has no axis 'c'; it has a, b"),
        ("a(b) -> b", "splits a into fewer than two parts"),
        ("a() -> a", "splits a into fewer than two parts"),
        ("(a b) c -> a b c", "has unnamed parentheses on the left"),
        ("a ((b c) d) -> b c d", "has unnamed parentheses on the left"),
        ("a(b c -> b c", "leaves a parenthesis open"),
        ("a(b c)) -> b c", "closes a parenthesis that was not opened"),
        (") -> a", "closes a parenthesis that was not opened"),
        ("a(b c) -> ((b c))", "nests parentheses"),
        ("a(b c) -> (b c", "leaves a parenthesis open"),
        ("a(b c) -> b c)", "closes a parenthesis that holds nothing"),
        ("a b -> a () b", "closes a parenthesis that holds nothing"),
        ("a 1 -> a 1", "has '1', which is neither a name nor"),
        ("a b2 3c -> a", "has '3c', which is neither"),
        ("a * -> a *", "has '[*]', which is neither"),
        ("a, b -> a, b", "has ',', which is neither"),
        ("a ... -> a ...", "has '...', which is neither"),
        ("a [b] -> a b", "has '\\[b\\]', which is neither"),
        ("a.b -> a.b", "has '.b', which is neither"),
        ("a b\0 -> a b", "which is neither"),
        ("a\u00e9 -> a", "has '\u00e9', which is neither"),
        ("\ufb01x -> fix", "which is neither"),  # the ligature fi, which Python would read as fix
        ("page_\uff53ize -> a", "which is neither"),
        ("a lambda -> a lambda", "names an axis lambda, which is a word of Python's own"),
        ("a(None b) -> a", "names an axis None, which is a word of Python's own"),
        ("a" + "(a b" * 40 + ")" * 40 + " -> a", "nested too deep"),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_what_is_no_pattern(text, message):
    with pytest.raises(PatternError, match=message) as caught:
        parse_pattern(text)
    assert repr(text)[:50].rstrip("'") in str(caught.value)


@pytest.mark.parametrize("text", ["a ((b c) d)", "(a b", "a)", "()", "a b-c", "a if"])
def test_what_is_no_view(text):
    with pytest.raises(PatternError) as caught:
        parse_groups(text)
    assert repr(text) in str(caught.value)


def test_a_view_of_an_axis_that_is_not_there():
    axes, _ = parse_pattern("slot(page token) dim -> page token dim")
    with pytest.raises(PatternError, match="'slot heads' has no axis 'heads'; it has slot, page, token, dim"):
        expand(parse_groups("slot heads"), axes, "slot heads")


@given(st.text(alphabet="ab( )->1.", max_size=16))
def test_any_text_is_a_pattern_or_an_error_that_shows_it(text):
    try:
        axes, memory = parse_pattern(text)
    except PatternError as error:
        message = str(error)
    else:
        assert sorted(leaf for g in memory for leaf in g) == sorted(leaf for a in axes for leaf in a.leaves())
        return
    assert repr(text) in message
