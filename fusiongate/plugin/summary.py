"""The summary at the end of a run, on the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusiongate.io import counted, one_line

from .causes import Cause
from .recorder import RECORDER, Failure, Recorder
from .session_checks import cell_name, shortened

__all__ = ["OUTCOMES", "not_compared", "not_run", "outcome_table", "reasons"]

OUTCOMES = ("fused", "reference", "refused", "raises", "not run", "red")
"""What may come of a cell, in the order of the table's columns."""

_UNCHECKED = "unchecked"
_NAMES = 4


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, the reasons, what was not run or not compared, the environment, and where the ledger lies."""
    recorder = config.stash.get(RECORDER, None)
    if recorder is None or not (recorder.cells or recorder.writer.count or recorder.complaints):
        return
    terminalreporter.write_sep("=", "fusiongate")
    for number, block in enumerate(_blocks(recorder, verbose=config.get_verbosity() > 0)):
        if number:
            terminalreporter.write_line("")
        for line in block:
            terminalreporter.write_line(one_line(line))
    for complaint in recorder.complaints:
        terminalreporter.write_line(f"red: {one_line(complaint)}", red=True, bold=True)


def _blocks(recorder: Recorder, *, verbose: bool) -> Iterator[list[str]]:
    cells = recorder.cells
    if cells:
        yield list(_aligned(outcome_table(cells)))
    if by_reason := reasons(cells):
        yield ["reasons", *_aligned([(f"  {outcome}", reason, str(n)) for (outcome, reason), n in by_reason.items()])]
    limit = len(cells) if verbose else _NAMES
    if recorder.causes:
        yield ["causes", *(_cause(cause, limit) for cause in recorder.causes)]
    for title, groups in (("not run", not_run(cells)), ("not compared", not_compared(cells))):
        if groups:
            yield [title, *(f"  {why} ({len(names)}): {shortened(names, limit)}" for why, names in groups.items())]
    if recorder.unstarted:
        yield ["not run because of a device that could not be used any more", *(f"  {n}" for n in recorder.unstarted)]
    closing = [f"environment: {environment.summary()}" for environment in recorder.environments.values()]
    if rows := recorder.writer.count:
        closing.append(f"ledger: {_relative(recorder.writer.path, recorder.config)} ({counted(rows, 'row')})")
    closing += [
        f"path table: {_relative(path, recorder.config)} ({counted(n, 'row')})" for path, n in recorder.tables.items()
    ]
    if closing:
        yield closing


def _cause(cause: Cause[Failure], limit: int) -> str:
    names = [failure.test.rpartition("::")[2] for failure in (cause.first, *cause.others)]
    return f"  {cause}: {shortened(names, limit)}"


def outcome_table(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Count cells by subject and outcome: a row of headings, one a subject, and the totals of several.

    The column of cells that their test never checked is there only when there are some.
    """
    columns = [*OUTCOMES, *([_UNCHECKED] if any(cell["outcome"] == _UNCHECKED for cell in cells) else [])]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for cell in cells:
        counts[cell["subject"]][cell["outcome"]] += 1
    table = [("subject", *columns)]
    table += [(subject, *(str(counts[subject][column]) for column in columns)) for subject in sorted(counts)]
    if len(counts) > 1:
        total = sum(counts.values(), Counter[str]())
        table.append(("total", *(str(total[column]) for column in columns)))
    return table


def reasons(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """Count cells by outcome and published reason, in the order of the outcomes; a red cell has a story of its own."""
    counts = Counter((cell["outcome"], cell["reason"]) for cell in cells if cell["outcome"] in OUTCOMES[:4])
    return dict(sorted(counts.items(), key=lambda entry: (OUTCOMES.index(entry[0][0]), -entry[1], entry[0][1])))


def not_run(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Group the names of the cells that were not run by what was missing."""
    groups: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell["outcome"] == "not run":
            groups[cell["reason"]].append(cell_name(cell))
    return dict(sorted(groups.items()))


def not_compared(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Group the names of the cells whose path no table was there to compare with by what was missing."""
    groups: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.get("not_compared"):
            groups[cell["not_compared"]].append(cell_name(cell))
    return dict(sorted(groups.items()))


def _aligned(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    columns = list(zip(*table, strict=True))
    # Names stand to the left; counts to the right, with their headings.
    layout = [(max(map(len, column)), column[-1].isdecimal()) for column in columns]
    for row in table:
        fields = (
            field.rjust(width) if count else field.ljust(width)
            for field, (width, count) in zip(row, layout, strict=True)
        )
        yield "  ".join(fields)


def _relative(path: Path, config: pytest.Config) -> str:
    start = config.invocation_params.dir
    return str(path.relative_to(start) if path.is_relative_to(start) else path)
