"""What is known about memory: who laid it out, how, with which sizes, and facts that a producer declared.

A tag belongs to a range of bytes of one storage, so every view, slice and ``.view(dtype)`` of it finds the tag again. A
storage is remembered weakly: when it is freed its tags go with it. Nothing here takes a lock (each step is one
operation on a dict or a list, and lists are replaced, never changed), so threads may tag and look up at the same time
and a forked child can never inherit a lock that is held.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from layoutcheck._layout import Layout
    from layoutcheck._record import Record


@dataclass(frozen=True, eq=False)
class Tag:
    """What is known about bytes ``start`` to ``stop`` of a storage.

    ``layout`` is a concrete layout or record, or None; ``name`` its name; ``facts`` what the producer declared;
    ``source`` the pool's class and field, with ``owner`` and ``generation``, where the memory belongs to a pool.
    """

    start: int
    stop: int
    name: str | None
    layout: Layout | Record | None
    facts: Mapping[str, Any]
    tensor: weakref.ref[torch.Tensor]
    dims: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    owner: weakref.ref[Any] | None = None
    generation: int = 0
    read_as: dict[Any, bool] = field(default_factory=dict, repr=False)

    def get(self, fact: str) -> Any:
        """A fact by name; ``"layout"`` is the name of the layout."""
        return self.name if fact == "layout" else self.facts.get(fact)


_known: dict[int, tuple[weakref.ref[Any], tuple[Tag, ...]]] = {}


def tag(tensor: torch.Tensor, layout: Layout | Record | str | None = None, /, **facts: Any) -> None:
    """Declare what ``tensor``'s memory holds: its layout and facts such as ``encoding``, ``version``, ``index_space``.

    ``layout`` is a concrete layout or record, or only a name where the layout is nobody's declaration. A layout,
    concrete or open, that the tensor does not have raises :class:`layoutcheck.LayoutError`. Memory that this library
    allocates has its layout already. Tagging the same tensor again replaces the facts that are given and keeps the
    others. Contracts read tags with ``tag(x, "version")`` and ``tags(x, "written")`` in their conditions; where another
    layout of the catalogue has the same shape and dtype, a guard compares the layout as well.
    """
    if layout is not None and not isinstance(layout, str):
        declared: Any = getattr(layout, "buffer", layout)  # of a record, the bytes
        from layoutcheck import _contract

        solved = _contract.check_tensor(declared, tensor, {}, memory=False)
        layout = declared(**{name: solved[name] for name in declared.dims})
    remember(tensor, layout, facts=facts)


def remember(
    tensor: torch.Tensor,
    layout: Layout | Record | str | None,
    *,
    facts: Mapping[str, Any] | None = None,
    dims: Mapping[str, Any] | None = None,
    source: str = "",
    owner: Any = None,
    generation: int = 0,
) -> None:
    """Tag a tensor's bytes; what was said of the same tensor before is kept where nothing new is said."""
    if torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor):
        return  # neither has memory that could be remembered
    if (storage := storage_of(tensor)) is None:
        return
    start, stop = extent(tensor)
    old = _of(storage)
    before = [t for t in old if (t.start, t.stop) == (start, stop) and ((of := t.tensor()) is None or of is tensor)]
    new = Tag(
        start,
        stop,
        layout if isinstance(layout, str) else layout.name if layout is not None else None,
        None if isinstance(layout, str) else layout,
        dict(facts or {}),
        weakref.ref(tensor),
        dict(dims or {}),
        source,
        weakref.ref(owner) if owner is not None else None,
        generation,
    )
    for earlier in before:
        if layout is None or earlier.tensor() is tensor:
            new = replace(new, facts={**earlier.facts, **new.facts}, read_as={})
        if layout is None:
            new = replace(
                new, name=earlier.name, layout=earlier.layout, dims=earlier.dims, source=earlier.source,
                owner=earlier.owner, generation=earlier.generation,
            )  # fmt: skip
    tags = [t for t in old if t not in before and not (layout is not None and _superseded(t, start, stop))]
    tags.insert(bisect_right([t.start for t in tags], start), new)
    key = id(storage)
    _known[key] = (weakref.ref(storage, lambda _, key=key: _known.pop(key, None)), tuple(tags))  # type: ignore[misc]


def _superseded(tag: Tag, start: int, stop: int) -> bool:
    """Whether a layout declared for these bytes ends an older one: it overlaps them, and does not contain them."""
    overlaps = tag.start < stop and start < tag.stop
    return tag.layout is not None and overlaps and not (tag.start <= start and stop <= tag.stop)


def find(tensor: Any) -> Tag | None:
    """The tag of a tensor's bytes, if there is one: of several, the one that starts last and was declared last."""
    return next(iter(_covering(tensor)), None)


def fact(tensor: Any, name: str) -> Any:
    """What the tags of a tensor say about ``name``; None where they say nothing."""
    return next((value for t in _covering(tensor) if (value := t.get(name)) is not None), None)


def facts(tensor: Any, name: str) -> tuple[Any, ...]:
    """Everything that any tag says about ``name`` whose memory overlaps the tensor's."""
    tags = _of_tensor(tensor)
    if not tags:
        return ()
    start, stop = extent(tensor)
    found = (t.get(name) for t in tags if t.start < stop and start < t.stop)
    return tuple(value for value in found if value is not None)


def _covering(tensor: Any) -> tuple[Tag, ...]:
    tags = _of_tensor(tensor)
    if not tags:
        return ()
    start, stop = extent(tensor)
    return tuple(t for t in reversed(tags) if t.start <= start and stop <= t.stop)


def _of_tensor(tensor: Any) -> tuple[Tag, ...]:
    return _of(storage_of(tensor)) if isinstance(tensor, torch.Tensor) else ()


def storage_of(tensor: torch.Tensor) -> Any:
    """A tensor's storage; None for one that has none of its own, as in functorch's transforms."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:
        return None


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's first element is; 0 for one without memory: fake, meta, functorch's, a wrapper of others."""
    try:
        return 0 if isinstance(tensor, torch._subclasses.FakeTensor) else tensor.data_ptr()
    except RuntimeError:
        return 0


def _of(storage: Any) -> tuple[Tag, ...]:
    entry = _known.get(id(storage))
    return () if entry is None or entry[0]() is not storage else entry[1]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor's memory, counted from the start of its storage."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * size, start * size
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + int(reach) + 1) * size


def shared(a: Any, b: Any) -> bool:
    """Whether two tensors have bytes of one storage in common, by the range that each spans."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if (storage := storage_of(a)) is None or storage is not storage_of(b):
        return False
    (start, stop), (other, end) = extent(a), extent(b)
    return start < end and other < stop
