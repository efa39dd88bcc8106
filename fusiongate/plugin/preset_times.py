"""The fixture ``preset_times``: a preset's end-to-end times, sent along on the test's report (see :mod:`.timings`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from fusiongate.errors import UsageError

from .device import select
from .rows import record

if TYPE_CHECKING:
    from fusiongate.presets import Preset, PresetTimes
    from fusiongate.presets.registry import Size

__all__ = ["preset_times"]


@pytest.fixture
def preset_times(request: pytest.FixtureRequest) -> Callable[..., PresetTimes]:
    """Measure ``preset_times(preset, size="real", seconds=20.0)``: eager, mounted and compiled, in turns."""
    session: Any = request.config.pluginmanager.get_plugin("pytest-benchmark")
    if session is None or session.skip:
        pytest.skip("not run: pytest-benchmark, which keeps the times, is switched off")

    def measure(preset: Preset, *, size: Size = "tiny", seconds: float = 20.0) -> PresetTimes:
        from fusiongate.platforms import environment
        from fusiongate.presets import missing_for, time_preset
        from fusiongate.timing.clocks import clock_limits
        from fusiongate.timing.device_lock import turn

        device = select(request.config).torch_device
        missing = missing_for(preset, size, device)
        if missing is not None:
            pytest.skip(f"not run: {missing}")
        try:
            with turn(device):
                times = time_preset(preset, size=size, device=device, seconds=seconds)
        except UsageError as error:
            pytest.fail(str(error), pytrace=False)
        for row in times.rows():
            payload = {**row.to_json(), "clock_limits": clock_limits(device)}
            record(request.node, "timing", row.subject, payload, environment(device))
        return times

    return measure
