"""A preset in a process of its own: fresh libraries, fresh gates, and on CPUs the settings that make results repeat."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from fusiongate.errors import FusiongateError, UsageError

from .records import PresetRecord
from .registry import Preset, Size, lookup
from .running import ArmRun, PresetRun, SiteCount, run_preset
from .traces import OpRecord, trace

__all__ = ["CPU_SETTINGS", "Task", "main", "run_fresh", "trace_fresh"]

CPU_SETTINGS = {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""What a process needs before it loads torch, so that a CPU of the same vector instructions gives the same bits."""

_TAIL = 3000


class ProcessFailed(FusiongateError):
    """The process that ran a preset did not live to tell its result."""


@dataclass(frozen=True, slots=True)
class Task:
    """One preset to run elsewhere."""

    preset: str
    """Its name."""
    module: str
    """The module that declares it."""
    file: str | None
    """That module's file."""
    size: Size
    """``tiny`` or ``real``."""
    seed: int
    """The run's seed."""
    device: str
    """The device."""
    traces: bool = False
    """Whether each operator of the reference's arm is recorded, instead of the steps of both."""
    deterministic: bool = False
    """Whether torch is asked for operators that repeat, where it has them."""

    @classmethod
    def of(cls, preset: Preset, size: Size, seed: int, device: torch.device, **further: bool) -> Task:
        """The task of running a preset that this process knows."""
        file = str(preset.file) if preset.file else None
        return cls(preset.name, preset.module, file, size, seed, str(device), **further)


def run_fresh(
    presets: Sequence[Preset],
    *,
    size: Size = "tiny",
    seed: int = 0,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
) -> Iterator[PresetRun]:
    """Run presets in one fresh process, each result as soon as it is there.

    Parameters
    ----------
    presets
        One or several, which share the process.
    size, seed, device
        As for :func:`fusiongate.presets.run_preset`.
    deterministic
        Whether torch is asked for operators that repeat, where it has them.

    Raises
    ------
    FusiongateError
        If the process dies or a preset fails in it; the message holds what it printed.
    """
    chosen = torch.device(device)
    tasks = [Task.of(preset, size, seed, chosen, deterministic=deterministic) for preset in presets]
    for answer in _ask(tasks, chosen):
        yield PresetRun(
            record=PresetRecord.from_json(answer["record"]),
            fused=_arm(answer["record"], "fused", answer),
            reference=_arm(answer["record"], "reference", answer),
        )


def _arm(record: dict[str, Any], name: str, answer: dict[str, Any]) -> ArmRun:
    parsed = PresetRecord.from_json(record)
    sites = tuple(SiteCount(**site) for site in answer["sites"]) if name == "fused" else ()
    return ArmRun(parsed.fused if name == "fused" else parsed.reference, answer["seconds"][name], sites)


def trace_fresh(
    preset: Preset, *, size: Size = "tiny", seed: int = 0, device: torch.device | str = "cpu"
) -> list[OpRecord]:
    """Run a preset's reference in a fresh process and keep a fingerprint of every operator's result."""
    chosen = torch.device(device)
    (answer,) = _ask([Task.of(preset, size, seed, chosen, traces=True)], chosen)
    return [OpRecord(*fields) for fields in answer["ops"]]


def _ask(tasks: Sequence[Task], device: torch.device) -> Iterator[dict[str, Any]]:
    settings = dict(CPU_SETTINGS) if device.type == "cpu" else {}
    if any(task.deterministic for task in tasks):
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with tempfile.TemporaryDirectory(prefix="fusiongate-") as folder:
        results = Path(folder, "results.jsonl")
        results.touch()
        command = [sys.executable, "-P", "-m", "fusiongate.presets", str(results)]
        done = subprocess.run(
            command,
            input=json.dumps([asdict(task) for task in tasks]),
            env={**os.environ, **settings, "FUSIONGATE_PARENT_PATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        answers = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    printed = (done.stdout + done.stderr)[-_TAIL:].strip()
    for answer in answers:
        if "error" in answer:
            raise UsageError(answer["error"])
        yield answer
    if done.returncode or len(answers) != len(tasks):
        failed = tasks[min(len(answers), len(tasks) - 1)]
        raise ProcessFailed(
            f"preset {failed.preset!r}: the process that ran it exited with {done.returncode}; it printed:\n{printed}"
        )


def main(arguments: Sequence[str]) -> int:
    """Run the tasks that stand on the standard input and append each result to the file that is named."""
    # What the parent could import, this process can; behind its own paths, so that no folder hides a library.
    for entry in os.environ.pop("FUSIONGATE_PARENT_PATH", "").split(os.pathsep):
        if entry and entry not in sys.path:
            sys.path.append(entry)
    results = Path(arguments[0])
    for fields in json.load(sys.stdin):
        task = Task(**fields)
        try:
            answer = _answer(task)
        except FusiongateError as error:
            answer = {"error": str(error)}
        with results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(answer) + "\n")
    return 0


def _answer(task: Task) -> dict[str, Any]:
    _load(task.module, Path(task.file) if task.file else None)
    preset = lookup(task.preset)
    device = torch.device(task.device)
    torch.use_deterministic_algorithms(task.deterministic, warn_only=True)
    if task.traces:
        return {"ops": [astuple(op) for op in trace(preset, size=task.size, seed=task.seed, device=device)]}
    run = run_preset(preset, size=task.size, seed=task.seed, device=device)
    return {
        "record": run.record.to_json(),
        "seconds": {"fused": run.fused.seconds, "reference": run.reference.seconds},
        "sites": [asdict(site) for site in run.fused.sites],
    }


def _load(module: str, file: Path | None) -> None:
    """Import the module that declares a preset, under the name that it has in the parent."""
    top = module.partition(".")[0]
    depth = module.count(".")
    if file is not None and depth and top not in sys.modules and _origin(top) != _package_file(file, depth):
        # pytest imports test packages without putting their folder on the path; nor do we, or it could hide a library.
        _import_file(top, _package_file(file, depth))
    if file is None or depth or _origin(module) == file:
        importlib.import_module(module)
    else:
        _import_file(module, file)


def _origin(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _package_file(file: Path, depth: int) -> Path:
    """The file of the top package of a module that lies so many packages deep."""
    folder = file.parents[depth - 1] if file.name != "__init__.py" else file.parents[depth]
    return folder / "__init__.py"


def _import_file(name: str, file: Path) -> None:
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file}: expected a Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
