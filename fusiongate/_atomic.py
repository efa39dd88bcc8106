"""Files that appear whole or not at all: written under a temporary name beside their own, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["link", "obstacle", "write_text"]


def obstacle(folder: Path, *, to_write: bool = True) -> str | None:
    """What is known to keep files from being found or written below a folder; None if nothing is.

    Parameters
    ----------
    folder
        It need not exist yet.
    to_write
        Whether files are to be written there, and not only read.
    """
    try:
        standing = next(place for place in (folder, *folder.parents) if place.exists())
    except OSError as error:
        return error.strerror
    if not standing.is_dir():
        return f"{standing} is no folder"
    if to_write and not os.access(standing, os.W_OK | os.X_OK):
        return f"no permission to write in {standing}"
    return None


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, making its folders, so that a reader sees the old file or the new one.

    Raises
    ------
    OSError
        The file could not be written; the old one, if any, still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files for their owner alone; a result is read by others too.
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target``, in place of whatever link stood there.

    Raises
    ------
    OSError
        The folder is not writable, or its file system has no links.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
