"""Layout: one declaration of how a buffer is laid out. Shapes, strides and sizes follow from it here.

Decides what a declaration means: which names are open, what a tensor of it must look like, how many bytes it needs.
Leaves the map from coordinates to memory to ``_index``, the checking of calls to ``_contract``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from layoutcheck import _dtypes, _index, _shown, _tags
from layoutcheck._dims import (
    Const,
    Equation,
    Expr,
    Inexact,
    Name,
    brief,
    evaluate,
    names,
    op_,
    parse,
    plan,
    product,
    substitute,
)
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._keywords import RULES, Rules, read_elements, read_rules, unknown
from layoutcheck._pattern import Axis, Group, expand, parse_groups, parse_pattern
from layoutcheck._shown import Dim


@dataclass(frozen=True, init=False, eq=True)
class Layout:
    """How the elements of a buffer are laid out in memory, declared once.

    ``pattern`` is ``"logical axes -> memory order"``; ``name(a b)`` names a composite axis. Keywords that are not rules
    are equations: ``lane=32`` sizes an axis, ``head_dim="group * 32"`` names a size that follows from one.

    Rules, each checked exactly and no more:

    - ``dtype``: an element type or several (the first is allocated); ``accept``: further torch dtypes that may carry
    it.
    - ``carrier``: several neighbours share one element of this type, the first in its lowest bits: four E8M0 in an
      ``"int32"``, two e2m1 in a ``"uint8"`` (the even index is the low nibble). Shape and strides count carriers,
      offsets count elements; a dimension that fits into one carrier is not shown.
    - ``view``: how a tensor shows the memory: axes (``"slot head dim"``), groups (``"(page token) head"``), or a
      tuple of sizes for a declared shape of the same bytes. Without it a tensor shows the memory order.
    - ``dense``: which inner axes must be packed (all, if not given); the strides of the others are free as long as
      elements do not overlap. A dimension of size 1 may have any stride.
    - ``pitch``: exact stride of an axis, in elements, or in bytes as ``"656 bytes"``; ``base``: where the first element
      is inside the first pitch, in bytes.
    - ``align``: bytes that the base pointer (``base=``) or an axis's stride must be a multiple of.
    - ``pad``: multiple to which a logical axis is rounded up before it is split.
    - ``offsets="int32"``: a view whose largest offset does not fit in 32 bits is refused. With
      ``offsets={"page": "int32"}`` only the term ``page * stride`` is computed in 32 bits.
    - ``strict``: axes whose stride counts even where they have size 1, as a TMA descriptor's do.
    - ``fill``: code that new memory is filled with; ``public``: parts that other arguments may refer to;
      ``default``: sizes used when nothing else determines them.

    Calling a layout substitutes dims (by a name, an expression or a number) or rules. A layout whose dims are all known
    is concrete: it has ``shape``, ``strides`` and ``nbytes``, can be allocated, and maps coordinates to offsets.
    """

    name: str
    axes: tuple[Axis, ...]
    memory: tuple[Group, ...]
    elements: tuple[_dtypes.Element, ...]
    sizes: tuple[tuple[str, Expr], ...]
    equations: tuple[Equation, ...]
    rules: Rules

    def __init__(self, name: str, pattern: str, *, dtype: Any, **keywords: Any) -> None:
        axes, memory = parse_pattern(pattern)
        nodes = [a for axis in axes for a in axis.walk()]
        rules = read_rules(Rules(), {k: keywords.pop(k) for k in RULES if k in keywords}, axes, pattern)
        known = {a.name for a in nodes}
        sizes: dict[str, Expr] = {a.name: Name(a.name) for a in nodes}
        equations: list[Equation] = []
        pads = dict(rules.pad)
        for axis in nodes:
            if axis.parts:
                whole = op_("align", Name(axis.name), pads[axis.name]) if axis.name in pads else Name(axis.name)
                equations.append(Equation(whole, product(Name(p.name) for p in axis.parts)))
        used = set(known)
        for keyword, value in keywords.items():
            expr = parse(value)
            if keyword in known:
                used |= set(names(expr))
        for keyword, value in keywords.items():
            expr = parse(value)
            if keyword not in known and keyword not in used and not set(names(expr)) & used:
                raise TypeError(f"{name}: {unknown(keyword, known | set(RULES))}")
            equations.append(Equation(Name(keyword), expr))
        self._set(name, axes, memory, read_elements(dtype), sizes, equations, rules)
        # An axis that a keyword sizes is that size everywhere: token is page_size, lane is 32.
        self._set(*self._substituted({k: parse(v) for k, v in keywords.items() if k in known}))
        self._check()

    def _set(
        self,
        name: str,
        axes: tuple[Axis, ...],
        memory: tuple[Group, ...],
        elements: tuple[_dtypes.Element, ...],
        sizes: Mapping[str, Expr],
        equations: Sequence[Equation],
        rules: Rules,
    ) -> None:
        kept: list[Equation] = []
        for e in equations:
            if e.left == e.right or e in kept:
                continue
            if not any(names(e.left)) and not any(names(e.right)):
                _must_hold(name, e)
                continue
            kept.append(e)
        self.__dict__.clear()  # what was derived from the fields before
        values = dict(
            name=name, axes=axes, memory=memory, elements=elements,
            sizes=tuple(sizes.items()), equations=tuple(kept), rules=rules,
        )  # fmt: skip
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def _substituted(self, values: Mapping[str, Expr]) -> tuple[Any, ...]:
        """The fields with names replaced."""

        def new(expr: Expr) -> Expr:
            return substitute(expr, values)

        old, axes = self.rules, {a.name for axis in self.axes for a in axis.walk()}
        rules = dataclasses.replace(
            old,
            pitch=tuple((a, new(e), b) for a, e, b in old.pitch),
            base=new(old.base),
            align=tuple((a, new(e)) for a, e in old.align),
            pad=tuple((a, new(e)) for a, e in old.pad),
            # A part that was renamed and is a number or an expression now has no name that others could share.
            public=tuple(
                _renamed(p, values) for p in old.public if p in axes or isinstance(values.get(p, Name(p)), Name)
            ),
            default=tuple((n, v) for n, v in old.default if n not in values),
            view=tuple(new(e) for e in old.view) if isinstance(old.view, tuple) else old.view,
        )
        sizes = {axis: new(e) for axis, e in self.sizes}
        equations = [Equation(new(e.left), new(e.right), e.source) for e in self.equations]
        return self.name, self.axes, self.memory, self.elements, sizes, equations, rules

    def __call__(self, **keywords: Any) -> Layout:
        """The layout with dims or rules replaced.

        Raises ``TypeError`` for a keyword that is neither, :class:`LayoutError` for numbers that contradict each other.
        """
        if all(type(value) in _COMPARABLE for value in keywords.values()):
            return _replaced(self, *keywords.items())
        return self._replaced(keywords)

    def _replaced(self, keywords: dict[str, Any]) -> Layout:
        changes = {k: keywords.pop(k) for k in (*RULES, "dtype", "name") if k in keywords}
        elements = read_elements(changes.pop("dtype")) if "dtype" in changes else self.elements
        name = changes.pop("name", self.name)
        # Rules first: a pitch given together with a size speaks of that size.
        new = object.__new__(type(self))
        rules = read_rules(self.rules, changes, self.axes, self.name)
        new._set(name, self.axes, self.memory, elements, dict(self.sizes), self.equations, rules)
        sizes, every = dict(self.sizes), new._names | self._names
        for keyword in keywords:
            if keyword not in every and keyword not in sizes:
                raise TypeError(f"{self.name}: {unknown(keyword, every | set(sizes) | set(RULES))}")
        values = {k: parse(v) for k, v in keywords.items() if k in every}
        # An axis whose size is an expression by now: token=64 says page_size == 64.
        extra = [Equation(substitute(sizes[k], values), parse(v)) for k, v in keywords.items() if k not in every]
        name, axes, memory, elements, now, equations, rules = new._substituted(values)
        new._set(name, axes, memory, elements, now, [*equations, *extra], rules)
        found: dict[str, int] = {}
        for axis, e, equation in plan((), new.equations):  # a number given for one name may fix others
            found[axis] = _computed(name, e, found, equation)
        if found:
            new._set(*new._substituted({axis: Const(n) for axis, n in found.items()}))
        if "default" not in changes:  # a default of a rule that has been replaced speaks of nothing now
            default = tuple((n, v) for n, v in new.rules.default if n in new._names)
            rules = dataclasses.replace(new.rules, default=default)
            new._set(name, axes, memory, elements, dict(new.sizes), new.equations, rules)
        new._check()
        return new

    def _check(self) -> None:
        """Refuse here, not at its first use, what cannot be shown or cannot be meant."""
        axes = {a.name for axis in self.axes for a in axis.walk()}
        if taken := sorted(axes & {*RULES, "dtype", "name"}):
            raise TypeError(f"{self.name}: an axis cannot be called {taken[0]}, which is a rule")
        for keyword, given in (("public", self.rules.public), ("default", [n for n, _ in self.rules.default])):
            if strange := [n for n in given if n not in self._names | axes]:
                raise TypeError(f"{self.name}: {keyword} names {unknown(strange[0], self._names | axes)}")
        bits = {e.bits for e in self.elements}
        if self.rules.carrier is not None or not bits <= {8, 16, 32, 64}:
            if len(bits) > 1 or max(bits) > 8 or not self.order:
                raise TypeError(f"{self.name}: only elements of one width, 8 bits or fewer, share a carrier")
            if self.leaf_strides[self.order[-1]] != Const(1):
                raise TypeError(f"{self.name}: {self.order[-1]} has a pitch, so its elements cannot share a carrier")
        _ = self.dims, self.tensor_dims
        if self.concrete:
            self._check_numbers()

    def _check_numbers(self) -> None:
        """What only a concrete layout shows: negative sizes, rows that overlap, a declared shape of other bytes."""
        for axis, size in self.sizes:
            if (n := self._number(size)) < 0:
                raise _broken(self.name, axis, f"{axis} >= 0", f"{axis} = {n}")
        inner = 1
        empty = any(self._number(self.memory_size(leaf)) == 0 for leaf in self.order)
        for leaf in reversed(self.order) if not empty else ():
            pitch, count = self._number(self.leaf_strides[leaf]), self._number(self.memory_size(leaf))
            if count > 1 and pitch < inner:
                raise _broken(self.name, leaf, f"pitch of {leaf} >= {inner}, what lies inside", f"{pitch}")
            inner = max(inner, pitch * count)
        if isinstance(self.rules.view, tuple) and math.prod(self.shape) * self.word != self.numel:
            shown = " * ".join(map(str, self.shape))
            raise _broken(self.name, "view", f"{self.numel} elements", f"{shown} = {math.prod(self.shape) * self.word}")

    # --- names -------------------------------------------------------------------------------------------------------

    @cached_property
    def _names(self) -> frozenset[str]:
        found = {n for _, e in self.sizes for n in names(e)}
        found |= {n for e in self.equations for side in (e.left, e.right) for n in names(side)}
        found |= {n for _, e, _ in self.rules.pitch for n in names(e)}
        found |= {n for _, e in (*self.rules.align, *self.rules.pad) for n in names(e)}
        found |= set(names(self.rules.base))
        return frozenset(found)

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names that are still open and that everything else follows from; top-level axes first."""
        sizes = dict(self.sizes)
        nodes = [a for axis in self.axes for a in axis.walk()]
        axis_names = {a.name for a in nodes}
        extra = [n for n in sorted(self._names) if n not in axis_names]
        top = [n for axis in self.axes for n in names(sizes[axis.name])]
        parts = [n for a in nodes for n in names(sizes[a.name])]
        free: list[str] = []
        follows: set[str] = {n for n, _ in self.rules.default}
        for name in dict.fromkeys([*extra, *top, *self.rules.public, *parts]):
            if name in follows or name not in self._names:
                continue
            free.append(name)
            follows = {*free, *(n for n, _ in self.rules.default)}
            follows |= {n for n, _, _ in plan(follows, self.equations)}
        order = dict.fromkeys([*top, *extra, *parts])
        return tuple(n for n in order if n in free)

    @cached_property
    def visible(self) -> tuple[str, ...]:
        """The names that other arguments of a contract share: open dims, defaults and public parts."""
        public = [n for p in self.rules.public for n in names(dict(self.sizes).get(p, Name(p)))]
        return tuple(dict.fromkeys([*self.dims, *(n for n, _ in self.rules.default), *public]))

    def with_names(self, rename: Mapping[str, str]) -> Layout:
        """The same layout with names replaced by new ones: one argument's private names apart from another's."""
        values = {old: Name(new) for old, new in rename.items() if old in self._names}
        renamed = object.__new__(type(self))
        renamed._set(*self._substituted(values))  # what was right with the old names is right with the new
        return renamed

    # --- sizes -------------------------------------------------------------------------------------------------------

    def size_of(self, axis: str) -> Expr:
        """Logical size of an axis."""
        return dict(self.sizes)[axis]

    def memory_size(self, axis: str) -> Expr:
        """Size of an axis in memory: rounded up where it is padded."""
        size = self.size_of(axis)
        pad = dict(self.rules.pad).get(axis)
        return op_("align", size, pad) if pad is not None else size

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Undivided axes from outermost to innermost in memory."""
        return tuple(leaf for group in self.memory for leaf in group)

    @cached_property
    def leaf_strides(self) -> dict[str, Expr]:
        """Stride of every undivided axis in elements, as allocated."""
        pitch = {axis: self._elements_of(e, in_bytes) for axis, e, in_bytes in self.rules.pitch}
        strides: dict[str, Expr] = {}
        running: Expr = Const(1)
        for leaf in reversed(self.order):
            strides[leaf] = pitch.get(leaf, running)
            running = product([strides[leaf], self.memory_size(leaf)])
        return strides

    def _elements_of(self, size: Expr, in_bytes: bool) -> Expr:
        return product([size, Const(8)], [Const(self.elements[0].bits)]) if in_bytes else size

    @cached_property
    def word(self) -> int:
        """Elements that share one element of the tensor: 1, unless they are narrower than what carries them."""
        return self.dtype.itemsize * 8 // self.elements[0].bits

    def in_words(self, leaf: str, size: Expr, *, stride: bool = False) -> Expr:
        """A size or stride of an undivided axis, in elements of the tensor."""
        innermost = leaf == self.order[-1]
        if self.word == 1 or (innermost and stride) or (not innermost and not stride):
            return size
        return product([size], [Const(self.word)])

    @cached_property
    def span(self) -> Expr:
        """Elements from the first to the end of the last, padding and gaps included."""
        if not self.order:
            return Const(1)
        outer = self.order[0]
        return product([self.leaf_strides[outer], self.memory_size(outer)])

    def packed(self, leaf: str) -> bool:
        """Whether the stride of an undivided axis is part of the layout, rather than free."""
        dense = self._dense
        return dense is None or leaf in dense or leaf in {axis for axis, _, _ in self.rules.pitch}

    @cached_property
    def _dense(self) -> frozenset[str] | None:
        if self.rules.dense is None:
            return None
        groups = expand(parse_groups(self.rules.dense), self.axes, self.rules.dense)
        dense = [leaf for group in groups for leaf in group]
        inner = self.order[len(self.order) - len(dense) :]
        if set(inner) != set(dense):
            raise TypeError(f"{self.name}: dense={self.rules.dense!r} must name the innermost axes, {' '.join(inner)}")
        return frozenset(dense)

    def adjacent(self, outer: str, inner: str) -> bool:
        """Whether two undivided axes are next to each other in memory without a gap, and so can be one."""
        at = self.order.index(outer)
        padded = {a for a, _ in self.rules.pad}
        pitched = {a for a, _, _ in self.rules.pitch}
        return self.order[at + 1 : at + 2] == (inner,) and outer not in pitched and inner not in padded

    @cached_property
    def tensor_dims(self) -> tuple[Dim, ...]:
        """The dimensions of a tensor that shows this layout, in its order."""
        return _shown.tensor_dims(self)

    @cached_property
    def view_leaves(self) -> tuple[Group, ...]:
        """The undivided parts behind each dimension of that tensor."""
        if self.rules.view is None or isinstance(self.rules.view, tuple):
            return self.memory
        return expand(parse_groups(self.rules.view), self.axes, self.rules.view)

    @cached_property
    def plain(self) -> bool:
        """Whether ``is_contiguous()`` is enough to accept the strides of a tensor that shows this layout."""
        if isinstance(self.rules.view, tuple):
            return True
        in_order = tuple(leaf for group in self.view_leaves for leaf in group) == self.order
        padded_view = bool(self.rules.pad) and self.rules.view is not None
        free = self.rules.pitch or padded_view or self.rules.dense is not None or self.rules.strict is not None
        return in_order and not free

    @property
    def narrow(self) -> tuple[str, ...]:
        """The undivided axes whose offsets are computed in 32 bits."""
        if isinstance(self.rules.offsets, tuple):
            return tuple(
                leaf for axis in self.axes for a in axis.walk() if a.name in self.rules.offsets for leaf in a.leaves()
            )
        return self.order if self.rules.offsets == "int32" else ()

    @cached_property
    def strict(self) -> frozenset[str]:
        """The undivided axes whose stride counts even where they have size 1."""
        if self.rules.strict is None:
            return frozenset()
        groups = expand(parse_groups(self.rules.strict), self.axes, self.rules.strict)
        return frozenset(leaf for group in groups for leaf in group)

    # --- solving -----------------------------------------------------------------------------------------------------

    def solve(self, **known: int) -> dict[str, int]:
        """Every size that follows from the given ones.

        Raises :class:`LayoutError` where they contradict each other, ``TypeError`` for a name the layout does not have
        or a size that does not follow.
        """
        solved = self._solve(known)
        missing = [n for n in self._names if n not in solved]
        if missing:
            open_ = [d for d in self.dims if d not in solved]
            raise TypeError(
                f"{self.name}: {', '.join(open_ or sorted(missing))} must be given; got {known or 'nothing'}"
            )
        return solved

    def _solve(self, known: Mapping[str, int]) -> dict[str, int]:
        if strange := [n for n in known if n not in self._names]:
            raise TypeError(f"{self.name}: {unknown(strange[0], self._names)}")
        values = dict(known)
        for defaults in ({}, dict(self.rules.default)):
            for name, value in defaults.items():
                values.setdefault(name, value)
            for name, expr, equation in plan(values, self.equations):
                values[name] = _computed(self.name, expr, values, equation)
        for equation in self.equations:
            if {n for side in (equation.left, equation.right) for n in names(side)} <= set(values):
                _must_hold(self.name, equation, values)
        for name, value in values.items():
            if value < 0:
                raise LayoutError(
                    self.name, [Violation(name, "relation", f"{name} >= 0", f"{value}", headline=f"{name} is negative")]
                )
        return values

    @cached_property
    def concrete(self) -> bool:
        """Whether every size is known."""
        return not self.dims

    def _number(self, expr: Expr) -> int:
        if not self.concrete:
            raise TypeError(f"{self.name} is open in {', '.join(self.dims)}: give them, {self.name}(...={{number}})")
        try:
            return int(evaluate(expr, self.values))
        except Inexact as error:
            raise _remainder(self.name, Equation(expr, expr), error) from None

    @cached_property
    def values(self) -> dict[str, int]:
        """Every named size of a concrete layout."""
        return self.solve()

    def values_of(self, axis: str) -> int:
        """Logical size of an axis of a concrete layout."""
        return self._number(self.size_of(axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that shows this layout, in elements."""
        return tuple(self._number(d.size) for d in self.tensor_dims)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of that tensor as allocated, in elements."""
        return tuple(self._number(d.stride or d.inner or Const(1)) for d in self.tensor_dims)

    @property
    def numel(self) -> int:
        """Elements of memory, padding and gaps included."""
        return self._number(self.span)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and gaps included."""
        return self._number(product([self.span], [Const(self.word)])) * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """Elements of memory that no coordinate maps to."""
        logical = math.prod(self._number(self.size_of(a.name)) for a in self.axes)
        return self.numel - logical

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that is allocated."""
        return self.rules.carrier or self.elements[0].torch

    @cached_property
    def accepted(self) -> tuple[torch.dtype, ...]:
        """Every torch dtype that a tensor of this layout may have."""
        own = [e.torch for e in self.elements]
        found = [self.dtype, *own, *(c for e in self.elements for c in e.carriers), *self.rules.accept]
        if self.rules.carrier is not None:
            found = [d for d in found if d.itemsize == self.dtype.itemsize]
        return tuple(dict.fromkeys(found))

    @cached_property
    def logical(self) -> tuple[torch.dtype, ...]:
        """Every torch dtype in which one element may stand alone, as ``pack`` takes it and ``unpack`` gives it."""
        if self.word == 1:
            return self.accepted
        if self.elements[0].bits < 8:
            return (torch.uint8,)
        found = [*(e.torch for e in self.elements), *(c for e in self.elements for c in e.carriers)]
        return tuple(dict.fromkeys(found))

    # --- memory ------------------------------------------------------------------------------------------------------

    def empty(self, *, device: Any = None, dtype: Any = None) -> torch.Tensor:
        """A new tensor of a concrete layout, filled by its own rule.

        Without a ``fill`` rule the contents are undefined, as with ``torch.empty``.
        """
        storage = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self._chosen(dtype), device=device)
        if self.rules.fill is not None:
            _index.fill_(storage, self.rules.fill, self.elements[0].bits)
        made = self._show(storage)
        _tags.remember(made, self)
        return made

    def view(self, raw: torch.Tensor, *, offset: int = 0, dtype: Any = None) -> torch.Tensor:
        """This layout over memory that somebody else allocated: ``raw`` is dense, ``offset`` counts its bytes.

        Nothing is written. Raises :class:`LayoutError` if the memory is too small or not aligned to the element.
        """
        chosen = self._chosen(dtype)
        room = raw.numel() * raw.element_size() - offset
        if not raw.is_contiguous():
            raise _raw_error(self.name, "stride", "dense memory", f"strides {tuple(raw.stride())}")
        if offset < 0 or room < self.nbytes:
            raise _raw_error(
                self.name, "shape", f"{self.nbytes} bytes from byte {offset}", f"{max(room, 0)} bytes"
            )  # fmt: skip
        start = raw.storage_offset() * raw.element_size() + offset
        if start % chosen.itemsize:
            raise _raw_error(
                self.name,
                "alignment",
                f"start % {chosen.itemsize} == 0 for {_dtypes.of(chosen)}",
                f"byte {start} of the storage",
            )
        bytes_ = raw.reshape(-1).view(torch.uint8)[offset : offset + self.nbytes]
        return self._show(bytes_.view(chosen))

    def _chosen(self, dtype: Any) -> torch.dtype:
        if dtype is None:
            return self.dtype
        element = _dtypes.element(dtype)
        if element.torch not in self.accepted:
            raise TypeError(f"{self.name} holds {' or '.join(map(str, self.elements))}, not {element}")
        return element.torch

    def _show(self, storage: torch.Tensor) -> torch.Tensor:
        base = self._number(product([self._elements_of(self.rules.base, True)], [Const(self.word)]))
        return storage.as_strided(self.shape, self.strides, storage.storage_offset() + base)

    # --- the map: see _index -----------------------------------------------------------------------------------------

    def offset(self, **coordinates: Any) -> Any:
        """Offset in elements of the element at the coordinates (ints, numpy arrays or torch tensors).

        Any cut through the tree of axes is a set of coordinates: ``slot``, or ``page`` and ``token``.
        """
        return _index.offset(self, coordinates)

    def pack(self, logical: torch.Tensor) -> torch.Tensor:
        """A new buffer that holds ``logical``, a tensor of the top-level axes in logical order. Pure torch."""
        return _index.pack(self, logical)

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        """The logical tensor that a buffer of this layout holds, padding dropped. Pure torch."""
        return _index.unpack(self, buffer)

    def offset_fn(self, *coordinates: str, name: str, strides: Sequence[str] = ()) -> Any:
        """A ``@triton.jit`` function that maps coordinates to offsets; see :func:`layoutcheck._index.offset_fn`."""
        return _index.offset_fn(self, coordinates, name, tuple(strides))

    def check(self, tensor: torch.Tensor, **known: int) -> dict[str, int]:
        """Raise :class:`LayoutError` unless ``tensor`` has this layout; return the sizes that it was solved for."""
        from layoutcheck import _contract

        return _contract.check_tensor(self, tensor, known)

    # --- identity ----------------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the declaration: equal declarations, in any process, have equal fingerprints."""
        return _digest(
            [str(a) for a in self.axes],
            self.memory,
            [str(e) for e in self.elements],
            [(n, brief(e)) for n, e in self.sizes],
            sorted(str(e) for e in self.equations),
            [self.rules.view if not isinstance(self.rules.view, tuple) else [brief(e) for e in self.rules.view]],
            [(f, str(getattr(self.rules, f))) for f in ("dense", "offsets", "fill", "accept", "carrier", "strict")],
            [(a, brief(e), b) for a, e, b in self.rules.pitch],
            brief(self.rules.base),
            [(a, brief(e)) for a, e in self.rules.align],
            [(a, brief(e)) for a, e in self.rules.pad],
            self.rules.public,
            self.rules.default,
        )

    @cached_property
    def map_fingerprint(self) -> str:
        """Digest of a concrete layout's bytes: equal wherever two layouts put the same elements at the same places."""
        return _digest(_index.coalesced(self), [str(e) for e in self.elements], self.numel)

    def __str__(self) -> str:
        order = " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in self.memory)
        return f"{' '.join(map(str, self.axes))} -> {order}"

    def __repr__(self) -> str:
        if self.concrete:
            return f"<{self.name} {self.shape} {'|'.join(map(str, self.elements))}>"
        return f"<{self.name}: {self}; {'|'.join(map(str, self.elements))}; open: {', '.join(self.dims)}>"


