"""Evidence from a GPU, in one command: ``python -m fusiongate.suites.models.evidence``.

Every preset is run in one fresh process and again in another; what agrees in both arms and both processes is recorded
under ``snapshots/``. Then the transformers at their real widths are timed, eager against mounted, in turns. Everything
that is found is printed, and kept as JSON where ``--report`` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fusiongate as fg
from fusiongate import presets
from fusiongate.progress import track

from .catalogue import ALL, REAL
from .forwards import FORWARDS

__all__ = ["main"]

MODULE = "test_snapshots"
"""The test module that holds presets against what is recorded here."""


class Report:
    """What is found, printed at once and kept."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.failures: list[str] = []
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        sys.stdout.write(f"[{time.perf_counter() - self._started:6.1f}] {text}\n")
        sys.stdout.flush()

    def fail(self, text: str) -> None:
        """Print what must not be, and remember it."""
        self.failures.append(text)
        self.say(f"FAILED: {text}")


def sites_of(run: presets.PresetRun) -> Iterator[tuple[str, Counter[str]]]:
    """The calls at each line of the source, over all modules that run it."""
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for site in run.fused.sites:
        line = site.name.partition(":")[2]
        lines[f"{line} {site.kind}"].update(site.calls or {site.reason or "not called": 1})
    yield from lines.items()


def digests(
    report: Report, root: Path, device: torch.device, size: presets.Size, chosen: Sequence[presets.Preset]
) -> None:
    """Run presets in two processes, and record what agrees."""
    able = [preset for preset in chosen if presets.missing_for(preset, size, device) is None]
    for preset in chosen:
        if preset not in able:
            report.say(f"not run: {preset.name} ({size}): {presets.missing_for(preset, size, device)}")
    names = [preset.name for preset in able]
    first, second = (
        list(track(presets.run_fresh(able, size=size, device=device), f"{size} presets, {process} process", names))
        for process in ("first", "second")
    )
    report.say(f"{size}: {len(able)} presets, each in two processes")
    for preset, run, again in zip(able, first, second, strict=True):
        calls = run.fused.calls()
        fused = calls["fused (verified)"]
        try:
            kept = presets.settle(preset, run, again, device=device)
        except presets.SnapshotError as error:
            outcome = str(error)
            report.fail(outcome)
        else:
            path = presets.location(root, run.record.environment, MODULE, preset.name, size)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(kept.text())
            recorded = isinstance(kept, presets.PresetRecord)
            outcome = "recorded, and the same in another process" if recorded else str(kept)
        report.say(f"{preset.name} ({size}): {outcome}; {fused} of {calls.total()} calls fused")
        for line, counted in sites_of(run):
            report.say(f"    {line}: {', '.join(f'{number} {what}' for what, number in sorted(counted.items()))}")
        report.facts[f"{preset.name}-{size}"] = {
            "outcome": outcome,
            "calls": dict(calls),
            "seconds": {"fused": run.fused.seconds, "reference": run.reference.seconds},
            "sites": {line: dict(counted) for line, counted in sites_of(run)},
        }


def forwards(report: Report, device: torch.device, seconds: float) -> None:
    """Time single forward passes at real widths: eager, with modulations alone, and with every kernel."""
    everything = (
        fg.kernels.modulate,
        fg.kernels.modulate_fp32,
        fg.kernels.rms_norm_modulate,
        fg.kernels.composite_rms_norm_modulate,
    )
    for preset in track(FORWARDS, "forwards", [preset.name for preset in FORWARDS]):
        missing = presets.missing_for(preset, "real", device)
        if missing is not None:
            report.say(f"not run: {preset.name}: {missing}")
            continue
        arms = [
            presets.TimedArm("eager", None),
            presets.TimedArm("modulate", (fg.kernels.modulate,)),
            presets.TimedArm("mounted", everything),
        ]
        times = presets.time_preset(preset, size="real", device=device, arms=arms, seconds=seconds)
        for line in times.markdown():
            report.say(line)
        report.facts[preset.name] = {
            "seconds": {arm: times.median(arm) for arm in times.seconds},
            "ratios": {arm: ratio.to_json() for arm, ratio in times.ratios.items()},
        }
        torch.cuda.empty_cache()


def denoising(report: Report, device: torch.device, seconds: float) -> None:
    """Time whole presets at real widths: the table that goes into a pull request."""
    lines = list(presets.HEADINGS)
    for preset in track(REAL, "denoising", [preset.name for preset in REAL]):
        if presets.missing_for(preset, "real", device) is None:
            lines += presets.time_preset(preset, size="real", device=device, seconds=seconds).markdown()
            torch.cuda.empty_cache()
    for line in lines:
        sys.stdout.write(line + "\n")
    report.facts["denoising"] = lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Gather the evidence; 1 if something is not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m fusiongate.suites.models.evidence", description=__doc__)
    parser.add_argument("--snapshots", type=Path, default=Path("snapshots"), help="the folder to record in")
    parser.add_argument("--report", type=Path, help="a file for everything that was found, as JSON")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each transformer is timed")
    parser.add_argument("--device", default="cuda", help="the GPU")
    parser.add_argument("--only", choices=("tiny", "real", "times"), help="one part of it")
    parser.add_argument("--markdown", action="store_true", help="instead, print denoising times of presets as a table")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    report = Report()
    if given.markdown:
        denoising(report, device, given.seconds)
        return 0
    where = fg.environment(device)
    report.say(where.summary())
    report.facts["environment"] = where.to_json()
    report.facts["sources"] = presets.kernel_sources()
    if given.only in (None, "tiny"):
        digests(report, given.snapshots, device, "tiny", ALL)
    if given.only in (None, "real"):
        digests(report, given.snapshots, device, "real", REAL)
    if given.only in (None, "times"):
        forwards(report, device, given.seconds)
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(report.facts, indent=2) + "\n")
    for failure in report.failures:
        report.say(f"FAILED: {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
