"""From coordinates to memory: offsets of ints and arrays, pack and unpack in torch, offset functions in Triton.

Every map here is derived from a layout's axes and strides. ``pack`` and ``unpack`` move axes and never compute an
offset, so they and ``offset`` check each other.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from layoutcheck._dims import Const, Expr, evaluate, names, plan, product, source, substitute

if TYPE_CHECKING:
    from layoutcheck._layout import Layout
    from layoutcheck._pattern import Axis


@dataclass(frozen=True)
class Term:
    """``(coordinate // divisor) % modulus * stride``; modulus None where the quotient is already smaller.

    ``stride`` is that of ``leaf``, the innermost of the parts that this term covers.
    """

    coordinate: str
    divisor: Expr
    modulus: Expr | None
    stride: Expr
    leaf: str


def terms(layout: Layout, coordinates: Sequence[str], apart: Sequence[str] = ()) -> list[Term]:
    """The map of a cut through the tree of axes, outermost term first. Parts adjacent in memory are one term.

    Parts in ``apart`` are a term of their own all the same.

    Raises ``TypeError`` unless the coordinates name every part of the layout exactly once.
    """
    nodes = {a.name: a for axis in layout.axes for a in axis.walk()}
    for name in coordinates:
        if name not in nodes:
            raise TypeError(f"{layout.name} has no axis {name!r}; it has {', '.join(nodes)}")
    covered = [leaf for name in coordinates for leaf in nodes[name].leaves()]
    if sorted(covered) != sorted(layout.order):
        missing = [leaf for leaf in layout.order if leaf not in covered]
        twice = sorted({leaf for leaf in covered if covered.count(leaf) > 1})
        raise TypeError(
            f"{layout.name}: {', '.join(coordinates) or 'no coordinates'} leave out {', '.join(missing)}"
            if missing
            else f"{layout.name}: {', '.join(coordinates)} give {', '.join(twice)} more than once"
        )
    result = []
    for name in coordinates:
        leaves = nodes[name].leaves()
        start = 0
        while start < len(leaves):
            end = start
            while end + 1 < len(leaves) and layout.adjacent(leaves[end], leaves[end + 1]):
                if leaves[end] in apart or leaves[end + 1] in apart:
                    break
                end += 1
            inner = product(layout.size_of(leaf) for leaf in leaves[end + 1 :])
            own = product(layout.size_of(leaf) for leaf in leaves[start : end + 1])
            result.append(Term(name, inner, own if start else None, layout.leaf_strides[leaves[end]], leaves[end]))
            start = end + 1
    position = {leaf: i for i, leaf in enumerate(layout.order)}
    first = {t: i for i, t in enumerate(result)}
    outermost = {name: min(position[leaf] for leaf in nodes[name].leaves()) for name in coordinates}
    return sorted(result, key=lambda t: (outermost[t.coordinate], first[t]))


def offset(layout: Layout, coordinates: Mapping[str, Any]) -> Any:
    """The offset in elements; coordinates are ints, numpy arrays or torch tensors that broadcast."""
    values = layout.values if layout.concrete else layout._solve({})
    total: Any = evaluate(layout._elements_of(layout.rules.base, True), values)
    for term in terms(layout, list(coordinates)):
        value = coordinates[term.coordinate]
        divisor = _known(layout, term.divisor, values)
        if divisor != 1:
            value = value // divisor
        if term.modulus is not None:
            value = value % _known(layout, term.modulus, values)
        total = value * _known(layout, term.stride, values) + total
    return total


def _known(layout: Layout, expr: Expr, values: Mapping[str, int]) -> int:
    try:
        return int(evaluate(expr, values))
    except KeyError as missing:
        raise TypeError(f"{layout.name}: {missing.args[0]} must be known to compute an offset") from None


def coalesced(layout: Layout) -> list[list[tuple[int, int]]]:
    """Where the first element is, if not at 0; for each logical axis larger than 1, its (size, stride) runs outermost
    first, merged as far as they go.
    """
    base = evaluate(layout._elements_of(layout.rules.base, True), layout.values)
    result = [[(base, 0)]] if base else []
    for axis in layout.axes:
        runs: list[tuple[int, int]] = []
        for leaf in axis.leaves():
            size = evaluate(layout.memory_size(leaf), layout.values)
            stride = evaluate(layout.leaf_strides[leaf], layout.values)
            if size == 1:
                continue
            if runs and runs[-1][1] == stride * size:
                runs[-1] = (runs[-1][0] * size, stride)
            else:
                runs.append((size, stride))
        logical = evaluate(layout.size_of(axis.name), layout.values)
        if logical > 1:
            result.append([(logical, 0), *runs])
    return result


# --- reference, in torch ----------------------------------------------------------------------------------------------


def pack(layout: Layout, logical: torch.Tensor) -> torch.Tensor:
    """A new buffer that holds the logical tensor; what no coordinate maps to holds the fill, or zero."""
    sizes = [evaluate(layout.size_of(a.name), layout.values) for a in layout.axes]
    if tuple(logical.shape) != tuple(sizes):
        wanted = ", ".join(f"{a.name}={s}" for a, s in zip(layout.axes, sizes, strict=True))
        raise ValueError(f"{layout.name}.pack needs ({wanted}), got {tuple(logical.shape)}")
    dtype = logical.dtype
    if dtype not in layout.logical:
        raise TypeError(f"{layout.name} holds {' or '.join(map(str, layout.elements))}, not {dtype}")
    stored = dtype if layout.word == 1 else layout.dtype
    buffer = torch.empty(layout.nbytes // stored.itemsize, dtype=stored, device=logical.device)
    fill_(buffer, layout.rules.fill or 0, layout.elements[0].bits)
    memory = _memory(layout, _raw(buffer))
    padded = [evaluate(layout.memory_size(a.name), layout.values) for a in layout.axes]
    source_ = _raw(logical.contiguous())
    if padded != sizes:
        whole = logical.new_empty(padded)
        fill_(whole, layout.rules.fill or 0, max(8, layout.elements[0].bits))
        whole = _raw(whole)
        whole[tuple(slice(s) for s in sizes)] = source_
        source_ = whole
    leaves = [leaf for axis in layout.axes for leaf in axis.leaves()]
    split = source_.reshape([evaluate(layout.memory_size(leaf), layout.values) for leaf in leaves])
    memory.copy_(_folded(layout, split.permute([leaves.index(leaf) for leaf in layout.order])))
    return layout._show(buffer)


def unpack(layout: Layout, buffer: torch.Tensor) -> torch.Tensor:
    """The logical tensor that a buffer holds."""
    layout.check(buffer)
    logical = _unfolded(layout, leaf_view(layout, buffer, padding=False))
    sizes = [evaluate(layout.size_of(a.name), layout.values) for a in layout.axes]
    padded = [
        evaluate(layout.memory_size(a.name), layout.values) if a.parts else size
        for a, size in zip(layout.axes, sizes, strict=True)
    ]
    found = logical.reshape(padded)[tuple(slice(s) for s in sizes)].contiguous()
    return found.view(buffer.dtype if layout.word == 1 else layout.logical[0])


def _folded(layout: Layout, elements: torch.Tensor) -> torch.Tensor:
    """Elements in memory order as what carries them: neighbours of the last dimension in one word, the first lowest."""
    if layout.word == 1:
        return elements
    bytes_ = elements
    if layout.elements[0].bits == 4:
        bytes_ = (elements[..., 0::2] & 0xF) | (elements[..., 1::2] << 4)
    return bytes_.contiguous().view(_integers(layout.dtype.itemsize))


def _unfolded(layout: Layout, words: torch.Tensor) -> torch.Tensor:
    """The opposite of :func:`_folded`, for words with one dimension for each undivided part in logical order."""
    if layout.word == 1:
        return words
    leaves = [leaf for axis in layout.axes for leaf in axis.leaves()]
    innermost = leaves.index(layout.order[-1])
    bytes_ = words.movedim(innermost, -1).contiguous().view(torch.uint8)
    if layout.elements[0].bits == 4:
        bytes_ = torch.stack([bytes_ & 0xF, bytes_ >> 4], dim=-1).flatten(-2)
    return bytes_.movedim(-1, innermost)


def _memory(layout: Layout, flat: torch.Tensor) -> torch.Tensor:
    sizes = [evaluate(layout.in_words(leaf, layout.memory_size(leaf)), layout.values) for leaf in layout.order]
    strides = list(_word_strides(layout).values())
    base = evaluate(layout._elements_of(layout.rules.base, True), layout.values) // layout.word
    return flat.as_strided(sizes, strides[::-1], flat.storage_offset() + base)


def _word_strides(layout: Layout) -> dict[str, int]:
    """The stride of each undivided axis in elements of the tensor, innermost first."""
    strides = layout.leaf_strides.items()
    return {leaf: evaluate(layout.in_words(leaf, e, stride=True), layout.values) for leaf, e in strides}


def leaf_view(layout: Layout, tensor: torch.Tensor, first: Axis | None = None, *, padding: bool = True) -> torch.Tensor:
    """A tensor of a concrete layout as integers with one dimension for each undivided part, in logical order.

    The parts of ``first`` come before all others. Elements that share a carrier stay in it. Without ``padding``, axes
    that are not split have their logical size: their padding may lie beyond the end of the tensor's storage.
    """
    raw = _raw(tensor)
    stride_of = _word_strides(layout)
    for dim, shown, stride in zip(layout.tensor_dims, layout.view_leaves, tensor.stride(), strict=False):
        if dim.stride is None:  # free: the tensor's own
            for leaf in reversed(shown):
                stride_of[leaf] = stride
                stride *= evaluate(layout.memory_size(leaf), layout.values)
    axes = [*([first] if first else []), *(a for a in layout.axes if a is not first)]
    leaves = [leaf for axis in axes for leaf in axis.leaves()]
    whole = {axis.name for axis in layout.axes if not axis.parts and not padding}
    size_of = {leaf: layout.size_of(leaf) if leaf in whole else layout.memory_size(leaf) for leaf in leaves}
    sizes = [evaluate(layout.in_words(leaf, size), layout.values) for leaf, size in size_of.items()]
    return raw.as_strided(sizes, [stride_of[leaf] for leaf in leaves], raw.storage_offset())


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: torch cannot fill, compare or index every float8."""
    return tensor.view(_integers(tensor.element_size()))


def _integers(itemsize: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def fill_(tensor: torch.Tensor, code: int, bits: int) -> None:
    """Fill by code for elements of a byte or less (torch cannot fill every float8), by value for wider ones."""
    if bits <= 8:
        tensor.view(torch.uint8).fill_(code if bits == 8 else code * 0x11)
    else:
        tensor.fill_(code)


# --- in a kernel ------------------------------------------------------------------------------------------------------


def offset_fn(layout: Layout, coordinates: Sequence[str], name: str, strides: tuple[str, ...] = ()) -> Any:
    """A ``@triton.jit`` function ``name(*coordinates, SIZE, ...)`` that returns the offset in elements.

    Sizes are upper-case and passed by keyword: the layout's open dims that the map needs. (They are not keyword-only,
    which Triton 3.6 cannot compile.) An axis in ``strides`` takes its
    stride as an argument (``PAGE_STRIDE``), for pages with gaps and for views; those of the other axes stay. The
    outermost term is 64-bit unless the layout says ``offsets="int32"``. Coordinates must be non-negative, as Triton's
    ``//`` truncates.
    """
    import triton
    import triton.language as tl

    text = offset_source(layout, coordinates, name, strides)
    # Named by its text: the interpreter reads a function's source when it first runs, not when it is made.
    filename = f"<layoutcheck {layout.name} {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    namespace: dict[str, Any] = {"tl": tl, "__name__": f"layoutcheck.generated.{name}"}
    # The compiler, the interpreter, Inductor and debuggers all read a function's source through linecache.
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), namespace)
    function = namespace[name]
    function.__doc__ = f"Offset into {layout.name} ({layout}), in elements of {layout.elements[0]}."
    return triton.jit(function)


