"""The option ``--fusiongate-progress``: what the log of a run says while tests take their time.

On a terminal pytest's own dots and percentages do. In a log that is read line by line, one test that builds a kernel
for a minute, or workers that collect, look like a run that hangs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

import pytest

from fusiongate.io import counted
from fusiongate.progress import Ticker

from .options import is_worker, options
from .session_checks import shortened

__all__: list[str] = []

_NAMES: Final = 2


class _Monitor:
    """Tells how many tests are done, and which ones are running."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ticker = Ticker(self._tell)
        self._started = time.monotonic()
        self._collected: set[str] = set()
        self._running: dict[str, float] = {}
        self._done = 0

    def pytest_sessionstart(self) -> None:
        self._ticker.__enter__()

    def pytest_sessionfinish(self) -> None:
        self._ticker.__exit__()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._done += 1

    def _tell(self) -> None:
        now = time.monotonic()
        # A line of its own, behind the dots that pytest has written.
        self._stream.write(f"\nfusiongate: {now - self._started:.0f} s: {self._state(dict(self._running), now)}\n")
        self._stream.flush()

    def _state(self, running: Mapping[str, float], now: float) -> str:
        if not self._collected:
            return "collecting"
        done = f"{self._done} of {counted(len(self._collected), 'test')} done"
        if not running:
            return done
        longest = now - min(running.values())
        return f"{done}; running, the longest for {longest:.0f} s: {shortened(running, _NAMES)}"


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch, where the output is somebody's log."""
    if options(config).progress and not is_worker(config) and not sys.stdout.isatty():
        config.pluginmanager.register(_Monitor(_uncaptured()), "fusiongate-progress")


def _uncaptured() -> TextIO:
    """The standard output as it is now, while nothing is captured: a test in this process takes it for itself."""
    with contextlib.suppress(OSError):
        return os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    return sys.stdout
