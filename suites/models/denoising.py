"""A denoising loop with a scheduler of diffusers, as pipelines have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["Predict", "denoise", "grid"]

Predict = Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]
"""The latents by name and the timestep (a scalar of 0 to 1000 in fp32), to a velocity for each of the latents."""


def denoise(latents: Mapping[str, Tensor], predict: Predict, steps: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Flow-matching Euler steps; yields the number of each step and the latents after it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    now = dict(latents)
    # One for each of the latents, since a scheduler counts the steps that it is asked for.
    schedulers = {name: FlowMatchEulerDiscreteScheduler() for name in now}
    for name, scheduler in schedulers.items():
        scheduler.set_timesteps(steps, device=now[name].device)
    for number in range(steps):
        time = next(iter(schedulers.values())).timesteps[number]
        velocities = predict(now, time)
        now = {
            name: scheduler.step(velocities[name], scheduler.timesteps[number], now[name], return_dict=False)[0]
            for name, scheduler in schedulers.items()
        }
        yield number, now


def grid(*sizes: int, device: torch.device) -> Tensor:
    """The coordinates of every cell of a grid, (product of sizes, number of sizes) in fp32."""
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")
    return torch.stack(axes, dim=-1).reshape(-1, len(sizes)).float()