def offset_source(layout: Layout, coordinates: Sequence[str], name: str, strides: tuple[str, ...] = ()) -> str:
    """The text of :func:`offset_fn`'s function."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise TypeError(f"{name!r} cannot be the name of a function")
    parts = terms(layout, coordinates, strides)
    visible = in_dims(layout)
    nodes = {a.name: a for axis in layout.axes for a in axis.walk()}
    given: dict[Term, str] = {}
    for axis in strides:
        if axis not in nodes:
            raise TypeError(f"{layout.name} has no axis {axis!r}; it has {', '.join(nodes)}")
        one = [t for t in parts if (t.coordinate if nodes[axis].parts else t.leaf) == axis]
        if len(one) != 1:
            raise TypeError(f"{layout.name}: {axis} has no stride of its own in {', '.join(coordinates)}")
        given[one[0]] = f"{axis.upper()}_STRIDE"
    written: dict[str, str] = {}

    def text(expr: Expr) -> str:
        expr = substitute(expr, visible)
        for n in names(expr):
            if written.setdefault(n.upper(), n) != n:
                raise TypeError(f"{layout.name}: {written[n.upper()]} and {n} would both be written {n.upper()}")
        return source(expr, str.upper)

    lines = []
    for i, term in enumerate(parts):
        value = term.coordinate
        if term.divisor != Const(1):
            value = f"{value} // {_operand(text(term.divisor))}"
        if term.modulus is not None:
            value = f"{value} % {_operand(text(term.modulus))}"
        if i == 0 and term.leaf not in layout.narrow:
            value = f"tl.cast({value}, tl.int64)"
        if term in given:
            value = f"{_operand(value)} * {given[term]}"
        elif term.stride != Const(1):
            value = f"{_operand(value)} * {_operand(text(term.stride))}"
        lines.append(value)
    base = layout._elements_of(layout.rules.base, True)
    if base != Const(0):
        lines.append(text(base))
    keywords = [*sorted(written), *given.values()]
    if taken := {"tl", *keywords} & set(coordinates):
        raise TypeError(f"{layout.name}: a coordinate cannot be called {', '.join(sorted(taken))} in a kernel")
    signature = ", ".join([*coordinates, *keywords])
    return f"def {name}({signature}):\n    return " + " + ".join(lines or ["0"]) + "\n"


def _operand(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() or text.startswith("tl.cast(") else f"({text})"


def in_dims(layout: Layout) -> dict[str, Expr]:
    """Every private name in terms of the layout's open dims."""
    known: dict[str, Expr] = {}
    for name, expr, _ in plan([*layout.dims, *(n for n, _ in layout.rules.default)], layout.equations):
        known[name] = substitute(expr, known)
    return known


