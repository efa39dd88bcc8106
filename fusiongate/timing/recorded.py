"""Recorded runs: what pytest-benchmark has written of our rows, read back and checked. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusiongate.errors import UsageError
from fusiongate.io import parse_json, read_bytes
from fusiongate.platforms import Environment

from .rows import SCHEMA

__all__ = ["MACHINE_KEY", "Bounds", "RecordedRow", "Run", "environment_differences", "read_run", "recorded_row"]

MACHINE_KEY: Final = "fusiongate"
"""Where in pytest-benchmark's ``machine_info`` our environments stand."""


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
        machines = record["machine_info"][MACHINE_KEY]
        environments = [Environment.from_json(machine["environment"]) for machine in machines]
        rows = [recorded_row(bench) for bench in record["benchmarks"] if "fusiongate" in bench.get("extra_info", {})]
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
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
    KeyError, TypeError, AttributeError, OverflowError
        A field is missing, or something else than it should be.
    UsageError
        It is from another version, or its interval is none.
    """
    info = bench["extra_info"]
    if info["fusiongate"] != SCHEMA:
        raise UsageError(f"{bench['name']}: schema {info['fusiongate']!r}, expected {SCHEMA}; record the run again")
    ratio = info["ratio"]
    share = info.get("share_of_copy_bandwidth")
    if share is not None and not isinstance(share, int | float):
        raise TypeError(f"{share!r} is no share of the copy's bandwidth")
    row = RecordedRow(
        name=bench["name"],
        arm=bench["params"]["arm"],
        reference=info["reference"],
        median_s=_bounds(bench["name"], info["median_s"]),
        ratio=None if ratio is None else _bounds(bench["name"], ratio),
        case=bench["group"],
        share=None if share is None else float(share),
        sources=info.get("sources") or "",
        samples=tuple(bench["stats"].get("data", ())),
    )
    for word in (row.name, row.arm, row.reference, row.case, row.sources):
        if not isinstance(word, str):
            raise TypeError(f"{word!r} is no string")
    return row


def _bounds(name: str, record: Mapping[str, Any]) -> Bounds:
    value, low, high = (record[key] for key in ("value", "low", "high"))
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if not (0 <= low <= value <= high and 0 < value < math.inf):
        raise UsageError(f"{name}: {value} in {low} to {high} is no interval of times; record the run again")
    # A number in JSON may be larger than any float.
    return Bounds(float(value), float(low), float(high))


def environment_differences(base: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between the environments of two runs, in words, from base to new; empty where they are the same."""
    return list(dict.fromkeys(_differences(base, new)))


def _differences(base: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(base) != len(new):
        yield f"{len(base)} environments → {len(new)}"
        return
    for before, after in zip(base, new, strict=True):
        yield from Environment.from_json(before["environment"]).diff(Environment.from_json(after["environment"]))
