"""compute-sanitizer finds no stray access and no race in the kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = [sys.executable, str(Path(__file__).with_name("sanitized.py"))]
NAME = "compute-sanitizer"
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def sanitizer() -> str | None:
    """The tool's path."""
    folders = [Path(root) / "bin" for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which(NAME, path=path)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    # Each tensor in an allocation of its own: inside the caching allocator's blocks nothing is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run([*words, *PROGRAM], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_watched_run_is_clean(tool: str, fusion_device: torch.device) -> None:
    if fusion_device.type == "cpu":
        pytest.skip(f"not run: {NAME} {tool} needs a GPU")
    path = sanitizer()
    if path is None:
        pytest.skip(f"not run: {NAME} is not installed; it comes with the CUDA toolkit")
    # Builds what is not built, and tells a fault of the program from one that the tool has found.
    plain = run()
    assert 0 == plain.returncode, plain.stderr
    watched = run(path, "--tool", tool, "--kernel-regex", "kns=fusiongate_kernel")
    output = watched.stdout + watched.stderr
    summary = FOUND.search(output)
    if summary is None:
        pytest.skip(f"not run: this machine refuses {NAME} {tool}: {' '.join(output.split())[:200]}")
    assert "0" == (summary[1] or summary[2]), output[-4000:]
