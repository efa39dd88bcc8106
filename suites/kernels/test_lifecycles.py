"""Whatever a gate goes through, it goes through in every mode: each lifecycle in each, on one GPU and on a second.

The matrix of a kernel has each lifecycle in the eager mode, and each mode with a kernel that is verified. What a mode
does to a lifecycle is the gate's doing, so that one kernel stands for all.
"""

from __future__ import annotations

import pytest
import torch

import fusiongate as fg

from ..framework.crossings import Crossing, crossings

CROSSINGS = list(crossings(fg.kernels.modulate, {"B": 2, "S": 33, "D": 512}, ("current", "other")))


@pytest.fixture(scope="module", autouse=True)
def loaded(fusion_device: torch.device) -> None:
    """The kernel and what compares it: a capture is no place to load code for the first time."""
    for crossing in CROSSINGS:
        if (crossing.cell.mode, crossing.cell.device) == ("eager", "current"):
            crossing.check(fusion_device)


@pytest.mark.parametrize("crossing", CROSSINGS, ids=str)
def test_a_lifecycle_in_a_mode(crossing: Crossing, fusion_device: torch.device) -> None:
    crossing.check(fusion_device)
