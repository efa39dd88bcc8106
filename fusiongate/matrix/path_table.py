"""Path tables: the committed path and reason of every cell, by subject and platform.

Expected paths that came from ``declines`` alone would turn green whatever it refuses. The table is the second opinion:
a cell whose path changes fails until a person has looked at the difference and recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusiongate.errors import SnapshotError, UsageError
from fusiongate.io import parse_json, read_bytes, shaped, write_text

from .cells import CellResult

__all__ = ["PathTable"]

_RECORD = "run pytest --fusiongate-update-paths to record it, and review the difference before committing it"


@dataclass(frozen=True, slots=True)
class PathTable:
    """Path and reason of each cell of one subject on one platform."""

    subject: str
    """The subject's name."""
    sources: str
    """The hash of the kernel sources that the table was made from; empty for a subject without sources of its own."""
    paths: Mapping[str, tuple[str, str]] = field(hash=False)
    """The path and the reason of each cell, by its id."""

    @classmethod
    def of(cls, subject: str, sources: str, results: Iterable[CellResult]) -> PathTable:
        """A table of what came of a run; cells that were not run have no row.

        Raises
        ------
        UsageError
            A result is another subject's.
        """
        paths = {}
        for result in results:
            if result.cell.subject != subject:
                raise UsageError(
                    f"the path table of {subject} was given a result of {result.cell.subject}; make one table each"
                )
            if result.outcome != "not run":
                paths[result.cell.id] = _row(result)
        return cls(subject, sources, paths)

    @staticmethod
    def location(root: Path, platform: str, subject: str) -> Path:
        """Where a table stands under the snapshots' root.

        Path decisions on a CPU don't depend on its vector ISA, so that every CPU shares the folder ``cpu``.
        """
        folder = "cpu" if platform.startswith("cpu-") else platform
        return root / folder / "paths" / f"{subject}.json"

    @classmethod
    def load(cls, path: Path) -> PathTable:
        """Read a table.

        Raises
        ------
        SnapshotError
            There is none, or it cannot be read.
        """
        try:
            content = read_bytes(path)
        except FileNotFoundError as error:
            raise SnapshotError(f"{path}: there is no path table; {_RECORD}") from error
        except OSError as error:
            raise SnapshotError(f"{path}: the path table cannot be read: {error.strerror}") from error
        try:
            return shaped(parse_json(content), cls, closed=True)
        except ValueError as error:
            raise SnapshotError(f"{path}: the path table is damaged ({error}); {_RECORD}") from error

    def save(self, path: Path) -> None:
        """Write the table whole or not at all, one cell a line and sorted, so that a change reads well in a diff.

        Raises
        ------
        SnapshotError
            It cannot be written there.
        """
        rows = ",\n".join(
            f"    {json.dumps(cell)}: {json.dumps(list(row))}" for cell, row in sorted(self.paths.items())
        )
        head = f'"subject": {json.dumps(self.subject)},\n  "sources": {json.dumps(self.sources)}'
        try:
            write_text(path, f'{{\n  {head},\n  "paths": {{\n{rows}\n  }}\n}}\n')
        except OSError as error:
            raise SnapshotError(f"{path}: the path table cannot be written: {error.strerror}") from error

    def updated(self, newer: PathTable) -> PathTable:
        """This table with the rows of a newer one; rows that the newer run did not reach stay.

        Raises
        ------
        UsageError
            The newer one is another subject's.
        """
        if newer.subject != self.subject:
            raise UsageError(f"the path table of {self.subject} cannot take rows of {newer.subject}")
        return PathTable(self.subject, newer.sources, {**self.paths, **newer.paths})

    def difference(self, result: CellResult) -> str | None:
        """What one result changes, in words; None if it is as recorded."""
        recorded, now = self.paths.get(result.cell.id), _row(result)
        if result.outcome == "not run" or recorded == now:
            return None
        return f"{result.cell.id}: {_told(recorded)} → {_told(now)}"


def _row(result: CellResult) -> tuple[str, str]:
    return ("reference" if result.outcome == "refused" else result.outcome), result.reason


def _told(row: tuple[str, str] | None) -> str:
    return "no row" if row is None else f"{row[0]} ({row[1]})"
