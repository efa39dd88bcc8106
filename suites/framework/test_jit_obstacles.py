"""Whatever keeps a library from being built is told as that, and never as the kernel's fault."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusiongate import Fusion
from fusiongate.errors import NoCompiler, UsageError
from fusiongate.jit import Source, Target, library
from fusiongate.jit.cache import CACHE_VARIABLE
from fusiongate.jit.compile import find_compiler

from .tiny_sources import write_tiny

pytestmark = pytest.mark.usefixtures("own_cache")

HOST = Target.host()
Patch = pytest.MonkeyPatch


def homeless(tmp_path: Path, patch: Patch) -> None:
    """Neither HOME nor an entry in passwd: a container that runs under any number."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in (CACHE_VARIABLE, "HOME", "XDG_CACHE_HOME"):
        patch.delenv(variable, raising=False)
    patch.setattr("pwd.getpwuid", unknown)


def home_of_nobody(tmp_path: Path, patch: Patch) -> None:
    patch.setenv(CACHE_VARIABLE, "~no-such-user/cache")


def unbalanced_quote(tmp_path: Path, patch: Patch) -> None:
    patch.setenv("CXX", 'g++ "')


def babbling_compiler(tmp_path: Path, patch: Patch) -> None:
    """What it says is in no encoding."""
    script = tmp_path / "babbler"
    script.write_bytes(b"#!/bin/sh\nprintf '\\377\\376'\nexit 1\n")
    script.chmod(0o755)
    patch.setenv("CXX", str(script))


def long_name(tmp_path: Path, patch: Patch) -> None:
    patch.setenv(CACHE_VARIABLE, str(tmp_path / ("x" * 300)))


def long_path(tmp_path: Path, patch: Patch) -> None:
    patch.setenv(CACHE_VARIABLE, str(tmp_path.joinpath(*["x" * 200] * 30)))


def loop(tmp_path: Path, patch: Patch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    patch.setenv(CACHE_VARIABLE, str(tmp_path / "loop" / "cache"))


def file_in_the_way(tmp_path: Path, patch: Patch) -> None:
    (tmp_path / "file").write_text("")
    patch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))


def file_in_its_place(tmp_path: Path, patch: Patch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").write_text("")


def no_permission(tmp_path: Path, patch: Patch) -> None:
    """At the first folder that is made: root, who often runs tests in containers, may write everywhere."""

    def refuse(path: Path, *args: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    patch.setattr(Path, "mkdir", refuse)


def full_disk(tmp_path: Path, patch: Patch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr("shutil.copyfile", refuse)
    patch.setattr("fusiongate.jit.load.compile_library", lambda *_: Path(__file__))


def no_locks(tmp_path: Path, patch: Patch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    patch.setattr("filelock.FileLock.acquire", refuse)


def no_more_processes(tmp_path: Path, patch: Patch) -> None:
    start = subprocess.Popen

    def refuse(command: list[str], *args: object, **named: object) -> object:
        if "fusiongate.jit.child" in command[-1]:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(command, *args, **named)  # type: ignore[call-overload]

    patch.setattr(subprocess, "Popen", refuse)


def embedded_interpreter(tmp_path: Path, patch: Patch) -> None:
    """A program that has Python built in may not know an executable of it."""
    patch.setattr(sys, "executable", None)


def unforeseen(tmp_path: Path, patch: Patch) -> None:
    def refuse(*_: object) -> None:
        raise LookupError("a thing that nobody thought of")

    patch.setattr("fusiongate.jit.load.compile_library", refuse)


@pytest.mark.parametrize(
    "obstacle, tells",
    [
        (homeless, ["no place for the kernel cache", "HOME is not set", CACHE_VARIABLE]),
        (home_of_nobody, ["no place for the kernel cache", "~no-such-user/cache", CACHE_VARIABLE]),
        (unbalanced_quote, ['CXX=g++ "', "No closing quotation", "name one in CXX"]),
        (babbling_compiler, ["the compiler does not answer", "babbler"]),
        (long_name, ["File name too long", CACHE_VARIABLE]),
        (long_path, ["File name too long", CACHE_VARIABLE]),
        (loop, ["loop", CACHE_VARIABLE]),
        (file_in_the_way, ["Not a directory", CACHE_VARIABLE]),
        (file_in_its_place, ["Not a directory", CACHE_VARIABLE]),
        (no_permission, ["Permission denied", CACHE_VARIABLE]),
        (full_disk, ["No space left on device", "make room"]),
        (no_locks, ["does not appear to support flock", CACHE_VARIABLE]),
        (no_more_processes, ["no child process could be started", os.strerror(errno.EAGAIN)]),
        (embedded_interpreter, ["no child process could be started", "sys.executable"]),
        (unforeseen, ["LookupError: a thing that nobody thought of", "no kernel has run"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_obstacle_is_no_kernel_and_says_what_to_do(
    obstacle: Callable[[Path, Patch], None],
    tells: list[str],
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = write_tiny(tmp_path / "source")
    op = Fusion("obstructed", reference=lambda x: x * 2, fused=lambda x: x * library(source, HOST).add(0))
    with monkeypatch.context() as patch:
        obstacle(tmp_path, patch)

        assert [2.0] * 8 == op(torch.ones(8)).tolist()

    assert {("reference", "no-kernel"): 1} == op.counters
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert [] == [fact for fact in tells if fact not in warning]
    assert "raised" not in warning


@pytest.mark.parametrize("variable", ["CUDA_HOME", "ROCM_HOME"])
def test_a_toolkit_that_cannot_be_looked_at_is_no_toolkit(variable: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    target = Target("cuda", "sm_90") if variable == "CUDA_HOME" else Target("hip", "gfx942")
    with pytest.raises(NoCompiler, match=f"{variable}=/xxx.*; install"):
        find_compiler(target)


def test_a_variable_that_names_nothing_is_as_none(monkeypatch: Patch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    expected = find_compiler(HOST)
    monkeypatch.setenv("CXX", "  ")
    assert expected == find_compiler(HOST)


def test_a_source_whose_name_no_folder_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"source name 'xxx.*expected at most 100"):
        Source("x" * 300, (Path("tiny.cu"),))


def test_a_probe_that_cannot_be_noted_down_is_repeated_and_no_obstacle(
    built_cache: Path, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with libraries that were built ahead into an image that may only be read now."""
    shutil.copytree(built_cache, tmp_path / "cache")
    (stamp,) = (tmp_path / "cache").rglob("probe-*.json")
    stamp.unlink()

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    caplog.set_level(logging.INFO, logger="fusiongate")

    assert 5 == library(write_tiny(tmp_path / "source"), HOST).add(3)

    (told,) = caplog.messages
    assert os.strerror(errno.EROFS) in told
