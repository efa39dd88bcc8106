"""What a kernel library is built for: its flags, which keep the arithmetic as written, and the devices that run it."""

from __future__ import annotations

import contextlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fusiongate.errors import ProbeFailed, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "local_targets", "machine_identity"]

Kind = Literal["host", "cuda", "hip"]

_ARCHES: dict[Kind, str] = {"host": r"\w+", "cuda": r"sm_\d{2,3}[af]?", "hip": r"gfx[0-9a-f]{3,4}"}

# Contraction is off everywhere: a kernel is exact because each operation rounds on its own, and a fused multiply-add
# rounds once where eager rounds twice. The host never gets -march=native: one cache may be shared by machines with
# different CPUs (an illegal instruction kills the process), and bits that depend on the CPU are no reference.
# Hidden visibility keeps the static variables of inline functions apart when a host and a device build of one source
# live in one process. nvcc's device code is optimised at level 3 by default; saying so again only draws a warning.
_FLAGS: dict[Kind, tuple[str, ...]] = {
    "host": ("-O2", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"),
    "cuda": (
        "--fmad=false",
        "--expt-relaxed-constexpr",
        "-Xcompiler",
        "-ffp-contract=off",
        "-Xcompiler",
        "-fvisibility=hidden",
    ),
    "hip": ("-O3", "-ffp-contract=off", "-fvisibility=hidden"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture that a library is built for, such as ``Target("cuda", "sm_90")``."""

    kind: Kind
    """``host`` for the CPU, ``cuda`` for NVIDIA, ``hip`` for AMD."""
    arch: str
    """The machine's name on the host (``x86_64``), else the GPU's architecture (``sm_90``, ``gfx942``)."""

    def __post_init__(self) -> None:
        if self.kind not in _ARCHES:
            raise UsageError(f"target kind {self.kind!r}: expected one of {', '.join(_ARCHES)}")
        if not re.fullmatch(_ARCHES[self.kind], self.arch):
            example = {"host": "x86_64", "cuda": "sm_90", "hip": "gfx942"}[self.kind]
            raise UsageError(f"architecture {self.arch!r}: expected a name such as {example} for {self.kind}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.arch}"

    @staticmethod
    def host() -> Target:
        """Return the target of this machine's CPU."""
        return Target("host", platform.machine().lower())

    @staticmethod
    def of(device: torch.device) -> Target:
        """Return the target whose libraries run on a device.

        Raises
        ------
        UsageError
            The device is neither a CPU nor a GPU that torch calls ``cuda``.
        """
        if device.type == "cpu":
            return Target.host()
        if device.type != "cuda":
            raise UsageError(f"device {device}: expected a cpu or cuda device; kernels exist for no other")
        import torch

        if torch.version.hip is not None:
            # The full name carries feature switches, as in gfx942:sramecc+:xnack-.
            return Target("hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
        major, minor = torch.cuda.get_device_capability(device)
        return Target("cuda", f"sm_{major}{minor}")

    @staticmethod
    def parse(text: str) -> Target:
        """Return the target that a user names: ``host``, ``sm_90``, ``gfx942``, or in full as ``cuda-sm_90``.

        Raises
        ------
        UsageError
            The text names no target.
        """
        kind, _, arch = text.strip().partition("-")
        if kind == "cuda" and arch:
            return Target("cuda", arch)
        if kind == "hip" and arch:
            return Target("hip", arch)
        if text == "host" or text == str(Target.host()):
            return Target.host()
        if text.startswith("sm_"):
            return Target("cuda", text)
        if text.startswith("gfx"):
            return Target("hip", text)
        raise UsageError(
            f"architecture {text!r}: expected host, an NVIDIA name such as sm_90 or an AMD name such as gfx942"
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags beyond what the binding layer itself passes."""
        return (*_FLAGS[self.kind], f"-DFUSIONGATE_TARGET_{self.kind.upper()}=1")

    @property
    def arch_list(self) -> str:
        """The architecture as the binding layer's environment variables spell it: ``9.0`` for sm_90, ``gfx942``."""
        if self.kind != "cuda":
            return self.arch
        number = re.fullmatch(r"sm_(\d+)(\d[af]?)", self.arch)
        assert number is not None  # __post_init__ has checked the spelling
        return f"{number[1]}.{number[2]}"


def local_targets() -> tuple[Target, ...]:
    """Return every target that this machine can run: the host, then each GPU architecture that torch sees."""
    import torch

    targets = [Target.host()]
    if torch.cuda.is_available():
        targets += [Target.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return tuple(dict.fromkeys(targets))


def machine_identity(target: Target) -> dict[str, str]:
    """Return what a successful probe holds for: device, driver and runtime of this machine, as seen from a target.

    Raises
    ------
    ProbeFailed
        This machine has no device that the target's libraries run on.
    """
    if target.kind == "host":
        if target != Target.host():
            raise ProbeFailed(_no_device(target, f"this machine is {Target.host().arch}"))
        return {"target": str(target), "device": _processor(), "driver": platform.release(), "runtime": ""}
    import torch

    if not torch.cuda.is_available():
        raise ProbeFailed(_no_device(target, "torch sees no GPU here"))
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    names = {torch.cuda.get_device_name(device) for device in devices if Target.of(device) == target}
    if not names:
        here = ", ".join(sorted({Target.of(device).arch for device in devices}))
        raise ProbeFailed(_no_device(target, f"the GPUs here are {here}"))
    return {
        "target": str(target),
        "device": ", ".join(sorted(names)),
        "driver": _driver(),
        "runtime": f"torch {torch.__version__}, cuda {torch.version.cuda}, hip {torch.version.hip}",
    }


def _no_device(target: Target, found: str) -> str:
    return (
        f"no device for {target}: {found}; `fusiongate build --arch {target.arch}` compiles for another machine "
        f"without loading"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    # Neither vendor's driver version is in torch's public interface, and both kernel modules tell it here.
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            return Path(file).read_text(encoding="utf-8").partition("\n")[0].strip()
    return platform.release()
