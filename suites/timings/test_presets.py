"""Whole presets at the widths that are used in earnest: kernels may not make a generation slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ..models.catalogue import REAL

if TYPE_CHECKING:
    from fusiongate.presets import Preset, PresetTimes


@pytest.mark.parametrize("preset", REAL, ids=lambda preset: preset.name)
def test_a_generation_is_no_slower_with_kernels(preset: Preset, preset_times: Callable[..., PresetTimes]) -> None:
    times = preset_times(preset, size="real")

    assert times.ratios["mounted"].outcome != "slower", f"{preset.name}: {times.ratios['mounted']}"
