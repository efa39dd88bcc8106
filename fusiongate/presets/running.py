"""Running a preset: one arm after the other, each step digested as soon as it is there."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusiongate.comparison.digests import digest
from fusiongate.errors import UsageError
from fusiongate.gate.device_state import wait_for
from fusiongate.gate.fusion import Fusion
from fusiongate.jit import source_hash
from fusiongate.platforms import environment
from fusiongate.scanning.rewire import RewiredSite

from .records import ArmRecord, PresetRecord, TensorRecord
from .registry import Arm, Preset, Run, Size, Steps

__all__ = [
    "ArmRun",
    "PresetRun",
    "SiteCount",
    "kernel_sources",
    "missing_for",
    "run_arm",
    "run_preset",
    "single_thread",
    "steps_of",
    "usual_ops",
]


@dataclass(frozen=True, slots=True)
class SiteCount:
    """One site of a preset's models and the calls that it had."""

    name: str
    """The site, see :class:`fusiongate.scanning.RewiredSite`."""
    kind: str
    """The kernel that stands there, or would fit."""
    reason: str | None
    """Why none stands there."""
    calls: dict[str, int]
    """Calls by ``path (reason)``."""
    refused: str | None = None
    """What its gate said when it refused the kernel; ``None`` where it never did."""


@dataclass(frozen=True, slots=True)
class ArmRun:
    """What one arm gave."""

    steps: ArmRecord
    """Digests of each step."""
    seconds: float
    """From the first step's beginning to the last one's end, digesting left out."""
    sites: tuple[SiteCount, ...]
    """The sites of the models that were rewired; none in the reference's arm."""

    def calls(self) -> Counter[str]:
        """The calls of all sites by ``path (reason)``."""
        return sum((Counter(site.calls) for site in self.sites), Counter())


@dataclass(frozen=True, slots=True)
class PresetRun:
    """Both arms, and what they are recorded as."""

    record: PresetRecord
    """What is kept."""
    fused: ArmRun
    """The arm with kernels."""
    reference: ArmRun
    """The arm without."""

    def faults(self) -> list[str]:
        """Why this run proves nothing about its kernels, one sentence each; empty where it does."""
        refused = [f"the gate at {site.name} {site.refused}" for site in self.fused.sites if site.refused is not None]
        return self.record.faults() + refused


def usual_ops(device: torch.device | str) -> tuple[Fusion, ...]:
    """The fusions that presets mount on a device.

    On a CPU these are the host builds of the modulations. The host builds of the norms repeat a GPU's order of
    summation, which is not the CPU's: their gates would rightly refuse all of them.
    """
    from fusiongate import kernels

    if torch.device(device).type == "cpu":
        hosts = (kernels.modulate.host, kernels.modulate_fp32.host)
        return tuple(op for op in hosts if op is not None)
    return (  # only on a GPU: a CPU has host builds
        kernels.modulate,
        kernels.modulate_fp32,
        kernels.rms_norm_modulate,
        kernels.composite_rms_norm_modulate,
    )


def missing_for(preset: Preset, size: str, device: torch.device) -> str | None:
    """What keeps a preset from running here; ``None`` where nothing does."""
    absent = [name for name in preset.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: pip install 'fusiongate[models]'"
    if device.type not in preset.devices:
        return f"it runs on {' or '.join(preset.devices)} only"
    if size not in preset.sizes:
        return f"it has no size {size!r}"
    if size == "real" and device.type == "cpu":
        return "the real size needs a GPU"
    return None


@contextlib.contextmanager
def single_thread(device: torch.device) -> Iterator[None]:
    """One thread on a CPU, whose number cuts the sums of reductions; on other devices, nothing."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def steps_of(preset: Preset, run: Run) -> Steps:
    """The steps of a preset with their names checked.

    Raises
    ------
    UsageError
        If a name comes twice, or there is no step at all.
    """
    seen: set[str] = set()
    # What is kept for another run, its mounts among it, is the caller's to close.
    closing = run.exits if run.built is None else contextlib.nullcontext()
    with closing, torch.no_grad(), single_thread(run.device):
        for step, tensors in preset.steps(run):
            if step in seen:
                raise UsageError(f"preset {preset.name!r} yields {step!r} twice: each step needs a name of its own")
            seen.add(step)
            yield step, tensors
    if not seen:
        raise UsageError(f"preset {preset.name!r} yields nothing: expected a name and tensors at each step")


def run_arm(
    preset: Preset,
    arm: Arm,
    *,
    size: Size = "tiny",
    seed: int = 0,
    device: torch.device,
    ops: Sequence[Fusion] | None = None,
) -> ArmRun:
    """Run one arm.

    Parameters
    ----------
    preset, size, seed, device
        What, how large, with which numbers, and where.
    arm
        With kernels or without.
    ops
        The fusions to mount; by default those of :func:`usual_ops`.

    Raises
    ------
    UsageError
        If the preset yields no named tensors.
    """
    chosen = tuple(usual_ops(device) if ops is None else ops) if arm == "fused" else ()
    run = Run(size=size, seed=seed, device=device, arm=arm, ops=chosen)
    steps: dict[str, dict[str, TensorRecord]] = {}
    seconds = 0.0
    generator = steps_of(preset, run)
    while True:
        started = time.perf_counter()
        step = next(generator, None)
        if step is None:
            break
        name, tensors = step
        wait_for(device)
        seconds += time.perf_counter() - started
        steps[name] = _digested(preset, name, tensors)
    sites = tuple(
        SiteCount(
            site.name,
            site.kind,
            site.reason,
            {f"{path} ({reason})": count for (path, reason), count in sorted(site.counters.items())},
            _refusal(site),
        )
        for report in run.reports
        for site in report.sites
    )
    return ArmRun(steps, seconds, sites)


def _refusal(site: RewiredSite) -> str | None:
    events = [] if site.fusion is None else site.fusion.gate.events
    return next((str(event) for event in events if event.kind == "refused"), None)


def _digested(preset: Preset, step: str, tensors: object) -> dict[str, TensorRecord]:
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UsageError(
            f"preset {preset.name!r}, step {step!r}: it yields {type(tensors).__name__}; expected a mapping from names "
            f"to tensors"
        )
    return {
        name: TensorRecord(found.dtype, found.shape, found.md5, found.nonfinite, _constant(tensors[name]))
        for name, found in digest(tensors).items()
    }


def _constant(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


def run_preset(
    preset: Preset,
    *,
    size: Size = "tiny",
    seed: int = 0,
    device: torch.device | str = "cpu",
    ops: Sequence[Fusion] | None = None,
) -> PresetRun:
    """Run both arms in this process, the reference first.

    Parameters and errors as for :func:`run_arm`.
    """
    chosen = torch.device(device)
    reference = run_arm(preset, "reference", size=size, seed=seed, device=chosen)
    fused = run_arm(preset, "fused", size=size, seed=seed, device=chosen, ops=ops)
    with single_thread(chosen):
        where = environment(chosen)
    record = PresetRecord(
        preset=preset.name,
        size=size,
        seed=seed,
        fused=fused.steps,
        reference=reference.steps,
        sources=kernel_sources(),
        environment=where,
    )
    return PresetRun(record, fused, reference)


def kernel_sources() -> str:
    """The hash of the sources of the kernels that are mounted."""
    from fusiongate.kernels import SOURCES

    return source_hash(SOURCES)
