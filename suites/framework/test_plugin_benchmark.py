"""`device_benchmark` in a project: its rows are pytest-benchmark's own; test_cases_runs.py tries it with workers."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from .projects import Project

ROW = "adaln[2x16x64-float32-{}]"
ARMS = ("copy", "eager", "kernel")

TIMED = """\
    import pytest
    import torch
    import fusiongate as fg

    def reference(x, scale, shift):
        return x * (1 + scale) + shift

    def kernel(x, scale, shift):
        return x.mul(scale.add(1)).add(shift)

    def operands(tokens=16):
        return torch.randn(2, tokens, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)

    QUICK = dict(seconds=0.02, margin=0.5, precision=None, hot=True)
    op = fg.Fusion("adaln", reference=reference, fused=kernel)
"""


@pytest.fixture
def timed(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with one timed test."""
    write(project, "def test_adaln(device_benchmark): assert device_benchmark(op, *operands(), **QUICK).value > 0")
    # Measurements of other runs on this machine are none of this one's business.
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return project


def write(project: Project, *tests: str) -> None:
    head = re.sub("^    ", "", TIMED, flags=re.MULTILINE)
    project.write("test_timed.py", "\n".join([head, *tests]) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return sorted(found, key=lambda bench: str(bench["fullname"]))


def test_each_arm_is_a_row_of_pytest_benchmarks_table_and_json(timed: Project) -> None:
    result = timed.run("--benchmark-json=run.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*benchmark 'adaln[[]2x16x64-float32]': 3 tests*"])
    for arm in ARMS:
        result.stdout.fnmatch_lines([f"{ROW.format(arm).replace('[', '[[]')}*"])
    recorded = rows(timed.path / "run.json")
    assert [ROW.format(arm) for arm in ARMS] == [row["fullname"] for row in recorded]
    kernel = recorded[2]
    assert {"shape": "2x16x64", "dtype": "float32", "arm": "kernel"} == kernel["params"]
    assert len(kernel["stats"]["data"]) == kernel["stats"]["rounds"] == kernel["extra_info"]["ratio"]["pairs"]
    assert kernel["stats"]["median"] == pytest.approx(kernel["extra_info"]["median_s"]["value"])
    assert kernel["extra_info"]["paths"]["fused verified"] > 0


def test_the_histogram_is_a_picture_of_the_same_rows(timed: Project) -> None:
    """Written by pytest-benchmark, out of what it takes for its own measurements."""
    for module in ("pygal", "pygaljs"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"not run: needs {module}, which pytest-benchmark[histogram] installs")
    # In a process of its own: pygal leaves an import hook behind that Python warns of at every later import.
    result = timed.run("--benchmark-histogram=chart", "-Wdefault", own_process=True)
    result.assert_outcomes(passed=1)
    (picture,) = timed.path.glob("*.svg")
    drawn = ET.parse(picture).getroot()
    assert "{http://www.w3.org/2000/svg}svg" == drawn.tag
    words = " ".join(text for text in drawn.itertext())
    assert all(ROW.format(arm) in words for arm in ARMS), words


def test_the_ratio_stands_in_the_summary_and_the_rows_in_the_ledger(timed: Project) -> None:
    result = timed.run()
    result.stdout.re_match_lines(
        [
            r"adaln\[2x16x64-float32\]: eager [\d.]+ µs, kernel [\d.]+ µs, copy [\d.]+ µs",
            r"  kernel \w+: [\d.]+ of eager",
        ]
    )
    assert 3 == len(timed.rows("timing"))


def test_the_machine_info_holds_gpu_and_stack_and_nothing_of_the_host(timed: Project) -> None:
    timed.run("--benchmark-json=run.json")
    machine = json.loads((timed.path / "run.json").read_text())["machine_info"]
    (ours,) = machine["fusiongate"]
    assert ours["environment"]["platform"].startswith("cpu-")
    assert not {"node", "release"} & set(machine)
    assert not [name for name in machine["cpu"] if name.startswith("hz_")]


def test_a_run_without_our_rows_is_left_as_pytest_benchmark_makes_it(project: Project) -> None:
    project.write("test_other.py", "def test_other(benchmark): benchmark(lambda: None)\n")
    briefly = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=1")
    project.run("--benchmark-json=run.json", *briefly).assert_outcomes(passed=1)
    machine = json.loads((project.path / "run.json").read_text())["machine_info"]
    assert "fusiongate" not in machine
    assert {"node", "release"} <= set(machine)


