"""Certificates: a kernel's arithmetic tried on every operand there is, stage by stage, against eager."""

from fusiongate.certificates.certifying import KERNELS, certify, counterexample
from fusiongate.certificates.records import Certificate, Counterexample, StageResult

__all__ = ["KERNELS", "Certificate", "Counterexample", "StageResult", "certify", "counterexample"]
