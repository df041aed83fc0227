"""The command line, ``layoutcheck COMMAND ...``: what the catalogue and the pools say, for people and scripts.

Decides how words become sizes and how answers are printed; the answers are the library's own. Exit codes: 0, 1 where
something does not fit or differs, 2 for wrong usage (and 141 where the reader of a pipe has gone).
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import torch

from layoutcheck import _describe, _dtypes, _manifest, layouts
from layoutcheck._dims import Equation, Name, names, plan
from layoutcheck._errors import LayoutError, numbers
from layoutcheck._layout import Layout
from layoutcheck._pool import Pool
from layoutcheck._record import Record

Entry = Layout | Record
UNITS = {"": 1, "b": 1} | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


class Usage(Exception):
    """A command that cannot be meant, in words for the one who typed it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Raises ``SystemExit(2)`` for wrong usage, as argparse does."""
    parser, commands = _parsers()
    arguments, rest = parser.parse_known_args(argv)
    used = commands[arguments.command]
    # argparse fills its list of sizes before the first option; those that follow one are left over.
    if strange := [word for word in rest if word.startswith("-") or not hasattr(arguments, "sizes")]:
        used.error(f"unrecognized arguments: {' '.join(strange)}")
    if rest:
        arguments.sizes = [*arguments.sizes, *rest]
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except Usage as error:
        used.error(str(error))
    except LayoutError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return BROKEN_PIPE
    return code


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="layoutcheck",
        description="Layouts of GPU kernels' buffers: what they are, what fits, what differs.",
        epilog="Exit code 0; 1 where something does not fit or differs; 2 for wrong usage.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Any, said: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=said, description=said, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    def sized(made: argparse.ArgumentParser, name: str, said: str) -> argparse.ArgumentParser:
        made.add_argument("name", metavar=name, help=said)
        made.add_argument("sizes", metavar="dim=value", nargs="*", default=[], help="such as page_size=64 head=8")
        return made

    command("list", _list, "the layouts of the catalogue, one a line")
    sized(command("show", _show, "one layout: pattern, shape, strides, bytes, rules, memory order"), "NAME", "a layout")
    explain = sized(command("explain", _explain, "why a tensor does not have a layout"), "NAME", "a layout")
    explain.add_argument("--shape", type=_integers, required=True, help="of the tensor, such as 4,2,32,4")
    explain.add_argument("--stride", type=_integers, help="in elements; contiguous if not given")
    explain.add_argument("--dtype", type=_dtype, help="such as uint8 or e4m3; the layout's own if not given")
    fit = sized(command("fit", _fit, "how much fits into a budget"), "NAME|POOL", "a layout, or a pool")
    fit.add_argument("--bytes", type=_bytes, required=True, help="the budget, such as 60GiB")
    fit.add_argument("--free", metavar="DIM", help="what is counted; page, slot or row if not given")
    fit.add_argument("--layers", type=int, help="so many of every buffer")
    diff = command("diff", _diff, "every field in which two manifests differ")
    diff.add_argument("first", metavar="A.json", help="what pool.manifest() says in one process")
    diff.add_argument("second", metavar="B.json", help="and in another")
    return parser, dict(commands.choices)


# --- words ------------------------------------------------------------------------------------------------------------


def _integers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d{1,18}\s*(,\s*\d{1,18}\s*)*,?\s*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 4,2,32,4")
    return tuple(int(n) for n in text.split(",") if n.strip())


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes such as 4096, 60GiB or 1.5GB")
    return int(Decimal(found[1]) * UNITS[found[2].lower()])


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    try:
        return _dtypes.element(text).torch
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(words: Iterable[str], wordy: Iterable[str] = ()) -> dict[str, Any]:
    """``dim=value`` by name: integers, or words for the names in ``wordy``."""
    found: dict[str, Any] = {}
    for text in words:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise Usage(f"{text!r} is no dim=value such as page_size=64")
        if name in found:
            raise Usage(f"{name} is given twice")
        if re.fullmatch(r"\d{1,18}", value):
            found[name] = int(value)
        elif name in wordy and value.isidentifier():
            found[name] = value
        else:
            raise Usage(
                f"{name}={value}: {name} is a number of 1 to 18 digits" + (" or a word" if name in wordy else "")
            )
    return found


def _entry(name: str) -> Entry:
    try:
        return layouts.layout(name)
    except KeyError as error:
        raise Usage(error.args[0]) from None


def _check_names(where: str, sizes: Iterable[str], known: Iterable[str]) -> None:
    for name in sizes:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Usage(f"{name!r} is no size of {where} ({', '.join(sorted(known))}){hint}")


# --- commands ---------------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    found = layouts.entries()
    width = max(map(len, found))
    for name, entry in found.items():
        print(f"{name:<{width}}  {_describe.pattern(entry)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    entry, sizes = _entry(arguments.name), _sizes(arguments.sizes)
    parts = [entry] if isinstance(entry, Layout) else [entry.buffer, *entry.sections.values()]
    _check_names(entry.name, sizes, {n for part in parts for n in (*part._names, *dict(part.sizes))})
    try:
        lines = list(_describe.describe(entry, sizes))
    except TypeError as error:
        raise Usage(str(error)) from None
    print(*lines, sep="\n")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    entry, sizes = _entry(arguments.name), _sizes(arguments.sizes)
    layout = entry if isinstance(entry, Layout) else entry.buffer
    where = entry.name if isinstance(entry, Layout) else f"the buffer of {entry.name}"
    _check_names(where, sizes, layout._names)
    shape, stride, dtype = arguments.shape, arguments.stride, arguments.dtype or layout.dtype
    if stride is not None and len(stride) != len(shape):
        raise Usage(f"{len(shape)} sizes in --shape, {len(stride)} in --stride")
    try:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if stride is not None:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise Usage(f"no tensor can be made of --shape and --stride: {error}") from None
    try:
        solved = entry.check(tensor, **sizes)
    except LayoutError as error:
        print(error)
        return 1
    except TypeError:
        missing = [f"{n}=..." for n in _undetermined(layout, sizes)]
        if not missing:
            raise
        raise Usage(f"the shape of {where} does not show every size; give {' '.join(missing)}") from None
    print(f"{entry.name}: a tensor of shape {numbers(shape)} and dtype {_dtypes.short(dtype)} fits")
    print(f"   {' '.join(f'{n}={v}' for n, v in solved.items())}")
    return 0


def _undetermined(layout: Layout, sizes: Iterable[str]) -> list[str]:
    """The open dims that follow neither from the given sizes nor from the shape of a tensor."""
    shown = {f"shape {i}": d.size for i, d in enumerate(layout.tensor_dims)}
    known = {*sizes, *shown, *(n for n, _ in layout.rules.default)}
    known |= {n for n, _, _ in plan(known, [*layout.equations, *(Equation(Name(n), e) for n, e in shown.items())])}
    return [n for n in layout.dims if n not in known]


def _fit(arguments: argparse.Namespace) -> int:
    pool = _pool(arguments.name)
    forms = [pair for pairs in pool._forms.values() for pair in pairs]
    equations = {n for _, f in forms for e in f.equations for side in (e.left, e.right) for n in names(side)}
    known = equations | {n for _, f in forms for s in f.sizes if s is not None for n in names(s)}
    wordy = {n for condition, _ in forms if condition is not None for n in names(condition)} - known
    sizes = _sizes(arguments.sizes, wordy)
    usual = next((n for n in ("page", "slot", "row") if n in known), None)
    free = arguments.free or usual
    if free is None:
        raise Usage(f"--free must say what is counted: {', '.join(sorted(n for n in known if '.' not in n))}")
    if free in sizes:
        raise Usage(f"{free} is what is counted, so it cannot be given")
    if missing := sorted(wordy - set(sizes)):
        raise Usage(f"{arguments.name} needs {', '.join(f'{n}=WORD' for n in missing)}")
    if arguments.layers is not None and arguments.layers < 1:
        raise Usage(f"--layers must be 1 or more, got {arguments.layers}")
    layers, budget = arguments.layers, arguments.bytes
    try:
        count = pool.fit(budget, free=free, layers=layers, **sizes)
        shown = sizes | {free: max(count, 1)}
        used, made = pool.nbytes(layers=layers, **shown), pool._layouts(shown, layers)[0]
    except TypeError as error:
        raise Usage(str(error)) from None
    except LayoutError as error:
        if usual in (free, None):
            raise
        raise Usage(f"{free} cannot be counted one by one with these sizes, try --free {usual}\n{error}") from None
    taken, room = _describe.amount(used), _describe.amount(budget)
    if count == 0:
        print(f"not even one {free} fits: it takes {taken}, the budget is {room}")
        return 1
    print(f"{free}={count} fits: {taken} of {room}" + (f"; each of {layers} layers:" if layers else ""))
    for field, layout in made.items():
        if layout is not None:
            dtype = (layout if isinstance(layout, Layout) else layout.buffer).dtype
            shown_as = f"{layout.name}, {_dtypes.short(dtype)}, shape {numbers(layout.shape)}"
            print(f"   {field:<8} {shown_as}, {_describe.amount(layout.nbytes)}")
    return 0


def _pool(name: str) -> type[Pool]:
    """A pool by name, or one of a single buffer of a catalogue layout."""
    from layoutcheck import pools

    known = {n: v for n, v in vars(pools).items() if isinstance(v, type) and issubclass(v, Pool) and v is not Pool}
    if name in known:
        return known[name]
    if name not in layouts.entries() and (close := difflib.get_close_matches(name, known, 1)):
        raise Usage(f"no pool {name!r}; did you mean {close[0]!r}?")
    entry = _entry(name)
    fields = {"__module__": __name__, "__annotations__": {"buffer": Annotated[torch.Tensor, entry]}}
    made: type[Pool] = types.new_class(name, (Pool,), exec_body=lambda body: body.update(fields))
    return made


def _diff(arguments: argparse.Namespace) -> int:
    first, second = (_manifest_of(path) for path in (arguments.first, arguments.second))
    found = _manifest.diff(first, second)
    for difference in found:
        print(_escaped(str(difference)))
    if not found:
        print("the manifests say the same")
    return 1 if found else 0


def _manifest_of(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return _manifest.load(file.read(_manifest.MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Usage(_escaped(f"{path}: {reason}")) from None


def _escaped(text: str) -> str:
    """Text from outside as ASCII: it must not move the cursor or colour the terminal."""
    return text.encode("unicode_escape").decode("ascii")
