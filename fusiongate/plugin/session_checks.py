"""What is wrong with a run although each of its tests may have passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from fusiongate.io import counted

__all__ = ["cell_name", "ended", "flaky", "shortened", "unheld", "unlaunched", "unreported"]

_NAMES = 5


def cell_name(cell: Mapping[str, Any]) -> str:
    """Give a cell's name as summaries write it: ``subject[id]``."""
    return f"{cell['subject']}[{cell['id']}]"


def shortened(names: Iterable[str], limit: int = _NAMES) -> str:
    """List ``names`` in order, the first ``limit`` of them in full."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f", and {rest} more" if rest > 0 else "")


def unlaunched(cells: Sequence[Mapping[str, Any]], *, require_fused: bool) -> list[str]:
    """Complain of a run that was to launch kernels and launched none, and of each cell that had to launch and did not.

    Parameters
    ----------
    cells
        The payloads of the run's cell rows.
    require_fused
        Whether every must-fuse cell has to have launched, those that were not run among them.
    """
    complaints = []
    # A cell that failed half-way tells by its own failure why; whether it launched is not known.
    known = [cell for cell in cells if cell["outcome"] not in ("not run", "unchecked") and cell["launches"] is not None]
    due = [cell for cell in known if cell["must_fuse"] or cell["expected"] == "fused"]
    if due and not any(cell["launches"] for cell in known):
        complaints.append(
            f"no kernel was launched, and {counted(len(due), 'cell')} had to launch one: "
            f"{shortened(map(cell_name, due))}; is FUSIONGATE_DISABLE set, or a declines too strict?"
        )
    if require_fused:
        idle = [cell for cell in cells if cell["must_fuse"] and not cell["launches"]]
        if idle:
            complaints.append(
                f"--fusiongate-require-fused: {counted(len(idle), 'cell')} must fuse and launched nothing: "
                f"{shortened(map(cell_name, idle))}"
            )
    return complaints


def unheld(cells: Sequence[Mapping[str, Any]], snapshots: Sequence[str]) -> list[str]:
    """Complain of what nothing was there to compare with, and that was recorded instead.

    Parameters
    ----------
    cells
        The payloads of the run's cell rows.
    snapshots
        The files of presets that had none.
    """
    recorded = [cell for cell in cells if cell.get("not_compared") and cell.get("table")]
    tables = {cell["table"]["file"] for cell in recorded}
    missing = [(f"{counted(len(recorded), 'cell')} had no committed path", tables)] if recorded else []
    if snapshots:
        missing.append((f"{counted(len(snapshots), 'preset')} had no committed digests", set(snapshots)))
    return [
        f"--fusiongate-missing=record: {what}; candidates are in {shortened(files)}: review and commit them"
        for what, files in missing
    ]


def unreported(collected: AbstractSet[str], reported: AbstractSet[str]) -> list[str]:
    """Complain of tests that were collected and never reported, as after a worker that died without a word."""
    silent = collected - reported
    if not silent:
        return []
    were, them = ("was", "it") if len(silent) == 1 else ("were", "them")
    told = f"{counted(len(silent), 'test')} {were} collected and never reported, so nothing is known of {them}"
    return [f"{told}: {shortened(silent)}"]


def flaky(tests: Sequence[str]) -> list[str]:
    """Complain of tests that were red and became green when they were tried again."""
    if not tests:
        return []
    return [f"{counted(len(tests), 'test')} flaky, red at first and green when tried again: {shortened(tests)}"]


def ended(causes: Iterable[object], unstarted: Sequence[str]) -> list[str]:
    """Complain of each cause that ended a process's run, and say how many tests were not run because of them."""
    complaints = [f"{cause}: its process ran no further test" for cause in causes]
    if unstarted:
        tests = f"{counted(len(unstarted), 'test')} {'was' if len(unstarted) == 1 else 'were'}"
        complaints.append(f"{tests} not run because of that; run what is named above again, in a new process")
    return complaints
