"""The controller's side: what the reports bring is kept, appended to the ledger, and judged at the end of the run."""

from __future__ import annotations

import datetime as dt
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from fusiongate import ledger
from fusiongate.errors import LedgerError, SnapshotError
from fusiongate.io import link, write_text
from fusiongate.platforms import Environment

from . import session_checks as judgement
from .causes import FLAKY, REPEATED, Cause, causes, key_of
from .device_health import Poisoning, poisoning
from .options import is_worker, options
from .paths import record_tables
from .rows import Observation, observations

__all__ = ["RECORDER", "Failure", "Recorder"]

FOLDER: Final = ".fusiongate"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed test that had something to say about fused kernels."""

    test: str
    """Its node id."""

    path: str
    """Its file, relative to the root."""

    line: int
    """Its line, counted from one."""

    message: str
    """What went wrong."""

    crash: Any = None
    """What pytest's short summary says of it, where pytest has a place for that."""


class Recorder:
    """Everything that the controller knows of a run; a worker of pytest-xdist has none."""

    def __init__(self, config: pytest.Config) -> None:
        now = dt.datetime.now(dt.UTC)
        run = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        path = options(config).ledger or config.rootpath / FOLDER / f"ledger-{run}.jsonl"
        self._in_our_folder = path.parent == config.rootpath / FOLDER
        self.config = config
        self.writer = ledger.Writer(path, run)
        self.cells: list[Mapping[str, Any]] = []
        self.environments: dict[str, Environment] = {}
        self.failures: list[Failure] = []
        self.complaints: list[str] = []
        self.candidates: list[str] = []
        self.tables: dict[Path, int] = {}
        self.poisonings: list[Poisoning] = []
        self.flaky: list[str] = []
        self.unstarted: list[str] = []
        self._causes: set[str] = set()
        self._first_attempts: dict[str, str] = {}
        self._collected: set[str] = set()
        self._reported: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests have to report, in a run without workers."""
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note which tests have to report, in a run with workers."""
        self._collected.update(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append what a report brings, at once: a run that is killed later keeps it.

        Before pytest's own look at it, which depends on whether the cause of a failure has been told.
        """
        self._reported.add(report.nodeid)
        lost = poisoning(report)
        if lost is not None and lost.test not in {known.test for known in self.poisonings}:
            self.poisonings.append(lost)
        brought = observations(report)
        # As pytest-rerunfailures marks the report of an attempt that another follows: its cells come again.
        tried_again = str(report.outcome) == "rerun"
        if report.passed and report.when == "call" and report.nodeid in self._first_attempts:
            brought = self._flaky(report, brought)
        for observation in brought:
            if observation.kind == "run":
                if observation.environment in self.environments:
                    continue
                self.environments[observation.environment] = Environment.from_json(observation.payload)
            elif observation.kind == "cell":
                if not tried_again:
                    self.cells.append({**observation.payload, "subject": observation.subject})
            elif candidate := observation.payload.get("candidate"):
                self.candidates.append(candidate)
            self._append(observation.kind, observation.subject, observation.environment, observation.payload)
        if brought and tried_again:
            self._first_attempts.setdefault(report.nodeid, _message(brought, report))
        if brought and report.failed:
            path, line, _ = report.location
            message = _message(brought, report)
            key = key_of(message)
            setattr(report, REPEATED, key in self._causes)
            self._causes.add(key)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures.append(Failure(report.nodeid, path, (line or 0) + 1, message, crash))

    def _flaky(self, report: pytest.TestReport, brought: list[Observation]) -> list[Observation]:
        """Turn a test red that was red in an earlier attempt, and the rows that it brings."""
        story = FLAKY + self._first_attempts[report.nodeid]
        self.flaky.append(report.nodeid)
        report.outcome, report.longrepr = "failed", story
        red = {"outcome": "red", "reason": story.splitlines()[0], "message": story}
        return [
            one if one.kind in ("run", "timing") else replace(one, payload={**one.payload, **red, "story": story})
            for one in brought
        ]

    @property
    def causes(self) -> list[Cause[Failure]]:
        """The causes of the failures, the one with the most of them first."""
        return causes(self.failures, lambda failure: failure.message)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self) -> None:
        """Let the line of pytest's short summary carry the cause, and how many failures it has."""
        for cause in self.causes:
            if cause.first.crash is not None:
                cause.first.crash.message = str(cause)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judge the run as a whole, and fail it where every test by itself has passed."""
        self.writer.close()
        if self.config.getoption("collectonly"):
            return
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        whole = finished and not session.shouldfail and not session.shouldstop
        if self.poisonings:
            self.unstarted = sorted(self._collected - self._reported)
            self.complaints += judgement.ended(self.poisonings, self.unstarted)
        elif whole:
            self.complaints += judgement.unreported(self._collected, self._reported)
        if whole or self.poisonings:
            try:
                self.tables = record_tables(self.cells, self.config.rootpath)
            except SnapshotError as error:
                self.complaints.append(str(error))
        self.complaints += judgement.flaky(self.flaky)
        self.complaints += judgement.unheld(self.cells, self.candidates)
        self.complaints += judgement.unlaunched(self.cells, require_fused=options(self.config).require_fused)
        if self.complaints and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _append(self, kind: str, subject: str, environment: str, payload: Mapping[str, Any]) -> None:
        try:
            if self._in_our_folder and self.writer.count == 0:
                _prepare_folder(self.writer.path)
            self.writer.append(kind, subject, environment, payload)
        except (LedgerError, OSError) as error:
            pytest.exit(
                f"fusiongate: {error}; --fusiongate-ledger=PATH puts the ledger elsewhere",
                returncode=pytest.ExitCode.USAGE_ERROR,
            )


def _message(brought: Sequence[Observation], report: pytest.TestReport) -> str:
    return next((o.payload["message"] for o in brought if "message" in o.payload), report.longreprtext)


RECORDER: Final = pytest.StashKey[Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the record, unless this process reports to another."""
    if not is_worker(config):
        config.stash[RECORDER] = Recorder(config)
        config.pluginmanager.register(config.stash[RECORDER], "fusiongate-recorder")
        _end_as_interrupted(config)


def _end_as_interrupted(config: pytest.Config) -> None:
    """Let a run that is told to end, by a time limit say, end as an interrupted one, which pytest sums up."""

    def restore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        config.add_cleanup(restore)


def _prepare_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.parent / ".gitignore", "# Made by fusiongate: records of runs.\n*\n")
    link(path.parent / "latest.jsonl", path.name)
