"""Certificates: a kernel's arithmetic tried on every operand there is, stage by stage, against eager."""

from .certifying import KERNELS, Certificate, certify, check_request, counterexample, device_named, stage_names
from .trials import Counterexample, Found, StageResult

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
