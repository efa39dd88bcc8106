"""A preset in a process of its own: fresh libraries, fresh gates, and on CPUs the settings that make results repeat."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from fusiongate.errors import FusiongateError, UsageError
from fusiongate.platforms import cpu_architecture
from fusiongate.switches import PORTABLE

from .op_bisect import OpRecord, trace
from .records import PresetRecord
from .registry import Preset, Size, lookup
from .running import ArmRun, PresetRun, SiteCount, run_preset

__all__ = ["PresetProcess", "ProcessFailed", "Task", "cpu_settings", "main", "run_fresh"]

_TAIL = 3000
"""Characters of what a process printed that its error repeats."""

_PATH = "FUSIONGATE_PARENT_PATH"


def cpu_settings() -> dict[str, str]:
    """Return what a process needs before it loads torch, so that its results on a CPU repeat on others.

    One thread everywhere; on x86-64 also one instruction set for every library, which no other architecture has
    been shown to hold.
    """
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | (PORTABLE if cpu_architecture() == "x86_64" else {})


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
    traces: bool
    """Whether each operator of the reference's arm is recorded, instead of the steps of both."""
    deterministic: bool
    """Whether torch is asked for operators that repeat, where it has them."""


class PresetProcess:
    """A process that runs presets, one after another; it ends with the ``with`` block.

    Parameters
    ----------
    device
        Where its presets run: on a CPU it is given :func:`cpu_settings`.
    deterministic
        Whether torch is asked for operators that repeat, where it has them.
    interpreter
        What starts Python: an emulator of another CPU, say, and the interpreter that it is to run.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        deterministic: bool = False,
        interpreter: Sequence[str] = (sys.executable,),
    ) -> None:
        self.device = torch.device(device)
        self._deterministic = deterministic
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        settings = cpu_settings() if self.device.type == "cpu" else {}
        if deterministic:
            settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Not the working directory but what the parent imports from is searched: a folder could hide a library.
        command = [*interpreter, "-P", "-m", "fusiongate.presets"]
        self._process = _started(command, {**os.environ, **settings, _PATH: os.pathsep.join(sys.path)}, self._printed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._printed.close()

    def run(self, preset: Preset, *, size: Size = "tiny", seed: int = 0) -> PresetRun:
        """Both arms of a preset.

        Raises
        ------
        UsageError
            The preset failed in it; the message is the preset's.
        ProcessFailed
            The process died; the message holds what it printed.
        """
        answer = self._ask(preset, size, seed, traces=False)
        record = PresetRecord.from_json(answer["record"])
        seconds = answer["seconds"]
        return PresetRun(
            record=record,
            fused=ArmRun(record.fused, seconds["fused"], tuple(SiteCount(**site) for site in answer["sites"])),
            reference=ArmRun(record.reference, seconds["reference"], ()),
            must_fuse=preset.fused,
        )

    def trace(self, preset: Preset, *, size: Size = "tiny", seed: int = 0) -> list[OpRecord]:
        """A fingerprint of every operator's result in the reference's arm; raises as :meth:`run` does."""
        return [OpRecord(*fields) for fields in self._ask(preset, size, seed, traces=True)["ops"]]

    def _ask(self, preset: Preset, size: Size, seed: int, *, traces: bool) -> dict[str, Any]:
        file = str(preset.file) if preset.file else None
        task = Task(preset.name, preset.module, file, size, seed, str(self.device), traces, self._deterministic)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._printed.seek(0)
            printed = self._printed.read()[-_TAIL:].strip()
            raise ProcessFailed(
                f"preset {preset.name!r}: the process that ran it exited with {status}; it printed:\n{printed}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer


def _started(command: Sequence[str], variables: Mapping[str, str], printed: IO[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=printed, env=variables, text=True)


def run_fresh(
    presets: Sequence[Preset],
    *,
    size: Size = "tiny",
    seed: int = 0,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
) -> Iterator[PresetRun]:
    """Run presets in one fresh process, each result as soon as it is there.

    Parameters and errors as for :class:`PresetProcess`.
    """
    with PresetProcess(device, deterministic=deterministic) as process:
        for preset in presets:
            yield process.run(preset, size=size, seed=seed)


def main() -> int:
    """Run the tasks that come on the standard input, a line each, and answer with a line on the standard output."""
    # Whatever a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # What the parent could import, this process can; behind its own paths, so that no folder hides a library.
    for entry in os.environ.pop(_PATH, "").split(os.pathsep):
        if entry and entry not in sys.path:
            sys.path.append(entry)
    for line in sys.stdin:
        try:
            answer = _answer(Task(**json.loads(line)))
        except FusiongateError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _answer(task: Task) -> dict[str, Any]:
    _load(task.module, Path(task.file) if task.file else None)
    preset = lookup(task.preset)
    device = torch.device(task.device)
    if task.deterministic:  # switching it off as well would load the compiler, which takes longer than most presets
        torch.use_deterministic_algorithms(True, warn_only=True)
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
