"""Presets: named, seeded, repeatable runs of real architectures, fused against eager, with digests of every step.

Numbers come from :mod:`fusiongate.presets.rng`; runs from :mod:`fusiongate.presets.running`, here or in a process
of their own.
"""

from typing import TYPE_CHECKING, Any

from fusiongate.errors import SnapshotError

from .baselines import Nondeterministic, location, settle
from .judgements import Judgement, judge
from .op_bisect import Parting, parting
from .outputs import command_preset, decode
from .records import Difference, PresetRecord, first_difference
from .registry import PRESETS, Preset, Run, Size, Steps, lookup, preset
from .rng import fill, normal, uniform
from .running import ArmRun, PresetRun, kernel_sources, missing_for, run_arm, run_preset, steps_of, usual_ops
from .worker import PresetProcess, run_fresh

if TYPE_CHECKING:
    from .timings import HEADINGS, PresetTimes, TimedArm, time_preset

__all__ = [
    "HEADINGS",
    "PRESETS",
    "ArmRun",
    "Difference",
    "Judgement",
    "Nondeterministic",
    "Parting",
    "Preset",
    "PresetProcess",
    "PresetRecord",
    "PresetRun",
    "PresetTimes",
    "Run",
    "Size",
    "SnapshotError",
    "Steps",
    "TimedArm",
    "command_preset",
    "decode",
    "fill",
    "first_difference",
    "judge",
    "kernel_sources",
    "location",
    "lookup",
    "missing_for",
    "normal",
    "parting",
    "preset",
    "run_arm",
    "run_fresh",
    "run_preset",
    "settle",
    "steps_of",
    "time_preset",
    "uniform",
    "usual_ops",
]


def __getattr__(name: str) -> Any:
    # Their statistics take half as long to load as torch: every process of a preset would wait for what it never uses.
    if name in {"HEADINGS", "PresetTimes", "TimedArm", "time_preset"}:
        from . import timings

        return getattr(timings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
