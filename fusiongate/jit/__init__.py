"""Kernel sources to loaded libraries: cache, lock, child processes, and the host, CUDA and HIP targets."""

from .load import Prebuilt, find_built, forget, library, prebuild
from .sources import Source, source_hash
from .targets import Target, local_targets

__all__ = [
    "Prebuilt",
    "Source",
    "Target",
    "find_built",
    "forget",
    "library",
    "local_targets",
    "prebuild",
    "source_hash",
]
