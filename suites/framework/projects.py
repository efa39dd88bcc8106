"""A downstream project in a folder of its own, run by a pytest of its own: what the plugin's tests assert on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fusiongate import ledger
from fusiongate.ledger import Row

__all__ = ["Modules", "Project"]

_SURROUNDINGS = (
    "FUSIONGATE_DISABLE",
    "GITHUB_ACTIONS",
    "GITHUB_STEP_SUMMARY",
    "GITHUB_WORKSPACE",
    "PYTEST_ADDOPTS",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
)


class Modules:
    """What runs in this process, and tests around them, have imported, apart from the projects' own modules.

    Pytester forgets all that; torch and kernels register what they define with C++, which takes no second time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, ModuleType] = {}

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """At the end of a run, as a plugin of it."""
        self.keep(config.rootpath)

    def keep(self, root: Path) -> None:
        """Keep what is imported now, apart from what lies below a folder."""
        for name, module in sys.modules.items():
            if not (getattr(module, "__file__", None) or "").startswith(str(root)):
                self._kept[name] = module

    def restore(self) -> None:
        """Put them back where Python looks for them."""
        sys.modules.update(self._kept)


class Project:
    """A project with the tests that it is given.

    Parameters
    ----------
    pytester
        The folder, and the way to run pytest in it.
    monkeypatch
        What the run around this one has set in the environment is taken away: a worker of pytest-xdist would take the
        inner pytest for itself, and a job's summary would be written by both.
    modules
        Keeps what its runs import.
    """

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, modules: Modules) -> None:
        self.pytester = pytester
        self.modules = modules
        self.path = pytester.path
        self.setenv = monkeypatch.setenv
        for name in _SURROUNDINGS:
            monkeypatch.delenv(name, raising=False)
        self.write("pytest.ini", "[pytest]\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of the project."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        # Bytecode is told apart by a file's second and length alone, and a test may write it twice in one.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        return path

    def run(self, *arguments: str, own_process: bool = False, python: Path | None = None) -> pytest.RunResult:
        """Run pytest in the project, strict in everything that a project may be strict in.

        In this process, which takes a tenth of the time, unless the test is about what a process has loaded, or about
        what is installed beside another interpreter.
        """
        # Hypothesis' plugin takes a second to write a summary of nothing, anyio's half of one in each worker to load.
        others = ("-p", "no:hypothesispytest", "-p", "no:anyio")
        strict = ("-Werror", "--strict-markers", "--strict-config", *others, *arguments)
        if python is not None:
            # A folder of its own, or pytest would tidy up among those of the run around this one.
            return self.pytester.run(python, "-m", "pytest", f"--basetemp={self.path / 'temporary'}", *strict)
        if own_process:
            return self.pytester.runpytest_subprocess(*strict)
        try:
            return self.pytester.runpytest_inprocess(*strict, plugins=[self.modules])
        finally:
            self.modules.restore()

    @property
    def ledger(self) -> ledger.Ledger:
        """The ledger of the latest run."""
        return ledger.read(self.path / ".fusiongate" / "latest.jsonl")

    def rows(self, kind: str) -> tuple[Row, ...]:
        """The rows of one kind in the ledger of the latest run."""
        return tuple(row for row in self.ledger.rows if row.kind == kind)

    @staticmethod
    def summary(result: pytest.RunResult) -> list[str]:
        """The lines of fusiongate's section in the terminal summary; empty when there is none."""
        lines = result.outlines
        start = next((n for n, line in enumerate(lines) if line.strip("=") == " fusiongate "), len(lines))
        end = next((n for n in range(start + 1, len(lines)) if lines[n].startswith("=")), len(lines))
        return lines[start + 1 : end]
