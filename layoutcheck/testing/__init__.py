"""Tests from a contract alone: valid calls, named faults, red zones, and a probe of the layout that is really written."""

from layoutcheck.testing._calls import Call, calls, tensors
from layoutcheck.testing._faults import Fault, faults
from layoutcheck.testing._memory import tensor

__all__ = ["Call", "Fault", "calls", "faults", "tensor", "tensors"]
