"""The table of a recorded run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusiongate.cli import main
from fusiongate.report.timings import markdown
from fusiongate.timing.recorded import read_run

from .recorded_runs import row, write_run

CASE = "modulate[1x14592x4096-bfloat16]"


def arm(name: str, *, time: float) -> dict[str, object]:
    """A row of another arm of the same measurement."""
    one = row(CASE, time=time)
    renamed = one["name"].replace("-kernel]", f"-{name}]")
    info = {**one["extra_info"], "ratio": None}
    return {**one, "name": renamed, "params": {**one["params"], "arm": name}, "extra_info": info}


def test_a_case_is_a_row_and_an_arm_a_column(tmp_path: Path) -> None:
    kernel = row(CASE, time=60e-6, ratio=0.2)
    kernel["extra_info"] |= {"share_of_copy_bandwidth": 0.9712, "sources": "b62d27e882cd01"}
    run = read_run(write_run(tmp_path / "run.json", arm("eager", time=300e-6), kernel))

    machine, sources, _, heading, _, line = markdown(run).splitlines()

    assert machine.startswith("Measured on cuda-sm_90 (NVIDIA H200), torch 2.11.0+cu130")
    assert "Kernel sources: b62d27e882cd." == sources
    assert "| case | eager µs | kernel µs | of the copy's bandwidth | kernel to its reference |" == heading
    assert f"| `{CASE}` | 300.00 | 60.00 | 97.1% | 0.2000 of eager (0.1998 to 0.2002) |" == line


def test_what_was_not_recorded_is_a_dash(tmp_path: Path) -> None:
    other = "silu_mul[2x8-float32]"
    run = read_run(write_run(tmp_path / "run.json", arm("eager", time=300e-6), row(other)))

    lines = markdown(run).splitlines()

    assert f"| `{CASE}` | 300.00 | – | – | – |" == lines[-2]
    assert f"| `{other}` | – | 60.00 | – | 0.2000 of eager (0.1998 to 0.2002) |" == lines[-1]


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run.json")

    assert 0 == main(["timings", str(path)])
    assert markdown(read_run(path)) == capsys.readouterr().out
