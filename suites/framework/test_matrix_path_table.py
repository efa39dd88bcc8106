"""A path table survives its file, and tells what a run changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusiongate.errors import SnapshotError, UsageError
from fusiongate.matrix.cells import Cell, CellResult, Outcome
from fusiongate.matrix.path_table import PathTable


def result(outcome: Outcome, reason: str, layout: str = "row-broadcast", subject: str = "modulate") -> CellResult:
    cell = Cell(subject, layout, "bf16", "B2S33D512", base_size="B2S33D512")
    return CellResult(cell, outcome, reason, launches=0, checks=3, seconds=0.0)


TABLE = PathTable("modulate", "abc", {"base": ("fused", "verified"), "permuted": ("reference", "stride")})


def test_a_table_is_made_of_results_and_leaves_out_what_was_not_run() -> None:
    results = [
        result("fused", "verified"),
        result("reference", "stride", "permuted"),
        result("refused", "refused", "sliced"),
        result("not run", "needs a GPU", "rank-2"),
    ]
    made = PathTable.of("modulate", "abc", results)
    assert {**TABLE.paths, "sliced": ("reference", "refused")} == made.paths


def test_a_result_of_another_subject_is_refused() -> None:
    with pytest.raises(UsageError, match="was given a result of rms"):
        PathTable.of("modulate", "", [result("fused", "verified", subject="rms")])


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "paths" / "modulate.json")
    assert TABLE == PathTable.load(tmp_path / "paths" / "modulate.json")


def test_a_file_has_one_cell_a_line(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "modulate.json")
    assert [
        "{",
        '  "subject": "modulate",',
        '  "sources": "abc",',
        '  "paths": {',
        '    "base": ["fused", "verified"],',
        '    "permuted": ["reference", "stride"]',
        "  }",
        "}",
    ] == (tmp_path / "modulate.json").read_text().splitlines()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"subject": "modulate", "sources": "", "paths": {"base": 3}}'])
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "modulate.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"modulate\.json: the path table is damaged .* --fusiongate-update-paths"):
        PathTable.load(tmp_path / "modulate.json")


def test_a_folder_in_a_table_s_place_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="the path table cannot be read: Is a directory"):
        PathTable.load(tmp_path)
    with pytest.raises(SnapshotError, match="the path table cannot be written: "):
        PathTable("toy", "", {}).save(tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no path table; run pytest --fusiongate-update-paths"):
        PathTable.load(tmp_path / "modulate.json")


def test_cpus_share_a_folder_and_gpus_do_not() -> None:
    root = Path("snapshots")
    assert ["snapshots/cpu/paths/m.json", "snapshots/cuda-sm_90/paths/m.json"] == [
        PathTable.location(root, platform, "m").as_posix() for platform in ("cpu-x86_64-avx512", "cuda-sm_90")
    ]


def test_a_changed_cell_is_told() -> None:
    assert None is TABLE.difference(result("fused", "verified"))
    assert None is TABLE.difference(result("not run", "needs a GPU"))
    assert "base: fused (verified) → reference (dtype)" == TABLE.difference(result("reference", "dtype"))
    assert "sliced: no row → fused (verified)" == TABLE.difference(result("fused", "verified", "sliced"))


def test_an_update_keeps_the_rows_that_a_narrow_run_did_not_reach() -> None:
    newer = PathTable("modulate", "abd", {"base": ("reference", "dtype")})
    assert PathTable("modulate", "abd", {**TABLE.paths, **newer.paths}) == TABLE.updated(newer)


def test_rows_of_another_subject_are_not_taken() -> None:
    with pytest.raises(UsageError, match="the path table of modulate cannot take rows of rms"):
        TABLE.updated(PathTable("rms", "abc", {}))
