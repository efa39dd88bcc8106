"""The record of a run: JSON lines, one row an observation, of which a killed process keeps what it had written.

A file may hold several runs, one after another. Each row names its run, its subject and the key of the environment it
was observed in; the environment itself stands once a run, in a row of kind ``run`` before every row that names it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from .errors import LedgerError
from .io import parse_json, read_bytes, shaped

__all__ = ["KINDS", "SCHEMA", "Ledger", "Row", "Writer", "environment_key", "read"]

SCHEMA = 1
"""The version of the row's layout; a reader refuses any other."""

KINDS = ("run", "cell", "digest", "timing")
"""What a row may be: an environment of a run, a cell of the matrix, a preset's digests, or a timing."""

_BEGINNING = b'{"schema":'
"""How every row begins."""

_logger = logging.getLogger("fusiongate")


@dataclass(frozen=True, slots=True)
class Row:
    """One observation."""

    schema: int
    """The version of this layout."""

    run: str
    """The run's id; the same in every row of one pytest session, whichever worker made it."""

    kind: str
    """One of ``KINDS``."""

    subject: str
    """What was observed: the name of a fusion, a foreign function or a preset; ``environment`` for kind ``run``."""

    environment: str
    """The key of the environment, as ``environment_key`` gives it."""

    payload: Mapping[str, Any]
    """The observation itself, of JSON's own types; finite numbers only."""

    def to_json(self) -> str:
        """Give the row as one line of JSON, without its end of line.

        Raises
        ------
        LedgerError
            The payload holds something that JSON has no form for.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            return json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"a ledger row of kind {self.kind!r} for {self.subject!r} cannot be written: {error}; "
                f"a payload holds JSON's own types and finite numbers only"
            ) from error


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a file held."""

    path: Path
    """The file."""

    rows: tuple[Row, ...]
    """Every row, in the order of writing, those of kind ``run`` among them."""

    torn: str | None
    """What is wrong with the last line, when the process that wrote it was killed half-way; None when nothing is."""

    @property
    def environments(self) -> dict[str, Mapping[str, Any]]:
        """The payload of each environment by its key."""
        return {row.environment: row.payload for row in self.rows if row.kind == "run"}


class Writer:
    """Append rows to a file, each handed to the operating system before the next.

    The file and its folders are made with the first row, so that a run without rows leaves nothing behind. A torn
    last line, left by a run that was killed, is cut off first: behind it a new row could not be read.

    Parameters
    ----------
    path
        The file; rows of earlier runs stay in it.
    run
        The id that all rows of this writer bear.
    """

    __slots__ = ("_stream", "count", "path", "run")

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.count = 0
        self._stream: BinaryIO | None = None

    def append(self, kind: str, subject: str, environment: str, payload: Mapping[str, Any]) -> Row:
        """Write one row and flush it.

        Raises
        ------
        LedgerError
            The row has no form in JSON, or the file could not be written.
        """
        row = Row(schema=SCHEMA, run=self.run, kind=kind, subject=subject, environment=environment, payload=payload)
        line = row.to_json().encode() + b"\n"
        try:
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _cut_torn_line(self.path)
                # Without a buffer of our own, one row is one write: rows of two runs on one file cannot interleave.
                self._stream = self.path.open("ab", buffering=0)
            # A file system that fills up takes the beginning of a row, and refuses only what is written after that.
            while line:
                line = line[self._stream.write(line) :]
        except OSError as error:
            raise LedgerError(f"{self.path}: the ledger could not be written: {error}") from error
        self.count += 1
        return row

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = read_bytes(path)
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return
    _check_torn(path, content[whole:])
    _logger.warning(
        "%s: cut off %d bytes of a row that an earlier, killed run had half written", path, len(content) - whole
    )
    os.truncate(path, whole)


def _check_torn(path: Path, tail: bytes) -> None:
    # Somebody's file that happens to lack its last end of line is no row that was cut short, and nothing to cut off.
    if not tail.startswith(_BEGINNING[: len(tail)]):
        raise LedgerError(f"{path}: its last line is not the beginning of a ledger row: expected {_BEGINNING.decode()}")


def environment_key(environment: Mapping[str, Any]) -> str:
    """Give the key of an environment: equal for equal ones, whatever the order of their fields."""
    canonical = json.dumps(environment, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read(path: str | os.PathLike[str]) -> Ledger:
    """Read a ledger and check every row of it.

    Raises
    ------
    LedgerError
        The file cannot be read, or a row is not what it should be; the message names file and line. A last line that
        lacks its end is no such fault: it is reported in ``Ledger.torn``.
    """
    path = Path(path)
    try:
        content = read_bytes(path)
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: the ledger could not be read: {getattr(error, 'strerror', error)}") from error
    lines = content.split(b"\n")
    tail = lines.pop()
    rows: list[Row] = []
    described: set[tuple[str, str]] = set()
    for number, line in enumerate(lines, start=1):
        row = _parse(path, number, line)
        if row.kind == "run":
            described.add((row.run, row.environment))
        elif (row.run, row.environment) not in described:
            raise LedgerError(
                f"{path}, line {number}: environment {row.environment!r} is not described: "
                f"expected a row of kind 'run' for it, in run {row.run!r}, on an earlier line"
            )
        rows.append(row)
    torn = None
    if tail:
        _check_torn(path, tail)
        torn = (
            f"{path}, line {len(lines) + 1}: half a row of {len(tail)} bytes: the run was killed while it was written"
        )
    return Ledger(path=path, rows=tuple(rows), torn=torn)


def _parse(path: Path, number: int, line: bytes) -> Row:
    where = f"{path}, line {number}"
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise LedgerError(f"{where}: not JSON: {error}") from error
    schema = fields.get("schema", SCHEMA) if isinstance(fields, dict) else SCHEMA
    if schema != SCHEMA:
        raise LedgerError(
            f"{where}: schema {schema!r} is not known: expected {SCHEMA}; "
            f"read this ledger with the version of fusiongate that wrote it"
        )
    try:
        row = shaped(fields, Row, closed=True)
    except ValueError as error:
        names = ", ".join(field.name for field in dataclasses.fields(Row))
        raise LedgerError(f"{where}: {error}; expected the fields {names}") from error
    if row.kind not in KINDS:
        raise LedgerError(f"{where}: unknown kind {row.kind!r}: expected one of {', '.join(KINDS)}")
    return row
