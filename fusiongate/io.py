"""Reading what somebody may have damaged, writing whole files, and text that is safe on a terminal."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Shape",
    "counted",
    "link",
    "obstacle",
    "one_line",
    "parse_json",
    "read_bytes",
    "shaped",
    "visible",
    "write_text",
]

Shape = TypeVar("Shape", bound="DataclassInstance")
"""The dataclass that a record becomes."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises
    ------
    OSError
        It cannot be read, or is a device or a pipe, of which some never end and others never begin.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.read_bytes()


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises
    ------
    ValueError
        It is no JSON, or so deeply nested that it is none of ours.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def shaped(record: object, kind: type[Shape], *, closed: bool = False) -> Shape:
    """Return a record of JSON's own types as an object of a dataclass, in which every field is of its declared type.

    Parameters
    ----------
    record
        What :func:`parse_json` gave, or a part of it.
    kind
        The dataclass. Its fields may be dataclasses too; they are checked alike.
    closed
        Refuse fields that the dataclass does not have.

    Raises
    ------
    ValueError
        A field is missing, is unknown, or is something else than was expected; the message says where.
    """
    try:
        shape = msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    unknown = sorted(record.keys() - kind.__dataclass_fields__.keys()) if closed and isinstance(record, dict) else ()
    if unknown:
        raise ValueError(f"Object contains unknown field `{unknown[0]}`")
    return shape


def obstacle(folder: Path, *, to_write: bool = True) -> str | None:
    """Return what is known to keep files from being found or written below a folder; None if nothing is.

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

    Where the system has files without names, as Linux does on most of its file systems, a process that is killed
    leaves nothing else behind either: a file is given a name once it is whole.

    Raises
    ------
    OSError
        The file could not be written; the old one, if any, still stands.
    """
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if not _write_unnamed(temporary, content):
            with temporary.open("xb") as stream:
                _write(stream, content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_unnamed(path: Path, content: bytes) -> bool:
    """Write a file that has its name only when it is whole; whether that is possible here."""
    try:
        handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except (AttributeError, OSError):
        return False
    with os.fdopen(handle, "wb") as stream:
        _write(stream, content)
        # Only with a folder's handle does `link` follow /proc's link to the file that is open.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.link(f"/proc/self/fd/{handle}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError:
            return False
        finally:
            os.close(folder)
    return True


def _write(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)
    stream.flush()
    # Temporary files are for their owner alone; a result is read by others too.
    os.fchmod(stream.fileno(), 0o644)
    os.fsync(stream.fileno())


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


def visible(text: str) -> str:
    """Return the text with an escape for all that does not print, apart from the ends of its lines.

    What somebody else named, or a compiler said, may move a cursor, ring, or turn the direction of writing.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in text
    )


def one_line(text: str) -> str:
    """Return the text with an escape for all that does not print, its ends of line too."""
    return visible(text).replace("\n", r"\n")


def counted(count: int, noun: str) -> str:
    """Return a number of things, such as ``1 row``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
