"""The noxfile as a module, and a session that keeps what it is told instead of doing it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from nox.command import CommandFailed

__all__ = ["NOXFILE", "Failed", "FakeSession", "called", "load_noxfile"]

NOXFILE = Path(__file__).parents[2] / "noxfile.py"


@functools.cache
def load_noxfile() -> ModuleType:
    """Load it, which registers its sessions and runs none."""
    spec = importlib.util.spec_from_file_location("fusiongate_noxfile", NOXFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Failed(Exception):
    """What a session's `error` raises, which ends it."""


class FakeSession:
    """Keeps what a session runs and says, and answers each question about the machine alike."""

    posargs: tuple[str, ...] = ()
    venv_backend = "virtualenv"

    def __init__(self, answer: str = "", statuses: Sequence[int] = ()) -> None:
        self.answer = answer
        self.statuses = list(statuses)
        self.ran: list[tuple[str, ...]] = []
        self.warned: list[str] = []

    def run(self, *command: str, **_: object) -> str:
        self.ran.append(command)
        if status := self.statuses.pop(0) if self.statuses else 0:
            raise CommandFailed(f"Returned code {status}", return_code=status)
        return self.answer

    def install(self, *arguments: str) -> None:
        pass

    def log(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        self.warned.append(message)

    def error(self, message: str) -> None:
        raise Failed(message)


def called(noxfile: ModuleType, session: str, fake: FakeSession) -> None:
    function = getattr(noxfile, session)
    # A session is registered as an object around its function.
    getattr(function, "func", function)(fake)