_COMPARABLE = (int, str, Name)  # equal values of these types mean the same


@lru_cache(maxsize=1024)
def _replaced(layout: Layout, *keywords: tuple[str, Any]) -> Layout:
    """Contracts replace the same names of the same layouts again and again."""
    return layout._replaced(dict(keywords))


def _renamed(name: str, values: Mapping[str, Expr]) -> str:
    new = values.get(name)
    return new.name if isinstance(new, Name) else name


def _computed(name: str, expr: Expr, values: Mapping[str, int], equation: Equation) -> int:
    try:
        return int(evaluate(expr, values))
    except Inexact as error:
        raise _remainder(name, equation, error) from None


def _must_hold(name: str, equation: Equation, values: Mapping[str, int] | None = None) -> None:
    values = values or {}
    try:
        left, right = evaluate(equation.left, values), evaluate(equation.right, values)
    except Inexact as error:
        raise _remainder(name, equation, error) from None
    if left != right:
        raise _broken(name, brief(equation.left), str(equation), f"{left} and {right}")


def _remainder(name: str, equation: Equation, error: Inexact) -> LayoutError:
    left, right = (brief(a) for a in error.division.args)
    fix = f"choose {left} as a multiple of {right}" if error.denominator else f"choose {right} above 0"
    rule = Violation(brief(equation.left), "relation", str(equation), str(error), None, fix, str(error), ())
    return LayoutError(name, [rule])


def _broken(name: str, argument: str, expected: str, got: str) -> LayoutError:
    headline, fix = f"{expected} is needed, got {got}", f"change or leave out one of the sizes in {expected}"
    return LayoutError(name, [Violation(argument, "relation", expected, got, None, fix, headline, ())])


def _raw_error(name: str, rule: Any, expected: str, got: str) -> LayoutError:
    return LayoutError(name, [Violation("raw", rule, expected, got, headline=f"raw cannot hold {name}")])


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
