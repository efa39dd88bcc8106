"""The clocks of a GPU and what throttles it, as NVML or AMD SMI tell; without either, nothing is told."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Clocks", "clock_limits", "clock_reader", "disturbance"]

_DRIFT = 0.03
"""The change of the core clock, as a share, from which on two samples are no longer of the same machine."""

# Named by their bits, as the library has renamed its constants. A power cap alone is the usual state of a busy card:
# what it does to a measurement shows in the clock.
_NVIDIA_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class Clocks:
    """One look at a GPU."""

    core_mhz: int
    """The clock of its processors, in MHz."""
    memory_mhz: int
    """The clock of its memory, in MHz."""
    throttled: tuple[str, ...] = ()
    """What slows it down at this moment, in words."""

    def to_json(self) -> dict[str, Any]:
        """The reading as an object of JSON's own types."""
        return {**asdict(self), "throttled": list(self.throttled)}


def disturbance(readings: Sequence[Clocks]) -> str | None:
    """What happened to a GPU between the first and the last reading that spoils a measurement, in words; else None."""
    reasons = sorted({reason for reading in readings for reason in reading.throttled})
    if reasons:
        return f"the device was throttled: {', '.join(reasons)}"
    clocks = [reading.core_mhz for reading in readings]
    if clocks and max(clocks) > min(clocks) * (1 + _DRIFT):
        return f"the core clock moved between {min(clocks)} and {max(clocks)} MHz"
    return None


def clock_reader(device: torch.device) -> Callable[[], Clocks | None]:
    """A function that reads a device's clocks; it gives None where there is nothing to ask."""
    if device.type == "cuda":
        find = _amd_reader if torch.version.hip else _nvidia_reader
        # Libraries that are missing, drivers that refuse and devices they do not know: all of it means no reading.
        with contextlib.suppress(Exception):
            return find(device.index if device.index is not None else torch.cuda.current_device())
    return lambda: None


def clock_limits(device: torch.device) -> dict[str, int]:
    """The highest clocks of an NVIDIA GPU in MHz, as its present settings allow; empty where nobody tells."""
    if device.type == "cuda" and not torch.version.hip:
        with contextlib.suppress(Exception):
            pynvml, handle = _nvidia_handle(device.index if device.index is not None else torch.cuda.current_device())
            return {
                "core_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                "memory_mhz": int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            }
    return {}


@functools.lru_cache
def _nvidia_handle(index: int) -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    # By its identity: the library counts all GPUs, and this process may see only some.
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


@functools.lru_cache
def _nvidia_reader(index: int) -> Callable[[], Clocks | None]:
    pynvml, handle = _nvidia_handle(index)

    def read() -> Clocks | None:
        try:
            bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return Clocks(
                core_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                memory_mhz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                throttled=tuple(name for bit, name in _NVIDIA_REASONS.items() if bits & bit),
            )
        except pynvml.NVMLError:
            return None

    return read


@functools.lru_cache
def _amd_reader(index: int) -> Callable[[], Clocks | None]:
    import amdsmi

    amdsmi.amdsmi_init()
    # Torch's type stubs do not know where a device sits, the object does.
    properties: Any = torch.cuda.get_device_properties(index)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    handle = next(
        handle
        for handle in amdsmi.amdsmi_get_processor_handles()
        if amdsmi.amdsmi_get_gpu_device_bdf(handle).lower().startswith(place)
    )

    def read() -> Clocks | None:
        try:
            kinds = amdsmi.AmdSmiClkType
            status = amdsmi.amdsmi_get_gpu_metrics_info(handle).get("throttle_status")
            return Clocks(
                core_mhz=int(amdsmi.amdsmi_get_clock_info(handle, kinds.GFX)["clk"]),
                memory_mhz=int(amdsmi.amdsmi_get_clock_info(handle, kinds.MEM)["clk"]),
                throttled=("throttling, as the driver tells",) if status in (True, 1) else (),
            )
        except (amdsmi.AmdSmiException, KeyError, ValueError):
            return None

    return read
