"""Modulation with a gate in the field's style: one flag for the whole process, and one ``torch.equal``.

The kernel is right wherever its authors tried it. What is wrong is how the gate decides that.
"""

from __future__ import annotations

import torch

__all__ = ["fused_modulate", "launch_modulate", "reference_modulate", "reset", "why_not"]

_checked = False
_enabled = True


def reference_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The eager chain: x (B, S, D), rows (B, 1, D)."""
    return x * (1 + scale) + shift


@torch.no_grad()
def launch_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Stands for the kernel: x (B, S, D) and dense rows (B, D), every step rounded to x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    product = (x * (1 + scale)[:, None]).to(x.dtype)
    return out.copy_(product + shift[:, None])


def why_not(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> str | None:
    """The fall-back ladder, in words; None where the kernel is to be launched."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "dtype"
    if x.dim() != 3 or not isinstance(scale, torch.Tensor) or not isinstance(shift, torch.Tensor):
        return "rank"
    if scale.shape != (x.shape[0], 1, x.shape[2]) or shift.shape != scale.shape:
        return "shape"
    return None


def fused_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The kernel where it is usable, and right on the very first call; else the eager chain."""
    global _checked, _enabled
    if not _enabled or torch.compiler.is_compiling() or why_not(x, scale, shift) is not None:
        return reference_modulate(x, scale, shift)
    out = launch_modulate(x, _dense(scale), _dense(shift))
    if not _checked:
        _checked = True
        expected = reference_modulate(x, scale, shift)
        if not torch.equal(out, expected):
            _enabled = False
            return expected
    return out


def _dense(row: torch.Tensor) -> torch.Tensor:
    return row.squeeze(1).contiguous()


def reset() -> None:
    """Forget the first call, as only a new process does."""
    global _checked, _enabled
    _checked, _enabled = False, True
