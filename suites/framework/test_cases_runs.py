"""Faults that people have reported of snapshots, of timings, and of many workers at once."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from fusiongate.errors import FusiongateError
from fusiongate.jit.cache import CACHE_VARIABLE, cache_folder, cached_entries
from fusiongate.platforms import environment
from fusiongate.presets import location
from fusiongate.sabotage import saboteur
from fusiongate.timing.benchmarks import benchmark
from fusiongate.timing.pairing import Settings
from fusiongate.timing.recorded import read_run

from .projects import Project
from .removals import normal, right

# 28: a record that keeps a fault --------------------------------------------------------------------------------------

COUNTED = '''
import os
from pathlib import Path
import torch
from fusiongate.presets import preset

RUNS = Path(__file__).with_name("runs")

@preset("counted", fused=False)
def counted(run):
    """Its kernels are wrong in the runs that the test names, each in a process of its own."""
    x = run.normal("x", 2, 8, dtype=torch.float32)
    if run.arm == "fused":
        with RUNS.open("a") as file:
            file.write("|")
        x = x + (str(RUNS.stat().st_size) in os.environ.get("WRONG_IN", "").split())
    yield "output", {"x": x}
'''

HELD = """
from counted_presets import counted

def test_counted(md5_snapshot):
    md5_snapshot.check(counted)
"""


@pytest.fixture
def counted(project: Project, forked: None) -> Project:
    project.write("counted_presets.py", COUNTED)
    project.write("test_counted.py", HELD)
    project.write("pytest.ini", "[pytest]\npythonpath = .\nfusiongate_snapshots = kept\nfusiongate_device = host\n")
    return project


def records(project: Project) -> list[Path]:
    return sorted((project.path / "kept").rglob("*.json"))


@pytest.mark.parametrize("wrong_in", ["1", "2"])
def test_case_28_a_fault_in_either_of_two_fresh_processes_is_not_recorded(counted: Project, wrong_in: str) -> None:
    counted.setenv("WRONG_IN", wrong_in)

    result = counted.run("--snapshot-update")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["preset 'counted' is not recorded: with kernels it gives something else than without*"]
    )
    assert "||" == (counted.path / "runs").read_text()
    assert [] == records(counted)


def test_case_28_a_record_of_another_platform_is_no_baseline(counted: Project) -> None:
    """It is missing, which is a failure, and what lies there stays as it is."""
    counted.run("--snapshot-update").assert_outcomes(passed=1)
    (record,) = records(counted)
    elsewhere = counted.path / "kept" / "cuda-sm_00" / "another-gpu" / Path(*record.parts[-3:])
    elsewhere.parent.mkdir(parents=True)
    record.rename(elsewhere)
    before = elsewhere.read_bytes()

    result = counted.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'counted': arms agree; no baseline for torch *: no snapshot kept/cpu-*"])
    assert [elsewhere] == records(counted)
    assert before == elsewhere.read_bytes()


def test_case_28_two_cards_of_one_architecture_have_records_of_their_own() -> None:
    """An H200 may be handed out for an H100: their bits may differ where a library chooses by the card."""
    h100, h200 = (
        dataclasses.replace(environment("cpu"), platform="cuda-sm_90", device_name=f"NVIDIA {name}")
        for name in ("H100", "H200")
    )

    assert location(Path(), h100, "test_it", "p", "tiny") != location(Path(), h200, "test_it", "p", "tiny")


# 29: timings that are not what they seem ------------------------------------------------------------------------------

MEASURED = """
import time
from pathlib import Path
import pytest
import torch
import fusiongate as fg

def reference(x):
    return x * 2

@pytest.mark.parametrize("number", range(4))
def test_timed(number, worker_id, device_benchmark):
    times = []
    def kernel(x):
        times.append(time.monotonic())
        return torch.mul(x, 2)
    op = fg.Fusion(f"op{number}", reference=reference, fused=kernel)
    device_benchmark(op, torch.ones(4096), seconds=0.05, margin=0.5, precision=None, hot=True)
    with Path(__file__).with_name("times").open("a") as file:
        file.write(f"{min(times)} {max(times)} {worker_id}\\n")
