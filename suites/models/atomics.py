"""A preset that really does not repeat: sums by atomic additions, whose order on a GPU is anybody's guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import fusiongate as fg

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["AtomicPooling", "atomic_pooling"]

_CHANNELS = 128


class AtomicPooling(nn.Module):
    """Tokens are modulated, summed by group with ``index_add``, and handed back to their tokens.

    The stream is kept in fp32: rounded to bf16, it would hide in most runs that the order of the additions is another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_CHANNELS, elementwise_affine=False)
        self.rows = nn.Linear(_CHANNELS, 2 * _CHANNELS)

    def forward(self, x: Tensor, condition: Tensor, groups: Tensor) -> Tensor:
        shift, scale = self.rows(condition)[:, None].chunk(2, dim=-1)
        y = self.norm(x.to(shift.dtype)) * (1 + scale) + shift
        flat = y.flatten(0, 1).float()
        sums = torch.zeros(int(groups.max()) + 1, _CHANNELS, device=x.device)
        sums.index_add_(0, groups, flat)
        return x + 0.01 * sums[groups].view_as(x)


@fg.preset("atomic-pooling")
def atomic_pooling(run: Run) -> Steps:
    """Three rounds of pooling; the sums are long enough for their order to matter in every one."""
    model = run.model("pooling", AtomicPooling)
    batch, tokens = (2, 64) if run.device.type == "cpu" else (2, 16384)
    x = run.normal("x", batch, tokens, _CHANNELS, std=3.0).float()
    condition = run.normal("condition", batch, _CHANNELS)
    groups = torch.arange(batch * tokens, device=run.device) % 4
    for number in range(3):
        x = model(x, condition, groups)
        yield f"round {number}", {"x": x}
    yield "output", {"x": x}
