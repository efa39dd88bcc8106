"""Blocks and norms as LTX-2 has them, with the mounts in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusiongate.models import ltx2

__all__ = ["EPS", "Block", "composite_norm", "recording_backend", "row_kernel_norm"]

EPS = 1e-6


def row_kernel_norm(x: Tensor, eps: float) -> Tensor:
    """F.rms_norm without a weight, of (…, D)."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps)


def composite_norm(x: Tensor, eps: float) -> Tensor:
    """The RMSNorm that models write out, of (…, D)."""
    return (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Block(nn.Module):
    """Both mounts, as a transformer block has them."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        normalized = ltx2.ltx2_rms_norm_modulate(self, row_kernel_norm, x, scale, shift, EPS)
        return ltx2.ltx2_modulate(normalized, scale, shift)


def recording_backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., Callable[..., Any]]:
    """A backend of torch.compile that runs each graph as it is, and appends it to ``graphs``."""

    def record(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return record
