"""The cache folder on disk: private to its user, verified on every load, whole after every crash."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from fusiongate.errors import BuildError
from fusiongate.io import parse_json, read_bytes, shaped

from .permissions import exposed_entry, exposed_way, is_own, writable_by_others

__all__ = [
    "CACHE_VARIABLE",
    "Entry",
    "Manifest",
    "cache_folder",
    "cached_entries",
    "disk_errors",
    "exposed_cache",
    "trusted_folder",
]

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
            return shaped(parse_json(read_bytes(self.folder / "manifest.json")), Manifest)
        except (OSError, ValueError):
            return None

    def exposed(self) -> str | None:
        """Return how somebody else could have written any of it, in words; None if nobody could, or nothing is there.

        Raises
        ------
        OSError
            It cannot be looked at.
        """
        try:
            return exposed_entry(self.folder)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            return f"{error.filename} may not be looked at by this user"

    def verified(self, name: str, target: str, recipe: str) -> Manifest | None:
        """Return the manifest if this is what it should be, byte for byte, and only this user's or root's; else None.

        Parameters
        ----------
        name, target, recipe
            What the manifest has to say: a whole entry may have been put in the place of another.
        """
        try:
            # Before anything in it is believed.
            if self.exposed() is not None:
                return None
            manifest = self.manifest()
            if manifest is None or (manifest.name, manifest.target, manifest.recipe) != (name, target, recipe):
                return None
            actual = hashlib.sha256(read_bytes(self.library)).hexdigest()
        except OSError:
            return None
        return manifest if actual == manifest.sha256 else None

    def prepare(self) -> None:
        """Make the entry's folder, empty of whatever others could have written."""
        with disk_errors(self.folder):
            if (self.folder.is_symlink() or self.folder.exists()) and (self.exposed() or not is_own(self.folder)):
                # Under another name first: what belongs to another user cannot always be removed.
                aside = self.folder.with_name(f".{self.folder.name}-{secrets.token_hex(4)}")
                self.folder.rename(aside)
                _remove(aside)
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def store(self, compiled: Path, manifest: Manifest) -> None:
        """Put a compiled library and its manifest in place, each at once and as a whole."""
        self.prepare()
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
    """Return the folder of the libraries: ``kernels`` inside $FUSIONGATE_CACHE_DIR or the user's cache folder.

    Raises
    ------
    BuildError
        There is no home folder to have it in, or links on the way lead nowhere.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        base = Path(named or platformdirs.user_cache_dir("fusiongate")).expanduser()
        # Links are resolved once and here: what is checked is then what is used.
        return (base / "kernels").resolve()
    except (RuntimeError, OSError) as error:
        told = f"{CACHE_VARIABLE}={named}: " if named else ""
        raise BuildError(
            f"no place for the kernel cache: {told}{str(error).rstrip('.')} (HOME is "
            f"{os.environ.get('HOME') or 'not set'}, the user's number is {os.geteuid()}); set {CACHE_VARIABLE} to a "
            f"folder that only you may write"
        ) from error


def trusted_folder(*, make: bool) -> Path | None:
    """Return the folder that libraries are kept in and loaded from; None if it is not there and is not to be made.

    That is the cache, made private to this user. A cache that somebody else could put another folder in the place of
    is not used: this process then has a folder of its own, which goes when it ends.

    Raises
    ------
    BuildError
        No place is known for the cache, or it cannot be made, tightened or looked at.
    """
    folder = cache_folder()
    with disk_errors(folder):
        if not make and not folder.exists():
            return None
        exposed = exposed_cache()
        if exposed is None:
            _make(folder)
            # In a sticky folder somebody else may have been faster.
            exposed = exposed_cache()
        if exposed is None:
            for place in _own_places(folder):
                _tighten(place)
            return folder
    return _folder_of_this_process(folder, exposed, os.getpid())


def exposed_cache() -> str | None:
    """Return how somebody else could put another folder in the cache's place, in words; None if nobody could.

    Raises
    ------
    BuildError
        No place is known for the cache, or it cannot be looked at.
    """
    folder = cache_folder()
    with disk_errors(folder):
        return exposed_way(folder, _own_places(folder))


def _own_places(folder: Path) -> list[Path]:
    # A folder that the user names may be shared on purpose; only what is below it is this library's to make private.
    return [folder] if os.environ.get(CACHE_VARIABLE) else [folder.parent, folder]


def _make(folder: Path) -> None:
    # Whatever the umask, and unlike Path.mkdir(parents=True): a parent that others may write is as bad.
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _tighten(folder: Path) -> None:
    exposed = writable_by_others(folder)
    if exposed is None or not is_own(folder):
        return
    folder.chmod(0o700)
    _log.warning("fusiongate: %s; it is private now (0700)", exposed)


@functools.cache
def _folder_of_this_process(cache: Path, exposed: str, process: int) -> Path:
    with disk_errors(Path(tempfile.gettempdir())):
        own = Path(tempfile.mkdtemp(prefix="fusiongate-")).resolve()
        # A forked child ends too, and is not to take its parent's folder along.
        atexit.register(lambda: shutil.rmtree(own, ignore_errors=True) if os.getpid() == process else None)
        also = exposed_way(own)
    if also is not None:
        raise BuildError(
            f"the kernel cache {cache} is not used, because others could put a library there: {exposed}; and neither "
            f"is {own}: {also}; set {CACHE_VARIABLE} to a folder that only you may write, below folders of which that "
            f"is true too"
        )
    _log.warning(
        "fusiongate: the kernel cache %s is not used, because others could put a library there: %s. Kernels are "
        "compiled for this process alone, in %s, and anew for the next; take away that permission, or set %s to a "
        "folder that only you may write",
        cache,
        exposed,
        own,
        CACHE_VARIABLE,
    )
    return own


def cached_entries(folder: Path) -> list[tuple[Entry, Manifest]]:
    """Return the libraries in a cache folder with their manifests, by name; an absent folder holds none."""
    with disk_errors(folder):
        folders = sorted(path.parent for path in folder.glob("[!.]*/manifest.json"))
    entries = [(Entry(path), Entry(path).manifest()) for path in folders]
    return [(entry, manifest) for entry, manifest in entries if manifest is not None]


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a BuildError that says which folder, why, and what to do."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter of a lock, on file systems that have none
        raise BuildError(
            f"the kernel cache {folder} cannot be used: {getattr(error, 'strerror', None) or error}{_at(error)}; "
            f"make room, give write permission or remove what is in the way, or set {CACHE_VARIABLE} to another folder"
        ) from error


def _at(error: Exception) -> str:
    # Of a rename, the second name is the place that could not be taken.
    place = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return f": {os.fsdecode(place)}" if place else ""


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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
