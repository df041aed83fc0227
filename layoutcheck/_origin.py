"""Where a tensor's memory came from, as far as it is tagged: allocated for other sizes, before a resize, as what."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layoutcheck import _tags
from layoutcheck._axes import Found
from layoutcheck._call import Call, sizes_in
from layoutcheck._layout import Layout
from layoutcheck._specs import Form, TensorSpec


def of(call: Call, spec: TensorSpec, form: Form, value: torch.Tensor) -> Iterator[Found]:
    """What the tag of a wrong tensor says, where that differs from what this call needs."""
    found = None if torch.compiler.is_compiling() else _tags.find(value)
    if found is None or form.layout is None:
        return
    pool = found.owner() if found.owner is not None else None
    source = f" as {found.source}" if found.source else ""
    if pool is not None and found.generation < pool.generation:
        resized = ", ".join(f"{n}={v}" for n, v in pool.resized[found.generation].items())
        owner, _, field = found.source.partition(".")
        yield (
            f"{spec.name} is {found.source} from before resize({resized})",
            f"pass the {field} that {owner} has now",
        )
        return
    if not isinstance(found.layout, Layout):
        return
    if found.layout.name != form.layout.name:
        yield f"{spec.name} was laid out{source} as {found.layout.name}, not as {form.layout.name}", None
        return
    theirs, mine = sizes_in(form.layout, found.layout), call.layout_dims(form)
    if theirs is None or mine is None:
        return
    other = {n: v for n, v in theirs.items() if mine.get(n) != v}
    if other:
        had = ", ".join(f"{n}={v}" for n, v in other.items())
        needs = ", ".join(f"{n}={mine[n]}" for n in other)
        scalars = all(n in call.contract.scalars for n in other)
        right = f"allocate it with {needs}: {call.wanted(spec, form)}"
        whole = call.concrete(form) is not None
        yield (
            f"{spec.name} was allocated{source} with {had}; this call has {needs}",
            f"pass {had}" if scalars and not whole else right,
        )
