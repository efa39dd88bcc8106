"""Path tables: each cell's path is held against the committed one, or recorded when that is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from fusiongate.platforms import platform_of

from .options import options

if TYPE_CHECKING:
    from fusiongate.matrix import CellResult, Matrix, PathTable, Selected

__all__ = ["observe", "record_tables"]

_TABLES: Final = pytest.StashKey[dict[Path, "PathTable | None"]]()


def observe(config: pytest.Config, selected: Selected, matrix: Matrix, result: CellResult) -> Mapping[str, Any]:
    """Compare a result with its table, and give what the cell's row has to say about that.

    Returns
    -------
    Mapping
        Nothing where no tables are kept or the path is the recorded one; ``not_compared`` with what is missing; or, in
        a run that records, ``table`` with the file and the row that goes into it. Both, where what is missing is
        recorded.

    Raises
    ------
    CellFailure
        The path is another than the recorded one, or there is none and ``--fusiongate-missing`` is ``fail``.
    SnapshotError
        The table cannot be read.
    """
    from fusiongate.matrix import CellFailure, PathTable

    asked = options(config)
    if asked.snapshots is None:
        return {}
    subject, cell = result.cell.subject, result.cell.id
    file = PathTable.location(asked.snapshots, platform_of(selected.torch_device), subject)
    name = file.relative_to(config.rootpath) if file.is_relative_to(config.rootpath) else file

    def to_record() -> Mapping[str, Any]:
        table = PathTable.of(subject, matrix.subject.sources(), [result])
        return {"table": {"file": str(name), "sources": table.sources, "row": list(table.paths[cell])}}

    if asked.update_paths:
        return to_record()
    kept = _table(config, file)
    if kept is None or cell not in kept.paths:
        missing = f"no table {name}" if kept is None else f"no row in {name}"
        if asked.missing == "skip":
            return {"not_compared": missing}
        if asked.missing == "record":
            return {"not_compared": missing, **to_record()}
        raise CellFailure(
            f"{subject}[{cell}]\n"
            f"  happened: {missing} to compare the path with\n"
            f"  expected: a committed row, or --fusiongate-missing=skip\n"
            f"  run: pytest --fusiongate-update-paths, and review what it records"
        )
    difference = kept.difference(result)
    if difference is not None:
        raise CellFailure(
            f"{subject}[{cell}]\n"
            f"  happened: the path changed: {difference.removeprefix(f'{cell}: ')}\n"
            f"  expected: the path that {name} records\n"
            f"  run: pytest --fusiongate-update-paths, if the change is meant, and review the difference"
        )
    return {}


def _table(config: pytest.Config, file: Path) -> PathTable | None:
    from fusiongate.matrix import PathTable

    tables = config.stash.setdefault(_TABLES, {})
    if file not in tables:
        tables[file] = PathTable.load(file) if file.exists() else None
    return tables[file]


def record_tables(cells: Iterable[Mapping[str, Any]], root: Path) -> dict[Path, int]:
    """Put the rows that cells brought into their tables, each file written whole; rows of other cells stay.

    Parameters
    ----------
    cells
        The payloads of the run's cell rows.
    root
        The folder that relative names of files start from: pytest's root.

    Returns
    -------
    dict
        How many rows each file was given.

    Raises
    ------
    SnapshotError
        A table that rows were to be added to cannot be read; nothing was written to it.
    """
    rows: dict[Path, dict[str, tuple[str, str]]] = defaultdict(dict)
    heads: dict[Path, tuple[str, str]] = {}
    for cell in cells:
        if table := cell.get("table"):
            path, reason = table["row"]
            file = root / table["file"]
            rows[file][cell["id"]] = path, reason
            heads[file] = cell["subject"], table["sources"]
    if not rows:
        return {}

    # Only a run that records paths imports torch in the controller, with the matrix.
    from fusiongate.matrix import PathTable

    for file, paths in sorted(rows.items()):
        newer = PathTable(*heads[file], paths)
        (PathTable.load(file).updated(newer) if file.exists() else newer).save(file)
    return {file: len(paths) for file, paths in rows.items()}
