"""What a certificate says, and the file that holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import dtype_name, integer_view
from fusiongate.errors import UsageError
from fusiongate.io import write_text
from fusiongate.platforms import Environment

__all__ = ["Certificate", "Counterexample", "StageResult"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage that found no difference."""

    name: str
    """The stage."""
    what: str
    """What was tried, in words."""
    tried: int
    """How many results were compared with eager's."""
    complete: bool
    """Whether these are all that there are."""
    md5: str
    """Over the results: cards on which it is the same share this arithmetic. All NaN count as one."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Operands on which a kernel's result is not eager's."""

    kernel: str
    """The kernel."""
    stage: str
    """The stage that found it."""
    operands: Mapping[str, str] = field(hash=False)
    """Each operand's value and bits at that element."""
    actual: str
    """The kernel's result there, with its bits."""
    expected: str
    """Eager's, likewise."""

    def __str__(self) -> str:
        operands = ", ".join(f"{name}={value}" for name, value in self.operands.items())
        return f"{self.stage}: {self.kernel}({operands}) is {self.actual}, and eager gives {self.expected}"

    @classmethod
    def at(
        cls, kernel: str, stage: str, operands: Mapping[str, Tensor], actual: Tensor, expected: Tensor
    ) -> Counterexample:
        """The counterexample in scalars."""
        named = {name: spelled(operand) for name, operand in operands.items()}
        return cls(kernel, stage, named, spelled(actual), spelled(expected))


def spelled(element: Tensor) -> str:
    """A scalar's value and bits: ``1.984375 (0x3ffe)``."""
    width = element.dtype.itemsize
    pattern = int(integer_view(element).item()) & ((1 << (8 * width)) - 1)
    value = f"{element.item():.9g}" if element.dtype == torch.float32 else str(element.item())
    return f"{value} (0x{pattern:0{2 * width}x})"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was tried on one device with one build of a kernel, all of it equal to eager."""

    kernel: str
    """The kernel's name."""
    dtype: str
    """The dtype of x."""
    claim: str
    """What follows, in one sentence."""
    is_proof: bool
    """Whether it follows from the stages and the assumptions for every input; otherwise this is evidence."""
    assumptions: tuple[str, ...]
    """What the argument takes for granted."""
    sources: str
    """The hash of the kernel's sources."""
    environment: Environment
    """Where it was tried."""
    is_sample: bool
    """Whether less was tried than a certificate takes."""
    stages: tuple[StageResult, ...]
    """What was tried."""

    def to_json(self) -> dict[str, Any]:
        """The certificate as basic types; it has neither times nor dates, so that trying again gives the same file."""
        return {"format": _FORMAT, **asdict(self), "environment": self.environment.to_json()}

    def path(self, folder: Path) -> Path:
        """Where it lies under a folder of snapshots."""
        return folder / self.environment.platform / "certificates" / f"{self.kernel}-{self.dtype}.json"

    def write(self, folder: Path) -> Path:
        """Write the file, which appears whole or not at all; its path.

        Raises
        ------
        UsageError
            It cannot be written there, or this is only a sample, which is no certificate.
        """
        path = self.path(folder)
        if self.is_sample:
            raise UsageError(f"{path}: a sample is no certificate and is not written; run without --sample")
        try:
            write_text(path, json.dumps(self.to_json(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be written: {error.strerror or error}; name another folder with --folder"
            ) from error
        return path


def name_of(dtype: torch.dtype) -> str:
    """The dtype as a file's name has it: ``bf16``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, dtype_name(dtype))
