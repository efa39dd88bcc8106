"""Writers to be killed: ``python -P endless_writers.py``, which a test talks to line by line.

A line names what is written, a folder, a number, and how many seconds a child may go on after its first file. The
answer is how many times the child, now killed, had finished writing.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from syrupy.data import Snapshot, SnapshotCollection

from fusiongate import ledger
from fusiongate.certificates import Certificate
from fusiongate.matrix.path_table import PathTable
from fusiongate.platforms import environment
from fusiongate.plugin.snapshot_files import extension_for

__all__ = ["FILES", "FILLER", "TURNS"]

TURNS = ("a", "b", "c")
"""The files of one kind, which are written in turns."""

FILLER = "filler" * 50_000
"""Long enough for a process to be killed in the middle of it."""

Write = Callable[[Path, str, str], None]


def _snapshot(folder: Path, turn: str, mark: str) -> None:
    path = folder / f"{turn}.json"
    collection = SnapshotCollection(location=str(path))
    collection.add(Snapshot(name=turn, data=json.dumps({"mark": mark, "filler": FILLER})))
    extension_for(path, any_difference=True).write_snapshot_collection(snapshot_collection=collection)


def _path_table(folder: Path, turn: str, mark: str) -> None:
    PathTable(turn, mark, {"cell": ("fused", FILLER)}).save(folder / f"{turn}.json")


_CERTIFICATE = Certificate(
    kernel="",
    dtype="bf16",
    claim="",
    is_proof=False,
    assumptions=(FILLER,),
    sources="",
    environment=environment(torch.device("cpu")),
    is_sample=False,
    stages=(),
)


def _certificate(folder: Path, turn: str, mark: str) -> None:
    replace(_CERTIFICATE, kernel=turn, claim=mark).write(folder)


def _carelessly(folder: Path, turn: str, mark: str) -> None:
    (folder / f"{turn}.json").write_text(json.dumps({"mark": mark, "filler": FILLER}), encoding="utf-8")


FILES: Mapping[str, tuple[Write, str]] = {
    "snapshot": (_snapshot, "mark"),
    "path table": (_path_table, "sources"),
    "certificate": (_certificate, "claim"),
    "carelessly": (_carelessly, "mark"),
}
"""What writes each kind of file, and the field that tells one writing from another."""


def _write_files(kind: str, folder: Path, number: str, finished: int) -> None:
    write, _ = FILES[kind]
    for count, turn in enumerate(itertools.cycle(TURNS)):
        write(folder, turn, f"{number}.{count}")
        os.write(finished, b".")


def _write_rows(folder: Path, number: str, finished: int) -> None:
    with ledger.Writer(folder / "ledger.jsonl", number) as writer:
        writer.append("run", "environment", "e", {})
        for count in itertools.count():
            writer.append("cell", "modulate", "e", {"count": count, "filler": FILLER})
            os.write(finished, b".")


def _kill_one(kind: str, folder: Path, number: str, files: int, seconds: float) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if kind == "ledger":
                _write_rows(folder, number, writing)
            else:
                _write_files(kind, folder, number, writing)
        finally:
            os._exit(1)
    os.close(writing)
    first = b"".join(os.read(reading, 1) for _ in range(files))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        count = len(first + pipe.read())
    return str(count) if os.WIFSIGNALED(status) else "it failed before it was killed"


def main() -> None:
    """Answer each line on the standard input."""
    for line in sys.stdin:
        kind, folder, number, files, seconds = json.loads(line)
        sys.stdout.write(_kill_one(kind, Path(folder), number, files, seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
