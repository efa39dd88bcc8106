"""Everything that is recorded on a GPU, in one command: ``nox -s record``, or ``python -m fusiongate.suites.record``.

Each step writes into a folder of its own; what a step that went well has made is put in its place, file by file, and
entered in the manifest. What the manifest holds already, from today's sources at this commit, is not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusiongate import Environment, environment, presets
from fusiongate.certificates import KERNELS
from fusiongate.errors import FusiongateError
from fusiongate.io import write_text
from fusiongate.ledger import environment_key
from fusiongate.progress import Progress
from fusiongate.report.manifest import NAME, Entry, Manifest, command, evidence_sources, sources_of, step_of

__all__ = ["Command", "Origin", "Step", "main", "record", "steps"]

ROOT: Final = Path(__file__).parents[1]
_LOGS: Final = ROOT / ".fusiongate" / "record"
_PYTHON: Final = (sys.executable, "-P", "-m")
"""-P keeps the working directory off sys.path, where the checkout's `kernels` would hide another package."""
_LAST_LINES: Final = 15
"""Of a failed step's output, that are shown."""
_NO_TEST: Final = 5
"""Pytest's exit status where it has selected none."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a step."""

    words: tuple[str, ...]
    """The command line."""
    prints: Path | None = None
    """The file that its standard output is kept as."""
    may_be_empty: bool = False
    """Whether a run of pytest may have no test to run."""


@dataclass(frozen=True, slots=True)
class Step:
    """What makes some of the evidence."""

    name: str
    """Its name, as ``--only`` takes it and the manifest has it."""
    commands: Callable[[Path, Path], Sequence[Command]]
    """The processes, of the folder in the snapshots' place and that of the device in it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where evidence comes from."""

    environment: Environment
    """The device's environment."""
    commit: str
    """The commit that is checked out."""
    dirty: bool
    """Whether the tree has changes besides the snapshots."""
    sources: str
    """The hash of the sources."""

    def folder(self, snapshots: Path) -> Path:
        """The device's folder."""
        return presets.location(snapshots, self.environment, "-", "-", "tiny").parents[1]


def steps(device: str) -> tuple[Step, ...]:
    """Every step, in order.

    Parameters
    ----------
    device
        ``cuda``, or ``host`` where there is no GPU and this is a trial.
    """
    gpu = device == "cuda"
    matrix: tuple[str, ...] = (*_PYTHON, "pytest", str(ROOT / "suites/kernels/test_matrix.py"), f"--rootdir={ROOT}")
    matrix += (f"--fusiongate-device={device}", "--fusiongate-update-paths")
    matrix += ("--fusiongate-require-fused",) if gpu else ()
    beside = ("-n", "auto", "--dist", "worksteal", *(("--fusiongate-pin-gpus",) if gpu else ()))

    def paths(into: Path, place: Path) -> list[Command]:
        both = (*matrix, f"--fusiongate-snapshots={into}")
        first = (*both, *beside, "-m", "not alone", f"--fusiongate-ledger={place / 'ledger.jsonl'}")
        alone = (*both, "-n", "0", "-m", "alone", f"--fusiongate-ledger={place / 'ledger-largest.jsonl'}")
        return [Command(first), Command(alone, may_be_empty=True)]

    def models(only: str, kept: str | None) -> Callable[[Path, Path], list[Command]]:
        words = (*_PYTHON, "fusiongate.suites.models.evidence", "--only", only, "--device", "cuda" if gpu else "cpu")
        return lambda into, place: [Command((*words, "--snapshots", str(into)), place / kept if kept else None)]

    def timings(_: Path, place: Path) -> list[Command]:
        run = place / "timings" / "kernels.json"
        bench = (*_PYTHON, "pytest", str(ROOT / "suites/timings"), f"--rootdir={ROOT}", f"--benchmark-json={run}")
        table = (*_PYTHON, "fusiongate.cli", "timings", str(run))
        return [Command((*bench, f"--fusiongate-device={device}")), Command(table, run.with_suffix(".md"))]

    def certificates(into: Path, _: Path) -> list[Command]:
        certify = (*_PYTHON, "fusiongate.cli", "certify")
        return [Command((*certify, kernel, "--device", device, "--folder", str(into))) for kernel in KERNELS]

    acceptance = (*_PYTHON, "fusiongate.suites.kernels.acceptance")
    calibration = (*_PYTHON, "fusiongate.suites.timings.calibration", "--json")
    return (
        Step("paths", paths),
        Step("snapshots", models("tiny", None)),
        Step("presets-real", models("real", "presets-real.txt")),
        Step("forwards", models("times", "timings/forwards.txt")),
        Step("acceptance", lambda _, place: [Command(acceptance, place / "acceptance.txt")]),
        Step("timings", timings),
        Step("calibration", lambda _, place: [Command((*calibration, str(place / "timings" / "calibration.json")))]),
        Step("certificates", certificates),
    )


