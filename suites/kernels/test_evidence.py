"""What was recorded on a GPU belongs to the kernels of this tree: other kernels prove nothing about these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusiongate.jit import source_hash
from fusiongate.kernels import FUSIONS, SOURCES
from fusiongate.kernels.launching import Launcher

SNAPSHOTS = Path(__file__).parents[2] / "snapshots"
PATHS = sorted(SNAPSHOTS.glob("*/paths/*.json"))
CERTIFICATES = sorted(SNAPSHOTS.glob("*/certificates/*.json"))
LEDGERS = sorted(SNAPSHOTS.glob("*/*/*/ledger*.jsonl"))

TIMINGS = sorted(SNAPSHOTS.glob("*/*/*/timings/kernels.json"))

CERTIFIED = {op.name: source_hash([op.fused.entry.source]) for op in FUSIONS if isinstance(op.fused, Launcher)}
"""The hash of the source that each kernel is launched from."""

pytestmark = pytest.mark.skipif(
    not SNAPSHOTS.is_dir(), reason="not run: the snapshots are in the repository, not in the wheel"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(SNAPSHOTS))


def test_there_is_evidence_from_a_gpu() -> None:
    for found in (PATHS, CERTIFICATES, LEDGERS, TIMINGS):
        assert any(name_of(path).startswith("cuda-") for path in found)


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_path_table_is_from_these_sources(path: Path) -> None:
    recorded = json.loads(path.read_text())["sources"]
    assert source_hash(SOURCES) == recorded, f"{name_of(path)} is stale: run pytest --fusiongate-update-paths there"


@pytest.mark.parametrize("path", CERTIFICATES, ids=name_of)
def test_a_certificate_is_from_these_sources(path: Path) -> None:
    certificate = json.loads(path.read_text())
    mine = CERTIFIED[certificate["kernel"]]
    assert mine == certificate["sources"], f"{name_of(path)} is stale: run fusiongate certify {certificate['kernel']}"


@pytest.mark.parametrize("path", LEDGERS, ids=name_of)
def test_a_ledger_is_from_these_sources(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tables = [row["payload"]["table"] for row in rows if row["kind"] == "cell" and row["payload"].get("table")]
    recorded = {table["sources"] for table in tables if table["sources"]}
    assert {source_hash(SOURCES)} == recorded, f"{name_of(path)} is stale: run nox -s gpu there, and keep its ledger"


@pytest.mark.parametrize("path", TIMINGS, ids=name_of)
def test_a_timing_is_from_these_sources(path: Path) -> None:
    recorded = {row["extra_info"]["sources"] for row in json.loads(path.read_text())["benchmarks"]}
    assert {source_hash(SOURCES)} == recorded, f"{name_of(path)} is stale: run nox -s bench there, and keep its JSON"


@pytest.mark.parametrize("path", TIMINGS, ids=name_of)
def test_the_table_beside_a_timing_is_what_the_command_prints(path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-P", "-m", "fusiongate.cli", "timings", str(path)], capture_output=True, text=True, check=True
    )
    assert path.with_suffix(".md").read_text() == printed.stdout, f"run fusiongate timings {name_of(path)}"
