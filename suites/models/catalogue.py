"""Every preset of these suites."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .atomics import atomic_pooling
from .images import ernie_image, flux1, flux2, ideogram4, qwen_image, sana
from .ltx import ltx2, ltx23_one_stage, ltx23_two_stage
from .videos import minimax_h3, wan

if TYPE_CHECKING:
    from fusiongate.presets import Preset

__all__ = ["ALL", "REAL"]

ALL: tuple[Preset, ...] = (
    *(atomic_pooling, ernie_image, flux1, flux2, ideogram4, ltx2, ltx23_one_stage, ltx23_two_stage),
    *(minimax_h3, qwen_image, sana, wan),
)
"""By name."""

REAL = tuple(preset for preset in ALL if "real" in preset.sizes)
"""Those that also have the widths that are used in earnest."""
