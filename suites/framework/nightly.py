"""What the nightly workflow does, as commands that can be run and tested anywhere.

- `python suites/framework/nightly.py runners`: the runners' labels as GitHub's matrix wants them, for `$GITHUB_OUTPUT`.
- `python suites/framework/nightly.py run RUNNER FOLDER`: `nox -s gpu`, then `nox -s bench`, keeping in FOLDER what they
  leave: JUnit files, ledgers, timings, and snapshots that are new or have changed.
- `python suites/framework/nightly.py collect FOLDER`: the report over all runners; exits with 1 where one has failed,
  has not reported, or has no baseline to be compared with. What is missing is recorded as a candidate, to be reviewed
  and committed: a kind of GPU that nobody has recorded yet leaves all of its path tables, digests and certificates.

The labels come from the variable NIGHTLY_RUNNERS, separated by commas: `nvidia-h200,amd-mi300x`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Report", "collect", "labels", "main", "run"]

SESSIONS = ("gpu", "bench")
"""The nox sessions that each runner runs, in this order."""

Nox = Callable[[Sequence[str]], int]
"""Runs nox with arguments and gives its exit status."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one runner has brought back."""

    runner: str
    """Its label."""
    problems: tuple[str, ...]
    """What is wrong with it; empty where all is well."""
    tests: int
    """The tests that it ran, over all sessions."""
    rows: int
    """The timings that it recorded."""
    snapshots: tuple[str, ...]
    """The snapshots that were new or changed on it, relative to the snapshot folder."""
    missing: tuple[str, ...] = ()
    """Those of them that there was no committed file for."""


def labels(listed: str | None) -> list[str]:
    """The labels in a comma-separated list.

    Raises
    ------
    SystemExit
        There is none, two are alike, or one could not be a file name.
    """
    found = [label.strip() for label in (listed or "").split(",") if label.strip()]
    if not found:
        raise SystemExit("NIGHTLY_RUNNERS names no runner: set it to labels such as nvidia-h200,amd-mi300x")
    if wrong := [label for label in found if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", label)]:
        raise SystemExit(f"NIGHTLY_RUNNERS: {wrong[0]!r} is no label: expected letters, digits, '.', '_' and '-'")
    if len(set(found)) < len(found):
        raise SystemExit(f"NIGHTLY_RUNNERS names a runner twice: {', '.join(found)}")
    return found


def run(runner: str, folder: Path, nox: Nox, checkout: Path) -> int:
    """Run the sessions on this machine and keep what they leave; a later one runs even where an earlier one failed."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    statuses: dict[str, int] = {}
    for session in SESSIONS:
        options = [f"--junitxml={folder / session}.xml", f"--fusiongate-ledger={folder / session}.jsonl"]
        if session == "bench":
            options.append(f"--benchmark-json={folder / 'timings.json'}")
        else:
            # What has no baseline yet is recorded as a candidate; what has one is compared as ever.
            options.append("--fusiongate-missing=record")
        statuses[session] = nox(["--non-interactive", "--session", session, "--", *options])
    missing = list(_listed(checkout, "--others"))
    for path in [*missing, *_listed(checkout, "--modified")]:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / path, target)
    # Last: its presence says that the runner came to the end.
    report = {"runner": runner, "sessions": statuses, "missing": [_below_snapshots(path) for path in missing]}
    (folder / "report.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    return int(any(statuses.values()))


def _listed(checkout: Path, which: str) -> Iterator[Path]:
    """The snapshots that git lists as modified, or as others than the committed ones."""
    command = ["git", "-C", str(checkout), "ls-files", "-z", which, "--exclude-standard", "snapshots"]
    for name in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0"):
        # A file that was deleted counts as modified, and is no candidate.
        if name and (checkout / name).is_file():
            yield Path(name)


def _below_snapshots(path: Path) -> str:
    return path.relative_to("snapshots").as_posix()


def collect(runners: Sequence[str], folder: Path) -> list[Report]:
    """Read what each runner has left in the folder of its name."""
    return [_report(runner, folder / runner) for runner in runners]


def _report(runner: str, folder: Path) -> Report:
    path = folder / "report.json"
    if not path.is_file():
        return Report(runner, ("did not report: offline, out of time, or ended before its sessions did",), 0, 0, ())
    problems = []
    report = json.loads(path.read_text(encoding="utf-8"))
    statuses, missing = report["sessions"], tuple(report["missing"])
    tests = 0
    for session in SESSIONS:
        if session not in statuses:
            problems.append(f"nox -s {session} did not run")
            continue
        if statuses[session]:
            problems.append(f"nox -s {session} failed with exit status {statuses[session]}")
        ran, failed = _junit(folder.glob(f"{session}*.xml"))
        tests += ran
        if not ran:
            problems.append(f"nox -s {session} ran no test")
        problems += failed
    rows = _rows(folder / "timings.json")
    if not rows:
        problems.append("no timings were recorded")
    if missing:
        baselines = "1 baseline was" if len(missing) == 1 else f"{len(missing)} baselines were"
        problems.append(f"{baselines} missing; what was recorded instead is below: review and commit it")
    snapshots = sorted(
        found.relative_to(folder / "snapshots").as_posix()
        for found in (folder / "snapshots").rglob("*")
        if found.is_file()
    )
    return Report(runner, tuple(problems), tests, rows, tuple(snapshots), missing)


def _junit(paths: Iterable[Path]) -> tuple[int, list[str]]:
    """The tests that ran, skipped ones left out, and the failed ones by name: a session of two lanes has two files."""
    ran, failed = 0, []
    for case in (case for path in sorted(paths) for case in ET.parse(path).getroot().iter("testcase")):
        children = {child.tag for child in case}
        ran += "skipped" not in children
        if children & {"failure", "error"}:
            failed.append(f"failed: {case.get('classname')}::{case.get('name')}")
    return ran, failed


def _rows(path: Path) -> int:
    return len(json.loads(path.read_text(encoding="utf-8"))["benchmarks"]) if path.is_file() else 0


def markdown(reports: Sequence[Report]) -> str:
    """The reports as a table, with the problems and the snapshot candidates below."""
    lines = [
        "## Nightly",
        "",
        "| runner | tests | timings | snapshot candidates | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for report in reports:
        state = "**failed**" if report.problems else "passed"
        lines.append(f"| {report.runner} | {report.tests} | {report.rows} | {len(report.snapshots)} | {state} |")
    for report in reports:
        if report.problems or report.snapshots:
            lines += ["", f"### {report.runner}", ""]
            lines += [f"- {problem}" for problem in report.problems]
            for name in report.snapshots:
                lines.append(f"- snapshot candidate, {'missing' if name in report.missing else 'changed'}: `{name}`")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str], environment: Mapping[str, str], nox: Nox) -> int:
    """Run one of the commands and give its exit status."""
    parser = argparse.ArgumentParser(prog="nightly.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("runners")
    running = commands.add_parser("run")
    running.add_argument("runner")
    running.add_argument("folder", type=Path)
    collecting = commands.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "run":
        return run(given.runner, given.folder, nox, Path(__file__).parents[2])
    runners = labels(environment.get("NIGHTLY_RUNNERS"))
    if given.command == "runners":
        sys.stdout.write(f"runners={json.dumps(runners)}\n")
        return 0
    reports = collect(runners, given.folder)
    text = markdown(reports)
    sys.stdout.write(text)
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(text)
    return int(any(report.problems for report in reports))


def _nox(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "nox", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ, _nox))
