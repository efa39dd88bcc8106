"""What GitHub Actions shows of a run: an annotation at each failed test, and a table on the job's page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusiongate.io import one_line
from fusiongate.platforms import Environment

from .recorder import RECORDER, Failure, Recorder
from .summary import not_compared, not_run, outcome_table, reasons

__all__ = ["annotation", "step_summary"]

# GitHub shows ten annotations of a step and drops the rest without a word.
_SHOWN = 10


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the annotations and append to the step's summary, in a GitHub Actions job."""
    recorder = config.stash.get(RECORDER, None)
    if recorder is None or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for line in _annotations(recorder):
        terminalreporter.write_line(one_line(line))
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target and (recorder.cells or recorder.complaints):
        with Path(target).open("a", encoding="utf-8") as stream:
            environments = list(recorder.environments.values())
            stream.write(step_summary(recorder.cells, environments, recorder.complaints, recorder.unstarted))


def _annotations(recorder: Recorder) -> Iterator[str]:
    for complaint in recorder.complaints:
        yield annotation(complaint, title="fusiongate")
    room = _SHOWN - len(recorder.complaints) - 1
    causes = recorder.causes
    shown = causes if len(causes) <= room + 1 else causes[:room]
    for cause in shown:
        failure = cause.first
        title = f"{cause.count} × {failure.test}" if cause.others else failure.test
        where = _in_workspace(recorder.config, failure)
        yield annotation(failure.message, title=title, file=where, line=str(failure.line))
    if len(shown) < len(causes):
        yield annotation(f"{len(causes) - len(shown)} more causes of failures stand in the log", title="fusiongate")


def annotation(message: str, **properties: str) -> str:
    """Give the workflow command that shows ``message`` as an error, with its properties escaped as GitHub asks."""
    escaped = ",".join(
        f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in sorted(properties.items())
    )
    return f"::error {escaped}::{_escape(message)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _in_workspace(config: pytest.Config, failure: Failure) -> str:
    path = config.rootpath / failure.path
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if workspace and path.is_relative_to(workspace):
        return path.relative_to(workspace).as_posix()
    return failure.path


def step_summary(
    cells: Sequence[Mapping[str, Any]],
    environments: Sequence[Environment],
    complaints: Sequence[str],
    unstarted: Sequence[str] = (),
) -> str:
    """Give the run as Markdown: complaints, the table, the reasons, and what was not run or not compared.

    Parameters
    ----------
    cells
        The payloads of the run's cell rows.
    environments
        Where they were observed.
    complaints
        What is wrong with the run as a whole.
    unstarted
        The tests that were not run because of a device that could not be used any more.
    """
    lines = ["## fusiongate", ""]
    lines += [f"- **red**: {_markdown(complaint)}" for complaint in complaints] + ([""] if complaints else [])
    if cells:
        lines += [*_table(outcome_table(cells)), ""]
        counted = [(outcome, reason, str(count)) for (outcome, reason), count in reasons(cells).items()]
        lines += [*_table([("outcome", "reason", "cells"), *counted]), ""]
    lost = {"a device that could not be used any more": unstarted} if unstarted else {}
    for title, groups in (("Not run", {**not_run(cells), **lost}), ("Not compared", not_compared(cells))):
        for reason, names in groups.items():
            lines += [f"<details><summary>{title}: {_markdown(reason)} ({len(names)})</summary>", ""]
            lines += [f"- {_markdown(name)}" for name in sorted(names)] + ["", "</details>", ""]
    lines += [f"Environment: {_markdown(environment.summary())}" for environment in environments]
    return "\n".join(lines) + "\n\n"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    header, *body = [f"| {' | '.join(map(_markdown, row))} |" for row in rows]
    return [header, f"|{' --- |' * len(rows[0])}", *body]


def _markdown(text: str) -> str:
    for sign in "\\`*_{}[]()#+!|~":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "").replace("\n", "<br>")
