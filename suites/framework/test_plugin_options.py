"""Options and their ini twins: every value is taken from both, and a bad one is a single clear line."""

from __future__ import annotations

import pytest

from .projects import Project

PRINT_OPTIONS = """
from fusiongate.plugin.options import options

def test_options(pytestconfig):
    print(options(pytestconfig))
"""


def error_of(result: pytest.RunResult) -> list[str]:
    return [line for line in result.errlines if line]


@pytest.mark.parametrize(
    "name, value, field",
    [
        ("device", "host", "device='host', device_index=None"),
        ("missing", "skip", "missing='skip'"),
        ("pin-gpus", None, "pin_gpus=True"),
    ],
)
def test_an_option_and_its_ini_twin_mean_the_same(project: Project, name: str, value: str | None, field: str) -> None:
    project.write("test_options.py", PRINT_OPTIONS)
    plain = project.run("-s")
    by_option = project.run("-s", f"--fusiongate-{name}" + ("" if value is None else f"={value}"))
    project.write("pytest.ini", f"[pytest]\nfusiongate_{name.replace('-', '_')} = {value or 'true'}\n")
    by_ini = project.run("-s")

    assert field not in plain.stdout.str()
    assert field in by_option.stdout.str()
    assert field in by_ini.stdout.str()


def test_every_option_has_an_ini_twin(project: Project) -> None:
    text = project.run("--help").stdout.str()
    options = {line.split("=")[0].split()[0][2:] for line in text.splitlines() if line.startswith("  --fusiongate-")}
    twins = {line.split()[0] for line in text.splitlines() if line.startswith("  fusiongate_")}
    assert "fusiongate-device" in options
    assert {name.replace("-", "_") for name in options} == twins


def test_a_path_is_meant_from_where_it_was_written(project: Project) -> None:
    """On the command line from the caller's folder, in the ini file from the root."""
    project.write("test_options.py", PRINT_OPTIONS)
    project.write("pytest.ini", "[pytest]\nfusiongate_snapshots = kept\n")
    project.write("below/here", "")
    project.pytester.chdir()
    by_ini = project.run("-s", "--rootdir", str(project.path))
    assert f"snapshots={type(project.path).__name__}('{project.path / 'kept'}')" in by_ini.stdout.str()

    by_option = project.run("-s", "--fusiongate-snapshots=other")
    assert f"snapshots={type(project.path).__name__}('{project.path / 'other'}')" in by_option.stdout.str()


@pytest.mark.parametrize(
    "argument, complaint",
    [
        ("--fusiongate-device=gpu", "--fusiongate-device=gpu: expected auto, host, cuda or cuda:N"),
        ("--fusiongate-device=cuda:", "--fusiongate-device=cuda:: expected auto, host, cuda or cuda:N"),
        ("--fusiongate-device=cuda:-1", "--fusiongate-device=cuda:-1: expected auto, host, cuda or cuda:N"),
        ("--fusiongate-missing=pass", "--fusiongate-missing=pass: expected fail, skip or record"),
        ("--fusiongate-device=\x1b[31m\n", r"--fusiongate-device=\x1b[31m\n: expected auto, host, cuda or cuda:N"),
        (
            "--fusiongate-ledger=/dev/null/x",
            "--fusiongate-ledger=/dev/null/x: cannot be written: /dev/null is no folder: expected another place",
        ),
        (
            "--fusiongate-ledger=/dev/full",
            (
                "--fusiongate-ledger=/dev/full: rows are appended to a ledger only: "
                "/dev/full: the ledger could not be read: Not a regular file"
            ),
        ),
        (
            f"--fusiongate-ledger=/{'x' * 300}",
            f"--fusiongate-ledger=/{'x' * 300}: File name too long: expected another place",
        ),
        (
            "--fusiongate-snapshots=/dev/null",
            "--fusiongate-snapshots=/dev/null: /dev/null is no folder: expected a folder",
        ),
        (
            "--fusiongate-missing=record",
            (
                "--fusiongate-missing=record: no folder to record in: set fusiongate_snapshots in the ini file, "
                "or give --fusiongate-snapshots=DIR"
            ),
        ),
        (
            "--fusiongate-update-paths",
            (
                "--fusiongate-update-paths: no folder to record in: set fusiongate_snapshots in the ini file, "
                "or give --fusiongate-snapshots=DIR"
            ),
        ),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_4(project: Project, argument: str, complaint: str) -> None:
    result = project.run(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert error_of(result) == [f"ERROR: {complaint}"]


def test_a_bad_value_in_the_ini_file_is_the_same_line(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfusiongate_device = gpu\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert error_of(result) == ["ERROR: --fusiongate-device=gpu: expected auto, host, cuda or cuda:N"]


def test_a_switch_in_the_ini_file_that_is_neither_on_nor_off_is_named(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nfusiongate_pin_gpus = perhaps\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert error_of(result) == ["ERROR: fusiongate_pin_gpus in the ini file: invalid truth value 'perhaps'"]


def test_requiring_fused_paths_on_the_host_is_a_contradiction(project: Project) -> None:
    result = project.run("--fusiongate-require-fused", "--fusiongate-device=host")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = error_of(result)
    assert line == (
        "ERROR: --fusiongate-require-fused needs a GPU, and --fusiongate-device=host runs on none: "
        "give only one of them"
    )


def test_a_pinned_worker_has_no_second_gpu(project: Project) -> None:
    result = project.run("--fusiongate-pin-gpus", "--fusiongate-device=cuda:1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert error_of(result)[0].startswith(
        "ERROR: --fusiongate-device=cuda:1: with --fusiongate-pin-gpus each worker sees"
    )


def test_rows_are_not_appended_to_a_file_of_another_kind(project: Project) -> None:
    notes = project.write("notes.md", "# Notes\n")
    result = project.run("--fusiongate-ledger=notes.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert error_of(result)[0].startswith(
        f"ERROR: --fusiongate-ledger={notes}: rows are appended to a ledger only: {notes}, line 1: not JSON"
    )
    assert notes.read_text() == "# Notes\n"
