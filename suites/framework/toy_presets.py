"""Small presets that run in no time, and whose arms a test can change one at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fusiongate.presets import preset

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["D", "Modulated", "Sized", "flat", "noisy", "steady"]

D = 16


class Modulated(nn.Module):
    """One layer with the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(D, 2 * D)
        self.norm = nn.LayerNorm(D, elementwise_affine=False)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.rows(condition)[:, None].chunk(2, dim=-1)
        y: Tensor = self.out(self.norm(x) * (1 + scale) + shift)
        return y


class Sized(nn.Module):
    """Parameters and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.table = nn.Parameter(torch.zeros(6, 64))
        self.register_buffer("noise", torch.rand(4))


@preset("steady")
def steady(run: Run) -> Steps:
    """Two steps and an output."""
    model = run.model("model", Modulated)
    x, condition = run.normal("x", 2, 5, D), run.normal("condition", 2, D)
    for number in range(2):
        x = x - 0.1 * model(x, condition)
        yield f"step {number}", {"x": x}
    yield "output", {"x": x.float(), "mean": x.float().mean()}


@preset("noisy")
def noisy(run: Run) -> Steps:
    """Its second step depends on the process."""
    model = run.model("model", Modulated)
    condition = run.normal("condition", 2, D)
    yield "first", {"x": model(run.normal("x", 2, 5, D), condition)}
    chance = torch.rand(2, 5, D, generator=torch.Generator().manual_seed(os.getpid()))
    yield "second", {"x": model(chance.to(torch.bfloat16), condition)}


@preset("flat", fused=False)
def flat(run: Run) -> Steps:
    """An output that proves nothing."""
    yield "output", {"x": torch.full((3,), float("nan")), "y": torch.zeros(4), "z": run.normal("z", 4)}
