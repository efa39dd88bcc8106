"""What ``fusiongate doctor`` says of this machine: versions, what can run and be built, the cache, the switches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator

from fusiongate.errors import BuildError
from fusiongate.io import obstacle, one_line
from fusiongate.jit.cache import CACHE_VARIABLE, cache_folder, cached_entries, exposed_cache
from fusiongate.jit.doctor import TargetState

__all__ = ["lines", "versions"]


def versions() -> str:
    """The versions of what runs the kernels, on one line."""
    names = ("fusiongate", "torch", "apache-tvm-ffi")
    told = [f"{name} {_version(name) or 'not installed'}" for name in names]
    return f"python {platform.python_version()} at {sys.executable}, {', '.join(told)}"


def lines(states: Iterable[TargetState]) -> Iterator[str]:
    """The diagnosis of the targets, then of the cache and of what is set and installed."""
    for state in states:
        yield from _of_target(state)
    yield from _of_cache()
    yield from _of_switches()


def _of_target(state: TargetState) -> Iterator[str]:
    if state.no_device is not None:
        yield f"{state.name}: cannot run: {state.no_device}"
    else:
        on = f" on {', '.join(state.devices)}" if state.devices else ""
        yield f"{state.name}: {'can run' if state.can_run else 'cannot run'}{on}"
    if state.compiler is not None:
        yield f"  compiler: {state.compiler.version} at {state.compiler.path}"
    else:
        yield f"  compiler: {state.no_compiler}"
    for source in state.sources:
        told = "built" if source.built else f"cannot be built: {source.obstacle}" if source.obstacle else "can be built"
        yield f"  {source.name}: {told}"


def _of_cache() -> Iterator[str]:
    try:
        folder = cache_folder()
        entries, exposed = cached_entries(folder), exposed_cache()
    except BuildError as error:
        yield f"cache: {one_line(str(error))}"
        return
    yield f"cache: {one_line(str(folder))}, {len(entries)} {'library' if len(entries) == 1 else 'libraries'}"
    if hindrance := obstacle(folder):
        yield f"  no kernel can be stored in it: {one_line(hindrance)}; set {CACHE_VARIABLE} to another folder"
    elif exposed is not None:
        yield f"  not used, because others could put a library there: {one_line(exposed)}"
    for entry, manifest in entries:
        size = entry.library.stat().st_size / 1e6 if entry.library.exists() else 0.0
        told = f"{manifest.name} for {manifest.target}: {size:.1f} MB, {manifest.compiler}, {manifest.built}"
        yield f"  {one_line(told)}"


def _of_switches() -> Iterator[str]:
    switch = os.environ.get("FUSIONGATE_DISABLE")
    off = switch not in (None, "", "0")
    told = "not set" if switch is None else f"{switch!r}{', so every fusion takes its reference' * off}"
    yield f"FUSIONGATE_DISABLE: {told}"
    for module, extra, use in (
        ("pynvml", "nvidia", "clocks and throttling of NVIDIA GPUs"),
        ("amdsmi", "amd", "clocks and throttling of AMD GPUs"),
        ("diffusers", "models", "the real models"),
        ("av", "video", "films and sound that presets write"),
    ):
        if importlib.util.find_spec(module) is not None:
            yield f"extra {extra}: installed"
        else:
            yield f"extra {extra}: not installed; for {use}: pip install 'fusiongate[{extra}]'"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