def padding_ranges(layout: Layout) -> list[tuple[int, int]]:
    """Maximal [start, end) runs of elements that no coordinate maps to."""
    sizes = [evaluate(layout.size_of(a.name), layout.values) for a in layout.axes]
    grids: Iterable[torch.Tensor] = torch.meshgrid(*(torch.arange(s) for s in sizes), indexing="ij")
    coordinates = {a.name: g for a, g in zip(layout.axes, grids, strict=True)}
    used = torch.zeros(layout.numel, dtype=torch.bool)
    if math.prod(sizes):
        used[offset(layout, coordinates).reshape(-1)] = True
    edges = torch.diff(torch.cat([torch.tensor([1]), used.int(), torch.tensor([1])]))
    starts = torch.nonzero(edges == -1).flatten().tolist()
    ends = torch.nonzero(edges == 1).flatten().tolist()
    return list(zip(starts, ends, strict=True))


def wrong_padding(layout: Layout, tensor: torch.Tensor) -> tuple[dict[str, int] | None, int | float]:
    """The first padded coordinate whose content is not the layout's fill, and that content; None if there is none."""
    sizes = [layout.values_of(a.name) for a in layout.axes]
    padded = [evaluate(layout.memory_size(a.name), layout.values) for a in layout.axes]
    content = _unfolded(layout, leaf_view(layout, tensor)).reshape(padded)
    if layout.word == 1 and tensor.element_size() > 1:
        content = content.contiguous().view(tensor.dtype)
    inside = torch.zeros(padded, dtype=torch.bool, device=tensor.device)
    inside[tuple(slice(s) for s in sizes)] = True
    bad = (~inside & (content != (layout.rules.fill or 0))).nonzero()
    if not len(bad):
        return None, 0
    where = bad[0].tolist()
    return {a.name: i for a, i in zip(layout.axes, where, strict=True)}, content[tuple(where)].item()


def elements(layout: Layout, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of a concrete layout holds, as ``dtype``: one dimension for each logical axis, padding dropped."""
    sizes = [evaluate(layout.size_of(a.name), layout.values) for a in layout.axes]
    padded = [
        evaluate(layout.memory_size(a.name), layout.values) if a.parts else size
        for a, size in zip(layout.axes, sizes, strict=True)
    ]
    raw = _unfolded(layout, leaf_view(layout, tensor, padding=False)).reshape(padded)
    return raw[tuple(slice(s) for s in sizes)].contiguous().view(dtype)
