"""The kinds of site, by the kernels that stand there."""

from __future__ import annotations

__all__ = ["KINDS"]

KINDS = {
    "modulate": 3,
    "modulate_fp32": 7,
    "rms_norm_modulate": 4,
    "composite_rms_norm_modulate": 10,
    "layer_norm_modulate": 4,
    "gated_residual": 2,
}
"""What a site can ask for, with the kernels that eager launches there; an op is told by its name."""
