"""Child processes that compile and probe: what starts one, and the program that it runs.

Processes of their own, because the binding layer reads environment variables and remembers what it detected, and
because a compiler or a library that aborts must not take the caller with it. A request is a JSON object on stdin; exit
status 0 is success, and what went wrong is written to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusiongate.errors import BuildError

__all__ = ["Outcome", "main", "run_child"]

_PROGRAM = "from fusiongate.jit.child import main; main()"


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
    """Run this module in a process of its own on a request and wait for it.

    Parameters
    ----------
    request
        The JSON object that it reads from stdin; ``task`` names what to do.
    environment
        Its whole environment. The import path is added: the child finds the same packages as this process.
    timeout_s
        Seconds after which it and everything that it started is killed.

    Raises
    ------
    BuildError
        No process could be started.
    """
    if not sys.executable:
        raise BuildError("no child process could be started: sys.executable is empty; set it to a Python interpreter")
    try:
        process = subprocess.Popen(
            # -P keeps the current folder off the import path, where a stray file could shadow a module.
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            text=True,
            errors="replace",
            # A group of its own, so that a time limit reaches the compilers below it too.
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(
            f"no child process could be started: {sys.executable}: {error.strerror}; raise the limit or free what is "
            f"used up, and start again"
        ) from error
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


def main() -> None:
    """Do what the request on the standard input says; the program of a child process.

    Raises
    ------
    SystemExit
        It could not be done, with what went wrong.
    """
    request = json.load(sys.stdin)
    {"compile": _compile, "probe": _probe}[request["task"]](request)


def _compile(request: dict[str, Any]) -> None:
    _without_torch()
    import tvm_ffi.cpp

    try:
        tvm_ffi.cpp.build(
            request["name"],
            sources=request["sources"],
            extra_cflags=request["cflags"],
            extra_cuda_cflags=request["cuda_cflags"],
            extra_ldflags=request["ldflags"],
            build_directory=request["build_directory"],
            backend=request["backend"],
        )
    except (RuntimeError, OSError) as error:
        raise SystemExit(str(error)) from None


def _probe(request: dict[str, Any]) -> None:
    if request["without_torch"]:
        _without_torch()
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(request["library"])
        if module.implements_function("fusiongate_probe"):
            module.get_function("fusiongate_probe")()
        if request["probe"] is not None:
            name, _, function = request["probe"].partition(":")
            getattr(importlib.import_module(name), function)(request["library"], request["target"])
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _without_torch() -> None:
    # tvm_ffi imports torch whenever it can, which takes ten times as long as everything else that is done here.
    sys.modules["torch"] = None  # type: ignore[assignment]
