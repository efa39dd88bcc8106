"""Files that others may have written, cut short or mistaken: whatever is wrong with one is a plain error."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "read_bytes"]


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises
    ------
    OSError
        It cannot be read, or is a device or a pipe, of which some never end and others never begin.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.read_bytes()


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises
    ------
    ValueError
        It is no JSON, or so deeply nested that it is none of ours.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
