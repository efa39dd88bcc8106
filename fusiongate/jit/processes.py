"""Child processes that may hang, abort or fail without taking this one along."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Outcome", "run_child"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child process ended."""

    returncode: int | None
    """The exit status, negative for a signal as in ``subprocess``; None when it ran past its limit and was killed."""
    output: str
    """What it wrote to stdout and stderr."""

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that killed the process, such as ``SIGABRT``, or None."""
        if self.returncode is None or self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


def run_child(request: Mapping[str, object], environment: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run :mod:`fusiongate.jit.child` on a request and wait for it.

    Parameters
    ----------
    request
        The JSON object that it reads from stdin; ``task`` names what to do.
    environment
        Its whole environment. The import path is added: the child finds the same packages as this process.
    timeout_s
        Seconds after which it and everything that it started is killed.
    """
    process = subprocess.Popen(
        # -P keeps the current folder off the import path, where a stray file could shadow a module.
        [sys.executable, "-P", "-m", "fusiongate.jit.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
        errors="replace",
        # A group of its own, so that a time limit reaches the compilers below it too.
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(json.dumps(request), timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return Outcome(None, output)
        raise
    return Outcome(process.returncode, output)