def test_a_saved_run_is_compared_and_a_slowdown_fails(timed: Project) -> None:
    timed.run("--benchmark-autosave").assert_outcomes(passed=1)
    (saved,) = (timed.path / ".benchmarks").rglob("0001_*.json")
    record = json.loads(saved.read_text())
    for bench in record["benchmarks"]:
        bench["stats"] = {name: v / 1e3 if isinstance(v, float) else v for name, v in bench["stats"].items()}
    saved.write_text(json.dumps(record))
    result = timed.run("--benchmark-compare", "--benchmark-compare-fail=median:50%")
    assert result.ret != 0
    result.stdout.fnmatch_lines([f"{ROW.format('kernel').replace('[', '[[]')} (NOW)*"])
    assert [ROW.format(arm) for arm in ("eager", "kernel", "copy")] == re.findall(
        r"^\t(\S+) \(\S+\) - Field 'median' has failed", str(result.stdout) + str(result.stderr), re.MULTILINE
    )


def test_a_saved_run_of_another_gpu_is_not_compared(timed: Project) -> None:
    timed.run("--benchmark-autosave").assert_outcomes(passed=1)
    (saved,) = (timed.path / ".benchmarks").rglob("0001_*.json")
    saved.write_text(saved.read_text().replace('"device_name": "', '"device_name": "another '))
    result = timed.run("--benchmark-compare")
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    result.stderr.fnmatch_lines(
        ["ERROR: --benchmark-compare: the saved run was measured in another environment: device*"]
    )


def test_two_runs_open_in_pytest_benchmarks_own_compare_command(timed: Project) -> None:
    for name in ("one.json", "two.json"):
        timed.run(f"--benchmark-json={name}")
    result = timed.pytester.run("pytest-benchmark", "compare", "one.json", "two.json", "--group-by=name")
    assert 0 == result.ret
    for arm in ARMS:
        assert 2 == sum(line.startswith(ROW.format(arm)) for line in result.outlines)


def test_benchmark_only_keeps_timed_tests_and_skips_others(timed: Project) -> None:
    timed.write("test_plain.py", "def test_plain(): pass\n")
    timed.run("--benchmark-only").assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize("option", ["--benchmark-skip", "--benchmark-disable"])
def test_a_run_that_wants_no_benchmarks_gets_none(option: str, timed: Project) -> None:
    timed.run(option).assert_outcomes(skipped=1)


def test_without_pytest_benchmark_other_tests_run_and_a_timed_one_says_what_it_needs(timed: Project) -> None:
    timed.write("test_plain.py", "def test_plain(): pass\n")
    result = timed.run("-p", "no:benchmark")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*device_benchmark records through pytest-benchmark*-p no:benchmark: leave that out*"])


def test_a_name_that_is_measured_twice_fails_the_run(timed: Project) -> None:
    write(
        timed,
        "def test_one(device_benchmark): device_benchmark(op, *operands(), **QUICK)",
        "def test_two(device_benchmark): device_benchmark(op, *operands(), **QUICK)",
    )
    result = timed.run()
    result.assert_outcomes(passed=2)
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    result.stdout.fnmatch_lines(["red: adaln*-kernel] was measured twice in this run*give one of them another label="])


def test_two_cases_of_one_shape_are_told_apart_by_a_label(timed: Project) -> None:
    write(
        timed,
        "def test_one(device_benchmark): device_benchmark(op, *operands(), **QUICK)",
        "def test_two(device_benchmark): device_benchmark(op, *operands(), label='strided', **QUICK)",
    )
    result = timed.run()
    assert 0 == result.ret
    result.stdout.fnmatch_lines(["adaln[[]strided-float32-kernel]*"])


def test_a_kernel_that_is_switched_off_is_no_timing(timed: Project) -> None:
    timed.setenv("FUSIONGATE_DISABLE", "1")
    result = timed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*UsageError: adaln: *disabled*"])


def test_a_wrong_kernel_is_no_timing(timed: Project) -> None:
    write(
        timed,
        "wrong = fg.Fusion('adaln', reference=reference, fused=lambda x, scale, shift: x + shift)",
        "def test_adaln(device_benchmark): device_benchmark(wrong, *operands(), **QUICK)",
    )
    result = timed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TimingError: adaln: a kernel that is wrong is not timed: *"])
