"""The files of a report: which ledger is told of, and where the page may be written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusiongate.errors import UsageError
from fusiongate.io import obstacle, read_bytes, write_text
from fusiongate.plugin.recorder import FOLDER

from .evidence import Evidence, gather
from .page import MARK, page

__all__ = ["newest_ledger", "write_report"]


def newest_ledger(root: Path) -> Path:
    """The ledger of a project that was written last.

    Parameters
    ----------
    root
        The folder that pytest was run in.

    Raises
    ------
    UsageError
        There is none.
    """
    ledgers = list((root / FOLDER).glob("ledger-*.jsonl"))
    if not ledgers:
        raise UsageError(
            f"{root / FOLDER}: holds no ledger: run the tests first, or name a ledger: fusiongate report LEDGER"
        )
    return max(ledgers, key=lambda path: (path.stat().st_mtime_ns, path.name))


def write_report(ledgers: Sequence[Path], timings: Sequence[Path], output: Path) -> Evidence:
    """Write the page, and give what it tells of.

    Parameters
    ----------
    ledgers, timings
        As :func:`fusiongate.report.evidence.gather` takes them.
    output
        The page; an older report there is replaced, once the new one is whole.

    Raises
    ------
    FusiongateError
        A file cannot be read or told, or the page cannot be written there; what stood there still stands.
    """
    _check_output(output)
    evidence = gather(ledgers, timings)
    text = page(evidence)
    try:
        write_text(output, text)
    except OSError as error:
        raise UsageError(_unwritable(output, error.strerror or str(error))) from error
    return evidence


def _check_output(output: Path) -> None:
    if hindrance := obstacle(output.parent):
        raise UsageError(_unwritable(output, hindrance))
    try:
        if not output.exists():
            return
        ours = read_bytes(output).startswith(MARK.encode())
    except OSError as error:
        raise UsageError(_unwritable(output, error.strerror or str(error))) from error
    if not ours:
        raise UsageError(
            f"{output}: exists and is no report of fusiongate's: nothing is written; name another --output"
        )


def _unwritable(output: Path, why: str) -> str:
    return f"{output}: the report cannot be written: {why}; name another --output"
