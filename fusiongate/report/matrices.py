"""The page's parts about the matrix: outcomes, reasons, where gates are live, what is red, what was not run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fusiongate.plugin.session_checks import cell_name, unlaunched
from fusiongate.plugin.summary import not_compared, not_run, outcome_table, reasons

from .evidence import UNCHECKED, Evidence, Observed
from .markup import Html, element, joined, table

__all__ = ["absences", "attention", "by_environment", "live", "outcomes", "reddened"]

Cells = Sequence[Mapping[str, Any]]


def by_environment(observed: Iterable[Observed]) -> dict[int, Cells]:
    """The payloads by the number of their environment, in its order."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for one in observed:
        groups[one.environment].append(one.payload)
    return dict(sorted(groups.items()))


def attention(evidence: Evidence) -> Iterator[Html]:
    """Every red cell and preset with its message, and whatever else makes a run doubtful."""
    findings = [*_doubts(evidence), *_red(evidence.cells, "message"), *_red(evidence.digests, "story")]
    if findings:
        yield from findings
    else:
        yield element("p", "Nothing that was run is red.")


def _doubts(evidence: Evidence) -> Iterator[Html]:
    for torn in evidence.torn:
        yield _finding("The ledger is cut short", torn)
    for run in evidence.runs:
        for complaint in unlaunched([cell.payload for cell in run.cells.values()], require_fused=False):
            yield _finding(f"Run {run.id}", complaint)


def _red(observed: Iterable[Observed], message: str) -> Iterator[Html]:
    for one in observed:
        payload, where = one.payload, f" in environment {one.environment}, run {one.run}"
        if payload["outcome"] == "red":
            yield _finding(f"{_name(payload)}{where}", payload.get(message) or payload.get("reason") or "red")
        elif payload["outcome"] == UNCHECKED:
            yield _finding(f"{_name(payload)}{where}", f"unchecked: {payload['reason']}")


def _name(payload: Mapping[str, Any]) -> str:
    return cell_name(payload) if "id" in payload else f"preset {payload['subject']} ({payload['size']})"


def _finding(title: str, message: str) -> Html:
    return element("section", element("h3", title), element("pre", message), class_="finding")


def outcomes(evidence: Evidence) -> Iterator[Html]:
    """Subject × outcome, and the reasons, for each environment."""
    for number, cells in by_environment(evidence.cells).items():
        heading, *counts = outcome_table(cells)
        rows = [reddened(row, heading.index("red")) for row in counts]
        body = [rows[:-1], rows[-1:]] if len(rows) > 1 else [rows]
        yield table(f"Cells by subject and outcome, {evidence.label(number)}", heading, body, numbers=len(heading) - 1)
        counted = reasons(cells)
        groups = [
            [(outcome, str(count), reason) for (outcome, reason), count in counted.items() if outcome == chosen]
            for chosen in dict.fromkeys(outcome for outcome, _ in counted)
        ]
        yield table(f"Reasons, {evidence.label(number)}", ("outcome", "cells", "reason"), groups, numbers=1)


def reddened(row: Sequence[str], column: int) -> Sequence[str]:
    """A row of counts, of which that of red cells stands out where there are any."""
    count = row[column]
    return row if count == "0" else [*row[:column], element("b", count, class_="red"), *row[column + 1 :]]


def live(evidence: Evidence) -> Iterator[Html]:
    """Layout × subject: in how many of the cells that ran the kernel's result was taken."""
    for number, cells in by_environment(evidence.cells).items():
        ran: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for cell in cells:
            if cell["outcome"] not in ("not run", UNCHECKED):
                ran[cell["layout"], cell["subject"]].append(cell["outcome"] == "fused")
        subjects = sorted({subject for _, subject in ran})
        rows = [
            [layout, *(_share(ran.get((layout, subject), [])) for subject in subjects)]
            for layout in dict.fromkeys(layout for layout, _ in ran)
        ]
        caption = f"Fused cells of those that ran, by layout and subject, {evidence.label(number)}"
        yield table(caption, ["layout", *map(_breakable, subjects)], [rows], numbers=len(subjects))


def _share(fused: Sequence[bool]) -> str:
    if not fused:
        return "–"
    told = f"{sum(fused)} of {len(fused)}"
    return element("b", told) if any(fused) else told


def _breakable(name: str) -> Html:
    """A long name that may go over several lines."""
    return joined(name.split("_"), joined(["_", element("wbr")]))


def absences(evidence: Evidence) -> Iterator[Html]:
    """Every cell and preset that was not run, and every cell whose path was not compared, by name."""
    cells, presets = by_environment(evidence.cells), by_environment(evidence.digests)
    for number in sorted({*cells, *presets}):
        missing: dict[str, list[str]] = defaultdict(list, not_run(cells.get(number, ())))
        for preset in presets.get(number, ()):
            if preset["outcome"] == "not run":
                missing[preset["story"] or "no reason is recorded"].append(_name(preset))
        for title, groups in (("Not run", missing), ("Not compared", not_compared(cells.get(number, ())))):
            for reason, names in groups.items():
                yield element("h3", f"{title}: {reason} ({len(names)} in {evidence.label(number)})")
                yield element("ul", *(element("li", name) for name in sorted(names)), class_="names")
