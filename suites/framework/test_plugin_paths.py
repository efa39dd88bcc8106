"""Each cell's path is held against a committed table, which only a run that is asked to records."""

from __future__ import annotations

import json

import pytest

from . import toys
from .projects import Project

TOY = "test_ops.py::test_toy"
CELLS = [f"{TOY}[base]", f"{TOY}[mixed]"]
HOST = "--fusiongate-device=host"
RECORD = "--fusiongate-missing=record"


@pytest.fixture
def kept(project: Project) -> Project:
    """A project that keeps its tables in the folder ``kept``."""
    project.write("pytest.ini", "[pytest]\nfusiongate_snapshots = kept\n")
    toys.prepare(project)
    return project


def table(project: Project) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = json.loads((project.path / "kept/cpu/paths/toy.json").read_text())["paths"]
    return paths


def test_a_run_that_is_asked_to_records_what_it_saw(kept: Project) -> None:
    result = kept.run(HOST, "--fusiongate-update-paths", *CELLS)
    result.assert_outcomes(passed=2)
    assert Project.summary(result)[-1] == "path table: kept/cpu/paths/toy.json (2 rows)"
    assert table(kept) == {"base": ["fused", "verified"], "mixed": ["reference", "mixed-dtype"]}


def test_a_path_that_is_the_recorded_one_passes(kept: Project) -> None:
    kept.run(HOST, "--fusiongate-update-paths", *CELLS)
    before = table(kept)
    kept.run(HOST, *CELLS).assert_outcomes(passed=2)
    assert table(kept) == before


def test_a_path_that_changed_fails_although_its_bits_are_right(kept: Project) -> None:
    """A declines made too strict: here outside of what must fuse, so that only the table knows."""
    outside = f"{TOY}[expanded-channels]"
    kept.run(HOST, "--fusiongate-update-paths", outside).assert_outcomes(passed=1)
    assert table(kept) == {"expanded-channels": ["fused", "verified"]}

    toys.prepare(kept, stricter="'stride' if 0 in x.stride() + scale.stride() + shift.stride() else None")
    result = kept.run(HOST, outside)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*CellFailure: toy?expanded-channels?",
            "*  happened: the path changed: fused (verified) → reference (stride)",
            "*  expected: the path that kept/cpu/paths/toy.json records",
            "*  run: pytest --fusiongate-update-paths, if the change is meant, and review the difference",
        ]
    )


def test_a_missing_table_fails_with_the_command_that_records_it(kept: Project) -> None:
    result = kept.run(HOST, *CELLS[:1])
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*  happened: no table kept/cpu/paths/toy.json to compare the path with",
            "*  expected: a committed row, or --fusiongate-missing=skip",
            "*  run: pytest --fusiongate-update-paths, and review what it records",
        ]
    )


def test_a_missing_table_may_be_said_instead(kept: Project) -> None:
    result = kept.run(HOST, "--fusiongate-missing=skip", *CELLS)
    result.assert_outcomes(passed=2)
    lines = Project.summary(result)
    assert lines[lines.index("not compared") + 1] == "  no table kept/cpu/paths/toy.json (2): toy[base], toy[mixed]"


def test_a_cell_that_the_table_does_not_know_is_missing_too(kept: Project) -> None:
    kept.run(HOST, "--fusiongate-update-paths", CELLS[0])
    kept.run(HOST, *CELLS).assert_outcomes(passed=1, failed=1)
    result = kept.run(HOST, "--fusiongate-missing=skip", *CELLS)
    result.assert_outcomes(passed=2)
    assert "  no row in kept/cpu/paths/toy.json (1): toy[mixed]" in Project.summary(result)


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "xdist"])
def test_what_is_missing_may_be_recorded_in_a_run_that_says_so_and_fails(
    kept: Project, arguments: tuple[str, ...]
) -> None:
    """A run on a new kind of machine: its cells are checked, and its table is a candidate for a person to look at."""
    result = kept.run(HOST, RECORD, *arguments, *CELLS)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert table(kept) == {"base": ["fused", "verified"], "mixed": ["reference", "mixed-dtype"]}
    lines = Project.summary(result)
    assert lines[lines.index("not compared") + 1] == "  no table kept/cpu/paths/toy.json (2): toy[base], toy[mixed]"
    assert lines[-2:] == [
        "path table: kept/cpu/paths/toy.json (2 rows)",
        (
            "red: --fusiongate-missing=record: 2 cells had no committed path; candidates are in "
            "kept/cpu/paths/toy.json: review and commit them"
        ),
    ]
    held = kept.run(HOST, RECORD, *CELLS)
    held.assert_outcomes(passed=2)
    assert held.ret == pytest.ExitCode.OK


