"""What a kernel is compiled from, and the digest that stands for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fusiongate.errors import BuildError, UsageError

__all__ = ["Source", "source_hash"]


@dataclass(frozen=True, slots=True)
class Source:
    """The CUDA C++ files of one kernel library, compiled by every target's own compiler."""

    name: str
    """Names the library in messages and in the cache: letters, digits, ``_`` and ``-``."""
    files: tuple[Path, ...]
    """The ``.cu`` files, each one translation unit."""
    include: tuple[Path, ...] = ()
    """Folders searched for headers; every file in them is part of the key."""
    defines: tuple[str, ...] = ()
    """Preprocessor definitions, ``NAME`` or ``NAME=value``."""
    quick: bool = False
    """Whether the host's build gives up speed for half the compilation: a library that runs a few times only."""
    probe: str | None = None
    """``package.module:function``, called in the probing child with the library's path and the target's name."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", self.name):
            raise UsageError(f"source name {self.name!r}: expected at most 100 letters, digits, '_' and '-'")
        if not self.files:
            raise UsageError(f"source {self.name}: expected at least one .cu file, got none")
        for file in self.files:
            if file.suffix != ".cu":
                raise UsageError(f"source {self.name}: expected .cu files, got {file.name}")
        if self.probe is not None and not re.fullmatch(r"[\w.]+:\w+", self.probe):
            raise UsageError(f"source {self.name}: expected probe as 'package.module:function', got {self.probe!r}")

    @property
    def key(self) -> str:
        """The hex SHA-256 over the contents of files and headers, their relative names, and the definitions.

        Raises
        ------
        BuildError
            A file or an include folder cannot be read.
        """
        digest = hashlib.sha256()
        try:
            for label, path in self._contents():
                content = path.read_bytes()
                # Lengths stand before the parts, or moving bytes from one file to the next would keep the digest.
                digest.update(f"{label}\0{len(content)}\0".encode())
                digest.update(content)
        except OSError as error:
            raise BuildError(
                f"source {self.name}: {error.filename}: {error.strerror}; the installation is incomplete: "
                f"install fusiongate again"
            ) from error
        for define in self.defines:
            digest.update(f"define\0{define}\0".encode())
        if self.quick:
            digest.update(b"quick\0")
        return digest.hexdigest()

    def with_defines(self, *more: str) -> Source:
        """Return the same source with further definitions: another library with another key."""
        return replace(self, defines=self.defines + more)

    def _contents(self) -> Iterator[tuple[str, Path]]:
        for index, file in enumerate(self.files):
            yield f"file{index}/{file.name}", file
        for index, folder in enumerate(self.include):
            # Path.rglob says nothing about a folder that is not there.
            folder.stat()
            # Python modules may live beside the headers, and their bytecode changes with the interpreter.
            headers = (
                path
                for path in folder.rglob("*")
                if path.is_file() and path.suffix not in {".py", ".pyc", ".pyi"} and not path.name.startswith(".")
            )
            for header in sorted(headers, key=lambda path: path.relative_to(folder).as_posix()):
                yield f"include{index}/{header.relative_to(folder).as_posix()}", header


def source_hash(sources: Iterable[Source]) -> str:
    """Return one hex SHA-256 for a set of sources in any order: the kernels that a piece of evidence was made with.

    Raises
    ------
    BuildError
        A file cannot be read.
    """
    digest = hashlib.sha256()
    for line in sorted(f"{source.name}\0{source.key}\n" for source in sources):
        digest.update(line.encode())
    return digest.hexdigest()
