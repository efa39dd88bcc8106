"""The fixture ``device_benchmark``: measures, and sends its rows along on the test's report (see :mod:`.timings`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from .rows import record

if TYPE_CHECKING:
    from fusiongate.gate.fusion import Fusion
    from fusiongate.subjects import Subject
    from fusiongate.timing.benchmarks import DeviceBenchmark
    from fusiongate.timing.intervals import Ratio
    from fusiongate.timing.measuring import Timer

__all__ = ["device_benchmark"]

_FIXTURE: Final = "device_benchmark"


@pytest.fixture
def device_benchmark(request: pytest.FixtureRequest) -> DeviceBenchmark:
    """Measure a fusion on its device's clock, paired with its reference, and record it through pytest-benchmark."""
    session = _session(request.config)
    if session is None:
        pytest.fail(
            f"{_FIXTURE} records through pytest-benchmark, which this run has switched off with -p no:benchmark: "
            f"leave that out, or deselect this test",
            pytrace=False,
        )
    if session.skip:
        pytest.skip("not run: --benchmark-skip was given")
    if request.config.getoption("benchmark_disable") and not request.config.getoption("benchmark_enable"):
        pytest.skip("not run: --benchmark-disable was given")

    def measure(
        op: Fusion | Subject,
        *args: Any,
        arms: Mapping[str, Callable[..., Any]] | None = None,
        baseline: Fusion | None = None,
        label: str | None = None,
        hot: bool = False,
        timer: Timer = "auto",
        seconds: float = 1.0,
        margin: float = 0.005,
        precision: float | None = 0.0025,
    ) -> Ratio:
        from fusiongate.platforms import environment
        from fusiongate.timing.benchmarks import benchmark
        from fusiongate.timing.clocks import clock_limits
        from fusiongate.timing.device_lock import turn
        from fusiongate.timing.measuring import common_device
        from fusiongate.timing.pairing import Settings

        device = common_device(args)
        settings = Settings(seconds=seconds, margin=margin, precision=precision)
        with turn(device):
            taken = benchmark(
                op, args, arms=arms, baseline=baseline, settings=settings, hot=hot, timer=timer, label=label
            )
        where = environment(device)
        for row in taken.rows:
            payload = {**row.to_json(), "clock_limits": clock_limits(device)}
            record(request.node, "timing", row.subject, payload, where)
        return taken.ratio

    return measure


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Let ``--benchmark-only`` keep these tests: pytest-benchmark knows its own fixture only, and skips all others."""
    for item in items:
        if _FIXTURE in getattr(item, "fixturenames", ()):
            item.own_markers[:] = [
                marker
                for marker in item.own_markers
                if not (marker.name == "skip" and "--benchmark-only" in str(marker.kwargs.get("reason")))
            ]


def _session(config: pytest.Config) -> Any:
    return config.pluginmanager.get_plugin("pytest-benchmark")
