"""What a failed cell says: what happened, what was expected, what to run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fusiongate.comparison.verdicts import compare
from fusiongate.subjects import Trial

from .cells import Cell, CellFailure
from .modes import Mode

__all__ = [
    "called_in_words",
    "calls_in_words",
    "described",
    "failure",
    "launches_in_words",
    "story",
]


def failure(cell: Cell, where: str, happened: str, expected: str, more: str = "") -> CellFailure:
    """The failure of a cell.

    Parameters
    ----------
    cell
        The cell.
    where
        At which call; may be empty.
    happened, expected
        In a few words each.
    more
        A verdict, or what the gate recorded, in any number of lines.
    """
    lines = [
        f"{cell.subject}[{cell.id}]{where}",
        f"  happened: {happened}",
        f"  expected: {expected}",
        *(f"  {line}" for line in more.splitlines()),
        f"  run: {_command(cell.id)}",
    ]
    return CellFailure("\n".join(lines))


def story(trial: Trial, args: tuple[Any, ...]) -> str:
    """What differs when the kernel runs on the cell's own arguments: says more than that it was refused."""
    fusion = trial.fusion
    assert fusion is not None
    lines = [str(event) for event in fusion.gate.events]
    try:
        verdict = compare(fusion.fused(*args), fusion.reference(*args), fusion.contract, fusion.reference, args)
        lines.append(f"on this cell's arguments: {verdict}")
    except Exception as error:
        lines.append(f"on this cell's arguments the kernel raised {described(error)}")
    return "\n".join(lines)


def described(error: Exception) -> str:
    """An exception by its type and first line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def launches_in_words(launches: int) -> str:
    """A number of launches, such as ``no launch``."""
    return f"{launches or 'no'} {'launch' if launches in (0, 1) else 'launches'}"


def called_in_words(number: int, calls: int, mode: Mode) -> str:
    """Which call of a cell it was, such as ``, call 3 of 3, on replay 2``: what a replay gives is no launch's fault."""
    replay = mode.replays[number]
    return f", call {number + 1} of {calls}" + (f", on replay {replay}" if replay else "")


def calls_in_words(counts: Mapping[tuple[str, str], int]) -> str:
    """Counted calls, such as ``1 × reference (stride)``."""
    calls = (f"{count} × {path} ({reason})" for (path, reason), count in sorted(counts.items()))
    return ", ".join(calls) or "no call that is counted"


def _command(cell_id: str) -> str:
    test, _, _phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
    return f'pytest "{test}"' if test else f'pytest -k "{cell_id}"'
