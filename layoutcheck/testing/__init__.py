"""Tests from a contract alone: valid calls, named faults, red zones, and a probe of what is really written."""

from layoutcheck.testing._call import Call
from layoutcheck.testing._calls import calls, tensors
from layoutcheck.testing._check import Report, check
from layoutcheck.testing._faults import Fault, faults
from layoutcheck.testing._memory import tensor
from layoutcheck.testing._probe import Probe, probe
from layoutcheck.testing._redzones import Run, redzones

__all__ = [
    "Call",
    "Fault",
    "Probe",
    "Report",
    "Run",
    "calls",
    "check",
    "faults",
    "probe",
    "redzones",
    "tensor",
    "tensors",
]
