"""Runs as a kernel team records them, judged: a kernel that has not changed, and one that has become slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("not_beside_a_revision")

PROJECT = '''\
"""A kernel that takes as long as it is told, beside a reference of 200 µs."""

import os

import torch

import fusiongate as fg
from fusiongate.suites.timings.spinning import spin_ns


def test_kernel(device_benchmark, fusion_device):
    counter = torch.zeros(1, dtype=torch.int64, device=fusion_device)

    def spinning(ns):
        def call(x):
            spin_ns(counter, ns)
            return x.clone()

        return call

    op = fg.Fusion("spinning", reference=spinning(200_000), fused=spinning(int(os.environ["KERNEL_NS"])))
    x = torch.randn(2, 8, 64, device=fusion_device)
    device_benchmark(op, x, seconds=0.5, margin=float(os.environ["MARGIN"]), precision=None)
'''


@pytest.fixture
def percent(fusion_device: torch.device) -> int:
    """What a judgement can see here, in percent of a kernel's time: a CPU's own clock disturbs more than a GPU's."""
    return 1 if fusion_device.type == "cuda" else 15


def recorded(folder: Path, name: str, ns: int, percent: int, device: torch.device) -> Path:
    """One run's JSON, made by a pytest of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "test_spinning.py").write_text(PROJECT)
    path = folder / f"{name}.json"
    selected = "host" if device.type == "cpu" else str(device)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", f"--fusiongate-device={selected}", f"--benchmark-json={path}"],
        cwd=folder,
        env={**os.environ, "KERNEL_NS": str(ns), "MARGIN": str(percent / 300)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return path


def judged(base: Path, new: Path, percent: int) -> tuple[int, str]:
    """The exit status of `fusiongate judge`, and what it printed."""
    words = ["judge", str(base), str(new), "--fail-on", f"slower:{percent}%"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fusiongate.cli", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_slowdown_is_failed_and_the_same_kernel_is_not(
    tmp_path: Path, percent: int, fusion_device: torch.device
) -> None:
    """Slower by three times what is failed on; and the same kernel in another process."""
    slower = 200_000 + 200_000 * 3 * percent // 100
    base, same, planted = (
        recorded(tmp_path, name, ns, percent, fusion_device)
        for name, ns in (("base", 200_000), ("same", 200_000), ("planted", slower))
    )
    code, told = judged(base, planted, percent)
    assert 1 == code, told
    assert "slower" in told

    code, told = judged(base, same, percent)
    assert 0 == code, told

    code, told = judged(base, base, percent)
    assert 0 == code, told
    assert "same" in told


def test_a_cut_file_is_refused_in_one_line(tmp_path: Path, percent: int, fusion_device: torch.device) -> None:
    base = recorded(tmp_path, "base", 200_000, percent, fusion_device)
    cut = tmp_path / "cut.json"
    cut.write_text(base.read_text()[:-200])

    code, told = judged(base, cut, percent)

    assert 2 == code
    assert 1 == len(told.splitlines()), told
    assert "cut.json" in told
