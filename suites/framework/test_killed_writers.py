"""Killed at any moment: of every file that holds results, the old one stands or the new one, and both are whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusiongate import ledger

from .endless_writers import FILES, FILLER, TURNS

KILLS = 25

Kill = Callable[[str, Path, int, tuple[int, float]], int]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """Kill a process that writes files, some time after it has finished so many; how many it had finished."""
    program = Path(__file__).with_name("endless_writers.py")
    process = subprocess.Popen(
        [sys.executable, "-P", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answered = process.stdin, process.stdout

    def killed(kind: str, folder: Path, number: int, moment: tuple[int, float]) -> int:
        asked.write(json.dumps([kind, str(folder), str(number), *moment]) + "\n")
        asked.flush()
        return int(answered.readline())

    yield killed
    asked.close()
    process.wait(timeout=30)
    answered.close()


def moments(kind: str) -> Iterator[tuple[int, float]]:
    """After how many files, and how many seconds later, each of them ends: on a busy machine too, more than one."""
    chance = random.Random(kind)
    return ((chance.randint(1, 5), chance.uniform(0, 0.003)) for _ in range(KILLS))


def marks(kind: str, folder: Path) -> dict[str, str]:
    """Which writing each file holds, by its name; a file that is not whole is none."""
    _, field = FILES[kind]
    found = {}
    for path in folder.rglob("[!.]*.json"):
        text = path.read_text(encoding="utf-8")
        assert FILLER in text
        found[path.name.removesuffix(".json").removesuffix("-bf16")] = json.loads(text)[field]
    return found


@pytest.mark.parametrize("kind", ["snapshot", "path table", "certificate"])
def test_each_file_is_as_it_was_before_or_as_it_should_be_after(kind: str, kill: Kill, tmp_path: Path) -> None:
    """What had been finished is there; what was being written is there as a whole or not at all; all else stays."""
    before: dict[str, str] = {}
    for number, moment in enumerate(moments(kind)):
        finished = kill(kind, tmp_path, number, moment)
        expected = before | {TURNS[count % len(TURNS)]: f"{number}.{count}" for count in range(finished)}
        one_more = expected | {TURNS[finished % len(TURNS)]: f"{number}.{finished}"}

        before = marks(kind, tmp_path)

        assert before in (expected, one_more)
    assert set(TURNS) == before.keys()


def test_a_careless_writer_would_be_found_out(kill: Kill, tmp_path: Path) -> None:
    """The same kills, while files are written in place."""
    torn = 0
    for number, moment in enumerate(moments("carelessly")):
        kill("carelessly", tmp_path, number, moment)
        try:
            marks("carelessly", tmp_path)
        except (AssertionError, ValueError):
            torn += 1

    assert torn > 0


def test_a_ledger_keeps_each_row_that_was_finished(kill: Kill, tmp_path: Path) -> None:
    """Of the row that was being written it keeps the beginning at most, which the next run cuts off."""
    path = tmp_path / "ledger.jsonl"
    earlier: tuple[ledger.Row, ...] = ()
    torn = 0
    for number, moment in enumerate(moments("ledger")):
        finished = kill("ledger", tmp_path, number, moment)

        read = ledger.read(path)

        torn += read.torn is not None
        assert earlier == read.rows[: len(earlier)]
        described, *rows = read.rows[len(earlier) :]
        assert (str(number), "run") == (described.run, described.kind)
        assert len(rows) in ((finished,) if read.torn else (finished, finished + 1))
        assert [{"count": count, "filler": FILLER} for count in range(len(rows))] == [row.payload for row in rows]
        earlier = read.rows
    assert torn < KILLS
