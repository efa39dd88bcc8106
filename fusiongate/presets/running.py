"""Running a preset: one arm after the other, each step digested as soon as it is there."""

from __future__ import annotations

import contextlib
import gc
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
from fusiongate.gate.states import Reason
from fusiongate.jit import source_hash
from fusiongate.platforms import environment

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
    """The sites of the models that were rewired, then every other fusion that was called; none without kernels."""

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
    must_fuse: bool = True
    """Whether a call had to be fused."""

    def faults(self) -> list[str]:
        """Why this run proves nothing about its kernels, one sentence each; empty where it does."""
        refused = [
            f"the gate at {site.name} {site.refused}\n"
            f"  If the kernel is not meant for these arguments, let its declines say so"
            for site in self.fused.sites
            if site.refused is not None
        ]
        found = self.record.faults() + refused
        calls = self.fused.calls()
        if self.must_fuse and not refused and not any(call.startswith("fused ") for call in calls):
            told = ", ".join(f"{count} × {call}" for call, count in calls.items()) or "no fusion was called"
            found.append(
                f"nothing fused: no call took a kernel ({told}); mount kernels and call each signature at least twice, "
                f"or declare the preset with fused=False if the digests of eager alone are meant"
            )
        return found


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
    counts = _Counts() if arm == "fused" else None
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
        if counts is not None:
            # While the preset still holds its models: the fusions that it has mounted end with them.
            counts.look()
    return ArmRun(steps, seconds, () if counts is None else tuple(counts.sites(run)))


class _Counts:
    """What each fusion of this process was called for since now, whoever mounted it."""

    def __init__(self) -> None:
        self._before = {id(fusion): (fusion, *_counted(fusion)) for fusion in _fusions()}
        self._seen: dict[int, Fusion] = {}

    def look(self) -> None:
        """Keep every fusion that there is now."""
        self._seen |= {id(fusion): fusion for fusion in _fusions()}

    def sites(self, run: Run) -> Iterator[SiteCount]:
        """The sites of the run's models, and then every other fusion that was called."""
        mounted = set()
        for site in (site for report in run.reports for site in report.sites):
            mounted.add(id(site.fusion))
            yield SiteCount(site.name, site.kind, site.reason, _told(site.counters), self._refusal(site.fusion))
        for fusion in self._seen.values():
            calls = self._calls(fusion)
            if id(fusion) not in mounted and calls:
                yield SiteCount(fusion.name, fusion.name, None, _told(calls), self._refusal(fusion))

    def _calls(self, fusion: Fusion) -> Counter[tuple[str, str]]:
        _, before, _ = self._before.get(id(fusion), (fusion, Counter[tuple[str, str]](), 0))
        return Counter(fusion.counters) - before

    def _refusal(self, fusion: Fusion | None) -> str | None:
        """What a gate said when it refused, in this run or for a call of this run."""
        if fusion is None:
            return None
        _, _, known = self._before.get(id(fusion), (fusion, Counter[tuple[str, str]](), 0))
        told = [str(event) for event in fusion.gate.events if event.kind == "refused"]
        fresh = told[known:] or (told if self._calls(fusion)["reference", str(Reason.REFUSED)] else [])
        return fresh[0] if fresh else None


def _fusions() -> list[Fusion]:
    """Every fusion that lives, as the garbage collector knows it: nothing has to be told of a mount."""
    return [found for found in gc.get_objects() if type(found) is Fusion]


def _counted(fusion: Fusion) -> tuple[Counter[tuple[str, str]], int]:
    return Counter(fusion.counters), sum(event.kind == "refused" for event in fusion.gate.events)


def _told(calls: Mapping[tuple[str, str], int]) -> dict[str, int]:
    return {f"{path} ({reason})": count for (path, reason), count in sorted(calls.items())}


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
    return PresetRun(record, fused, reference, preset.fused)


def kernel_sources() -> str:
    """The hash of the sources of the kernels that are mounted."""
    from fusiongate.kernels import SOURCES

    return source_hash(SOURCES)
