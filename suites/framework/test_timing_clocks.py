"""The clocks of a GPU: what counts as a disturbance, and that NVML is asked about the right device."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from fusiongate.timing import clocks
from fusiongate.timing.clocks import Clocks, clock_limits, clock_reader, disturbance

GPU = torch.device("cuda", 1)


class FakeNvml(types.ModuleType):
    """Stands in for pynvml on a machine without a driver."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    reasons = 0
    lost = False

    def nvmlInit(self) -> None:  # noqa: N802  # the library's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802  # likewise
        return uuid

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802  # likewise
        if self.lost:
            raise self.NVMLError
        return self.reasons

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802  # likewise
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind] if handle == "GPU-one" else 0

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802  # likewise
        return self.nvmlDeviceGetClockInfo(handle, kind) + 10


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    uuids = {0: "zero", 1: "one"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index]))
    caches = (clocks._nvidia_handle, clocks._nvidia_reader)
    for cached in caches:
        cached.cache_clear()
    yield fake
    for cached in caches:
        cached.cache_clear()


def test_a_steady_clock_is_no_disturbance() -> None:
    assert disturbance([]) is None
    assert disturbance([Clocks(1980, 3201), Clocks(1950, 3201)]) is None


def test_a_clock_that_moves_is_told_with_its_range() -> None:
    readings = [Clocks(1980, 3201), Clocks(1755, 3201), Clocks(1980, 3201)]
    assert "the core clock moved between 1755 and 1980 MHz" == disturbance(readings)


def test_throttling_is_told_with_its_reasons() -> None:
    readings = [Clocks(1980, 3201, ("power brake",)), Clocks(1980, 3201, ("hardware slowdown", "power brake"))]
    assert "the device was throttled: hardware slowdown, power brake" == disturbance(readings)


def test_the_gpu_is_asked_by_its_identity_whatever_its_number_here(nvml: FakeNvml) -> None:
    assert Clocks(1980, 3201) == clock_reader(GPU)()
    assert {"core_mhz": 1990, "memory_mhz": 3211} == clock_limits(GPU)


@pytest.mark.parametrize(
    "bits, words",
    [
        (0x01, ()),  # idle
        (0x04, ()),  # the power cap, which a busy card is often at
        (0x08 | 0x40, ("hardware slowdown", "thermal slowdown by hardware")),
        (0x20, ("thermal slowdown by software",)),
        (0x80, ("power brake",)),
    ],
)
def test_what_slows_a_gpu_down_is_put_in_words(nvml: FakeNvml, bits: int, words: tuple[str, ...]) -> None:
    nvml.reasons = bits
    reading = clock_reader(GPU)()
    assert reading is not None
    assert words == reading.throttled


def test_a_driver_that_no_longer_answers_gives_no_reading(nvml: FakeNvml) -> None:
    read = clock_reader(GPU)
    nvml.lost = True
    assert read() is None


def test_a_cpu_has_no_reading() -> None:
    assert clock_reader(torch.device("cpu"))() is None
    assert {} == clock_limits(torch.device("cpu"))


def test_a_missing_library_gives_no_reading(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert clock_reader(GPU)() is None
    assert {} == clock_limits(GPU)


def test_a_reading_is_of_jsons_own_types() -> None:
    assert {"core_mhz": 1, "memory_mhz": 2, "throttled": ["a"]} == Clocks(1, 2, ("a",)).to_json()
