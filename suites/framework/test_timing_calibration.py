"""The calibration's own judgement: what it counts, what it calls wrong, and that it runs from end to end on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusiongate.timing.intervals import Interval, Ratio
from fusiongate.timing.measuring import ArmTimes, Measurement

from ..timings import calibration
from ..timings.calibration import Plan, summary


def plan(**changes: Any) -> Plan:
    given = {"margin": 0.003, "seconds": 0.3, "same_trials": 500, "planted_trials": 100, "budget_s": 1.0}
    return Plan(device=torch.device("cuda"), **{**given, **changes})


def trial(value: float, half_width: float = 0.001) -> Measurement:
    ratio = Ratio(value, value - half_width, value + half_width, 0.003, 0.99, pairs=32, looks=1)
    arms = {name: ArmTimes(name, (1e-4,), Interval(1e-4, 1e-4, 1e-4), 10, None) for name in ("a", "b")}
    return Measurement(arms, {"b": ratio}, "graph", False, 2, 1000, 1, (), (), 0.1)


def same(**counted: int) -> dict[str, Any]:
    outcomes = {"faster": 0, "slower": 0, "same": 0, "inconclusive": 0, **counted}
    return {"trials": sum(outcomes.values()), **outcomes}


def test_a_summary_counts_verdicts_and_coverage() -> None:
    row = summary("trials", [trial(1.0), trial(1.0005), trial(1.02), trial(1.003)], 1.0)
    assert (4, 2, 1, 1, 0) == tuple(row[name] for name in ("trials", "same", "slower", "inconclusive", "faster"))
    assert 0.5 == row["covered"]


@pytest.mark.parametrize(
    "counted, wrong",
    [
        ({"same": 500}, []),
        ({"same": 445, "slower": 3, "faster": 2, "inconclusive": 50}, []),
        ({"same": 494, "slower": 3, "faster": 3}, ["called slower or faster in 6 of 500"]),
        ({"same": 449, "inconclusive": 51}, ["inconclusive in 51 of 500"]),
        ({"same": 499}, ["499 trials fitted the time, wanted 500"]),
    ],
)
def test_what_is_wrong_about_the_same_kernel_twice(counted: dict[str, int], wrong: list[str]) -> None:
    found = calibration._wrong_about_the_same(same(**counted), plan())
    assert len(wrong) == len(found)
    assert all(words in line for words, line in zip(wrong, found, strict=True))


@pytest.mark.parametrize("known_s, error, wrong", [(200e-6, 0.05, True), (200e-6, 0.01, False), (50e-6, 0.05, False)])
def test_a_long_spin_that_is_read_wrong_is_told_and_a_short_one_is_not(
    known_s: float, error: float, wrong: bool
) -> None:
    assert wrong == bool(calibration._wrong_about_spins([{"known_s": known_s, "error": error}]))


@pytest.mark.parametrize(
    "row, wrong",
    [({"trials": 100, "slower": 100}, False), ({"trials": 100, "slower": 50}, True), ({"trials": 0}, True)],
)
def test_a_planted_percent_that_is_not_found_is_told(row: dict[str, int], wrong: bool) -> None:
    assert wrong == bool(calibration._wrong_about_the_planted({"spin": row}, plan()))


def test_the_bound_on_false_verdicts_is_told() -> None:
    """None of 500 leaves open up to 0.6 %: 1 − 0.05 ** (1 / 500)."""
    row = same(same=500)
    calibration._wrong_about_the_same(row, plan())
    assert 1 - 0.05 ** (1 / 500) == pytest.approx(row["false_rate_upper_95"])


def test_it_runs_from_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    """Its figures belong to whoever shares the machine; that there are some does not."""
    if torch.cuda.is_available():
        pytest.skip("not run: on a GPU the calibration itself is run, which takes minutes")
    path = tmp_path / "calibration.json"
    status = calibration.main(["--trials", "2", "--seconds", "0.02", "--json", str(path)])
    results = json.loads(path.read_text())
    assert status == bool(results["wrong"])
    assert 5 == len(results["spins"])
    assert 2 == results["same"]["trials"]
    assert all(row["wait_each_s"] > 0 for row in results["spins"])
