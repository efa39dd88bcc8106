"""Preset processes that are forked from one that has torch loaded: a fresh process in a tenth of a second."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn, Self

__all__ = ["ForkServer", "Forked", "serve"]

_SERVER = "from fusiongate.suites.framework.forks import serve; serve(0)"


class ForkServer:
    """A process that has loaded torch as a preset's process does, and forks one for each request."""

    def __init__(self) -> None:
        from fusiongate.presets.worker import cpu_settings

        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER], stdin=theirs.fileno(), env={**os.environ, **cpu_settings()}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.wait()

    def start(self, command: Sequence[str], variables: Mapping[str, str], printed: IO[str]) -> Forked:
        """Take the place of the function that starts a preset's process."""
        assert [sys.executable, "-P", "-m", "fusiongate.presets"] == list(command)
        (tasks, writing), (reading, answers), (told, telling) = os.pipe(), os.pipe(), os.pipe()
        ends = [tasks, answers, printed.fileno(), telling]
        socket.send_fds(self._channel, [json.dumps(dict(variables)).encode()], ends)
        for end in (tasks, answers, telling):
            os.close(end)
        return Forked(os.fdopen(writing, "w"), os.fdopen(reading), os.fdopen(told))


class Forked:
    """As much of ``subprocess.Popen`` as a preset's process takes: the same program, without starting Python.

    What tests of the real start must not do without: the settings in time for torch, and the command line.
    """

    def __init__(self, stdin: IO[str], stdout: IO[str], told: IO[str]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._told = told
        self._pid = int(told.readline())
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended."""
        if self._status is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            with self._told:
                self._status = int(self._told.readline())
        return self._status

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def serve(channel: int) -> NoReturn:
    """Fork a process for every request until the other end is closed."""
    # What every process needs, loaded once; and the compiler, which comes with a switch of torch's.
    import torch

    import fusiongate.kernels
    import fusiongate.presets.worker  # noqa: F401

    torch.use_deterministic_algorithms(False)

    with socket.socket(fileno=channel) as requests:
        while True:
            request, ends, *_ = socket.recv_fds(requests, 1 << 20, 4)
            _reap()
            if not request:
                os._exit(0)  # without taking apart all that it has loaded
            if os.fork() == 0:
                requests.close()
                _watched(json.loads(request), *ends)
            for end in ends:
                os.close(end)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watched(variables: Mapping[str, str], tasks: int, answers: int, printed: int, telling: int) -> None:
    pid = os.fork()
    if pid == 0:
        _preset_process(variables, tasks, answers, printed)
    os.write(telling, f"{pid}\n".encode())
    for end in (tasks, answers, printed):
        os.close(end)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(telling, f"{status}\n".encode())
    os._exit(0)


def _preset_process(variables: Mapping[str, str], *ends: int) -> None:
    import traceback

    from fusiongate.presets.worker import main

    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(variables)
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)
