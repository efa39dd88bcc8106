"""Kernel sources to loaded libraries: from this process, from the cache on disk, or from the compiler."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from fusiongate.errors import BuildError, NoCompiler

from .cache import Entry, Manifest, cache_folder, cached_entries, disk_errors, private_folder
from .compilers import find_compiler
from .compiling import COMPILE_TIMEOUT_S, compile_library
from .probing import machine_identity, probe_once
from .sources import Source
from .targets import Target

if TYPE_CHECKING:
    import tvm_ffi

__all__ = ["Prebuilt", "available_cores", "find_built", "forget", "library", "prebuild"]

BUILD_FORMAT = 1
"""Counts up when what a library's key does not cover changes, such as how its units are put together."""

_log = logging.getLogger("fusiongate")


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The outcome of building one library ahead of time."""

    source: Source
    """What was built."""
    target: Target
    """For which target."""
    library: Path | None
    """The library in the cache, or None when it could not be built."""
    compiled: bool
    """Whether a compiler ran: False when the cache had the library already, or on an error."""
    seconds: float
    """How long it took, in seconds."""
    error: BuildError | None
    """Why there is no library."""


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: type[BuildError]
    message: str


_outcomes: dict[tuple[Source, Target], tvm_ffi.Module | _Failure] = {}
_outcomes_lock = threading.Lock()


def library(source: Source, target: Target) -> tvm_ffi.Module:
    """Return the loaded library of a source, building and probing it first where that has not been done.

    The first answer for a source and a target is this process's answer, failures included, until :func:`forget`.

    Raises
    ------
    NoCompiler
        The library is not in the cache and the compiler that it needs is missing.
    ProbeFailed
        This machine has no device for the target, or the library failed or killed the child that first loaded it.
    BuildError
        The compiler refused the source, or the cache folder cannot be used.
    """
    # A dictionary is read without the lock: only the first call for a key waits for a build.
    outcome = _outcomes.get((source, target))
    if outcome is None:
        with _outcomes_lock:
            outcome = _outcomes.get((source, target))
            if outcome is None:
                try:
                    outcome = _load(source, target)
                except BuildError as error:
                    outcome = _Failure(type(error), str(error))
                _outcomes[source, target] = outcome
    if isinstance(outcome, _Failure):
        raise outcome.kind(outcome.message)
    return outcome


def forget() -> None:
    """Forget this process's libraries and failures, so that the next call looks at the disk and the compilers again."""
    with _outcomes_lock:
        _outcomes.clear()


def find_built(source: Source, target: Target) -> Entry | None:
    """Return the cache's intact library for a source and a target without building anything, or None."""
    folder = cache_folder()
    recipe = _recipe(source, target)
    if not folder.is_dir():
        return None
    private_folder(folder)
    try:
        entry = _entry(folder, source, target, recipe, find_compiler(target).digest)
    except NoCompiler:
        # A machine without a compiler uses what was built for it ahead of time.
        for cached, manifest in cached_entries(folder):
            if (manifest.name, manifest.target, manifest.recipe) == (source.name, str(target), recipe):
                return cached if cached.verified() is not None else None
        return None
    return entry if entry.verified() is not None else None


def prebuild(sources: Iterable[Source], targets: Iterable[Target]) -> Iterator[Prebuilt]:
    """Build every source for every target without loading any, as many at once as there are cores.

    Yields each outcome as it comes; a library that cannot be built is an outcome with an error.
    """
    jobs = [(source, target) for target in targets for source in sources]
    # Each thread only waits for the compiling process that it started.
    with ThreadPoolExecutor(max_workers=available_cores()) as pool:
        yield from (future.result() for future in as_completed([pool.submit(_prebuild, *job) for job in jobs]))


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prebuild(source: Source, target: Target) -> Prebuilt:
    started = time.perf_counter()
    try:
        entry, _, compiled = _build(source, target)
    except BuildError as error:
        return Prebuilt(source, target, None, False, time.perf_counter() - started, error)
    return Prebuilt(source, target, entry.library, compiled, time.perf_counter() - started, None)


def _load(source: Source, target: Target) -> tvm_ffi.Module:
    identity = machine_identity(target)
    entry, manifest, _ = _build(source, target)
    probe_once(source, target, entry, manifest, identity)
    import tvm_ffi

    try:
        return tvm_ffi.load_module(entry.library)
    except (RuntimeError, OSError) as error:
        raise BuildError(
            f"{source.name} for {target} passed its probe but cannot be loaded into this process: {error}; "
            f"look for libraries that this process loaded before and its environment overrides"
        ) from error


def _build(source: Source, target: Target) -> tuple[Entry, Manifest, bool]:
    """Return an intact library, its manifest, and whether a compiler had to run for it."""
    entry = find_built(source, target)
    manifest = entry.verified() if entry is not None else None
    if entry is not None and manifest is not None:
        return entry, manifest, False
    compiler = find_compiler(target)
    folder = private_folder(cache_folder())
    recipe = _recipe(source, target)
    entry = _entry(folder, source, target, recipe, compiler.digest)
    with _locked(entry):
        # Another process may have built it while this one waited.
        manifest = entry.verified()
        if manifest is not None:
            return entry, manifest, False
        if entry.library.exists():
            _log.warning("fusiongate: the cached library %s is damaged and is built again", entry.library)
        prefix = f".building-{entry.folder.name}-"
        # Whoever holds the lock is the only builder: such a folder was left by a process that was killed.
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        started = time.perf_counter()
        with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch:
            _log.info("fusiongate: compiling %s for %s", source.name, target)
            compiled = compile_library(source, target, compiler, Path(scratch))
            manifest = Manifest(
                name=source.name,
                target=str(target),
                sha256=hashlib.sha256(compiled.read_bytes()).hexdigest(),
                recipe=recipe,
                compiler=compiler.version,
                tvm_ffi=_tvm_ffi_version(),
                flags=target.flags,
                built=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=round(time.perf_counter() - started, 2),
            )
            entry.store(compiled, manifest)
    return entry, manifest, True


@contextlib.contextmanager
def _locked(entry: Entry) -> Iterator[None]:
    lock = FileLock(entry.lock, timeout=COMPILE_TIMEOUT_S + 60)
    try:
        with disk_errors(entry.folder.parent):
            lock.acquire()
    except BuildError as error:
        if isinstance(error.__cause__, Timeout):
            raise BuildError(
                f"another process has held {entry.lock} for {COMPILE_TIMEOUT_S + 60:.0f} s; end it and try again"
            ) from error
        raise
    try:
        yield
    finally:
        lock.release()


def _entry(folder: Path, source: Source, target: Target, recipe: str, compiler: str) -> Entry:
    return Entry(folder / f"{source.name}-{target}-{recipe[:16]}-{compiler[:8]}")


def _recipe(source: Source, target: Target) -> str:
    """Return the digest of everything that goes into a library except the compiler."""
    parts = [BUILD_FORMAT, source.name, source.key, str(target), target.flags, _tvm_ffi_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tvm_ffi_version() -> str:
    return importlib.metadata.version("apache-tvm-ffi")
