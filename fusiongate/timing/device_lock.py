"""One measuring process a device: others wait for their turn, so that none is part of what another measures."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fusiongate.errors import TimingError

__all__ = ["lock_path", "turn"]

_PATIENCE_S = 1800.0


def lock_path(device: torch.device) -> Path:
    """The file that stands for a device, the same for every process of this user, whichever number it has there."""
    name = "cpu"
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"fusiongate-timing-{user}-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"


@contextlib.contextmanager
def turn(device: torch.device, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the device for a measurement, as soon as no other process does.

    Raises
    ------
    TimingError
        Another process has held it longer than that, or there is no place for the lock.
    """
    path = lock_path(device)
    lock = FileLock(path, timeout=patience_s)
    try:
        if path.is_symlink():
            # Another user's, in a folder for all: to open it would empty what it leads to.
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        lock.acquire()
    except Timeout as error:
        raise TimingError(
            f"{device}: another process has been measuring on it for {patience_s:.0f} s; end it, or wait ({path})"
        ) from error
    except OSError as error:
        raise TimingError(
            f"{device}: nothing shows that no other process measures on it: {path}: {error.strerror or error}; set "
            f"TMPDIR to a folder that you may write"
        ) from error
    try:
        yield
    finally:
        lock.release()
