"""Certificates: a kernel's arithmetic tried on every operand there is, stage by stage, against eager."""

from .certifying import KERNELS, certify, check_request, counterexample, device_named, stage_names
from .records import Certificate, Counterexample, StageResult
from .trials import Found

__all__ = [
    "KERNELS",
    "Certificate",
    "Counterexample",
    "Found",
    "StageResult",
    "certify",
    "check_request",
    "counterexample",
    "device_named",
    "stage_names",
]
