"""Certifying one kernel: its stages in turn, and what follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusiongate.comparison.bits import dtype_name
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.io import write_text
from fusiongate.jit import source_hash
from fusiongate.kernels import FUSIONS, SOURCES
from fusiongate.platforms import Environment, environment

from .stages import EVERY_OP, ONCE, VALUES, Bench
from .trials import ROWS, WITNESS, Counterexample, Found, StageResult, Trials, evidence

__all__ = ["KERNELS", "Certificate", "certify", "check_request", "counterexample", "device_named", "stage_names"]

_SCHEDULES = {"modulate": EVERY_OP, "modulate_fp32": ONCE}
_NORM_CLAIM = "the witness is the reference's on every row that was tried: evidence, not proof"
_NORM_ASSUMPTIONS = (
    "a row of D elements has more values than can be tried; rows of many structures were",
    "what follows the norm are the stages of modulate, which a certificate of its own covers",
)

KERNELS: tuple[str, ...] = tuple(fusion.name for fusion in FUSIONS if fusion.name in _SCHEDULES or fusion.witness)
"""What can be certified."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was tried on one device with one build of a kernel, all of it equal to eager."""

    kernel: str
    """The kernel's name."""
    dtype: str
    """The dtype of x."""
    claim: str
    """What follows, in one sentence."""
    is_proof: bool
    """Whether it follows from the stages and the assumptions for every input; otherwise this is evidence."""
    assumptions: tuple[str, ...]
    """What the argument takes for granted."""
    sources: str
    """The hash of the kernel's sources."""
    environment: Environment
    """Where it was tried."""
    is_sample: bool
    """Whether less was tried than a certificate takes."""
    stages: tuple[StageResult, ...]
    """What was tried."""

    def to_json(self) -> dict[str, Any]:
        """The certificate as basic types; it has neither times nor dates, so that trying again gives the same file."""
        return {"format": _FORMAT, **asdict(self), "environment": self.environment.to_json()}

    def path(self, folder: Path) -> Path:
        """Where it lies under a folder of snapshots."""
        return folder / self.environment.platform / "certificates" / f"{self.kernel}-{self.dtype}.json"

    def write(self, folder: Path) -> Path:
        """Write the file, which appears whole or not at all; its path.

        Raises
        ------
        UsageError
            It cannot be written there, or this is only a sample, which is no certificate.
        """
        path = self.path(folder)
        if self.is_sample:
            raise UsageError(f"{path}: a sample is no certificate and is not written; run without --sample")
        try:
            write_text(path, json.dumps(self.to_json(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be written: {error.strerror or error}; name another folder with --folder"
            ) from error
        return path


def check_request(kernel: str, dtype: str, sample: int | None) -> None:
    """Refuse what cannot be tried, before anything is: a trial takes long.

    Raises
    ------
    UsageError
        There is no such kernel or dtype, or the sample is none.
    """
    if kernel not in KERNELS:
        raise UsageError(f"no kernel {kernel!r} can be certified: expected {', '.join(KERNELS)}")
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected {' or '.join(_DTYPES)}; 2**32 values of another are too many")
    if sample is not None and not 1 <= sample <= _most(kernel):
        raise UsageError(f"sample {sample}: expected a number from 1 to {_most(kernel)}")


def certify(
    kernel: str,
    dtype: str,
    device: torch.device,
    *,
    sample: int | None = None,
    fusion: Fusion | None = None,
    done: Callable[[StageResult], None] | None = None,
) -> Certificate:
    """Try a kernel's arithmetic on every operand there is, stage by stage.

    Parameters
    ----------
    kernel
        One of `KERNELS`.
    dtype
        ``bf16`` or ``fp16``.
    device
        A GPU; on the CPU the host build is tried, which takes long.
    sample
        Only so many of the 65,536 values of x, or for a norm so many rows: no certificate then.
    fusion
        Tried in the kernel's place.
    done
        Called after each stage.

    Raises
    ------
    Found
        A result is not eager's.
    UsageError
        There is no such kernel or dtype, or it declines the operands here.
    """
    check_request(kernel, dtype, sample)
    chosen = _DTYPES[dtype]
    is_sample = sample is not None and sample < _most(kernel)
    tried = fusion or _fusion(kernel, device)
    stages = []
    for stage in _stages(kernel, tried, chosen, device, sample):
        if done is not None:
            done(stage)
        stages.append(stage)
    schedule = _SCHEDULES.get(kernel)
    source = kernel.removesuffix("_fp32")
    return Certificate(
        kernel=kernel,
        dtype=_name_of(chosen),
        claim=_NORM_CLAIM if schedule is None else schedule.claim,
        is_proof=schedule is not None and schedule.is_proof and not is_sample,
        assumptions=_NORM_ASSUMPTIONS if schedule is None else schedule.assumptions,
        sources=source_hash([one for one in SOURCES if one.name == source]),
        environment=environment(device),
        is_sample=is_sample,
        stages=tuple(stages),
    )


def stage_names(kernel: str) -> tuple[str, ...]:
    """The names of a kernel's stages, in the order in which they are tried."""
    schedule = _SCHEDULES.get(kernel)
    return (WITNESS,) if schedule is None else tuple(stage.name for stage in schedule.stages)


def device_named(name: str) -> torch.device:
    """The device that ``auto``, ``host``, ``cuda`` or ``cuda:<n>`` names.

    Raises
    ------
    UsageError
        It names none, or one that is not here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "host" or (name == "auto" and not count):
        return torch.device("cpu")
    found = re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", name)
    if found is None or (name.startswith("auto") and name != "auto"):
        raise UsageError(f"device {name!r}: expected auto, host, cuda or cuda:<number>")
    index = int(found[1] or 0)
    if index >= count:
        raise UsageError(
            f"device {name}: torch {torch.__version__} sees {count} GPUs here; --device=host takes the CPU"
        )
    return torch.device("cuda", index)


def counterexample(
    kernel: str, fusion: Fusion, device: torch.device, *, sample: int, dtype: str = "bf16"
) -> Counterexample | None:
    """The first result of a sampled trial that is not eager's, None if all are.

    Parameters
    ----------
    kernel
        Whose stages are tried.
    fusion
        On which kernel.
    device, sample, dtype
        As for `certify`.
    """
    try:
        certify(kernel, dtype, device, sample=sample, fusion=fusion)
    except Found as found:
        return found.counterexample
    return None


def _most(kernel: str) -> int:
    return VALUES if kernel in _SCHEDULES else ROWS


def _fusion(kernel: str, device: torch.device) -> Fusion:
    fusion = next(fusion for fusion in FUSIONS if fusion.name == kernel)
    if device.type == "cuda":
        return fusion  # only on a GPU: the device's own kernel
    assert fusion.host is not None
    return fusion.host


def _stages(
    kernel: str, fusion: Fusion, dtype: torch.dtype, device: torch.device, sample: int | None
) -> Iterator[StageResult]:
    schedule = _SCHEDULES.get(kernel)
    if schedule is None:
        yield evidence(kernel, fusion, dtype, device, ROWS if sample is None else sample)
        return
    trials = Trials(kernel, fusion)
    bench = Bench(fusion, dtype, device, sample)
    for stage in schedule.stages:
        yield trials.run(stage.name, stage.what, stage.operands(bench), complete=stage.exhaustive and sample is None)


def _name_of(dtype: torch.dtype) -> str:
    """The dtype as a file's name has it: ``bf16``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, dtype_name(dtype))
