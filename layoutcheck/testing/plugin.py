"""Pytest fixtures: ``layout_mode``, ``redzones``, ``layout_cases``; and ``--layoutcheck-examples``, how many cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from layoutcheck._mode import mode
from layoutcheck.testing._call import Call
from layoutcheck.testing._calls import calls
from layoutcheck.testing._check import for_each
from layoutcheck.testing._redzones import redzones as run_over_redzones


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option for the number of examples."""
    parser.getgroup("layoutcheck").addoption(
        "--layoutcheck-examples", type=int, default=20, metavar="N",
        help="valid calls that the fixture layout_cases draws for a function (default: 20)",
    )  # fmt: skip


@pytest.fixture
def layout_mode() -> Iterator[None]:
    """Every guard checks the rules that read data too, for as long as the test runs."""
    with mode("values"):
        yield


@pytest.fixture
def redzones() -> Callable[..., Any]:
    """:func:`layoutcheck.testing.redzones`: runs a call, and fails where it touches what it must not."""
    return run_over_redzones


@pytest.fixture
def layout_cases(request: pytest.FixtureRequest) -> Callable[..., list[Call]]:
    """``layout_cases(fn, **bounds)``: valid calls of a function with a contract, as many as the option says."""
    number = request.config.getoption("--layoutcheck-examples")

    def cases(fn: Callable[..., Any], **bounds: Any) -> list[Call]:
        found: list[Call] = []
        for_each(calls(fn, **bounds), found.append, number)
        return found

    return cases
