"""Gates, kernels, a test matrix, md5 snapshots and timings for fused kernels in diffusion inference.

Everything public is here and loaded when it is first used: importing fusiongate imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import kernels as kernels
    from .comparison.contracts import Exact, Ulp
    from .comparison.digests import digest, md5
    from .comparison.verdicts import Verdict
    from .diagnosis.hints import compare
    from .gate.fusion import Fusion
    from .gate.judging import require_fused, warm_up
    from .gate.policies import After, Every, Policy, Sampled
    from .gate.states import Decision, Event, Reason, State
    from .matrix import ADALN, operand
    from .platforms import Environment, environment
    from .plugin.cells import FusionCase
    from .plugin.saboteurs import PlantedSaboteur
    from .plugin.snapshots import Md5Snapshot
    from .presets import command_preset, preset
    from .scanning import rewired, scan
    from .sites import MountReport, attach, mount, mounted, unmount
    from .subjects import Subject
    from .timing.benchmarks import DeviceBenchmark

_HOMES = {
    "ADALN": "matrix",
    "After": "gate.policies",
    "Decision": "gate.states",
    "DeviceBenchmark": "timing.benchmarks",
    "Environment": "platforms",
    "Event": "gate.states",
    "Every": "gate.policies",
    "Exact": "comparison.contracts",
    "Fusion": "gate.fusion",
    "FusionCase": "plugin.cells",
    "Md5Snapshot": "plugin.snapshots",
    "MountReport": "sites",
    "PlantedSaboteur": "plugin.saboteurs",
    "Policy": "gate.policies",
    "Reason": "gate.states",
    "Sampled": "gate.policies",
    "State": "gate.states",
    "Subject": "subjects",
    "Ulp": "comparison.contracts",
    "Verdict": "comparison.verdicts",
    "attach": "sites",
    "command_preset": "presets",
    "compare": "diagnosis.hints",
    "digest": "comparison.digests",
    "environment": "platforms",
    "md5": "comparison.digests",
    "mount": "sites",
    "mounted": "sites",
    "operand": "matrix",
    "preset": "presets",
    "require_fused": "gate.judging",
    "rewired": "scanning",
    "scan": "scanning",
    "unmount": "sites",
    "warm_up": "gate.judging",
}
"""Where each public name lives."""

__all__ = [
    "ADALN",
    "After",
    "Decision",
    "DeviceBenchmark",
    "Environment",
    "Event",
    "Every",
    "Exact",
    "Fusion",
    "FusionCase",
    "Md5Snapshot",
    "MountReport",
    "PlantedSaboteur",
    "Policy",
    "Reason",
    "Sampled",
    "State",
    "Subject",
    "Ulp",
    "Verdict",
    "attach",
    "command_preset",
    "compare",
    "digest",
    "environment",
    "kernels",
    "md5",
    "mount",
    "mounted",
    "operand",
    "preset",
    "require_fused",
    "rewired",
    "scan",
    "unmount",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module(".kernels", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
