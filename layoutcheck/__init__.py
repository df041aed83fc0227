"""Declare the layout of a GPU kernel's buffers once; derive allocation, launch guards, index maps and tests from it."""

from layoutcheck import layouts
from layoutcheck._choose import Choose
from layoutcheck._contract import Contract, contract, guard
from layoutcheck._dtypes import (
    BF16,
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    FP16,
    FP32,
    INT8,
    INT32,
    INT64,
    UINT8,
)
from layoutcheck._errors import LayoutError, Violation
from layoutcheck._layout import Layout
from layoutcheck._manifest import Difference, diff
from layoutcheck._mode import mode
from layoutcheck._pool import Pool
from layoutcheck._record import Record
from layoutcheck._rules import Finite, Index, Indptr, Writes, agree, each, forbids, needs, no_overlap, together, when
from layoutcheck._tags import tag
from layoutcheck.layouts import layout

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E8M0",
    "FP16",
    "FP32",
    "INT8",
    "INT32",
    "INT64",
    "UINT8",
    "Choose",
    "Contract",
    "Difference",
    "Finite",
    "Index",
    "Indptr",
    "Layout",
    "LayoutError",
    "Pool",
    "Record",
    "Violation",
    "Writes",
    "agree",
    "contract",
    "diff",
    "each",
    "forbids",
    "guard",
    "layout",
    "layouts",
    "mode",
    "needs",
    "no_overlap",
    "tag",
    "together",
    "when",
]
