"""The ledger keeps what was written, and says exactly what is wrong with a file."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusiongate import ledger
from fusiongate.errors import LedgerError


def fields(**changes: Any) -> dict[str, Any]:
    row = {"schema": 1, "run": "r", "kind": "run", "subject": "environment", "environment": "e", "payload": {}}
    return row | changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "on" / "demand" / "ledger.jsonl"


def test_rows_come_back_as_they_were_written(path: Path) -> None:
    with ledger.Writer(path, "r1") as writer:
        described = writer.append("run", "environment", "e", {"torch": "2.9"})
        cell = writer.append("cell", "modulate", "e", {"outcome": "fused", "launches": 3, "note": "×½ \n |"})

    read = ledger.read(path)

    assert read.rows == (described, cell)
    assert read.environments == {"e": {"torch": "2.9"}}
    assert read.torn is None
    assert writer.count == 2


def test_a_writer_without_rows_leaves_no_file(path: Path) -> None:
    with ledger.Writer(path, "r1"):
        pass
    assert not path.parent.exists()


def test_a_second_run_is_appended_behind_the_first(path: Path) -> None:
    for run in ("first", "second"):
        with ledger.Writer(path, run) as writer:
            writer.append("run", "environment", "e", {})
    assert [row.run for row in ledger.read(path).rows] == ["first", "second"]


def test_each_row_is_on_disk_before_the_next(path: Path) -> None:
    writer = ledger.Writer(path, "r1")
    for count in range(1, 4):
        writer.append("run", "environment", f"e{count}", {})
        assert len(ledger.read(path).rows) == count
    writer.close()


def test_a_killed_process_keeps_its_rows(path: Path) -> None:
    """SIGKILL leaves no time to close a file: whatever was appended has to be there already."""
    program = f"""
import os, pathlib, signal
from fusiongate import ledger
writer = ledger.Writer(pathlib.Path({str(path)!r}), "r1")
writer.append("run", "environment", "e", {{}})
writer.append("cell", "modulate", "e", {{"outcome": "fused"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert [row.kind for row in ledger.read(path).rows] == ["run", "cell"]


def test_a_torn_last_line_is_reported_and_the_rest_is_read(path: Path) -> None:
    with ledger.Writer(path, "r1") as writer:
        writer.append("run", "environment", "e", {})
    with path.open("a") as stream:
        stream.write('{"schema":1,"run":"r1","ki')

    read = ledger.read(path)

    assert [row.kind for row in read.rows] == ["run"]
    assert read.torn == f"{path}, line 2: half a row of 26 bytes: the run was killed while it was written"


def test_a_torn_last_line_is_cut_off_before_a_new_row(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(fields()) + "\n" + '{"schema"')
    with caplog.at_level(logging.WARNING, "fusiongate"), ledger.Writer(path, "r2") as writer:
        writer.append("run", "environment", "e", {})

    assert [row.run for row in ledger.read(path).rows] == ["r", "r2"]
    assert caplog.messages == [f"{path}: cut off 9 bytes of a row that an earlier, killed run had half written"]


@pytest.mark.parametrize(
    "line, complaint",
    [
        pytest.param("{", "not JSON: Expecting property name", id="not-json"),
        pytest.param("[" * 100_000, "not JSON: nested too deeply", id="nested-too-deeply"),
        pytest.param("[]", "Expected `object`, got `array`; expected the fields schema, run,", id="not-an-object"),
        pytest.param("", "not JSON: Expecting value", id="empty-line"),
        pytest.param(json.dumps(fields(schema=2)), "schema 2 is not known: expected 1; read", id="foreign-schema"),
        pytest.param(json.dumps({"schema": 1}), "Object missing required field `run`; expected", id="missing-field"),
        pytest.param(json.dumps(fields(run=3)), "Expected `str`, got `int` - at `$.run`", id="wrong-type"),
        pytest.param(
            json.dumps(fields(extra=1)), "Object contains unknown field `extra`; expected", id="unknown-field"
        ),
        pytest.param(json.dumps({**fields(), "schema": True}), "Expected `int`, got `bool`", id="schema-of-no-number"),
        pytest.param(json.dumps({"run": "r"}), "Object missing required field `schema`; expected", id="no-schema"),
        pytest.param(json.dumps(fields(kind="cells")), "unknown kind 'cells': expected one of run, cell,", id="kind"),
        pytest.param(
            json.dumps(fields(kind="cell", environment="f")),
            "environment 'f' is not described: expected a row of kind 'run' for it, in run 'r', on an earlier line",
            id="undescribed-environment",
        ),
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(fields()) + "\n" + line + "\n")
    with pytest.raises(LedgerError) as raised:
        ledger.read(path)
    assert str(raised.value).startswith(f"{path}, line 2: {complaint}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none\.jsonl: the ledger could not be read: No such file or directory"):
        ledger.read(tmp_path / "none.jsonl")


def test_a_ledger_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = ledger.Writer(tmp_path / "file" / "ledger.jsonl", "r1")
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: the ledger could not be written: "):
        writer.append("run", "environment", "e", {})


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
def test_a_device_is_no_ledger(device: str) -> None:
    """Reading it would not end."""
    with pytest.raises(LedgerError, match=f"{device}: the ledger could not be read: Not a regular file"):
        ledger.read(device)
    with pytest.raises(LedgerError, match=f"{device}: the ledger could not be written: .*Not a regular file"):
        ledger.Writer(Path(device), "r1").append("run", "environment", "e", {})


def test_another_file_without_an_end_of_line_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("half a line")
    for attempt in (lambda: ledger.read(path), lambda: ledger.Writer(path, "r1").append("run", "environment", "e", {})):
        with pytest.raises(LedgerError, match=r"notes\.txt: its last line is not the beginning of a ledger row"):
            attempt()
    assert path.read_text() == "half a line"


def test_a_disk_that_fills_up_in_the_middle_of_a_row_is_told(path: Path) -> None:
    """The operating system takes the row's beginning without an error: the limit on a file's size does the same."""
    program = f"""
import pathlib, resource, signal
from fusiongate import ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
writer = ledger.Writer(pathlib.Path({str(path)!r}), "r1")
try:
    writer.append("run", "environment", "e", {{"text": "x" * 400}})
except ledger.LedgerError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told.startswith(f"{path}: the ledger could not be written: ")
    assert path.stat().st_size == 200
    assert ledger.read(path).torn is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()], ids=["nan", "inf", "object"])
def test_a_payload_outside_json_is_refused_and_nothing_is_written(path: Path, value: object) -> None:
    writer = ledger.Writer(path, "r1")
    with pytest.raises(LedgerError, match="a ledger row of kind 'cell' for 'modulate' cannot be written"):
        writer.append("cell", "modulate", "e", {"value": value})
    assert not path.exists()


def test_the_key_of_an_environment_ignores_the_order_of_its_fields() -> None:
    assert ledger.environment_key({"a": 1, "b": 2}) == ledger.environment_key({"b": 2, "a": 1})
    assert ledger.environment_key({"a": 1, "b": 2}) != ledger.environment_key({"a": 1, "b": 3})
