"""Threads on shared and separate gates beside threads that draw; minutes of it by hand."""

from __future__ import annotations

import random

import pytest
import torch

from fusiongate.gate.global_state import GlobalState

from .stress import stress


def test_nothing_is_refused_and_no_draw_repeated() -> None:
    outcome = stress(1.5)

    assert [] == outcome.faults
    assert min(outcome.calls, outcome.fused, outcome.draws) > 10


def test_a_first_sight_that_rewinds_the_generator_repeats_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it once did."""
    init = GlobalState.__init__

    def rewinding(self: GlobalState, device: torch.device) -> None:
        state = torch.get_rng_state()
        init(self, device)
        if random.random() < 0.9:
            torch.set_rng_state(state)

    monkeypatch.setattr(GlobalState, "__init__", rewinding)

    assert any("draws came twice" in fault for fault in stress(1.5).faults)
