"""End-to-end times of presets, and their rows among pytest-benchmark's."""

from __future__ import annotations

import json
import time

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.presets import TimedArm, time_preset

from .projects import Project
from .toy_presets import noisy, steady


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


def slowly(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The same, after two milliseconds."""
    time.sleep(0.002)
    return modulated(x, scale, shift)


def test_arms_are_measured_in_turns_with_models_that_are_built_once() -> None:
    counted = Fusion("modulate", reference=modulated, fused=slowly)
    mounted = TimedArm("mounted", (counted,))

    times = time_preset(steady, arms=[TimedArm("eager", None), mounted], seconds=0.5)

    assert ["eager", "mounted"] == list(times.seconds)
    assert len(times.seconds["eager"]) == len(times.seconds["mounted"]) >= 32
    assert {"mounted"} == times.ratios.keys()
    # Two steps a run, and two milliseconds for each.
    assert times.median("mounted") - times.median("eager") > 0.004
    assert "slower" == times.ratios["mounted"].outcome
    assert ["model"] == list(mounted.built)


def test_models_are_as_they_were_when_the_times_are_taken() -> None:
    mounted = TimedArm("mounted", (Fusion("modulate", reference=modulated, fused=modulated),))

    time_preset(steady, arms=[TimedArm("eager", None), mounted], seconds=0.1)

    assert "forward" not in vars(mounted.built["model"])


def test_the_table_has_a_row_for_each_arm() -> None:
    arms = [TimedArm("eager", None), TimedArm("again", None)]

    rows = list(time_preset(steady, arms=arms, seconds=0.1).markdown())

    assert 2 == len(rows)
    assert rows[0].startswith("| steady (tiny) | eager | 0.")
    assert " %" in rows[1]


def test_one_arm_is_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="1 arms; expected the reference and at least one more"):
        time_preset(steady, arms=[TimedArm("eager", None)])


def test_a_preset_that_does_not_run_here_is_not_timed() -> None:
    with pytest.raises(UsageError, match="it has no size 'real'"):
        time_preset(noisy, size="real")


TESTS = """
from project_preset import quick

def test_quick(preset_times):
    assert preset_times(quick, seconds=0.1).ratios.keys() == {"mounted", "compiled"}
"""

PRESET = """
from fusiongate.presets import preset

@preset("quick")
def quick(run):
    yield "output", {"x": run.normal("x", 1000)}
"""


def test_the_times_are_rows_of_pytest_benchmark_and_of_the_ledger(project: Project) -> None:
    project.write("project_preset.py", PRESET)
    project.write("test_times.py", TESTS)
    project.write("pytest.ini", "[pytest]\npythonpath = .\nfusiongate_device = host\n")

    project.run("--benchmark-json=times.json").assert_outcomes(passed=1)

    recorded = json.loads((project.path / "times.json").read_text(encoding="utf-8"))
    names = {bench["name"] for bench in recorded["benchmarks"]}
    assert {f"quick[tiny-denoise-{arm}]" for arm in ("eager", "mounted", "compiled")} == names
    assert {"quick"} == {row.subject for row in project.rows("timing")}
