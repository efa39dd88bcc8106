"""Whatever is wrong with a file is a plain error, and reading it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusiongate._reading import parse_json, read_bytes


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0\xff\n")
    assert b"\0\xff\n" == read_bytes(tmp_path / "file")


def test_a_device_and_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OSError, match=f"Not a regular file: '{path}'"):
            read_bytes(path)


def test_a_folder_and_a_missing_file_keep_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000], ids=["empty", "cut-short", "binary", "deep"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the words are the parser's own
        parse_json(text)
