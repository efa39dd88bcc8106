"""A library is first loaded in a child process: an abort or illegal instruction there is one exception here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from fusiongate.errors import ProbeFailed

from .cache import Entry, Manifest
from .processes import run_child
from .sources import Source
from .targets import Target

__all__ = ["machine_identity", "probe_once"]

_PROBE_TIMEOUT_S = 120.0
_OUTPUT_LINES = 15


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


def probe_once(source: Source, target: Target, entry: Entry, manifest: Manifest, identity: dict[str, str]) -> None:
    """Load a library in a child process and call its probes, unless it has passed them on this machine before.

    The child calls the library's own ``fusiongate_probe()`` where it exports one, then ``source.probe``.

    Raises
    ------
    ProbeFailed
        The child raised, was killed by a signal (which the message names) or ran past its limit. Nothing about a
        failure is stored, so that a new process tries again.
    """
    stamp = {**identity, "library": manifest.sha256, "probe": source.probe or ""}
    digest = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()
    name = f"probe-{digest[:16]}.json"
    if (entry.folder / name).is_file():
        return
    request = {
        "task": "probe",
        "library": str(entry.library),
        "target": str(target),
        "probe": source.probe,
        "without_torch": target.kind == "host" and source.probe is None,
    }
    outcome = run_child(request, os.environ, _PROBE_TIMEOUT_S)
    if outcome.returncode != 0:
        if outcome.signal_name is not None:
            happened = f"killed the process that first loaded it, by {outcome.signal_name}"
        elif outcome.returncode is None:
            happened = f"did not return from its probe within {_PROBE_TIMEOUT_S:.0f} s"
        else:
            happened = "failed its probe"
        lines = [line for line in outcome.output.splitlines() if line.strip()]
        raise ProbeFailed(
            "\n".join([f"{source.name} for {target} {happened}; it is not loaded here", *lines[-_OUTPUT_LINES:]])
        )
    entry.write_json(name, {**stamp, "passed": datetime.now(UTC).isoformat(timespec="seconds")})


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
