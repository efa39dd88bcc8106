"""Single forward passes at real widths, as presets: what an evidence run times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import fusiongate as fg

from .images import flux1_inputs
from .ltx import clip_of, forward_call, model, start

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["FORWARDS"]

NEEDS = ("diffusers",)


def _ltx(run: Run, version: str) -> Steps:
    transformer, clip = model(run, version), clip_of(run.size, batch=1)
    time = torch.tensor(500.0, device=run.device)
    video, audio = forward_call(run, transformer, clip, start(run, transformer, clip), time)
    yield "output", {"video": video, "audio": audio}


@fg.preset("ltx2-forward", sizes=("tiny", "real"), needs=NEEDS)
def ltx2_forward(run: Run) -> Steps:
    """One pass of LTX-2."""
    yield from _ltx(run, "2")


@fg.preset("ltx23-forward", sizes=("tiny", "real"), needs=NEEDS)
def ltx23_forward(run: Run) -> Steps:
    """One pass of LTX-2.3."""
    yield from _ltx(run, "2.3")


@fg.preset("flux1-forward", sizes=("tiny", "real"), needs=NEEDS)
def flux1_forward(run: Run) -> Steps:
    """One pass of FLUX.1."""
    predict, latents = flux1_inputs(run)
    time = torch.tensor(500.0, device=run.device)
    yield "output", {"image": predict(latents, time.expand(latents.shape[0]))}


FORWARDS = (ltx2_forward, ltx23_forward, flux1_forward)
