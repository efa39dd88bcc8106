"""The judgement on recorded runs, as `fusiongate judge` gives it: its words, its refusals and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusiongate.cli import main
from fusiongate.errors import UsageError
from fusiongate.timing.intervals import Outcome
from fusiongate.timing.judging import FailOn, judge
from fusiongate.timing.recorded import environment_differences, read_run

from .recorded_runs import row, write_run

OTHER = "rms_norm_modulate[2x517x4096-bfloat16]"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base.json", row(), row(OTHER))


def judged(base: Path, new: Path, *options: str) -> int:
    return main(["judge", str(base), str(new), *options])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refusal is."""
    printed = capsys.readouterr()
    assert "" == printed.out
    (line,) = printed.err.splitlines()
    return line


def test_a_run_judged_against_itself_is_the_same(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == judged(base, base, "--fail-on", "slower:1%", "--fail-on", "inconclusive:1%")
    lines = capsys.readouterr().out.splitlines()
    assert 2 == len(lines)
    assert all("ratio same +0.00%" in line and "time same +0.00%" in line for line in lines)


def test_two_runs_of_the_same_kernels_pass(base: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new.json", row(time=60.1e-6, ratio=0.2003), row(OTHER, time=59.9e-6, ratio=0.1998))
    assert 0 == judged(base, new, "--fail-on", "slower:1%", "--fail-on", "inconclusive:1%")


def test_a_planted_slowdown_fails_and_is_named(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(tmp_path / "new.json", row(), row(OTHER, time=61e-6, ratio=0.2 * 61 / 60))
    assert 1 == judged(base, new, "--fail-on", "slower:1%")
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert [f"failed: {OTHER[:-1]}-kernel]: {what}" for what in ("ratio", "time")] == [
        line[: line.index(" +1.67%")] for line in failed
    ]


def test_without_a_condition_a_slowdown_is_told_and_passes(base: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new.json", row(), row(OTHER, time=66e-6, ratio=0.22))
    assert 0 == judged(base, new)


def test_a_kernel_that_slows_down_with_its_reference_fails_by_its_time(base: Path, tmp_path: Path) -> None:
    """The ratio hides it; the words point at the device before the kernel."""
    new = write_run(tmp_path / "new.json", row(time=63e-6), row(OTHER))
    judgement = judge(read_run(base), read_run(new), [FailOn.parse("slower:1%")])
    assert ["time"] == [failure.split(": ")[1].split()[0] for failure in judgement.failures]
    assert next(judgement.lines()).endswith(
        "its reference has become slower alike, so look at the device or at torch first"
    )


def test_a_kernel_whose_reference_became_faster_fails_by_its_ratio(base: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new.json", row(ratio=0.21), row(OTHER))
    judgement = judge(read_run(base), read_run(new), [FailOn.parse("slower:1%")])
    assert ["ratio"] == [failure.split(": ")[1].split()[0] for failure in judgement.failures]
    assert next(judgement.lines()).endswith(": its reference has become faster")


def test_a_change_that_the_intervals_leave_open_is_inconclusive(base: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new.json", row(ratio=0.202), row(OTHER))
    judgement = judge(read_run(base), read_run(new))
    assert Outcome.INCONCLUSIVE is judgement.rows[0].ratio.outcome(0.01)
    assert 0 == judged(base, new, "--fail-on", "slower:1%")
    assert 1 == judged(base, new, "--fail-on", "inconclusive:1%")


def test_runs_of_two_gpus_are_refused_in_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write_run(tmp_path / "new.json", row(), row(OTHER), device_name="NVIDIA H100", torch="2.12.0+cu130")
    assert 2 == judged(base, new)
    line = refusal(capsys)
    assert "device name NVIDIA H200 → NVIDIA H100; torch 2.11.0+cu130 → 2.12.0+cu130" in line
    assert line.endswith("measure both in one, or say --allow-environment")


def test_runs_of_two_gpus_are_judged_where_that_is_allowed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write_run(tmp_path / "new.json", row(), row(OTHER), device_name="NVIDIA H100")
    assert 0 == judged(base, new, "--allow-environment")
    assert capsys.readouterr().out.splitlines()[-1].startswith("the environments differ, as allowed: device name")


def test_a_renamed_row_is_refused_in_one_line(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(tmp_path / "new.json", row(), row("renamed[2x517x4096-bfloat16]"))
    assert 2 == judged(base, new)
    line = refusal(capsys)
    assert f"{OTHER[:-1]}-kernel] of {base} is missing in {new}" in line
    assert "which has renamed[2x517x4096-bfloat16-kernel] instead (1 missing, 1 new)" in line


def test_a_missing_row_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == judged(base, write_run(tmp_path / "new.json", row()))
    assert "(1 missing, 0 new)" in refusal(capsys)


def test_a_new_row_is_named_and_passes(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(tmp_path / "new.json", row(), row(OTHER), row("new[1x1x4-bfloat16]"))
    assert 0 == judged(base, new, "--fail-on", "slower:1%")
    assert "new, nothing to hold it against: new[1x1x4-bfloat16-kernel]" in capsys.readouterr().out


def test_a_truncated_file_is_refused_in_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(base.read_text()[:500])
    assert 2 == judged(base, cut)
    assert "no JSON, or cut short" in refusal(capsys)


@pytest.mark.parametrize(
    "record",
    ["[]", "{}", '{"machine_info": {}, "benchmarks": []}', '{"machine_info": {"fusiongate": []}, "benchmarks": []}'],
)
def test_a_file_without_timings_of_ours_is_refused_in_one_line(
    record: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(record)
    assert 2 == judged(base, other)
    assert "holds no timings of fusiongate's" in refusal(capsys)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_device_is_refused_in_one_line(device: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == judged(base, Path(device))
    assert f"{device}: cannot be read: Not a regular file" in refusal(capsys)


def test_a_file_that_is_not_there_is_refused_in_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == judged(base, tmp_path / "absent.json")
    assert "absent.json: cannot be read" in refusal(capsys)


@pytest.mark.parametrize("damage", ["twice", "schema", "interval", "reference"])
def test_a_row_that_cannot_be_judged_is_refused(
    damage: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = row(), row(OTHER)
    if damage == "twice":
        second = row()
    elif damage == "schema":
        first["extra_info"]["fusiongate"] = 99
    elif damage == "interval":
        first["extra_info"]["ratio"] = {"value": 1.0, "low": 2.0, "high": 3.0}
    else:
        first["extra_info"]["reference"] = "base"
    assert 2 == judged(base, write_run(tmp_path / "new.json", first, second))
    expected = {
        "twice": "stands in it twice",
        "schema": "schema 99, expected 1",
        "interval": "is no interval of times",
        "reference": "is held against eager in one run and base in the other",
    }
    assert expected[damage] in refusal(capsys)


@pytest.mark.parametrize("text", ["slower", "slower:1", "slower:0%", "slower:200%", "same:1%", "1%"])
def test_a_condition_that_means_nothing_is_refused(text: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == judged(base, base, "--fail-on", text)
    assert "expected an outcome and a margin such as slower:1%" in refusal(capsys)


def test_the_smallest_condition_is_the_tables_margin(base: Path) -> None:
    run = read_run(base)
    assert 0.005 == judge(run, run, [FailOn.parse("slower:1%"), FailOn.parse("slower:0.5%")]).margin


def test_the_markdown_is_a_table_with_a_row_for_each_kernel(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = write_run(tmp_path / "new.json", row(time=66e-6, ratio=0.22), row(OTHER))
    assert 1 == judged(base, new, "--markdown", "--fail-on", "slower:1%")
    lines = capsys.readouterr().out.splitlines()
    assert "| --- | ---: | ---: | --- | --- |" == lines[1]
    assert lines[2].startswith("| `modulate[1x14592x4096-bfloat16-kernel]` | 60.00 | 66.00 | slower +10.00% (")
    assert [5 + 1] * 4 == [line.count("|") for line in lines[:4]]
    assert lines[5].startswith("- failed: ")


def test_a_table_without_anything_to_add_ends_with_its_last_row(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == judged(base, base, "--markdown")
    assert ["| `modulate", "| `rms_norm"] == [line[:11] for line in capsys.readouterr().out.splitlines()[2:]]


def test_the_committed_form_has_no_samples_and_is_judged_all_the_same(base: Path, tmp_path: Path) -> None:
    """Autosaved runs leave them out: everything that is judged stands beside them."""
    record = json.loads(base.read_text())
    for bench in record["benchmarks"]:
        del bench["stats"]["data"]
    thin = tmp_path / "thin.json"
    thin.write_text(json.dumps(record))
    assert 0 == judged(thin, thin, "--fail-on", "inconclusive:1%")


def test_an_unbounded_interval_is_written_as_null_and_read_back(tmp_path: Path) -> None:
    open_row = row()
    open_row["extra_info"]["ratio"] = {"value": 0.2, "low": None, "high": None}
    path = write_run(tmp_path / "open.json", open_row)
    ratio = next(iter(read_run(path).rows.values())).ratio
    assert ratio is not None
    assert (0.0, float("inf")) == (ratio.low, ratio.high)
    other = read_run(write_run(tmp_path / "other.json"))
    assert Outcome.INCONCLUSIVE is judge(read_run(path), other).rows[0].ratio.outcome(0.01)


def test_a_run_without_kernels_has_nothing_to_judge(tmp_path: Path) -> None:
    copy = row()
    copy["params"]["arm"] = "copy"
    run = read_run(write_run(tmp_path / "copies.json", copy))
    with pytest.raises(UsageError, match="no row of a kernel"):
        judge(run, run)


def test_runs_over_other_numbers_of_environments_differ_by_that() -> None:
    assert ["1 environments → 2"] == environment_differences([{}], [{}, {}])
