"""What is kept of a preset for later: its record, or the finding that it does not repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fusiongate.errors import SnapshotError, UsageError
from fusiongate.io import parse_json, read_bytes
from fusiongate.platforms import Environment

from .op_bisect import OpRecord, Parting, parting
from .records import SCHEMA, PresetRecord, checked, first_difference
from .registry import Preset, Size
from .running import PresetRun
from .worker import PresetProcess, run_fresh

__all__ = ["Nondeterministic", "establish", "load", "loads", "location", "settle", "torch_release"]

_ATTEMPTS = 4
"""Pairs of processes that are compared operator by operator: what a preset leaves to chance may agree by chance."""


@dataclass(frozen=True, slots=True)
class Nondeterministic:
    """The finding that a preset gives something else in another process; it has no md5."""

    preset: str
    """The preset's name."""
    size: str
    """``tiny`` or ``real``."""
    seed: int
    """The run's seed."""
    step: str
    """The first step that differed."""
    tensor: str
    """The first tensor of it that did."""
    module: str | None
    """The module that called the first operator that differed; ``None`` where no operator was caught."""
    op: str | None
    """That operator."""
    sources: str
    """The hash of the kernels' sources."""
    environment: Environment
    """Where it was found."""

    def to_json(self) -> dict[str, Any]:
        """The finding as the json module can write it."""
        fields = {name: getattr(self, name) for name in ("preset", "size", "seed", "step", "tensor", "module", "op")}
        kept = {"schema": SCHEMA, "class": "nondeterministic", **fields, "sources": self.sources}
        return {**kept, "environment": self.environment.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The finding that :meth:`to_json` wrote.

        Raises
        ------
        SnapshotError
            If it is none.
        """
        found = checked(fields, cls)
        try:
            Environment.from_json(fields["environment"])  # which has no field that this version does not know
        except UsageError as error:
            raise SnapshotError(f"a preset's record is damaged: {error}; record it again") from error
        return found

    def text(self) -> str:
        """The finding as its file holds it."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    def __str__(self) -> str:
        where = f"step {self.step!r}, tensor {self.tensor!r}"
        if self.op is None:
            return f"nondeterministic: first at {where}; no single operator was caught at it"
        inside = f" in {self.module}" if self.module else ""
        return f"nondeterministic: first at {where}; by {self.op}{inside}"


def location(root: Path, environment: Environment, module: str, preset: str, size: str) -> Path:
    """Where a preset's record lies.

    ``<platform>/<device>/torch-<x.y>/<test module>/<preset>.json``, with the platform of digests; on CPUs the device
    is ``any``.
    """
    platform = environment.digest_platform
    device = "any"
    if not platform.startswith("cpu-"):
        device = re.sub(r"[^a-z0-9]+", "-", environment.device_name.lower()).strip("-")
    name = preset if size == "tiny" else f"{preset}-{size}"
    return root / platform / device / f"torch-{torch_release(environment)}" / module / f"{name}.json"


def torch_release(environment: Environment) -> str:
    """Return the release of torch that records are kept by: ``2.13``."""
    return ".".join(environment.torch.split(".")[:2])


def loads(text: str, where: str) -> PresetRecord | Nondeterministic:
    """The record in a text.

    Raises
    ------
    SnapshotError
        If it is none; the message begins with ``where``.
    """
    try:
        fields = parse_json(text)
        if isinstance(fields, Mapping) and fields.get("class") == "nondeterministic":
            return Nondeterministic.from_json(fields)
        return PresetRecord.from_json(fields)
    except (ValueError, SnapshotError) as error:
        raise SnapshotError(f"{where}: {error}") from error


def load(path: Path) -> PresetRecord | Nondeterministic | None:
    """The record in a file; ``None`` where there is no file.

    Raises
    ------
    SnapshotError
        If the file is damaged.
    """
    try:
        return loads(read_bytes(path).decode(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error


def establish(
    preset: Preset, run: PresetRun, *, size: Size, seed: int, device: torch.device
) -> PresetRecord | Nondeterministic:
    """What may be kept of a run, by another run in a fresh process, see :func:`settle`.

    Parameters
    ----------
    preset, size, seed, device
        What was run, and how.
    run
        The run, from a process of its own.

    Raises
    ------
    SnapshotError
        If nothing may be kept.
    """
    (again,) = run_fresh([preset], size=size, seed=seed, device=device)
    return settle(preset, run, again, device=device)


def settle(
    preset: Preset, run: PresetRun, again: PresetRun, *, device: torch.device
) -> PresetRecord | Nondeterministic:
    """What may be kept of two runs: they have to mean something, both arms have to agree, and both processes.

    Parameters
    ----------
    preset, device
        What was run, and where.
    run, again
        The runs, each from a process of its own.

    Raises
    ------
    SnapshotError
        If nothing may be kept.
    """
    record = run.record
    if faults := run.faults():
        raise SnapshotError(f"preset {preset.name!r} proves nothing and is not recorded: {'; '.join(faults)}")
    drift = first_difference(record.reference, again.record.reference)
    if drift is not None:
        found = _caught(preset, run, device)
        return Nondeterministic(
            preset=preset.name,
            size=record.size,
            seed=record.seed,
            step=drift.step,
            tensor=drift.tensor,
            module=found.module if found is not None else None,
            op=found.op if found is not None else None,
            sources=record.sources,
            environment=record.environment,
        )
    for arms in (record, again.record):
        parted = first_difference(arms.reference, arms.fused)
        if parted is not None:
            raise SnapshotError(
                f"preset {preset.name!r} is not recorded: with kernels it gives something else than without, "
                f"first at {parted}"
            )
    return record


def _caught(preset: Preset, run: PresetRun, device: torch.device) -> Parting | None:
    """The first operator at which two processes part."""
    size: Size = "real" if run.record.size == "real" else "tiny"

    def traced() -> list[OpRecord]:
        with PresetProcess(device) as process:
            return process.trace(preset, size=size, seed=run.record.seed)

    first = traced()
    return next((found for _ in range(_ATTEMPTS) if (found := parting(first, traced())) is not None), None)
