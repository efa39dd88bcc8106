"""A timing as a row: what pytest-benchmark records of one arm, and what stands beside the times. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from fusiongate.errors import UsageError

__all__ = ["SCHEMA", "TimedRow"]

SCHEMA = 1
"""The version of what stands in ``extra_info``."""


@dataclass(frozen=True, slots=True)
class TimedRow:
    """One arm of a measurement, of JSON's own types throughout."""

    subject: str
    """What was measured."""
    shape: str
    """The shape of its first operand, ``1x14592x4096``, or what the user calls the case."""
    dtype: str
    """The dtype of its first operand, such as ``bfloat16``."""
    arm: str
    """``kernel``, ``eager``, ``compile``, ``copy``, or a user's own word."""
    seconds: Sequence[float]
    """The seconds of one call in each sample."""
    calls: int
    """The calls in one sample."""
    info: Mapping[str, Any]
    """What is recorded beside the times: the ratio with its interval, bytes moved, path counts, clocks."""

    @property
    def group(self) -> str:
        """What the arms of one measurement share: ``modulate[1x14592x4096-bfloat16]``."""
        return f"{self.subject}[{self.shape}-{self.dtype}]"

    @property
    def name(self) -> str:
        """The row's name, by which runs are compared: ``modulate[1x14592x4096-bfloat16-kernel]``."""
        return f"{self.group.removesuffix(']')}-{self.arm}]"

    def to_json(self) -> dict[str, Any]:
        """The row as an object of JSON's own types."""
        return {**asdict(self), "seconds": list(self.seconds), "info": dict(self.info)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The row that :meth:`to_json` gave.

        Raises
        ------
        UsageError
            The record lacks a field, or its times are none.
        """
        try:
            row = cls(**record)
        except TypeError as error:
            raise UsageError(f"a timing row has the wrong fields: {error}; record it again") from error
        if not row.seconds or not all(isinstance(s, float) and 0 < s < math.inf for s in row.seconds):
            raise UsageError(f"{row.name}: expected a positive number of seconds in each sample; record it again")
        return row