def test_the_ini_file_may_ask_for_what_is_missing_to_be_recorded(kept: Project) -> None:
    kept.write("pytest.ini", "[pytest]\nfusiongate_snapshots = kept\nfusiongate_missing = record\n")
    assert kept.run(HOST, *CELLS).ret == pytest.ExitCode.TESTS_FAILED
    assert sorted(table(kept)) == ["base", "mixed"]


def test_recording_what_is_missing_leaves_what_is_there(kept: Project) -> None:
    """The path of one cell has changed: that is a failure, and no reason to write over its row."""
    kept.run(HOST, "--fusiongate-update-paths", CELLS[0])
    before = table(kept)
    toys.prepare(kept, stricter="'stride'")
    declined = f"{TOY}[expanded-channels]"
    kept.run(HOST, RECORD, CELLS[0], declined).assert_outcomes(passed=1, failed=1)
    assert table(kept) == {**before, "expanded-channels": ["reference", "stride"]}


def test_a_red_cell_is_no_candidate(kept: Project) -> None:
    toys.prepare(kept, kernel="(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)")
    kept.run(HOST, RECORD, *CELLS).assert_outcomes(passed=1, failed=1)
    assert sorted(table(kept)) == ["mixed"]


def test_an_update_keeps_the_rows_of_cells_that_did_not_run(kept: Project) -> None:
    for cell in CELLS:
        kept.run(HOST, "--fusiongate-update-paths", cell)
    assert sorted(table(kept)) == ["base", "mixed"]


def test_a_red_cell_is_not_recorded(kept: Project) -> None:
    toys.prepare(kept, kernel="(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)")
    kept.run(HOST, "--fusiongate-update-paths", *CELLS).assert_outcomes(passed=1, failed=1)
    assert sorted(table(kept)) == ["mixed"]


def test_a_damaged_table_fails_and_is_not_written_over(kept: Project) -> None:
    damaged = kept.write("kept/cpu/paths/toy.json", "{")
    plain = kept.run(HOST, CELLS[0])
    plain.assert_outcomes(failed=1)
    # The story, and no frame of ours.
    assert f"E       fusiongate.errors.SnapshotError: {damaged}: the path table is damaged" in plain.stdout.str()
    assert "path_table.py" not in plain.stdout.str()
    result = kept.run(HOST, "--fusiongate-update-paths", CELLS[0])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert Project.summary(result)[-1].startswith(f"red: {damaged}: the path table is damaged")
    assert damaged.read_text() == "{"


def test_nothing_is_compared_where_no_tables_are_kept(kept: Project) -> None:
    kept.write("pytest.ini", "[pytest]\n")
    result = kept.run(HOST, *CELLS)
    result.assert_outcomes(passed=2)
    assert "not compared" not in Project.summary(result)


@pytest.mark.parametrize("option", ["--fusiongate-update-paths", RECORD])
def test_a_run_without_kernels_may_not_record(kept: Project, option: str) -> None:
    kept.setenv("FUSIONGATE_DISABLE", "1")
    result = kept.run(HOST, option, *CELLS)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if line)
    assert line == (
        f"ERROR: {option}: FUSIONGATE_DISABLE is set, and every path of such a run is the reference: unset it"
    )