def record(
    chosen: Sequence[Step],
    into: Path,
    origin: Origin,
    *,
    limit: float,
    again: bool = False,
    logs: Path = _LOGS,
) -> dict[str, tuple[float, str]]:
    """Run steps, each whatever came of the others; the seconds and the outcome of each.

    Parameters
    ----------
    chosen
        The steps, in order.
    into
        The folder of snapshots.
    origin
        Where this is run.
    limit
        The seconds that a step may take.
    again
        Run also those whose files are what they would make.
    logs
        The folder for what the steps print.
    """
    outcomes = {}
    with Progress("recording", [step.name for step in chosen]) as progress:
        for step in chosen:
            started = time.monotonic()
            if not again and _is_held(step, into, origin):
                outcome = "held already"
            else:
                with tempfile.TemporaryDirectory(prefix="fusiongate-record-") as folder:
                    outcome = _run(step, Path(folder), origin, limit, logs / f"{step.name}.log")
                    if not outcome:
                        outcome = _publish(step, Path(folder), into, origin)
            outcomes[step.name] = (time.monotonic() - started, outcome)
            _say(f"{step.name}: {outcome} ({outcomes[step.name][0]:.0f} s)")
            progress.advance()
    return outcomes


def _is_held(step: Step, into: Path, origin: Origin) -> bool:
    """Whether all files of a step are there as the manifest has them, made where and from what they would be now."""
    manifest = Manifest.load(origin.folder(into) / NAME)
    mine = {name: entry for name, entry in manifest.files.items() if step_of(name) == step.name}
    return bool(mine) and all(
        (into / name).is_file() and entry == _entry(name, (into / name).read_bytes(), origin)
        for name, entry in mine.items()
    )


def _entry(name: str, content: bytes, origin: Origin) -> Entry:
    return Entry(
        sha256=hashlib.sha256(content).hexdigest(),
        sources=sources_of(name, origin.sources),
        command=command(step_of(name)),
        commit=origin.commit,
        dirty=origin.dirty,
        environment=environment_key(origin.environment.to_json()),
    )


def _run(step: Step, folder: Path, origin: Origin, limit: float, log: Path) -> str:
    """Run a step's processes one after the other; empty if all went well, else what happened."""
    deadline = time.monotonic() + limit
    log.parent.mkdir(parents=True, exist_ok=True)
    place = origin.folder(folder)
    # Pytest-benchmark makes no folders.
    (place / "timings").mkdir(parents=True)
    with log.open("w+", encoding="utf-8", errors="replace") as told:
        for command_line in step.commands(folder, place):
            try:
                status = _status(command_line, told.fileno(), deadline)
            except subprocess.TimeoutExpired:
                happened = f"took longer than {limit:.0f} s"
            else:
                well = not status or (command_line.may_be_empty and status == _NO_TEST)
                happened = "" if well else f"exit status {status}"
            if happened:
                told.seek(0)
                printed = told.read() + (_text(command_line.prints) if command_line.prints else "")
                for line in printed.splitlines()[-_LAST_LINES:]:
                    _say(f"    {line}")
                return f"failed: {happened}; see {log}"
    return ""


