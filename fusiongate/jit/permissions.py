"""Who could have written a file, or could put another one in its place: what is loaded runs as this user."""

from __future__ import annotations

import contextlib
import functools
import grp
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

__all__ = ["exposed_entry", "exposed_way", "is_own", "writable_by_others"]


def exposed_entry(path: Path) -> str | None:
    """Return how somebody else could have written a file, a folder or anything directly in it; None if nobody could.

    Somebody else is whoever is neither this user nor root. A link counts as theirs, wherever it leads.

    Raises
    ------
    OSError
        It is not there, or may not be looked at.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return _exposed_file(path, status)
    reason = _of_another(path, status) or _writable(path, status)
    if reason is not None:
        return reason
    return next(filter(None, (_exposed_file(inner, os.lstat(inner)) for inner in sorted(path.iterdir()))), None)


def exposed_way(folder: Path, own: Collection[Path] = ()) -> str | None:
    """Return how somebody else could put another folder in one's place, in words; None if nobody could.

    Every folder that leads to it is looked at, and it itself, as far as they are there.

    Parameters
    ----------
    folder
        Absolute, with every link resolved.
    own
        Those that are made private next, where they belong to this user: only their owner counts then.
    """
    for place in (folder, *folder.parents):
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        reason = None if status.st_uid == _unknown_owner() else _of_another(place, status)
        made_private = place in own and status.st_uid == os.geteuid()
        # In a sticky folder, such as /tmp, nobody takes away what is another's, and the owner below is looked at too.
        if reason is None and not made_private and not status.st_mode & stat.S_ISVTX:
            reason = _writable(place, status)
        if reason is not None:
            return reason
    return None


def writable_by_others(path: Path) -> str | None:
    """Return who else may write a file or folder, in words, or None."""
    return _writable(path, os.lstat(path))


def is_own(path: Path) -> bool:
    """Whether a file or folder belongs to this user, who may then change its mode."""
    return os.lstat(path).st_uid == os.geteuid()


def _exposed_file(path: Path, status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    return _of_another(path, status) or _writable(path, status)


def _of_another(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid in {0, os.geteuid()}:
        return None
    return f"{path} belongs to user {status.st_uid}"


def _writable(path: Path, status: os.stat_result) -> str | None:
    if status.st_mode & stat.S_IWOTH:
        writers = "every user"
    elif status.st_mode & stat.S_IWGRP and (_is_listed(path) or not _has_no_other_member(status.st_gid)):
        writers = f"group {status.st_gid}"
    else:
        return None
    return f"{path} is writable by {writers} (mode {stat.S_IMODE(status.st_mode):04o})"


def _has_no_other_member(group: int) -> bool:
    """Whether a group is the user's own, as on systems that give each user a group of the same name and umask 002."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (found.gr_name, group) == (user.pw_name, user.pw_gid) and set(found.gr_mem) <= {user.pw_name}


def _is_listed(path: Path) -> bool:
    """Whether an access control list says more than the mode, whose bits for the group are then the list's most."""
    with contextlib.suppress(OSError, AttributeError):
        return "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False)
    return False


@functools.cache
def _unknown_owner() -> int | None:
    """The owner that the outer system's files, root's among them, show inside a user namespace that lacks them."""
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
