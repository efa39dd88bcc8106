"""What is kept of a preset: where it lies, and what may be kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusiongate.errors import SnapshotError
from fusiongate.platforms import environment
from fusiongate.presets import Nondeterministic, PresetRun, location, run_preset, settle
from fusiongate.presets.baselines import load, loads
from fusiongate.presets.records import ArmRecord
from fusiongate.switches import PORTABLE

from .toy_presets import flat, noisy, steady

CPU = torch.device("cpu")
HERE = environment(CPU)
FOUND = Nondeterministic("noisy", "tiny", 0, "second", "x", "model", "aten.rand", "a" * 64, HERE)


@pytest.fixture(scope="module")
def run() -> PresetRun:
    """Both arms of a preset, once for all tests."""
    return dataclasses.replace(run_preset(steady, ops=()), must_fuse=False)


def faulty(run: PresetRun, arm: str, step: str = "output") -> PresetRun:
    """The run with another digest at a step of one arm."""
    right = run.record.fused if arm == "fused" else run.record.reference
    wrong = {name: dataclasses.replace(tensor, md5="0" * 32) for name, tensor in right[step].items()}
    steps: ArmRecord = {**right, step: wrong}
    if arm == "fused":
        return dataclasses.replace(run, record=dataclasses.replace(run.record, fused=steps))
    return dataclasses.replace(run, record=dataclasses.replace(run.record, reference=steps))


@pytest.mark.parametrize(
    ("platform", "device", "torch_version", "size", "expected"),
    [
        ("cpu-x86_64-avx512", "AMD EPYC", "2.13.0+cpu", "tiny", "cpu-x86_64-avx512/any/torch-2.13/test_it/toy.json"),
        ("cpu-x86_64-default", "AMD EPYC", "2.13.0+cpu", "tiny", "cpu-x86_64/any/torch-2.13/test_it/toy.json"),
        (
            "cuda-sm_90",
            "NVIDIA H200",
            "2.11.0+cu130",
            "real",
            "cuda-sm_90/nvidia-h200/torch-2.11/test_it/toy-real.json",
        ),
        (
            "rocm-gfx942",
            "AMD Instinct MI300X",
            "2.10.1",
            "tiny",
            "rocm-gfx942/amd-instinct-mi300x/torch-2.10/test_it/toy.json",
        ),
    ],
)
def test_a_record_lies_by_platform_device_and_torch(
    platform: str, device: str, torch_version: str, size: str, expected: str
) -> None:
    """Another card or another torch has a record of its own, and a CPU whose libraries were not held to one code."""
    switches = PORTABLE if platform.endswith("-default") else {}
    where = dataclasses.replace(
        HERE, platform=platform, device_name=device, torch=torch_version, threads=1, switches=switches
    )

    assert Path("root", expected) == location(Path("root"), where, "test_it", "toy", size)


def test_two_runs_that_agree_are_kept(run: PresetRun) -> None:
    assert run.record == settle(steady, run, run, device=CPU)


@pytest.mark.parametrize("second", [False, True], ids=["in the first process", "in the second process"])
def test_arms_that_differ_are_not_kept(run: PresetRun, second: bool) -> None:
    runs = (run, faulty(run, "fused")) if second else (faulty(run, "fused"), run)

    with pytest.raises(SnapshotError, match=r"with kernels it gives something else .* first at step 'output'"):
        settle(steady, *runs, device=CPU)


def test_outputs_that_prove_nothing_are_not_kept() -> None:
    empty = run_preset(flat, ops=())

    with pytest.raises(SnapshotError, match=r"proves nothing and is not recorded: .*3 elements are not finite"):
        settle(flat, empty, empty, device=CPU)


@pytest.mark.usefixtures("forked")
def test_a_run_that_does_not_repeat_is_a_finding_with_its_operator() -> None:
    one = dataclasses.replace(run_preset(noisy, ops=()), must_fuse=False)

    found = settle(noisy, one, faulty(one, "reference", "second"), device=CPU)

    assert isinstance(found, Nondeterministic)
    assert ("second", "x", "aten.rand.generator") == (found.step, found.tensor, found.op)
    assert str(found) == "nondeterministic: first at step 'second', tensor 'x'; by aten.rand.generator"


def test_a_finding_survives_its_file() -> None:
    assert FOUND == loads(FOUND.text(), "here")
    assert "by aten.rand in model" in str(FOUND)
    assert "no single operator was caught at it" in str(dataclasses.replace(FOUND, op=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 9}, "here: a preset's record has schema 9"),
        ({"step": None}, r"here: .*damaged: Expected `str`, got `null` - at `\$\.step`; record it again"),
        ({"environment": {**HERE.to_json(), "colour": "red"}}, "here: .*environment record: .*unknown field `colour`"),
    ],
)
def test_a_damaged_finding_says_what_is_wrong_with_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        loads(json.dumps({**FOUND.to_json(), **changes}), "here")


def test_a_record_is_read_from_its_file(run: PresetRun, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    assert load(path) is None

    path.write_text(run.record.text(), encoding="utf-8")
    assert run.record == load(path)

    path.write_text("{", encoding="utf-8")
    with pytest.raises(SnapshotError, match=r"toy\.json: "):
        load(path)
