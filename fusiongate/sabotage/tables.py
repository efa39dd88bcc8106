"""The table saboteur × detector: what was declared, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from .saboteurs import Detector, Saboteur

__all__ = ["Outcome", "summary", "table"]


class Outcome(StrEnum):
    """What came of one detector's look at one saboteur."""

    CAUGHT = "caught"
    MISSED = "MISSED"
    NOT_RUN = "not run"


Outcomes = Mapping[tuple[str, Detector], Outcome]


def _lines(cells: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def table(saboteurs: Iterable[Saboteur], outcomes: Outcomes) -> Iterator[str]:
    """The table's lines: a dot where nothing is declared.

    Parameters
    ----------
    saboteurs
        The rows.
    outcomes
        By saboteur's name and detector; what is declared and has none counts as missed.
    """
    cells = [["saboteur", "kind", *Detector]]
    for saboteur in saboteurs:
        row = (_outcome(saboteur, detector, outcomes) for detector in Detector)
        cells.append([saboteur.name, saboteur.kind, *("·" if one is None else str(one) for one in row)])
    return _lines(cells)


def _outcome(saboteur: Saboteur, detector: Detector, outcomes: Outcomes) -> Outcome | None:
    if detector not in saboteur.detectors:
        return None
    return outcomes.get((saboteur.name, detector), Outcome.MISSED)


def summary(saboteurs: Iterable[Saboteur], outcomes: Outcomes) -> tuple[dict[str, str], int, int]:
    """What could not run and why, how many were caught by all that they declare, and how many ran."""
    not_run: dict[str, str] = {}
    caught = ran = 0
    for saboteur in saboteurs:
        results = {_outcome(saboteur, detector, outcomes) for detector in saboteur.detectors}
        if Outcome.NOT_RUN in results:
            not_run[saboteur.name] = saboteur.missing(0) or "its tool is missing"
            continue
        ran += 1
        caught += results == {Outcome.CAUGHT}
    return not_run, caught, ran
