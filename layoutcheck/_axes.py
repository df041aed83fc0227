"""Which change of axes turns the shape that was needed into the one that came: numbers and labels only, no layout.

Axes in another order, one missing, extra, split or merged, all of them flat, rounded up or not, two values to a byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from layoutcheck._errors import numbers

Found = tuple[str, str | None]  # cause, fix
_MOST_AXES = 6  # 720 orders; more axes than that are not searched
_TILES = (4, 8, 16, 32, 64, 128, 256)


def permuted(name: str, labels: Sequence[str], actual: list[int], wanted: list[int]) -> Iterator[Found]:
    """The axes in another order."""
    if sorted(actual) != sorted(wanted) or actual == wanted or len(actual) > _MOST_AXES:
        return
    options = [p for p in itertools.permutations(range(len(wanted))) if [wanted[i] for i in p] == actual]
    # Of the orders that give these sizes, the one that moves the fewest axes is the likely mistake.
    best = min(options, key=lambda p: sum(i != j for i, j in enumerate(p)))
    order = " ".join(labels[i] for i in best)
    moved = [i for i, j in enumerate(best) if i != j]
    swapped = f"{labels[best[moved[0]]]} and {labels[best[moved[1]]]} are swapped"
    what = swapped if len(moved) == 2 else "the axes are in another order"
    back = ", ".join(str(best.index(i)) for i in range(len(best)))
    yield (
        f"{what}: {name} has the sizes of ({order}), needed is ({' '.join(labels)})",
        f"build {name} as ({' '.join(labels)}); {name}.permute({back}) shows it so, but does not move the bytes",
    )


def regrouped(name: str, labels: Sequence[str], actual: list[int], wanted: list[int]) -> Iterator[Found]:
    """One axis missing, extra, split or merged, or all of them flat."""
    shape = numbers(wanted)
    same_bytes = f"pass the shape {shape}; if the bytes are in this order, {name}.view{shape}"
    n = len(wanted)
    if len(actual) == 1 < n and actual[0] == math.prod(wanted):
        yield f"{name} is flat: {actual[0]} = {' * '.join(map(str, wanted))} elements in one dimension", same_bytes
        return
    gone = [labels[i] for i in range(n) if wanted[:i] + wanted[i + 1 :] == actual]
    if gone:
        yield f"the axis {' or '.join(gone)} is missing", f"pass the shape {shape}"
    for i, j in itertools.combinations(range(n + 1), 2):
        run = wanted[i:j]
        if j - i > 1 and 1 not in run and [*wanted[:i], math.prod(run), *wanted[j:]] == actual:
            product = " * ".join(map(str, run))
            yield f"{' and '.join(labels[i:j])} are merged into one dimension: {product} = {actual[i]}", same_bytes
    extra = next((i for i in range(len(actual)) if actual[:i] + actual[i + 1 :] == wanted), None)
    if extra is not None:
        yield f"there is an extra dimension of {actual[extra]} at position {extra}", f"pass the shape {shape}"
        return
    for i, j in itertools.combinations(range(len(actual) + 1), 2):
        run = actual[i:j]
        if j - i > 1 and [*actual[:i], math.prod(run), *actual[j:]] == wanted:
            product = " * ".join(map(str, run))
            yield f"{labels[i]} is split into {j - i} dimensions: {product} = {wanted[i]}", same_bytes


def rounded(name: str, labels: Sequence[str], actual: list[int], wanted: list[int]) -> Iterator[Found]:
    """Sizes rounded up to a tile although the layout has no padding."""
    if len(actual) != len(wanted):
        return
    texts = []
    for label, a, w in zip(labels, actual, wanted, strict=True):
        if a == w:
            continue
        tile = next((t for t in reversed(_TILES) if a % t == 0 and w % t and -(-w // t) * t == a), None)
        if tile is None:
            return
        texts.append(f"{label} {a} is {w} rounded up to a multiple of {tile}")
    if texts:
        yield (
            f"{name} is padded, and this layout has no padding: {', '.join(texts)}",
            f"pass the shape {numbers(wanted)}",
        )


def packed(name: str, labels: Sequence[str], actual: list[int], wanted: list[int]) -> Iterator[Found]:
    """Two 4-bit values to a byte: half as many elements in the innermost dimension."""
    if len(actual) != len(wanted) or not wanted or actual[:-1] != wanted[:-1]:
        return
    if actual[-1] * 2 == wanted[-1]:
        yield f"{name} holds two values to a byte: {wanted[-1]} of {labels[-1]} in {actual[-1]} bytes", None
    elif actual[-1] == wanted[-1] * 2:
        text = f"{name} holds one value to a byte, needed are two: {actual[-1]} bytes for {labels[-1]} {wanted[-1]}"
        yield text, None
