"""What ledgers and recorded timings hold, checked and brought together for one page. Imports no torch.

Several runs may have seen the same cell: they are kept apart by run, and the last that saw it counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fusiongate import ledger
from fusiongate.errors import UsageError
from fusiongate.io import shaped
from fusiongate.platforms import Environment
from fusiongate.plugin.summary import OUTCOMES
from fusiongate.timing.recorded import RecordedRow, TimedRow, read_run, recorded_row

__all__ = ["UNCHECKED", "VERDICTS", "Evidence", "LedgerRun", "Observed", "TimedRun", "gather"]

UNCHECKED: Final = "unchecked"
"""The outcome of a cell whose test ended without checking it."""

VERDICTS: Final = ("same", "recorded", "nondeterministic", "not run", "red")
"""What may come of a preset."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """What a cell's payload has to hold, as far as the page uses it."""

    id: str
    layout: str
    outcome: str
    reason: str
    test: str
    expected: str | None
    launches: int | None
    must_fuse: bool
    message: str = ""
    not_compared: str | None = None


@dataclass(frozen=True, slots=True)
class _Digest:
    """What a preset's payload has to hold, as far as the page uses it."""

    outcome: str
    story: str | None
    size: str
    seed: int
    fused: Mapping[str, Mapping[str, str]]
    reference: Mapping[str, Mapping[str, str]]
    calls: Mapping[str, Any]
    test: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A cell or a preset as one run saw it."""

    run: str
    """The run's id."""
    environment: int
    """The number of its environment on the page, counted from one."""
    subject: str
    """The name of a fusion, a foreign function or a preset."""
    payload: Mapping[str, Any]
    """The row's payload, of which every field that the page uses has been checked, with its ``subject``."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Timings that were recorded together."""

    name: str
    """The file's name or the run's id."""
    environments: tuple[int, ...]
    """The numbers of its environments on the page."""
    rows: tuple[RecordedRow, ...]
    """One a measured arm."""


@dataclass(slots=True)
class LedgerRun:
    """One run of the tests, as a ledger has kept it."""

    id: str
    """Its id, which begins with the time of its start."""
    cells: dict[tuple[int, str, str, str], Observed] = field(default_factory=dict)
    """By environment, subject, test and cell: a cell that was tried again counts once."""
    digests: dict[tuple[int, str, str, int], Observed] = field(default_factory=dict)
    """By environment, preset, size and seed."""
    timings: dict[tuple[int, str], RecordedRow] = field(default_factory=dict)
    """By environment and name."""
    environments: list[int] = field(default_factory=list)
    """The numbers of its environments on the page."""


@dataclass(slots=True)
class Evidence:
    """Everything that the page tells."""

    environments: list[Environment] = field(default_factory=list)
    """Each once; the page numbers them from one."""
    runs: list[LedgerRun] = field(default_factory=list)
    """In the order of their ids, and so of their start."""
    recorded: list[TimedRun] = field(default_factory=list)
    """The runs of pytest-benchmark, in the order that they were given in."""
    files: list[str] = field(default_factory=list)
    """The paths of what was read, ledgers first."""
    torn: list[str] = field(default_factory=list)
    """Of each ledger whose last row is cut short, what is wrong with it."""

    @property
    def cells(self) -> list[Observed]:
        """Every cell as the last run saw it."""
        return list({key: cell for run in self.runs for key, cell in run.cells.items()}.values())

    @property
    def digests(self) -> list[Observed]:
        """Every preset as the last run saw it."""
        return list({key: digest for run in self.runs for key, digest in run.digests.items()}.values())

    @property
    def timed(self) -> list[TimedRun]:
        """Everything that was timed: the runs' own timings, then the recorded ones."""
        own = []
        for run in self.runs:
            for number in run.environments:
                rows = tuple(row for (where, _), row in run.timings.items() if where == number)
                own += [TimedRun(run.id, (number,), rows)] if rows else []
        return [*own, *self.recorded]

    def number(self, environment: Environment) -> int:
        """The number of an environment on the page."""
        if environment not in self.environments:
            self.environments.append(environment)
        return self.environments.index(environment) + 1

    def label(self, number: int) -> str:
        """An environment as the page names it: its number, with the device and the version of torch."""
        one = self.environments[number - 1]
        return f"environment {number} ({one.device_name}, torch {one.torch})"


