"""Timings as rows: what pytest-benchmark records of one arm, and whole runs read back. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from fusiongate.errors import UsageError
from fusiongate.io import parse_json, read_bytes, shaped
from fusiongate.platforms import Environment

__all__ = [
    "MACHINE_KEY",
    "SCHEMA",
    "Bounds",
    "RecordedRow",
    "Run",
    "TimedRow",
    "environment_differences",
    "read_run",
    "recorded_row",
]

MACHINE_KEY: Final = "fusiongate"
"""Where in pytest-benchmark's ``machine_info`` our environments stand."""

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
            row = shaped(record, cls, closed=True)
        except ValueError as error:
            raise UsageError(f"a timing row has the wrong fields: {error}; record it again") from error
        if not row.seconds or not all(0 < s < math.inf for s in row.seconds):
            raise UsageError(f"{row.name}: expected a positive number of seconds in each sample; record it again")
        return row


@dataclass(frozen=True, slots=True)
class Bounds:
    """An estimate and its interval, as recorded."""

    value: float
    """The estimate."""
    low: float
    """The lower end."""
    high: float
    """The upper end."""


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One arm of a recorded measurement."""

    name: str
    """``<subject>[<shape>-<dtype>-<arm>]``."""
    arm: str
    """The last part of that."""
    reference: str
    """The arm that the ratio is to."""
    median_s: Bounds
    """The median time of a call, in seconds."""
    ratio: Bounds | None
    """The arm's time over the reference's; None for the reference itself."""
    case: str
    """What the arms of one measurement share: ``<subject>[<shape>-<dtype>]``."""
    share: float | None
    """The bytes a second that it moves, over those of the copy in the same run; None where that was not recorded."""
    sources: str
    """The hash of the kernels' sources; empty where none is known."""
    samples: tuple[float, ...]
    """The samples, where the file keeps them: equal ones mean that two rows are of one measurement."""


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run."""

    path: Path
    """Its file."""
    machines: Sequence[Mapping[str, Any]]
    """The environments that it was measured in, with the limits of their clocks."""
    rows: Mapping[str, RecordedRow]
    """Its rows by name."""


@dataclass(frozen=True, slots=True)
class _File:
    """What is read of pytest-benchmark's file; the entries one by one, as others than ours may be among them."""

    machine_info: Mapping[str, Any]
    benchmarks: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Interval:
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class _Info:
    reference: str
    median_s: _Interval
    ratio: _Interval | None
    share_of_copy_bandwidth: float | None = None
    sources: str | None = None


@dataclass(frozen=True, slots=True)
class _Params:
    arm: str


@dataclass(frozen=True, slots=True)
class _Stats:
    data: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    group: str
    params: _Params
    extra_info: _Info
    stats: _Stats


def read_run(path: Path) -> Run:
    """Read a file that pytest-benchmark wrote, by ``--benchmark-json`` or into its storage.

    Raises
    ------
    UsageError
        The file cannot be read, is cut short, or holds no timings of ours; in one line.
    """
    try:
        record = parse_json(read_bytes(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: no JSON, or cut short: {error}; record the run again") from error
    try:
        file = shaped(record, _File)
        machines = file.machine_info[MACHINE_KEY]
        environments = [Environment.from_json(machine["environment"]) for machine in machines]
        rows = [recorded_row(bench) for bench in file.benchmarks if "fusiongate" in (bench.get("extra_info") or {})]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: holds no timings of fusiongate's: {type(error).__name__}: {error}; expected a file that a run "
            f"with device_benchmark has written by --benchmark-json"
        ) from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if not environments or not rows:
        raise UsageError(f"{path}: holds no timings of fusiongate's; expected one row or more of device_benchmark")
    named = {row.name: row for row in rows}
    if len(named) < len(rows):
        twice = sorted({row.name for row in rows if sum(row.name == other.name for other in rows) > 1})
        raise UsageError(f"{path}: {twice[0]} stands in it twice; record the run again")
    return Run(path, machines, named)


def recorded_row(bench: Mapping[str, Any]) -> RecordedRow:
    """One arm's row, from an entry of pytest-benchmark's ``benchmarks`` that has our ``extra_info``.

    Raises
    ------
    ValueError
        A field is missing, or something else than it should be.
    UsageError
        It is from another version, or its interval is none.
    """
    schema = bench["extra_info"]["fusiongate"]
    if schema != SCHEMA:
        raise UsageError(f"{bench['name']}: schema {schema!r}, expected {SCHEMA}; record the run again")
    entry = shaped(bench, _Entry)
    info = entry.extra_info
    return RecordedRow(
        name=entry.name,
        arm=entry.params.arm,
        reference=info.reference,
        median_s=_bounds(entry.name, info.median_s),
        ratio=None if info.ratio is None else _bounds(entry.name, info.ratio),
        case=entry.group,
        share=info.share_of_copy_bandwidth,
        sources=info.sources or "",
        samples=entry.stats.data,
    )


def _bounds(name: str, interval: _Interval) -> Bounds:
    low = 0.0 if interval.low is None else interval.low
    high = math.inf if interval.high is None else interval.high
    if not (0 <= low <= interval.value <= high and 0 < interval.value < math.inf):
        raise UsageError(f"{name}: {interval.value} in {low} to {high} is no interval of times; record the run again")
    return Bounds(interval.value, low, high)


def environment_differences(base: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between the environments of two runs, in words, from base to new; empty where they are the same."""
    return list(dict.fromkeys(_differences(base, new)))


def _differences(base: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(base) != len(new):
        yield f"{len(base)} environments → {len(new)}"
        return
    for before, after in zip(base, new, strict=True):
        yield from Environment.from_json(before["environment"]).diff(Environment.from_json(after["environment"]))
