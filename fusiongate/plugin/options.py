"""The options, their ini twins, and what they come to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from fusiongate import ledger
from fusiongate.errors import LedgerError
from fusiongate.io import obstacle, one_line

__all__ = ["Options", "is_worker", "kernels_disabled", "options"]

Device = Literal["auto", "host", "cuda"]
Missing = Literal["fail", "skip", "record"]

_DEVICES: Final[Mapping[str, Device]] = {"auto": "auto", "host": "host", "cuda": "cuda"}
_MISSING: Final[Mapping[str, Missing]] = {"fail": "fail", "skip": "skip", "record": "record"}

_WORKERS_PER_GPU: Final = 14
"""Cells keep the CPU busier than the GPU: beside sixteen cores, an H200 was done sooner with fourteen than eight."""

SETTINGS: Final = (
    # name, kind, metavar, help
    (
        "device",
        "text",
        "auto|host|cuda[:n]",
        "where subjects run: a GPU if there is one (auto), host builds, or a given GPU",
    ),
    ("require-fused", "switch", None, "there must be a GPU, and every must-fuse cell has to launch its kernel there"),
    (
        "missing",
        "text",
        "fail|skip|record",
        "what a missing snapshot or path table means: a failure, something not compared, or something to record",
    ),
    (
        "ledger",
        "text",
        "PATH",
        "append the run's rows to this file (default: a new file under .fusiongate in the root)",
    ),
    (
        "snapshots",
        "text",
        "DIR",
        "the folder of snapshots and path tables; path tables are compared only where it is set",
    ),
    (
        "pin-gpus",
        "switch",
        None,
        "under pytest-xdist, put another GPU of CUDA_VISIBLE_DEVICES first for each worker, and let -n auto count them",
    ),
    (
        "workers-per-gpu",
        "text",
        "N",
        "with pinned GPUs, -n auto starts so many workers a GPU (default: 14), and no more than there are cores",
    ),
    (
        "quick",
        "switch",
        None,
        "of each matrix the base cell and each axis alone; after three red cells of one cause a subject is left",
    ),
    ("progress", "switch", None, "where the output is no terminal, say every ten seconds how far the run is"),
    (
        "update-paths",
        "switch",
        None,
        "record the path of every cell that passed in the path tables under the snapshot folder",
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the ini file ask of fusiongate."""

    device: Device
    """Where subjects run; ``auto`` is a GPU if there is one, else the host."""

    device_index: int | None
    """The GPU's index where one was given."""

    require_fused: bool
    """Whether there must be a GPU on which every must-fuse cell launches."""

    missing: Missing
    """What a missing snapshot or path table means."""

    ledger: Path | None
    """The ledger that rows are appended to; None for a new file."""

    snapshots: Path | None
    """The folder of snapshots and path tables; None where none is set."""

    pin_gpus: bool
    """Whether each worker of pytest-xdist has a GPU of its own first."""

    workers_per_gpu: int
    """How many workers ``-n auto`` starts for each pinned GPU, if there are cores for them."""

    quick: bool
    """Whether a matrix has each axis alone, and is left after three red cells of one cause."""

    progress: bool
    """Whether a log says how far the run is."""

    update_paths: bool
    """Whether path tables are recorded rather than compared."""

    @property
    def recording(self) -> str | None:
        """The option that has this run write below the folder of snapshots; None where it only reads."""
        if self.update_paths:
            return "--fusiongate-update-paths"
        return "--fusiongate-missing=record" if self.missing == "record" else None

    @property
    def device_name(self) -> str:
        """The device as it was asked for, such as ``cuda:1``."""
        return self.device if self.device_index is None else f"{self.device}:{self.device_index}"


_KEY: Final = pytest.StashKey[Options]()


def is_worker(config: pytest.Config) -> bool:
    """Tell whether this process is a worker of pytest-xdist, which reports to a controller."""
    return hasattr(config, "workerinput")


def kernels_disabled() -> bool:
    """Tell whether FUSIONGATE_DISABLE switches all kernels off, as every fusion reads it."""
    return os.environ.get("FUSIONGATE_DISABLE", "") not in ("", "0")


def options(config: pytest.Config) -> Options:
    """Give the options of this run.

    Raises
    ------
    pytest.UsageError
        A value that means nothing, or two that contradict each other.
    """
    if _KEY not in config.stash:
        try:
            config.stash[_KEY] = _parse(config)
        except pytest.UsageError as error:
            raise pytest.UsageError(one_line(str(error))) from error
    return config.stash[_KEY]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare every option together with its ini twin."""
    group = parser.getgroup("fusiongate", "fused kernels against their reference")
    for name, kind, metavar, text in SETTINGS:
        twin, told = f"fusiongate_{name.replace('-', '_')}", f"as --fusiongate-{name}: {text}"
        if kind == "switch":
            # None rather than False, so that a switch that was not given leaves the ini file its say.
            group.addoption(f"--fusiongate-{name}", action="store_true", default=None, help=text)
            parser.addini(twin, type="bool", default=False, help=told)
        else:
            group.addoption(f"--fusiongate-{name}", metavar=metavar, default=None, help=text)
            parser.addini(twin, type="string", default="", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse bad values before anything is collected."""
    options(config)


