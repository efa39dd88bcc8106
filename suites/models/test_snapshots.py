"""The digests of every preset against their snapshots."""

from __future__ import annotations

import pytest

import fusiongate as fg
from fusiongate.presets import Preset

from .catalogue import ALL, REAL


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_presets_digests_are_those_that_were_recorded(preset: Preset, md5_snapshot: fg.Md5Snapshot) -> None:
    md5_snapshot.check(preset)


@pytest.mark.parametrize("preset", REAL, ids=lambda preset: preset.name)
def test_a_presets_digests_at_real_widths_are_those_that_were_recorded(
    preset: Preset, md5_snapshot: fg.Md5Snapshot
) -> None:
    md5_snapshot.check(preset, size="real")
