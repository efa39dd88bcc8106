"""What a page is made from: several files as one, and one line for whatever cannot be told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusiongate.errors import LedgerError, UsageError
from fusiongate.report.evidence import gather

from .recorded_runs import write_run
from .reported import Observation, cell, digest, rewritten, timing, write_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_the_last_run_that_saw_a_cell_counts_whatever_the_order_of_the_files(tmp_path: Path) -> None:
    later = write_ledger(tmp_path / "a.jsonl", cell(outcome="fused"), run="2026-02")
    earlier = write_ledger(tmp_path / "b.jsonl", cell(outcome="red", message="m"), cell("fp16"), run="2026-01")

    evidence = gather([later, earlier], [])

    assert [("bf16", "2026-02"), ("fp16", "2026-01")] == [(one.payload["id"], one.run) for one in evidence.cells]
    assert ["2026-01", "2026-02"] == [run.id for run in evidence.runs]


def test_cells_of_two_environments_do_not_replace_each_other(path: Path) -> None:
    write_ledger(path, cell(), run="1")
    write_ledger(path, cell(), run="2", device_name="NVIDIA B200")

    evidence = gather([path], [])

    assert [1, 2] == [one.environment for one in evidence.cells]
    assert "environment 2 (NVIDIA B200, torch 2.11.0+cu130)" == evidence.label(2)


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, path: Path) -> None:
    write_ledger(path, cell())
    (tmp_path / "link.jsonl").symlink_to(path)

    assert [str(tmp_path / "link.jsonl")] == gather([path, tmp_path / "link.jsonl"], []).files


def test_timings_come_from_ledgers_and_from_recorded_runs(tmp_path: Path, path: Path) -> None:
    write_ledger(path, timing(), run="2026-01")

    evidence = gather([path], [write_run(tmp_path / "run.json", device_name="NVIDIA B200")])

    assert [("2026-01", (1,)), ("run.json", (2,))] == [(run.name, run.environments) for run in evidence.timed]
    assert ["modulate[2x8-bfloat16-kernel]"] == [row.name for row in evidence.timed[0].rows]


def test_a_last_row_that_is_cut_short_is_said(path: Path) -> None:
    write_ledger(path, cell(), cell("fp16"))
    path.write_bytes(path.read_bytes()[:-20])

    evidence = gather([path], [])

    assert ["bf16"] == [one.payload["id"] for one in evidence.cells]
    assert [f"{path}, line 3: half a row of"] == [
        torn[: len(f"{path}, line 3: half a row of")] for torn in evidence.torn
    ]


@pytest.mark.parametrize(
    "observation, message",
    [
        (cell(outcome="purple"), "outcome 'purple' is not known: expected fused, reference,"),
        (cell(outcome=["red"]), "Expected `str`, got `array` - at `$.outcome`; record it again"),
        (cell(launches=True), "Expected `int | null`, got `bool` - at `$.launches`"),
        (cell(message=3), "Expected `str`, got `int` - at `$.message`"),
        (("cell", "modulate", {}), "Object missing required field `id`; record it again"),
        (digest(outcome="fused"), "outcome 'fused' is not known: expected same,"),
        (digest(fused={"step": "md5"}), "Expected `object`, got `str` - at `$.fused[...]`; record it again"),
        (digest(calls=[]), "Expected `object`, got `array` - at `$.calls`"),
        (timing(median_s=None), "Expected `object`, got `null` - at `$.extra_info.median_s`; record it again"),
        (timing(share_of_copy_bandwidth="all"), "got `str` - at `$.extra_info.share_of_copy_bandwidth`"),
        (timing(share_of_copy_bandwidth=10**400), "Number out of range - at `$.extra_info.share_of_copy_bandwidth`"),
        (
            timing(ratio={"value": 10**400, "low": 0.3, "high": None}),
            "Number out of range - at `$.extra_info.ratio.value`",
        ),
        (timing(reference=None), "Expected `str`, got `null` - at `$.extra_info.reference`"),
        (timing(ratio={"value": 0.2, "low": 0.3, "high": 0.4}), "is no interval of times"),
        (("timing", "modulate", {"seconds": []}), "a timing row has the wrong fields"),
    ],
)
def test_a_row_that_cannot_be_told_is_named(path: Path, observation: Observation, message: str) -> None:
    write_ledger(path, cell(), observation)

    with pytest.raises(UsageError) as caught:
        gather([path], [])

    assert f"{path}: a row of kind {observation[0]} for {observation[1]!r} cannot be told: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields, message",
    [({"payload": {}}, "environment record: Object missing required field `"), ({"schema": 9}, "schema 9")],
)
def test_an_environment_that_cannot_be_told_is_named(path: Path, fields: dict[str, Any], message: str) -> None:
    rewritten(write_ledger(path, cell()), 0, **fields)

    with pytest.raises((UsageError, LedgerError), match=message):
        gather([path], [])


@pytest.mark.parametrize("content", ["", "\n", '{"schema":1', "{}\n", "[1]\n", "no ledger\n", '{"schema":1,"run":"r"'])
def test_a_file_that_is_no_ledger_is_one_line(path: Path, content: str) -> None:
    path.write_text(content)

    with pytest.raises((UsageError, LedgerError)) as caught:
        gather([path], [])

    assert str(caught.value).startswith(str(path))
    assert 1 == len(str(caught.value).splitlines())


def test_nothing_of_it_needs_torch(path: Path) -> None:
    write_ledger(path, cell(), digest(), timing())
    program = (
        "import sys, pathlib\n"
        "from fusiongate.report.files import write_report\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "write_report([path], [], path.with_suffix('.html'))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert (0, "") == (result.returncode, result.stderr)