"""


def test_case_29_workers_measure_in_turns_and_bring_a_serial_run_s_rows(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pytest-xdist no measurement begins before another one on the same device has ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # in workers as in this process
    project.write("test_timed.py", MEASURED)
    project.run("--benchmark-json=serial.json").assert_outcomes(passed=4)
    times = project.path / "times"
    times.unlink()

    # pytest-benchmark warns that it has switched itself off, which is no news.
    quiet = "-Wignore::pytest_benchmark.logger.PytestBenchmarkWarning"
    result = project.run("--benchmark-json=workers.json", "-n2", quiet)

    result.assert_outcomes(passed=4)
    serial, workers = (read_run(project.path / name) for name in ("serial.json", "workers.json"))
    assert sorted(serial.rows) == sorted(workers.rows)
    assert 12 == len(serial.rows)
    assert serial.machines == workers.machines
    lines = [line.split() for line in times.read_text().splitlines()]
    intervals = sorted((float(begin), float(end)) for begin, end, _ in lines)
    assert {"gw0", "gw1"} == {worker for *_, worker in lines}
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(intervals))


QUICK = Settings(seconds=0.02, margin=0.5, precision=None)


@pytest.mark.parametrize(
    "name, tells",
    [
        ("raises-at-launch", "a kernel that is wrong is not timed: raised: the kernel raised RuntimeError"),
        ("raises-later", "0 launches: expected one or more each"),
        ("last-bit-off", "a kernel that is wrong is not timed: 1 of "),
        ("wrong-after-first-sight", "its output was wrong after it had been timed"),
        ("declines-too-much", "they take the reference"),
    ],
)
def test_case_29_a_timing_without_its_kernel_or_with_a_wrong_one_is_none(name: str, tells: str) -> None:
    x, scale, shift = normal(2, 33, 64)
    rows = torch.stack([scale, shift], dim=-1)
    with pytest.raises(FusiongateError, match=tells):
        benchmark(saboteur(name).apply(right()), (x, rows[..., 0], rows[..., 1]), settings=QUICK, hot=True)


def test_case_29_a_right_kernel_is_timed_on_the_same_operands() -> None:
    taken = benchmark(right(), normal(2, 33, 64), settings=QUICK, hot=True)

    assert 0 < taken.ratio.value
    assert {"eager", "kernel", "copy"} == set(taken.measurement.arms)


# 30: many workers, in any order ---------------------------------------------------------------------------------------

SHUFFLED = """
import random

def pytest_collection_modifyitems(items):
    random.Random(30).shuffle(items)
"""

FRESH = """
import os
from pathlib import Path
import pytest
import torch

@pytest.mark.parametrize("number", range(8))
def test_fresh(modulate, number, worker_id):
    assert modulate.launches == 0
    x, row = torch.randn(2, 8, 64), torch.randn(2, 1, 64)
    for _ in range(2):
        assert modulate(x, row, row).equal(modulate.reference(x, row, row))
    assert modulate.counters == {("reference", "first-sight"): 1, ("fused", "verified"): 1}
    with Path(__file__).with_name("seen").open("a") as file:
        print(worker_id, os.environ["CUDA_VISIBLE_DEVICES"], file=file)
"""


def test_case_30_shuffled_workers_share_the_caller_s_gpu_and_one_cache(project: Project) -> None:
    """Both begin with an empty cache: one library comes of it, every gate is fresh, and none sees another GPU."""
    project.setenv("CUDA_VISIBLE_DEVICES", "1")
    project.setenv(CACHE_VARIABLE, str(project.path / "cache"))
    project.write("conftest.py", SHUFFLED)
    project.write("test_fresh.py", FRESH)

    result = project.run("-n", "2", "--fusiongate-pin-gpus", "--fusiongate-device=host")

    result.assert_outcomes(passed=8)
    seen = [line.split() for line in (project.path / "seen").read_text().splitlines()]
    assert {"gw0", "gw1"} == {worker for worker, _ in seen}
    assert {"1"} == {gpus for _, gpus in seen}
    assert 1 == len(cached_entries(cache_folder()))
    assert [] == list(cache_folder().glob(".building-*"))
