"""The kernels' sources, as the build knows them."""

from __future__ import annotations

from pathlib import Path

from fusiongate.jit import Source

__all__ = ["SOURCES", "source"]

_FOLDER = Path(__file__).parent


def source(name: str) -> Source:
    """The source in the folder ``name``."""
    return Source(name, files=(_FOLDER / name / f"{name}.cu",), include=(_FOLDER / "common",))


SOURCES = tuple(source(name) for name in ("modulate", "rms_norm_modulate", "composite_rms_norm_modulate"))
"""One for each library."""
