"""The cache folder on disk: private to its user, verified on every load, whole after every crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from fusiongate._reading import parse_json, read_bytes
from fusiongate.errors import BuildError

__all__ = ["CACHE_VARIABLE", "Entry", "Manifest", "cache_folder", "cached_entries", "disk_errors", "private_folder"]

CACHE_VARIABLE = "FUSIONGATE_CACHE_DIR"
"""The environment variable that moves the cache."""

_log = logging.getLogger("fusiongate")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about a built library, written beside it as JSON."""

    name: str
    """The source's name."""
    target: str
    """The target's name, such as ``cuda-sm_90``."""
    sha256: str
    """Hex digest of the library's bytes."""
    recipe: str
    """Hex digest of everything that went in, except the compiler."""
    compiler: str
    """The version line of the compiler that made it."""
    tvm_ffi: str
    """The version of the binding layer that it was compiled against."""
    flags: tuple[str, ...]
    """The compiler flags beyond the binding layer's own."""
    built: str
    """When, in ISO 8601 with the offset from UTC."""
    seconds: float
    """How long the compilation took, in seconds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One library's folder inside the cache."""

    folder: Path
    """Holds the library, its manifest and the stamps of the probes that it passed."""

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / "library.so"

    @property
    def lock(self) -> Path:
        """The file that processes lock while they build this entry."""
        return self.folder.with_name(f"{self.folder.name}.lock")

    def manifest(self) -> Manifest | None:
        """Return what is written beside the library, or None when nothing readable is."""
        try:
            told = parse_json(read_bytes(self.folder / "manifest.json"))
            return Manifest(**{**told, "flags": tuple(told["flags"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def verified(self) -> Manifest | None:
        """Return the manifest if the library's bytes are those that were stored, else None."""
        manifest = self.manifest()
        if manifest is None:
            return None
        private_folder(self.folder)
        try:
            actual = hashlib.sha256(read_bytes(self.library)).hexdigest()
        except OSError:
            return None
        return manifest if actual == manifest.sha256 else None

    def store(self, compiled: Path, manifest: Manifest) -> None:
        """Put a compiled library and its manifest in place, each at once and as a whole."""
        private_folder(self.folder)
        with disk_errors(self.folder):
            for stamp in self.folder.glob("probe-*.json"):
                stamp.unlink()
            with _temporary_beside(self.library) as temporary:
                shutil.copyfile(compiled, temporary)
            self.write_json("manifest.json", asdict(manifest))

    def write_json(self, name: str, content: dict[str, object]) -> None:
        """Write a small file into the entry, at once and as a whole."""
        with disk_errors(self.folder), _temporary_beside(self.folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def cache_folder() -> Path:
    """Return the folder of the libraries: ``kernels`` inside $FUSIONGATE_CACHE_DIR or the user's cache folder."""
    base = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("fusiongate")
    return Path(base).expanduser().absolute() / "kernels"


def private_folder(folder: Path) -> Path:
    """Create a folder that only this user may write, or check and if need be tighten an existing one, and return it.

    A library that is loaded runs as this user, so nobody else may be able to put one there.

    Raises
    ------
    BuildError
        The folder belongs to another user, is no folder, or cannot be created or tightened.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"the kernel cache {folder} belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this: "
            f"libraries in it could be anybody's; set {CACHE_VARIABLE} to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        with disk_errors(folder):
            folder.chmod(0o700)
        _log.warning(
            "fusiongate: the kernel cache %s was writable by other users (mode %04o); it is private now (0700)",
            folder,
            stat.S_IMODE(status.st_mode),
        )
    return folder


def cached_entries(folder: Path) -> list[tuple[Entry, Manifest]]:
    """Return the libraries in a cache folder with their manifests, by name; an absent folder holds none."""
    with disk_errors(folder):
        folders = sorted(path.parent for path in folder.glob("*/manifest.json"))
    entries = [(Entry(path), Entry(path).manifest()) for path in folders]
    return [(entry, manifest) for entry, manifest in entries if manifest is not None]


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a BuildError that says which folder, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"the kernel cache {folder} cannot be used: {error.strerror or error}{_at(error)}; "
            f"make room, give write permission or remove what is in the way, or set {CACHE_VARIABLE} to another folder"
        ) from error


def _at(error: OSError) -> str:
    # Of a rename, the second name is the place that could not be taken.
    place = error.filename2 or error.filename
    return f": {os.fsdecode(place)}" if place else ""


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
