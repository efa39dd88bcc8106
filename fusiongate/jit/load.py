"""Kernel sources to loaded libraries: from this process, from the cache on disk, or from the compiler.

A library is first loaded in a child process: an abort or an illegal instruction there is one exception here.
"""

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

from fusiongate.errors import BuildError, NoCompiler, ProbeFailed
from fusiongate.platforms import available_cores

from .cache import Entry, Manifest, cached_entries, disk_errors, trusted_folder
from .child import run_child
from .compile import COMPILE_TIMEOUT_S, compile_library, find_compiler
from .permissions import is_own
from .sources import Source
from .targets import Target, machine_identity

if TYPE_CHECKING:
    import tvm_ffi

__all__ = ["Prebuilt", "find_built", "forget", "library", "prebuild"]

BUILD_FORMAT = 1
"""Counts up when what a library's key does not cover changes, such as how its units are put together."""

_PROBE_TIMEOUT_S = 120.0
_OUTPUT_LINES = 15

# Nothing that a device says is among them: an error of the device's is the gate's to judge.
_UNFORESEEN = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, NotImplementedError)

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


def _free_lock() -> None:
    # The thread that held it, for as long as a compiler runs, is not in the child.
    global _outcomes_lock
    _outcomes_lock = threading.Lock()


os.register_at_fork(after_in_child=_free_lock)


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
                except _UNFORESEEN as error:
                    outcome = _Failure(
                        BuildError,
                        f"{source.name} for {target} could not be built or loaded: {type(error).__name__}: {error}; no "
                        f"kernel has run: `fusiongate doctor` may tell more, and this is to be reported with its lines",
                    )
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
    folder = trusted_folder(make=False)
    recipe = _recipe(source, target)
    if folder is None:
        return None
    expected = (source.name, str(target), recipe)
    try:
        entry = _entry(folder, source, target, recipe, find_compiler(target).digest)
    except NoCompiler:
        # A machine without a compiler uses what was built for it ahead of time.
        entries = [entry for entry, _ in cached_entries(folder)]
    else:
        entries = [entry]
    return next((entry for entry in entries if entry.verified(*expected) is not None), None)


def prebuild(sources: Iterable[Source], targets: Iterable[Target]) -> Iterator[Prebuilt]:
    """Build every source for every target without loading any, as many at once as there are cores.

    Yields each outcome as it comes; a library that cannot be built is an outcome with an error.
    """
    jobs = [(source, target) for target in targets for source in sources]
    # Each thread only waits for the compiling process that it started.
    with ThreadPoolExecutor(max_workers=available_cores()) as pool:
        yield from (future.result() for future in as_completed([pool.submit(_prebuild, *job) for job in jobs]))


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
    _probe_once(source, target, entry, manifest, identity)
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
    expected = (source.name, str(target), _recipe(source, target))
    entry = find_built(source, target)
    manifest = entry.verified(*expected) if entry is not None else None
    if entry is not None and manifest is not None:
        return entry, manifest, False
    compiler = find_compiler(target)
    folder = trusted_folder(make=True)
    assert folder is not None  # it has just been made
    entry = _entry(folder, source, target, expected[-1], compiler.digest)
    with _locked(entry):
        # Another process may have built it while this one waited.
        manifest = entry.verified(*expected)
        if manifest is not None:
            return entry, manifest, False
        with disk_errors(folder):
            exposed = entry.exposed()
        if exposed is not None:
            _log.warning("fusiongate: a cached library that others could have written is built again: %s", exposed)
        elif entry.library.exists():
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
                recipe=expected[-1],
                compiler=compiler.version,
                tvm_ffi=_tvm_ffi_version(),
                flags=target.flags,
                built=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=round(time.perf_counter() - started, 2),
            )
            entry.store(compiled, manifest)
    return entry, manifest, True


def _probe_once(source: Source, target: Target, entry: Entry, manifest: Manifest, identity: dict[str, str]) -> None:
    """Load a library in a child process and call its probes, unless it has passed them on this machine before.

    The child calls the library's own ``fusiongate_probe()`` where it exports one, then ``source.probe``.

    Raises
    ------
    ProbeFailed
        The child raised, was killed by a signal (which the message names) or ran past its limit. Nothing about a
        failure is stored, so that a new process tries again.
    """
    stamp = {**identity, "library": manifest.sha256, "probe": source.probe or ""}
    digest = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()
    name = f"probe-{digest[:16]}.json"
    if (entry.folder / name).is_file():
        return
    request = {
        "task": "probe",
        "library": str(entry.library),
        "target": str(target),
        "probe": source.probe,
        "without_torch": target.kind == "host" and source.probe is None,
    }
    outcome = run_child(request, os.environ, _PROBE_TIMEOUT_S)
    if outcome.returncode != 0:
        if outcome.signal_name is not None:
            happened = f"killed the process that first loaded it, by {outcome.signal_name}"
        elif outcome.returncode is None:
            happened = f"did not return from its probe within {_PROBE_TIMEOUT_S:.0f} s"
        else:
            happened = "failed its probe"
        lines = [line for line in outcome.output.splitlines() if line.strip()]
        raise ProbeFailed(
            "\n".join([f"{source.name} for {target} {happened}; it is not loaded here", *lines[-_OUTPUT_LINES:]])
        )
    try:
        entry.write_json(name, {**stamp, "passed": datetime.now(UTC).isoformat(timespec="seconds")})
    except BuildError as error:
        # As in an image that is read-only now, with libraries that were built ahead.
        _log.info("fusiongate: %s passed its probe, which the next process repeats: %s", source.name, error)


@contextlib.contextmanager
def _locked(entry: Entry) -> Iterator[None]:
    lock = FileLock(entry.lock, timeout=COMPILE_TIMEOUT_S + 60)
    try:
        with disk_errors(entry.folder.parent):
            if entry.lock.is_symlink() or (entry.lock.exists() and not is_own(entry.lock)):
                # Put there while others could write here. To open it would empty what it leads to.
                entry.lock.unlink()
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
