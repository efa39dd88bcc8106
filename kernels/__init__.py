"""The kernels: exact fusions of adaLN chains, and their sources.

Each source has a folder, ``<name>/<name>.cu``, and builds for CUDA, HIP and the host; the fusions on them are here. A
fusion declines CPU tensors; its ``.host`` is the same kernel built for the host, for machines without a GPU.
"""

from __future__ import annotations

from .composite_rms_norms import composite_rms_norm_modulate
from .modulations import modulate, modulate_fp32
from .rms_norms import rms_norm_modulate, rms_norm_modulate_high
from .sources import SOURCES

__all__ = [
    "FUSIONS",
    "SOURCES",
    "composite_rms_norm_modulate",
    "modulate",
    "modulate_fp32",
    "rms_norm_modulate",
    "rms_norm_modulate_high",
]

FUSIONS = (modulate, modulate_fp32, rms_norm_modulate, composite_rms_norm_modulate, rms_norm_modulate_high)
"""Every fusion that is shipped."""