def _parse(config: pytest.Config) -> Options:
    kind, index = _device(_value(config, "device") or "auto")
    missing = _value(config, "missing") or "fail"
    if missing not in _MISSING:
        raise pytest.UsageError(f"--fusiongate-missing={missing}: expected fail, skip or record")
    parsed = Options(
        device=kind,
        device_index=index,
        require_fused=_value(config, "require-fused"),
        missing=_MISSING[missing],
        ledger=_ledger(config),
        snapshots=_snapshots(config),
        pin_gpus=_value(config, "pin-gpus"),
        workers_per_gpu=_workers_per_gpu(_value(config, "workers-per-gpu")),
        quick=_value(config, "quick"),
        progress=_value(config, "progress"),
        update_paths=_value(config, "update-paths"),
    )
    if parsed.require_fused and parsed.device == "host":
        raise pytest.UsageError(
            "--fusiongate-require-fused needs a GPU, and --fusiongate-device=host runs on none: give only one of them"
        )
    if parsed.pin_gpus and parsed.device_index:
        raise pytest.UsageError(
            f"--fusiongate-device={parsed.device_name}: with --fusiongate-pin-gpus each worker sees its own GPU first, "
            f"as cuda:0: expected cuda, and the GPUs listed in CUDA_VISIBLE_DEVICES"
        )
    if parsed.recording and parsed.snapshots is None:
        raise pytest.UsageError(
            f"{parsed.recording}: no folder to record in: set fusiongate_snapshots in the ini file, "
            "or give --fusiongate-snapshots=DIR"
        )
    if parsed.recording and kernels_disabled():
        raise pytest.UsageError(
            f"{parsed.recording}: FUSIONGATE_DISABLE is set, and every path of such a run is the reference: unset it"
        )
    return parsed


def _value(config: pytest.Config, name: str) -> Any:
    given, twin = config.getoption(f"--fusiongate-{name}"), f"fusiongate_{name.replace('-', '_')}"
    try:
        return config.getini(twin) if given is None else given
    except (TypeError, ValueError, pytest.UsageError) as error:
        # pytest's own words do not say which setting they are about.
        raise pytest.UsageError(f"{twin} in the ini file: {error}") from error


def _device(text: str) -> tuple[Device, int | None]:
    if text in _DEVICES:
        return _DEVICES[text], None
    numbered = re.fullmatch(r"cuda:(\d{1,4})", text, re.ASCII)
    if numbered is None:
        raise pytest.UsageError(f"--fusiongate-device={text}: expected auto, host, cuda or cuda:N")
    return "cuda", int(numbered[1])


def _workers_per_gpu(text: str) -> int:
    if not text:
        return _WORKERS_PER_GPU
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise pytest.UsageError(f"--fusiongate-workers-per-gpu={text}: expected a number of workers, such as 8")
    return int(text)


def _path(config: pytest.Config, name: str) -> Path | None:
    value = _value(config, name)
    if not value:
        return None
    # A path on the command line is meant from where the command runs, one in a file from where the file lies.
    on_command_line = config.getoption(f"--fusiongate-{name}") is not None
    return Path(config.invocation_params.dir if on_command_line else config.rootpath, value)


def _snapshots(config: pytest.Config) -> Path | None:
    path = _path(config, "snapshots")
    writes = _value(config, "update-paths") or _value(config, "missing") == "record"
    if path is not None and (hindrance := obstacle(path, to_write=writes)):
        raise pytest.UsageError(f"--fusiongate-snapshots={path}: {hindrance}: expected a folder")
    return path


def _ledger(config: pytest.Config) -> Path | None:
    path = _path(config, "ledger")
    if path is None or is_worker(config):
        return path
    if hindrance := obstacle(path.parent):
        raise pytest.UsageError(f"--fusiongate-ledger={path}: cannot be written: {hindrance}: expected another place")
    # Rows appended to a file of another kind would ruin it.
    try:
        if path.exists():
            ledger.read(path)
    except LedgerError as error:
        raise pytest.UsageError(f"--fusiongate-ledger={path}: rows are appended to a ledger only: {error}") from error
    except OSError as error:
        raise pytest.UsageError(f"--fusiongate-ledger={path}: {error.strerror}: expected another place") from error
    return path
