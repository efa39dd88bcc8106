"""Every saboteur is caught by each detector that it declares, and no right kernel by any of them."""

from __future__ import annotations

import os

import pytest
import torch

import fusiongate as fg
from fusiongate.sabotage import COMPILED, SABOTEURS, Detector, Outcome, Stage, built, caught, looked_at, saboteur

DECLARED = [
    pytest.param(
        one.name,
        detector,
        id=f"{one.name}-{detector}",
        marks=[pytest.mark.alone] if detector is Detector.TIMING else [],
    )
    for one in SABOTEURS
    for detector in one.detectors
]
STAGES = sorted({(one.kernel, one.cell) for one in SABOTEURS})
UNDER_ARITHMETIC_ALONE = [
    Detector.FIRST_SIGHT,
    Detector.RECHECK,
    Detector.MATRIX,
    Detector.SNAPSHOT,
    Detector.CERTIFICATE,
]


@pytest.fixture(scope="session", autouse=True)
def _libraries(request: pytest.FixtureRequest, fusion_device: torch.device) -> None:
    """A serial run builds on all cores before its first test; workers of a parallel one build as they go."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    params = [getattr(item, "callspec", None) for item in request.session.items]
    names = {str(one.params["saboteur"]) for one in params if one is not None and "saboteur" in one.params}
    built([saboteur(name) for name in sorted(names)], fusion_device)


@pytest.mark.parametrize("saboteur, detector", DECLARED, indirect=["saboteur"])
def test_each_declared_detector_catches_it(
    saboteur: fg.PlantedSaboteur, detector: Detector, fusion_device: torch.device
) -> None:
    outcome = Outcome.MISSED
    try:
        catch = caught(saboteur.saboteur, detector, fusion_device)
        outcome = Outcome.CAUGHT if catch else Outcome.MISSED
    finally:
        saboteur.note(detector, outcome)
    assert catch, catch.story


@pytest.mark.parametrize("kernel, cell", STAGES)
def test_the_right_kernel_passes_the_same_cells(kernel: str, cell: str, fusion_device: torch.device) -> None:
    """In those that it declines, which a saboteur takes, with the reference."""
    stage = Stage(None, kernel, cell, fusion_device)
    declined = stage.fusion().declines(*stage.arguments())
    result = stage.prepared().check()
    assert ("fused", "verified") == (result.outcome, result.reason) if declined is None else declined == "stride"


@pytest.mark.parametrize("detector", UNDER_ARITHMETIC_ALONE)
@pytest.mark.parametrize("kernel", ["modulate", "modulate_fp32"])
def test_no_detector_refuses_a_right_kernel(kernel: str, detector: Detector, fusion_device: torch.device) -> None:
    refused, story = looked_at(Stage(None, kernel, "base", fusion_device), detector)
    assert not refused, story


@pytest.mark.alone
def test_the_right_kernel_is_faster_than_eager(fusion_device: torch.device) -> None:
    """Beside the saboteurs that compute the right result and gain nothing by it."""
    if fusion_device.type == "cpu":
        pytest.skip("not run: needs a GPU: a host build is made to be compared, not to be fast")
    refused, story = looked_at(Stage(None, "modulate", "base", fusion_device), Detector.TIMING)
    assert not refused, story


def test_there_are_many_and_of_both_kinds() -> None:
    assert len(SABOTEURS) >= 30
    assert len(COMPILED) >= 12
    assert len({one.name for one in SABOTEURS}) == len(SABOTEURS)
