"""The platform key, the environment that a result was made in, and what differs between two of them.

Torch is imported inside functions only, so that command line and plugin can import this module without it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec

from .errors import UsageError
from .io import shaped
from .switches import PORTABLE, switches

if TYPE_CHECKING:
    import torch

__all__ = ["Environment", "available_cores", "cpu_architecture", "environment", "platform_of"]

_LIBRARIES = ("apache-tvm-ffi", "diffusers", "numpy", "nvidia-cublas", "pytorch-triton-rocm", "transformers", "triton")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def platform_of(device: torch.device | str | int | None = None) -> str:
    """The platform key of a device: ``cuda-sm_90``, ``rocm-gfx942`` or ``cpu-x86_64-avx512``.

    On ROCm it comes from the arch string and never from the capability, which for some AMD parts reads like an NVIDIA
    one's.

    Parameters
    ----------
    device
        A CUDA, ROCm or CPU device; ``None`` is the current GPU, or the CPU where there is none.

    Raises
    ------
    UsageError
        If there is no such device.
    """
    import torch

    chosen = _device(device)
    if chosen.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability().lower()
        isa = "default" if capability in {"default", "no avx"} else capability.replace(" ", "-")
        return f"cpu-{cpu_architecture()}-{isa}"
    properties = torch.cuda.get_device_properties(chosen)
    if torch.version.hip:
        return f"rocm-{properties.gcnArchName.partition(':')[0]}"
    return f"cuda-sm_{properties.major}{properties.minor}"


def cpu_architecture() -> str:
    """Return the CPU's architecture by one name on every operating system: ``x86_64``, ``aarch64``."""
    machine = platform.machine().lower()
    return _MACHINES.get(machine, machine)


def _device(device: torch.device | str | int | None) -> torch.device:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} is no device: expected cpu, cuda or cuda:<number>") from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise UsageError(f"{chosen} has no platform: expected a CPU, CUDA or ROCm device")
    present = torch.cuda.device_count()
    if (chosen.index or 0) >= present:
        raise UsageError(f"{chosen} is not here: this process sees {present} GPUs")
    return chosen


_Name = Annotated[str, msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that may move the bits of a result."""

    platform: _Name
    """The platform key, see :func:`platform_of`."""
    device_name: _Name
    """The device's name as its driver gives it, or the CPU's model."""
    torch: _Name
    """Torch's version with its build suffix."""
    runtime: str | None
    """The runtime that torch was built against, such as ``cuda 13.0``; ``None`` for the CPU."""
    driver: str | None
    """The GPU driver's version, ``None`` where there is none or it cannot be asked."""
    python: _Name
    """The interpreter's version."""
    threads: Annotated[int, msgspec.Meta(gt=0)]
    """Torch's intra-op threads, which cut the sums of CPU reductions."""
    libraries: Mapping[str, str] = field(hash=False)
    """Versions of the libraries that compute or generate code, those that are installed."""
    switches: Mapping[str, str] = field(hash=False)
    """Settings of torch and environment variables that change arithmetic, those variables that are set."""

    @property
    def digest_platform(self) -> str:
        """The platform that digests are kept under: ``cpu-x86_64`` where every library was held to one instruction set.

        What was computed otherwise on a CPU is kept under its vector instructions, as :attr:`platform` has them.
        """
        if self.platform.startswith("cpu-x86_64-") and self.threads == 1 and PORTABLE.items() <= self.switches.items():
            return "cpu-x86_64"
        return self.platform

    def diff(self, other: Environment) -> list[str]:
        """What differs from here to ``other``, in words: ``torch 2.11.0+cu130 → 2.12.0+cu130``."""
        words = []
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            absent = {"libraries": "not installed", "switches": "unset"}.get(name)
            if absent is not None:
                for key in sorted({*mine, *theirs}):
                    before, after = mine.get(key, absent), theirs.get(key, absent)
                    if before != after:
                        words.append(f"{key} {before} → {after}")
            elif mine != theirs:
                before, after = ("none" if value is None else value for value in (mine, theirs))
                words.append(f"{name.replace('_', ' ')} {before} → {after}")
        return words

    def summary(self) -> str:
        """One line for a report or a warning: the platform, the device, and the versions that compute."""
        libraries = "".join(f", {name} {version}" for name, version in sorted(self.libraries.items()))
        driver = "" if self.driver is None else f", driver {self.driver}"
        return f"{self.platform} ({self.device_name}), torch {self.torch}{driver}{libraries}"

    def to_json(self) -> dict[str, Any]:
        """The environment as an object that the json module can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: object) -> Self:
        """The environment that :meth:`to_json` wrote.

        Raises
        ------
        UsageError
            If the record is not one, naming what is wrong with it.
        """
        try:
            return shaped(record, cls, closed=True)
        except ValueError as error:
            raise UsageError(
                f"environment record: {error}; record it again, or read it with the version of fusiongate that wrote it"
            ) from error


def environment(device: torch.device | str | int | None = None) -> Environment:
    """The environment of a result that is computed now, on the given device.

    Parameters
    ----------
    device
        As :func:`platform_of` takes it.

    Raises
    ------
    UsageError
        If there is no such device.
    """
    import torch

    chosen = _device(device)
    on_gpu = chosen.type == "cuda"
    runtime = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return Environment(
        platform=platform_of(chosen),
        device_name=torch.cuda.get_device_name(chosen) if on_gpu else _cpu_name(),
        torch=str(torch.__version__),
        runtime=runtime if on_gpu else None,
        driver=_driver(bool(torch.version.hip)) if on_gpu else None,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        libraries=dict(_libraries()) | ({} if on_gpu else _libc()),
        switches=switches(),
    )


@functools.cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _libraries() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


@functools.cache
def _libc() -> dict[str, str]:
    """The C library, whose functions torch and NumPy call on a CPU."""
    name, version = platform.libc_ver()
    return {name: version} if name else {}


@functools.cache
def _driver(amd: bool) -> str | None:
    if amd:
        try:
            return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip() or None
        except OSError:
            return None
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # the library is optional, and its own errors say only that no driver answers
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
