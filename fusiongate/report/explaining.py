"""What a cell is, how it was made, what came of it, and how to run it alone: from the ledger of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusiongate import ledger
from fusiongate.errors import UsageError
from fusiongate.matrix.cells import AXES
from fusiongate.matrix.data import DATA
from fusiongate.matrix.lifecycles import LIFECYCLES
from fusiongate.matrix.modes import MODES

__all__ = ["explained"]


def explained(path: Path, name: str) -> list[str]:
    """The lines about each cell of a ledger that has this id, or whose test has this name.

    Parameters
    ----------
    path
        The ledger.
    name
        A cell's id, ``subject[id]``, or a test's node id.

    Raises
    ------
    UsageError
        The ledger has no such cell.
    LedgerError
        It cannot be read.
    """
    rows = [row for row in ledger.read(path).rows if row.kind == "cell"]
    found = {
        (row.subject, row.payload["test"], row.payload["id"]): row.payload
        for row in rows
        if name in (row.payload["id"], f"{row.subject}[{row.payload['id']}]", row.payload["test"])
    }
    if not found:
        raise UsageError(f"{path} has no cell {name!r}: expected the id of one of its {len(rows)}, or its test's name")
    return [line for (subject, _, _), cell in found.items() for line in _lines(subject, cell)]


def _lines(subject: str, cell: Mapping[str, Any]) -> Iterator[str]:
    yield f"{subject}[{cell['id']}]"
    for axis in AXES:
        value = str(cell.get(axis, ""))
        yield f"  {axis}: {value}" + (f": {meaning}" if (meaning := _meaning(axis, value)) else "")
    yield f"  has to take: {cell.get('expected') or 'not known'}" + (" (must fuse)" if cell.get("must_fuse") else "")
    yield f"  came of it: {cell['outcome']} ({cell['reason']}), launches: {cell['launches']}"
    yield "  operands: drawn on the CPU by a generator that is seeded with the cell's id and the number of the call"
    yield f'  alone: pytest "{cell["test"]}"'


def _meaning(axis: str, value: str) -> str:
    if axis == "data" and value in DATA:
        return (DATA[value].draw.__doc__ or "").strip().splitlines()[0]
    if axis == "mode" and value in MODES and (forced := MODES[value].forced):
        return f"forces the reference, for {forced.reason}"
    if axis == "lifecycle" and value in LIFECYCLES:
        one = LIFECYCLES[value]
        return f"first {one.first[0]} ({one.first[1]}), then {one.later[0]} ({one.later[1]})"
    return ""
