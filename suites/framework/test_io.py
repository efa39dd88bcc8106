"""A file is read or is a plain error, is written whole or not at all, and what it says stays on its line."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fusiongate import io


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0\xff\n")
    assert b"\0\xff\n" == io.read_bytes(tmp_path / "file")


def test_a_device_and_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OSError, match=f"Not a regular file: '{path}'"):
            io.read_bytes(path)


def test_a_folder_and_a_missing_file_keep_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        io.read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        io.read_bytes(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000], ids=["empty", "cut-short", "binary", "deep"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the words are the parser's own
        io.parse_json(text)


def assert_written_and_replaced(path: Path) -> None:
    for text in ("first", "second ×"):
        io.write_text(path, text)
        assert text == path.read_text(encoding="utf-8")
    assert [path] == list(path.parent.iterdir())


def test_text_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    assert_written_and_replaced(tmp_path / "made" / "table.json")


def test_a_file_has_no_name_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that is killed leaves no half of one behind."""
    if not io._write_unnamed(tmp_path / "probe", b""):
        pytest.skip("not run: this file system has no files without names")
    seen = []
    synced: Callable[[int], None] = lambda handle: seen.append((os.fstat(handle).st_size, [*tmp_path.iterdir()]))
    monkeypatch.setattr(os, "fsync", synced)

    io.write_text(tmp_path / "table.json", "whole")

    assert [(5, [tmp_path / "probe"])] == seen


def unsupported(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("lacking", ["files without names", "names for them"])
def test_where_a_file_needs_a_name_from_the_beginning_it_still_appears_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "names for them":
        monkeypatch.setattr(os, "link", unsupported)
    else:
        monkeypatch.delattr(os, "O_TMPFILE")

    assert_written_and_replaced(tmp_path / "made" / "table.json")


def test_a_result_is_read_by_others_too(tmp_path: Path) -> None:
    io.write_text(tmp_path / "table.json", "")

    assert "-rw-r--r--" == stat.filemode((tmp_path / "table.json").stat().st_mode)


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    """A lone surrogate has no form in UTF-8, so the write itself raises."""
    path = tmp_path / "table.json"
    io.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        io.write_text(path, "\udc80")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_in_the_way_of_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert io.obstacle(tmp_path / "made" / "later") is None
    assert f"{tmp_path / 'file'} is no folder" == io.obstacle(tmp_path / "file" / "folder")
    assert "File name too long" == io.obstacle(tmp_path / ("x" * 300))
    # Root, who often runs tests in containers, may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert f"no permission to write in {tmp_path}" == io.obstacle(tmp_path / "made")
    assert io.obstacle(tmp_path / "made", to_write=False) is None


def test_a_link_replaces_the_link_that_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for target in ("first", "second"):
        io.link(path, target)
        assert path.readlink() == Path(target)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text, told",
    [
        ("σ × [2, 33] ☃", "σ × [2, 33] ☃"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\u202eright to left", r"\u202eright to left"),
        ("undecodable \udcff", r"undecodable \udcff"),
        (r"C:\new", r"C:\new"),
    ],
)
def test_only_what_does_not_print_is_escaped(text: str, told: str) -> None:
    assert told == io.one_line(text)


def test_what_a_compiler_said_keeps_its_lines_and_nothing_else() -> None:
    assert "one\n\\x1b[2Jtwo\\x00\n\\u2066three\\r" == io.visible("one\n\x1b[2Jtwo\0\n\u2066three\r")
