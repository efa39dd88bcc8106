"""The rows of ``device_benchmark`` among pytest-benchmark's records, for its table, JSON, storage, comparison.

pytest-benchmark switches itself off under pytest-xdist, and one of its benchmarks is one callable. The rows here are
measured several at a time, ride on the test's report, in a serial run as with workers, and whichever process writes the
report puts them among pytest-benchmark's. Runs without such rows are left as pytest-benchmark makes them.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from fusiongate.errors import UsageError
from fusiongate.platforms import environment
from fusiongate.timing.recorded import MACHINE_KEY, TimedRow, environment_differences

from .device import select
from .options import is_worker
from .recorder import RECORDER
from .rows import observations

__all__ = ["TIMINGS", "Timings"]

_UNSTABLE: Final = ("node", "release")
"""Fields of pytest-benchmark's machine info that name one host or one boot: they say nothing about the GPU."""


class Timings:
    """The rows that have arrived in the process that writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._environments: dict[str, Mapping[str, Any]] = {}
        self.rows: list[TimedRow] = []
        self.machines: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows that ride on a report."""
        for observation in observations(report):
            if observation.kind == "run":
                self._environments[observation.environment] = observation.payload
            elif observation.kind == "timing":
                self._add(dict(observation.payload), observation.environment)

    def _add(self, fields: dict[str, Any], key: str) -> None:
        limits = fields.pop("clock_limits")
        try:
            row = TimedRow.from_json(fields)
        except UsageError as error:
            self._config.stash[RECORDER].complaints.append(str(error))
            return
        if any(row.name == other.name for other in self.rows):
            complaint = (
                f"{row.name} was measured twice in this run, and runs are compared by that name: "
                f"give one of them another label="
            )
            self._config.stash[RECORDER].complaints.append(complaint)
            return
        self.rows.append(row)
        self.machines[key] = {"environment": self._environments[key], "clock_limits": limits}
        session: Any = self._config.pluginmanager.get_plugin("pytest-benchmark")
        session.benchmarks.append(_as_benchmark(row))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print each measurement in a line: times, share of the copy's bandwidth, and the ratio with its interval."""
        if not self.rows:
            return
        terminalreporter.write_sep("=", "fusiongate timings")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        """The measurements in words, one a line."""
        groups: dict[str, list[TimedRow]] = defaultdict(list)
        for row in self.rows:
            groups[row.group].append(row)
        for group, rows in groups.items():
            times = ", ".join(f"{row.arm} {row.info['median_s']['value'] * 1e6:.2f} µs" for row in rows)
            yield f"{group}: {times}"
            for row in rows:
                if row.arm == "kernel":
                    yield from _ratio_lines(row)


def _ratio_lines(row: TimedRow) -> Iterator[str]:
    ratio, info = row.info["ratio"], row.info
    low, high = (end if ratio[end] is None else f"{ratio[end]:.4f}" for end in ("low", "high"))
    host = "" if info["host_s"] is None else f", {info['host_s'] * 1e6:.1f} µs of host time a call"
    yield (
        f"  kernel {ratio['outcome']}: {ratio['value']:.4f} of {info['reference']} ({low} to {high} at "
        f"{ratio['confidence']:.0%}, {ratio['pairs']} pairs), {info['share_of_copy_bandwidth']:.0%} of the copy's "
        f"bandwidth, {info['cache']} cache, timed by {info['timer']}{host}"
    )
    for note in info["notes"]:
        yield f"  note: {note}"


TIMINGS: Final = pytest.StashKey[Timings]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin to receive rows, unless this process reports to another; before saved runs are loaded for comparison."""
    if not is_worker(config):
        config.stash[TIMINGS] = Timings(config)
        config.pluginmanager.register(config.stash[TIMINGS], "fusiongate-timings")


def _as_benchmark(row: TimedRow) -> Any:
    """The row as pytest-benchmark keeps its own: its statistics over our samples, which are seconds of one call."""
    from pytest_benchmark import stats

    make: Any = stats.Metadata
    case = row.group.removeprefix(row.subject).strip("[]")
    origin = types.SimpleNamespace(
        name=row.name,
        fullname=row.name,
        group=row.group,
        param=f"{case}-{row.arm}",
        params={"shape": row.shape, "dtype": row.dtype, "arm": row.arm},
        extra_info=dict(row.info),
        cprofile_stats=None,
        has_error=False,
    )
    bench = make(origin, iterations=row.calls, options={"timer": row.info["timer"]})
    for seconds in row.seconds:
        bench.update(seconds * row.calls)
    return bench


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Say which GPU and which stack the rows were measured on, and drop what differs from host to host and boot."""
    timings = config.stash.get(TIMINGS, None)
    if timings is not None and timings.machines:
        machines = [timings.machines[key] for key in sorted(timings.machines)]
    elif _compares_with_ours(config):
        # Saved runs are loaded before the first test: what will be measured is the selected device.
        from fusiongate.timing.clocks import clock_limits

        device = select(config).torch_device
        machines = [{"environment": environment(device).to_json(), "clock_limits": clock_limits(device)}]
    else:
        return
    machine_info[MACHINE_KEY] = machines
    for name in _UNSTABLE:
        machine_info.pop(name, None)
    cpu = machine_info.get("cpu")
    if isinstance(cpu, dict):
        machine_info["cpu"] = {name: value for name, value in cpu.items() if not name.startswith("hz_")}


def _compares_with_ours(config: pytest.Config) -> bool:
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.compare:
        return False
    loaded = session.storage.load() if session.compare is True else session.storage.load(session.compare)
    return any(MACHINE_KEY in saved["machine_info"] for _, saved in loaded)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
) -> None:
    """Refuse to compare times of another GPU or stack: pytest-benchmark would only warn, and judge all the same.

    Raises
    ------
    pytest.UsageError
        The saved run was measured elsewhere.
    """
    saved = compared_benchmark["machine_info"]
    if MACHINE_KEY not in saved or is_worker(config):
        return
    differences = environment_differences(saved[MACHINE_KEY], machine_info[MACHINE_KEY])
    if differences:
        raise pytest.UsageError(
            f"--benchmark-compare: the saved run was measured in another environment: {'; '.join(differences)}; "
            f"record a run here, or judge the two files with: fusiongate judge --allow-environment"
        )
