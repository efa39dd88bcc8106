"""Every exception that fusiongate raises, one class a failure."""

from __future__ import annotations

__all__ = [
    "BuildError",
    "EnvironmentMismatch",
    "FallbackError",
    "FusiongateError",
    "LedgerError",
    "MountError",
    "NoCompiler",
    "PoisonedDevice",
    "ProbeFailed",
    "SnapshotError",
    "TimingError",
    "UsageError",
]


class FusiongateError(Exception):
    """The base of every exception that fusiongate raises on its own account."""


class UsageError(FusiongateError):
    """A caller, an option or a file gave something that fusiongate cannot work with."""


class BuildError(FusiongateError):
    """A kernel library could not be built or loaded."""


class NoCompiler(BuildError):
    """The compiler that a kernel's target needs is not installed."""


class ProbeFailed(BuildError):
    """A built kernel failed, or killed its process, when it was first run in a child process."""


class PoisonedDevice(FusiongateError):
    """A device context is unusable after an earlier fault, so neither kernel nor reference can run on it.

    Parameters
    ----------
    device
        The device's name as torch writes it, such as ``cuda:0``.
    original
        The error that told of it.
    """

    def __init__(self, device: str, original: BaseException) -> None:
        super().__init__(device, original)
        self.device = device
        self.original = original

    def __str__(self) -> str:
        return (
            f"{self.device}: the device context is unusable after {type(self.original).__name__}: {self.original}; "
            f"nothing more can run on it in this process: start a new one"
        )


class FallbackError(FusiongateError):
    """A fusion took its reference path inside ``require_fused()``.

    Parameters
    ----------
    op
        The fusion's name.
    path
        The path that the call took.
    reason
        The published reason for it.
    """

    def __init__(self, op: str, path: str, reason: str) -> None:
        super().__init__(op, path, reason)
        self.op = op
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.op} took the {self.path} path (reason: {self.reason}) inside require_fused(), "
            f"where every call has to launch the kernel; {self.op}.explain(*args) says why for given arguments"
        )


class MountError(FusiongateError):
    """A family of sites could not be mounted, and nothing of it was left mounted."""


class SnapshotError(FusiongateError):
    """A stored snapshot is missing, damaged, or may not be recorded."""


class LedgerError(FusiongateError):
    """A ledger file is damaged or could not be written."""


class TimingError(FusiongateError):
    """A timing is invalid: no kernel was launched in it, or its output was wrong afterwards."""


class EnvironmentMismatch(FusiongateError):
    """Two records made in different environments were to be compared as if they were one."""
