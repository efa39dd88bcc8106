"""Presets of video models beside LTX: Wan, and MiniMax-H3's packed sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fusiongate as fg

from .denoising import denoise, grid

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["minimax_h3", "wan"]

NEEDS = ("diffusers",)


@fg.preset("wan", needs=NEEDS)
def wan(run: Run) -> Steps:
    """Wan: norms and chain in fp32, between casts."""
    from diffusers import WanTransformer3DModel

    transformer = run.model(
        "transformer",
        lambda: WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=8,
            out_channels=8,
            text_dim=24,
            freq_dim=32,
            ffn_dim=256,
            num_layers=2,
        ),
        in_fp32=WanTransformer3DModel._keep_in_fp32_modules,
    )
    text = run.normal("text", 2, 7, 24)

    def predict(now: Any, time: Tensor) -> dict[str, Tensor]:
        return {"video": transformer(now["video"], time.expand(2), text, return_dict=False)[0]}

    latents = {"video": run.normal("video", 2, 8, 3, 8, 8)}
    for number, now in denoise(latents, predict, 3):
        latents = now
        yield f"step {number}", now
    yield "output", latents


@fg.preset("minimax-h3", needs=NEEDS, fused=False)
def minimax_h3(run: Run) -> Steps:
    """MiniMax-H3: text, audio and video in one packed sequence, modulated row by row."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    transformer = run.model(
        "transformer",
        lambda: MiniMaxH3Transformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            hidden_size=128,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=256,
            in_channels=4,
            audio_in_channels=8,
            text_dim=24,
            freq_dim=32,
            time_embed_hidden_dim=64,
            time_embed_dim=32,
            rope_freq_dim=4,
        ),
        in_fp32=MiniMaxH3Transformer3DModel._keep_in_fp32_modules,
    )
    frames, height, width, audio, text = 2, 4, 6, 10, 7
    video = frames * height * width
    length = text + audio + video
    where = torch.arange(length, device=run.device)
    at = {"text": where[:text], "audio": where[text : text + audio], "video": where[text + audio :]}
    tags = torch.ones(length, dtype=torch.long, device=run.device)
    tags[at["audio"]], tags[at["video"]] = 2, 0
    places = torch.zeros(length, 3, device=run.device)
    places[at["text"], 0] = torch.arange(text, device=run.device).float()
    places[at["audio"], 0] = torch.arange(audio, device=run.device).float()
    places[at["video"]] = grid(frames, height, width, device=run.device)
    fixed = {
        "encoder_hidden_states": run.normal("text", 1, text, 24),
        "timestep_indices": (tags != 1).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": at["video"],
        "audio_indices": at["audio"],
        "text_indices": at["text"],
    }

    def predict(now: Any, time: Tensor) -> dict[str, Tensor]:
        levels = torch.stack([torch.zeros_like(time), time / 1000])
        moving, sounding = transformer(now["video"], now["audio"], timestep=levels, return_dict=False, **fixed)
        return {"video": moving, "audio": sounding}

    latents = {"video": run.normal("video", 1, video, 16), "audio": run.normal("audio", 1, audio, 8)}
    for number, now in denoise(latents, predict, 3):
        latents = now
        yield f"step {number}", now
    yield "output", latents