def gather(ledgers: Sequence[Path], timings: Sequence[Path]) -> Evidence:
    """Read everything that one page is to tell.

    Parameters
    ----------
    ledgers
        Files of ledgers; one that is named twice is read once.
    timings
        Runs that ``--benchmark-json`` recorded.

    Raises
    ------
    LedgerError
        A ledger cannot be read, or a line of it is no row.
    UsageError
        A file holds nothing of ours, or something that this version does not know.
    """
    evidence = Evidence()
    runs: dict[str, LedgerRun] = {}
    for path in _once(ledgers):
        kept = ledger.read(path)
        if all(row.kind == "run" for row in kept.rows):
            raise UsageError(f"{path}: holds no observation: expected a ledger that a run of the tests has written")
        evidence.files.append(str(path))
        evidence.torn += [kept.torn] if kept.torn else []
        described: dict[tuple[str, str], int] = {}
        for row in kept.rows:
            run = runs.setdefault(row.run, LedgerRun(row.run))
            try:
                if row.kind == "run":
                    number = evidence.number(Environment.from_json(row.payload))
                    described[row.run, row.environment] = number
                    run.environments += [number] if number not in run.environments else []
                else:
                    _add(run, row, described[row.run, row.environment])
            except UsageError as error:
                raise UsageError(
                    f"{path}: a row of kind {row.kind} for {row.subject!r} cannot be told: {error}"
                ) from error
    evidence.runs = [runs[name] for name in sorted(runs)]
    for path in _once(timings):
        recorded = read_run(path)
        evidence.files.append(str(path))
        numbers = [evidence.number(Environment.from_json(machine["environment"])) for machine in recorded.machines]
        evidence.recorded.append(TimedRun(path.name, tuple(dict.fromkeys(numbers)), tuple(recorded.rows.values())))
    return evidence


def _once(paths: Iterable[Path]) -> Iterator[Path]:
    yield from {os.path.realpath(path): path for path in paths}.values()


def _add(run: LedgerRun, row: ledger.Row, number: int) -> None:
    payload = {**row.payload, "subject": row.subject}
    seen = Observed(row.run, number, row.subject, payload)
    if row.kind == "cell":
        _check(payload, _Cell, (*OUTCOMES, UNCHECKED))
        run.cells[number, row.subject, payload["test"], payload["id"]] = seen
    elif row.kind == "digest":
        _check(payload, _Digest, VERDICTS)
        run.digests[number, row.subject, payload["size"], payload["seed"]] = seen
    else:
        timing = _timing(row.payload)
        run.timings[number, timing.name] = timing


def _timing(payload: Mapping[str, Any]) -> RecordedRow:
    row = TimedRow.from_json({name: value for name, value in payload.items() if name != "clock_limits"})
    try:
        return recorded_row(
            {
                "name": row.name,
                "group": row.group,
                "params": {"arm": row.arm},
                "extra_info": row.info,
                "stats": {"data": row.seconds},
            }
        )
    except (KeyError, ValueError) as error:
        raise UsageError(f"{error}; record it again") from error


def _check(payload: Mapping[str, Any], kind: type[_Cell | _Digest], outcomes: Sequence[str]) -> None:
    try:
        outcome = shaped(payload, kind).outcome
    except ValueError as error:
        raise UsageError(f"{error}; record it again") from error
    if outcome not in outcomes:
        raise UsageError(
            f"outcome {outcome!r} is not known: expected {', '.join(outcomes)}; is it from another version?"
        )
