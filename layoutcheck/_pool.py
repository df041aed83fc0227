"""Pool: layouts that share dims and are allocated, resized and moved as one.

A pool is a class whose annotations name its buffers and their layouts. One binding of the dims sizes all of them, so
they cannot disagree. What a kernel does with the buffers is elsewhere.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from layoutcheck import _layout, _manifest, _specs, _tags
from layoutcheck._choose import Choose
from layoutcheck._dims import Equation, Expr, evaluate, names, parse, plan
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._index import leaf_view
from layoutcheck._layout import Layout
from layoutcheck._record import Record

Field = Layout | Choose | Record
Forms = tuple[tuple[Expr | None, _specs.Form], ...]  # of one field, each with the condition that picks it


class Pool:
    """Buffers that share dims. Subclasses annotate them::

        class MXFP8KVPool(Pool):
            k: Annotated[Tensor, PAGED_NHD(dtype=E4M3)]
            k_scale: Annotated[Tensor, Choose({"page_size == 128": MXFP8_SCALE_INTERLEAVED}, default=MXFP8_SCALE_FLAT)]

    A field annotated ``... | None`` is None where none of its ``Choose`` conditions holds. ``layers=n`` makes every
    field a list of n buffers; a dim given as a sequence then has one value a layer. ``default`` says what a size is
    where nothing else determines it: ``default = {"v_head_dim": "head_dim"}``.

    ``dims`` are the sizes of the pool by name, ``layers`` the number of layers or None, ``generation`` counts resizes,
    ``resized`` holds what each of them was given.
    """

    default: ClassVar[Mapping[str, str]] = {}
    _fields: ClassVar[dict[str, tuple[Field, bool]]] = {}
    _forms: ClassVar[dict[str, Forms]] = {}
    _given: dict[str, Any]
    _concrete: list[dict[str, Layout | Record | None]]
    dims: dict[str, Any]
    layers: int | None
    generation: int
    resized: list[dict[str, Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        fields = dict(cls._fields)
        for name, annotation in inspect.get_annotations(cls).items():
            value = _specs.resolve(annotation, _Scope(cls))
            inner, optional = _specs._without_none(value)
            if typing.get_origin(inner) is not typing.Annotated:
                continue
            found = [e for e in typing.get_args(inner)[1:] if isinstance(e, Layout | Choose | Record)]
            if found:
                fields[name] = (found[0], optional)
        cls._fields = fields
        cls._forms = {
            name: _specs._layout_forms(name, field.buffer if isinstance(field, Record) else field)
            for name, (field, _) in fields.items()
        }

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by allocate(...) or over(...)")

    # --- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def allocate(cls, *, device: Any = None, layers: int | None = None, **dims: Any) -> Self:
        """A new pool: every buffer allocated and filled by its own rule.

        ``dims`` are any sizes from which all others follow, such as ``page=64, page_size=128, head=8, head_dim=128``.
        Raises ``TypeError`` for a size that is missing or unknown, :class:`LayoutError` for sizes that contradict.
        """
        return cls._make(dims, layers, lambda layout: layout.empty(device=device))

    @classmethod
    def over(cls, raw: torch.Tensor, *, layers: int | None = None, alignment: int = 256, **dims: Any) -> Self:
        """A pool over one dense slab that somebody else allocated; nothing is written.

        Buffers follow each other in declaration order, layer by layer, each starting at a multiple of ``alignment``
        bytes. Raises :class:`LayoutError` if the slab is smaller than :meth:`nbytes` says.
        """
        needed = cls.nbytes(layers=layers, alignment=alignment, **dims)
        room = raw.numel() * raw.element_size()
        if room < needed:
            raise LayoutError(
                cls.__name__, [Violation("raw", "shape", f"at least {needed} bytes", f"{room} bytes",
                                         headline="raw is too small for the pool", fix="use fit(budget, free=...)")]
            )  # fmt: skip
        at = 0

        def place(layout: Layout | Record) -> torch.Tensor:
            nonlocal at
            start = at
            at = _up(start + layout.nbytes, alignment)
            return layout.view(raw, offset=start)

        return cls._make(dims, layers, place)

    @classmethod
    def nbytes(cls, *, layers: int | None = None, alignment: int = 1, **dims: Any) -> int:
        """Bytes of a pool with these sizes, without allocating it."""
        return sum(
            _up(layout.nbytes, alignment)
            for per_layer in cls._layouts(dims, layers)
            for layout in per_layer.values()
            if layout is not None
        )

    @classmethod
    def fit(cls, budget: int, *, free: str, layers: int | None = None, alignment: int = 1, **dims: Any) -> int:
        """The largest ``free`` (``"page"``, say) for which the pool takes at most ``budget`` bytes; 0 if not even one.

        Bytes grow with the dim, so this is a search over :meth:`nbytes`, exact whatever is padded. Raises ``TypeError``
        where they do not.
        """

        def fits(n: int) -> bool:
            return cls.nbytes(layers=layers, alignment=alignment, **{**dims, free: n}) <= budget

        if not fits(1):
            return 0
        high = 2
        while fits(high):
            if high > budget:  # a byte each would not fit
                raise TypeError(f"{cls.__name__}.fit: {free} takes no memory with these sizes")
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    @classmethod
    def _make(cls, dims: Mapping[str, Any], layers: int | None, buffer: Any) -> Self:
        pool = object.__new__(cls)
        pool._given = dict(dims)
        pool.layers = layers
        pool.generation = 0
        pool.resized = []
        pool._concrete = cls._layouts(dims, layers)
        pool.dims = cls._solved(dims, layers)
        made = [
            {n: None if layout is None else buffer(layout) for n, layout in per_layer.items()}
            for per_layer in pool._concrete
        ]
        pool._set(made)
        return pool

    def _set(self, made: list[dict[str, torch.Tensor | None]]) -> None:
        for name in self._fields:
            value: Any = [m[name] for m in made] if self.layers is not None else made[0][name]
            setattr(self, name, value)
        for name, layout, tensor in self.buffers():
            bytes_ = layout.buffer if isinstance(layout, Record) else layout
            source = f"{type(self).__name__}.{name}"
            _tags.remember(tensor, bytes_, source=source, owner=self, generation=self.generation)

    @classmethod
    def _per_layer(cls, dims: Mapping[str, Any], layers: int | None) -> Iterator[dict[str, Any]]:
        for name, value in dims.items():
            many = isinstance(value, Sequence) and not isinstance(value, str)
            if many and (layers is None or len(value) != layers):
                raise TypeError(f"{cls.__name__}: {name} has {len(value)} values for {layers or 'no'} layers")
        for i in range(layers or 1):
            yield {n: v[i] if isinstance(v, Sequence) and not isinstance(v, str) else v for n, v in dims.items()}

    @classmethod
    def _layouts(cls, dims: Mapping[str, Any], layers: int | None) -> list[dict[str, Layout | Record | None]]:
        return [cls._layouts_of(d) for d in cls._per_layer(dims, layers)]

    @classmethod
    def _layouts_of(cls, dims: Mapping[str, Any]) -> dict[str, Layout | Record | None]:
        values = cls._all(dims)
        result: dict[str, Layout | Record | None] = {}
        for name, (field, optional) in cls._fields.items():
            layout = _picked(field, values, optional)
            if layout is None:
                result[name] = None
                continue
            known = {d: values[d] for d in layout.dims if d in values}
            concrete = layout(**known)
            if not concrete.concrete:
                raise TypeError(
                    f"{cls.__name__}.{name} ({layout.name}) needs {', '.join(concrete.dims)}; given are "
                    f"{', '.join(f'{k}={v}' for k, v in dims.items()) or 'none'}"
                )
            result[name] = concrete
            equations = layout.buffer.equations if isinstance(layout, Record) else layout.equations
            for equation in equations:  # page and slot given both: they must agree
                if {n for side in (equation.left, equation.right) for n in names(side)} <= set(values):
                    _layout._must_hold(cls.__name__, equation, values)
        return result

    @classmethod
    def _solved(cls, dims: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
        every = [cls._all(d) for d in cls._per_layer(dims, layers)]
        return {
            n: every[0][n] if all(e[n] == every[0][n] for e in every) else tuple(e[n] for e in every) for n in every[0]
        }

    @classmethod
    def _all(cls, dims: Mapping[str, Any]) -> dict[str, Any]:
        """Every shared size that follows from the given ones, over all fields."""
        every = [(c, f) for forms in cls._forms.values() for c, f in forms]
        known = {n for _, f in every for e in f.equations for side in (e.left, e.right) for n in names(side)}
        known |= {n for _, f in every for s in f.sizes if s is not None for n in names(s)}
        known |= {n for c, _ in every if c is not None for n in names(c)}
        for name in dims:
            if name not in known:
                shown = ", ".join(sorted(n for n in known if "." not in n))
                raise TypeError(f"{cls.__name__}: {name!r} is no size of this pool ({shown})")
        values = dict(dims)
        for defaults in ({}, cls.default):
            before = -1
            while len(values) > before:  # what is new may decide a choice, and that may say more
                before = len(values)
                for name, text in defaults.items():
                    if name not in values and set(names(parse(text))) <= set(values):
                        values[name] = evaluate(parse(text), values)
                equations = [e for forms in cls._forms.values() for e in _equations(forms, values)]
                for name, expr, equation in plan([n for n in values if not isinstance(values[n], str)], equations):
                    try:
                        values[name] = evaluate(expr, values)
                    except ArithmeticError as error:
                        raise LayoutError(
                            cls.__name__,
                            [
                                Violation(
                                    name,
                                    "relation",
                                    str(equation),
                                    str(error),
                                    None,
                                    f"choose sizes for which {equation}",
                                    str(error),
                                    (),
                                )
                            ],
                        ) from None
        return {n: v for n, v in values.items() if "." not in n}

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with 8-bit floats as bytes: torch cannot pickle those."""
        return self.__dict__ | {n: _carried(getattr(self, n)) for n in self._fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields = {n: _arrived(state[n]) for n in self._fields}
        self.__dict__.update(state)
        layers = range(len(self._concrete))
        self._set([{n: v if self.layers is None else v[i] for n, v in fields.items()} for i in layers])

    # --- using -------------------------------------------------------------------------------------------------------

    def buffers(self) -> Iterator[tuple[str, Layout | Record, torch.Tensor]]:
        """(name, concrete layout, tensor) of every buffer, layer by layer."""
        for i, per_layer in enumerate(self._concrete):
            for name, layout in per_layer.items():
                value = getattr(self, name)
                if layout is not None:
                    yield name, layout, value[i] if self.layers is not None else value

    def manifest(self) -> dict[str, Any]:
        """This pool as JSON, to be compared with another process's by :func:`layoutcheck.diff`."""
        return _manifest.manifest(self)

    def resize(self, *, device: Any = None, **dims: Any) -> None:
        """Give the pool new sizes: contents are kept where both sizes have them, new space is filled by its rule.

        The buffers are new tensors afterwards: views of the old ones and captured CUDA graphs still point at the old
        memory. Shrinking drops what no longer fits. Raises like :meth:`allocate`, and then changes nothing.
        """
        given = self._merged(dims)
        new = self._layouts(given, self.layers)
        made: list[dict[str, torch.Tensor | None]] = []
        for i, per_layer in enumerate(new):
            buffers: dict[str, torch.Tensor | None] = {}
            for name, layout in per_layer.items():
                old = self._concrete[i][name]
                tensor = getattr(self, name)[i] if self.layers is not None else getattr(self, name)
                if layout is None or old is None:
                    if (layout is None) != (old is None):
                        raise TypeError(f"{type(self).__name__}.resize cannot add or drop {name}")
                    buffers[name] = None
                    continue
                grown = layout.empty(device=device or tensor.device)
                _copy(old, tensor, layout, grown)
                buffers[name] = grown
            made.append(buffers)
        self._given, self._concrete = given, new
        self.dims = self._solved(given, self.layers)
        self.generation += 1
        self.resized.append(dims)
        self._set(made)

    def _merged(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes given so far with the new ones; an old one that the new ones contradict gives way."""
        merged = {**self._given, **dims}
        candidates = [n for n in self._given if n not in dims]
        for dropped in (None, *candidates):
            sizes = {n: v for n, v in merged.items() if n != dropped}
            try:
                self._layouts(sizes, self.layers)
            except (LayoutError, TypeError):
                continue
            return sizes
        return merged

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy slots ``src`` to slots ``dst`` in every buffer that has slots, so scales travel with their payload.

        Both are integer tensors (n,). The sources are read before anything is written: they may overlap. Raises
        :class:`LayoutError` for different lengths or, on a CPU, for a slot that does not exist.
        """
        slots = int(self.dims["slot"]) if not isinstance(self.dims["slot"], tuple) else min(self.dims["slot"])
        found = []
        if src.shape != dst.shape or src.dim() != 1:
            got = f"{tuple(src.shape)} and {tuple(dst.shape)}"
            fix = "pass one destination for each source"
            found.append(
                Violation(
                    "dst", "shape", "src and dst of one length, (n,)", got, None, fix, "dst is not as long as src"
                )
            )
        for name, index in (("src", src), ("dst", dst)):
            if (
                index.device.type == "cpu"
                and index.numel()
                and not (int(index.min()) >= 0 and int(index.max()) < slots)
            ):
                bad = int(index[(index < 0) | (index >= slots)][0])
                fix, headline = f"pass slots below {slots}", f"{name} has a slot that is not there"
                found.append(Violation(name, "value", f"0 <= {name} < {slots}", str(bad), None, fix, headline))
        if found:
            raise LayoutError(f"{type(self).__name__}.move", found)
        for _, layout, tensor in self.buffers():
            if isinstance(layout, Record):
                layout = layout.buffer
            axis = next((a for a in layout.axes if a.name == "slot"), None)
            if axis is None:
                continue
            rows = leaf_view(layout, tensor, axis)
            sizes = rows.shape[: len(axis.leaves())]
            at_src = torch.unravel_index(src.long(), sizes)
            at_dst = torch.unravel_index(dst.long(), sizes)
            rows[at_dst] = rows[at_src]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={v}" for n, v in self._given.items())
        layers = f", layers={self.layers}" if self.layers is not None else ""
        return f"<{type(self).__name__} {sizes}{layers}>"


class _Carried:
    """A buffer on its way through a pickle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.bytes = tensor.dtype, tensor.view(torch.uint8)


def _carried(value: Any) -> Any:
    if isinstance(value, list):
        return [_carried(v) for v in value]
    eight_bits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 1
    return _Carried(value) if eight_bits else value


def _arrived(value: Any) -> Any:
    if isinstance(value, list):
        return [_arrived(v) for v in value]
    return value.bytes.view(value.dtype) if isinstance(value, _Carried) else value


class _Scope:
    """What :func:`_specs.resolve` needs of a function, for a class: its module's names."""

    def __init__(self, cls: type) -> None:
        import sys

        self.__globals__ = vars(sys.modules[cls.__module__])
        self.__qualname__ = cls.__qualname__


def _picked(field: Field, values: Mapping[str, Any], optional: bool) -> Layout | Record | None:
    if not isinstance(field, Choose):
        return field
    if optional and field.default is None and not any(evaluate(c, values) for c, _ in field.cases):
        return None
    return field.pick(values)


def _equations(forms: Forms, values: Mapping[str, Any]) -> tuple[Equation, ...]:
    """The equations of the form that these sizes pick, as far as they can pick one."""
    for condition, form in forms:
        if condition is None:
            return form.equations
        if not set(names(condition)) <= set(values):
            return ()
        if evaluate(condition, values):
            return form.equations
    return ()


def _copy(old: Layout | Record, source: torch.Tensor, new: Layout | Record, target: torch.Tensor) -> None:
    """Copy what both layouts have, coordinate by coordinate."""
    if isinstance(old, Record) or isinstance(new, Record):
        assert isinstance(old, Record)
        assert isinstance(new, Record)
        if all(old.buffer.values_of(leaf) == new.buffer.values_of(leaf) for leaf in old.buffer.order[1:]):
            return _copy(old.buffer, source, new.buffer, target)
        for name, section in old.split(source).items():
            _copy(old.section(name), section, new.section(name), new.split(target)[name])
        return None
    before, after = leaf_view(old, source), leaf_view(new, target)
    if _inner(old) == _inner(new):  # only outermost parts changed: the same leaves, more or fewer of them
        common = tuple(slice(min(a, b)) for a, b in zip(before.shape, after.shape, strict=True))
        after[common].copy_(before[common])
        return None
    logical = old.unpack(source)
    whole = new.unpack(target)
    common = tuple(slice(min(a, b)) for a, b in zip(logical.shape, whole.shape, strict=True))
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[logical.element_size()]
    whole.view(width)[common] = logical.view(width)[common]
    after.copy_(leaf_view(new, new.pack(whole)))
    return None


def _inner(layout: Layout) -> list[tuple[tuple[str, int], ...]]:
    """Sizes of all parts but the outermost of each axis: while they stay, a coordinate keeps its parts."""
    return [tuple((leaf, layout.values_of(leaf)) for leaf in axis.leaves()[1:]) for axis in layout.axes]


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple
