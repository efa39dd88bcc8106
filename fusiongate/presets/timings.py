"""End-to-end times of a preset: eager, mounted and compiled, the same work in turns on the same device."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fusiongate.errors import UsageError
from fusiongate.gate.device_state import wait_for
from fusiongate.gate.fusion import Fusion
from fusiongate.timing.intervals import Ratio, median_interval
from fusiongate.timing.pairing import Schedule, Settings, pair
from fusiongate.timing.recorded import SCHEMA, TimedRow

from .registry import Preset, Run, Size
from .running import kernel_sources, missing_for, steps_of, usual_ops

__all__ = ["HEADINGS", "PresetTimes", "TimedArm", "time_preset"]

HEADINGS = ("| preset | arm | seconds | change |", "| --- | --- | ---: | ---: |")
"""The head of the table that :meth:`PresetTimes.markdown` gives the rows of."""

_LEVEL = 0.01
"""What the intervals of the medians may miss."""


@dataclass(slots=True)
class TimedArm:
    """One way to run a preset, with its models built once and kept."""

    name: str
    """``eager``, ``mounted``, ``compiled``, or a word of the caller's."""
    ops: tuple[Fusion, ...] | None
    """The fusions to mount; ``None`` for none."""
    compiles: bool = False
    """Whether the models are compiled."""
    built: dict[str, nn.Module] = field(default_factory=dict)
    """The models."""

    def run(self, preset: Preset, size: Size, seed: int, device: torch.device, exits: contextlib.ExitStack) -> float:
        """The seconds that one run takes, from before its first step until the device has finished the last."""
        run = Run(
            size=size,
            seed=seed,
            device=device,
            arm="reference" if self.ops is None else "fused",
            ops=self.ops or (),
            prepare=_compiled if self.compiles else None,
            built=self.built,
            exits=exits,
        )
        wait_for(device)
        started = time.perf_counter()
        for _ in steps_of(preset, run):
            pass
        wait_for(device)
        return time.perf_counter() - started


def _compiled(model: nn.Module) -> nn.Module:
    # In place: what a preset asks of its model, its configuration say, is still there.
    model.compile()
    return model


@dataclass(frozen=True, slots=True)
class PresetTimes:
    """How long a preset takes."""

    preset: str
    """Its name."""
    size: str
    """``tiny`` or ``real``."""
    seconds: Mapping[str, tuple[float, ...]]
    """The seconds of each run, by arm."""
    ratios: Mapping[str, Ratio]
    """Each arm but the first against it."""
    sources: str
    """The hash of the kernels' sources."""

    def median(self, arm: str) -> float:
        """The median of an arm's runs, in seconds."""
        return statistics.median(self.seconds[arm])

    def rows(self) -> Iterator[TimedRow]:
        """The times as pytest-benchmark keeps them, a row for each arm."""
        reference = next(iter(self.seconds))
        for arm, seconds in self.seconds.items():
            ratio = self.ratios.get(arm)
            info = {
                "fusiongate": SCHEMA,
                "median_s": median_interval(seconds, _LEVEL).to_json(),
                "ratio": None if ratio is None else ratio.to_json(),
                "reference": reference,
                "sources": self.sources,
                "timer": "wall",
                "notes": [],
            }
            yield TimedRow(self.preset, self.size, "denoise", arm, seconds, 1, info)

    def markdown(self) -> Iterator[str]:
        """The rows of a table under :data:`HEADINGS`: preset, arm, seconds, and the change with its interval."""
        for arm in self.seconds:
            change = "" if arm not in self.ratios else _change(self.ratios[arm])
            yield f"| {self.preset} ({self.size}) | {arm} | {self.median(arm):.4f} | {change} |"


def _change(ratio: Ratio) -> str:
    value, low, high = ((end - 1) * 100 for end in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"


@dataclass(frozen=True, slots=True)
class _Turns:
    """Takes samples by running the arms in the order that is asked for."""

    arms: Sequence[TimedArm]
    preset: Preset
    size: Size
    seed: int
    device: torch.device
    exits: contextlib.ExitStack

    def sample(self, order: Sequence[int]) -> Sequence[float]:
        return [self.one(number) for number in order]

    def one(self, number: int) -> float:
        return self.arms[number].run(self.preset, self.size, self.seed, self.device, self.exits)


def time_preset(
    preset: Preset,
    *,
    size: Size = "tiny",
    seed: int = 0,
    device: torch.device | str = "cpu",
    arms: Sequence[TimedArm] | None = None,
    seconds: float = 20.0,
) -> PresetTimes:
    """Measure the runs of a preset in turns, arm against arm.

    Parameters
    ----------
    preset, size, seed, device
        What, how large, with which numbers, and where. Every arm has models of its own.
    arms
        The first is the reference; by default eager, mounted and compiled.
    seconds
        How long to measure; sixteen rounds at least are made, however long they take.

    Raises
    ------
    UsageError
        If the preset does not run there, or there are fewer than two arms.
    """
    where = torch.device(device)
    settings = Settings(seconds=seconds, margin=0.005, precision=0.002)
    chosen = list(arms) if arms is not None else _usual_arms(where)
    if len(chosen) < 2:
        raise UsageError(f"time_preset: {len(chosen)} arms; expected the reference and at least one more")
    missing = missing_for(preset, size, where)
    if missing is not None:
        raise UsageError(f"preset {preset.name!r} does not run here: {missing}")
    with contextlib.ExitStack() as exits:
        turns = _Turns(chosen, preset, size, seed, where, exits)
        # Twice: building, compiling and first sights happen in the first, and shapes that depend on them in the second.
        for number in range(len(chosen)):
            turns.one(number)
        unit = 2 * sum(turns.one(number) for number in range(len(chosen)))
        paired = pair(
            turns, len(chosen), Schedule.plan(settings, unit), settings, resolution=lambda: [0.0] * len(chosen)
        )
    return PresetTimes(
        preset=preset.name,
        size=size,
        seconds={arm.name: tuple(paired.seconds[:, :, n].flatten().tolist()) for n, arm in enumerate(chosen)},
        ratios={chosen[number].name: ratio for number, ratio in paired.ratios.items()},
        sources=kernel_sources(),
    )


def _usual_arms(device: torch.device) -> list[TimedArm]:
    return [
        TimedArm("eager", None),
        TimedArm("mounted", usual_ops(device)),
        TimedArm("compiled", None, compiles=True),
    ]
