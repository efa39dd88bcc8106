"""What was recorded on a GPU belongs to the kernels of this tree: other kernels prove nothing about these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusiongate.jit import source_hash
from fusiongate.kernels import FUSIONS
from fusiongate.kernels.launching import Launcher

SNAPSHOTS = Path(__file__).parents[2] / "snapshots"
DEVICES = sorted(path for vendor in ("cuda-*", "rocm-*") for path in SNAPSHOTS.glob(f"{vendor}/*/torch-*"))
CERTIFICATES = sorted(SNAPSHOTS.glob("*/certificates/*.json"))
TIMINGS = sorted(SNAPSHOTS.glob("*/*/*/timings/kernels.json"))

CERTIFIED = {op.name: source_hash([op.fused.entry.source]) for op in FUSIONS if isinstance(op.fused, Launcher)}
"""The hash of the source that each kernel is launched from."""

pytestmark = pytest.mark.skipif(
    not SNAPSHOTS.is_dir(), reason="not run: the snapshots are in the repository, not in the wheel"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(SNAPSHOTS))


def printed(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "fusiongate.cli", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def findings() -> list[str]:
    """All that is wrong with what was recorded, as the command prints it."""
    return printed("evidence", "--check", str(SNAPSHOTS)).splitlines()


def test_there_is_evidence_from_a_gpu() -> None:
    for found in (DEVICES, CERTIFICATES):
        assert any(name_of(path).startswith("cuda-") for path in found)


@pytest.mark.parametrize("folder", DEVICES, ids=name_of)
def test_what_a_device_gave_is_what_its_manifest_holds_and_from_these_sources(
    folder: Path, findings: list[str]
) -> None:
    shared = [f"{folder.parents[1].name}/{kind}/" for kind in ("certificates", "paths")]
    mine = [line for line in findings if line.startswith((f"{name_of(folder)}/", *shared))]
    assert not mine, "\n".join(mine)


def test_no_finding_belongs_to_no_device(findings: list[str]) -> None:
    shared = [f"{path.parents[1].name}/{kind}/" for path in DEVICES for kind in ("certificates", "paths")]
    known = (*shared, *(f"{name_of(path)}/" for path in DEVICES))
    assert [] == [line for line in findings if not line.startswith(known)]


@pytest.mark.parametrize("path", CERTIFICATES, ids=name_of)
def test_a_certificate_is_from_these_sources(path: Path) -> None:
    certificate = json.loads(path.read_text())
    mine = CERTIFIED[certificate["kernel"]]
    assert mine == certificate["sources"], f"{name_of(path)} is stale: run fusiongate certify {certificate['kernel']}"


@pytest.mark.parametrize("path", TIMINGS, ids=name_of)
def test_the_table_beside_a_timing_is_what_the_command_prints(path: Path) -> None:
    table = printed("timings", str(path))
    assert path.with_suffix(".md").read_text() == table, f"run fusiongate timings {name_of(path)}"
