"""The shipped kernels' certificates: complete on a GPU, a sample of each stage on the host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fusiongate.cli import main

SAMPLES = {"modulate": 16, "modulate_fp32": 16, "rms_norm_modulate": 200, "composite_rms_norm_modulate": 200}
"""Values of x, or rows of a norm, that are tried on the host, where all of them take an hour."""


def keep_missing(written: Path, kept: Path) -> None:
    """Put the certificates of one folder of snapshots beside those of another, where it has none."""
    for file in written.rglob("*.json"):
        target = kept / file.relative_to(written)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel", list(SAMPLES))
def test_every_result_is_eagers(
    kernel: str,
    dtype: str,
    fusion_device: torch.device,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_cpu = fusion_device.type == "cpu"
    where = ["--device=host", f"--sample={SAMPLES[kernel]}"] if on_cpu else [f"--device={fusion_device}"]
    status = main(["certify", kernel, f"--dtype={dtype}", f"--folder={tmp_path}", *where])
    told = capsys.readouterr()
    assert 0 == status, told.out + told.err
    files = list(tmp_path.rglob("*.json"))
    if on_cpu:
        assert [] == files
        assert "a sample, which is no certificate: nothing is written" in told.out
        return
    (record,) = (json.loads(file.read_text()) for file in files)
    tried = {stage["name"]: stage["tried"] for stage in record["stages"]}
    if kernel == "modulate":
        assert record["is_proof"]
        assert {"product", "residue", "tie", "tie-odd", "sum"} <= {name for name, n in tried.items() if n == 1 << 32}
    elif kernel == "modulate_fp32":
        assert {"product", "residue", "sum", "fp32-product", "fp32-scale", "fp32-rounding"} <= {
            name for name, n in tried.items() if n == 1 << 32
        }
    else:
        assert tried["rstd"] >= 10_000_000
    # What is shown of the norms is evidence, and none of it is committed.
    if kernel.startswith("modulate") and pytestconfig.getoption("--fusiongate-missing") == "record":
        keep_missing(tmp_path, pytestconfig.rootpath / pytestconfig.getini("fusiongate_snapshots"))


def test_a_missing_certificate_is_kept_and_a_committed_one_stays(tmp_path: Path) -> None:
    for folder, names in {"written": ["new", "old"], "kept": ["old"]}.items():
        for name in names:
            file = tmp_path / folder / "cuda-sm_80" / "certificates" / f"{name}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(folder)
    keep_missing(tmp_path / "written", tmp_path / "kept")
    kept = tmp_path / "kept" / "cuda-sm_80" / "certificates"
    assert {"new": "written", "old": "kept"} == {file.stem: file.read_text() for file in kept.iterdir()}