def _status(command_line: Command, log: int, deadline: float) -> int:
    """Run a process, which is ended with all that it has started when the time is over; its exit status."""
    output = log
    if command_line.prints:
        command_line.prints.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(command_line.prints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        process = subprocess.Popen(command_line.words, cwd=ROOT, stdout=output, stderr=log, start_new_session=True)
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    finally:
        if output != log:
            os.close(output)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _publish(step: Step, folder: Path, into: Path, origin: Origin) -> str:
    """Put a step's files in their places, take away what it no longer makes, and enter all that; the outcome."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # What else a program leaves, such as a .gitignore, is no evidence.
    made = {name: path for name, path in found.items() if step_of(name) == step.name}
    if not made:
        return "failed: it made no file"
    manifest_path = origin.folder(into) / NAME
    manifest = Manifest.load(manifest_path)
    for name in [name for name in manifest.files if step_of(name) == step.name]:
        del manifest.files[name]
    platform = origin.folder(into).parents[1]
    for path in sorted(platform.glob("**/*")):
        name = path.relative_to(into).as_posix()
        mine = path.is_relative_to(manifest_path.parent) or path.parents[1] == platform
        if path.is_file() and mine and step_of(name) == step.name and name not in made:
            path.unlink()
    for name, path in made.items():
        # A ledger names its path tables, which lie in the snapshots now.
        text = _text(path).replace(str(folder), "snapshots")
        write_text(into / name, text)
        manifest.files[name] = _entry(name, text.encode(), origin)
    manifest.environments[environment_key(origin.environment.to_json())] = origin.environment.to_json()
    manifest.save(manifest_path)
    return f"recorded {len(made)} files"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _git(*words: str) -> str | None:
    """What git says of this checkout; None where there is none."""
    try:
        told = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; 1 if a step failed, 2 for what cannot be begun."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "host"
    every = steps(device)
    names = [step.name for step in every]
    parser = argparse.ArgumentParser(prog="nox -s record --", description=__doc__)
    parser.add_argument("--only", metavar="STEP[,STEP]", help=f"these steps: {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="also what is recorded already")
    parser.add_argument("--into", type=Path, default=ROOT / "snapshots", help="the folder to record in")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a step may take, default: %(default)s")
    parser.add_argument("--logs", type=Path, default=_LOGS, help="the folder for what the steps print")
    parser.add_argument("--commit", help="the commit that is checked out, where there is no git to ask")
    parser.add_argument("--allow-dirty", action="store_true", help="for a trial: the check will say so")
    given = parser.parse_args(arguments)
    chosen = given.only.split(",") if given.only else names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    commit = _git("rev-parse", "HEAD") or given.commit
    if not commit:
        parser.error("git knows no commit of this tree: name the one that it is with --commit")
    # What is recorded changes the snapshots.
    dirty = bool(_git("status", "--porcelain", "--", ".", ":!snapshots"))
    if dirty and not given.allow_dirty:
        parser.error("the tree has changes that are in no commit, so that nobody could repeat this: commit them first")
    origin = Origin(environment("cuda" if device == "cuda" else "cpu"), commit, dirty, evidence_sources(ROOT))
    _say(origin.environment.summary())
    asked = [step for step in every if step.name in chosen]
    into, logs = given.into.resolve(), given.logs.resolve()
    try:
        outcomes = record(asked, into, origin, limit=given.limit, again=given.again, logs=logs)
    except FusiongateError as error:
        parser.error(str(error))
    _say(f"\n{'step':14}{'seconds':>8}  outcome")
    for name, (seconds, outcome) in outcomes.items():
        _say(f"{name:14}{seconds:8.0f}  {outcome}")
    return int(any(outcome.startswith("failed") for _, outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
