"""Presets of image models: each family's transformer in a loop of a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fusiongate as fg

from .denoising import denoise, grid

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["ernie_image", "flux1", "flux1_inputs", "flux2", "ideogram4", "qwen_image", "sana"]

NEEDS = ("diffusers",)


def _loop(latents: Tensor, predict: Any, steps: int = 3) -> Steps:
    def named(now: Any, time: Tensor) -> dict[str, Tensor]:
        return {"image": predict(now["image"], time.expand(latents.shape[0]))}

    last = latents
    for number, now in denoise({"image": latents}, named, steps):
        last = now["image"]
        yield f"step {number}", now
    yield "output", {"image": last}


def flux1_inputs(run: Run) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """FLUX.1's velocity as a function of latents and times, and the latents to begin with."""
    from diffusers import FluxTransformer2DModel

    if run.size == "tiny":
        sizes: dict[str, Any] = {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "pooled_projection_dim": 24,
            "axes_dims_rope": (8, 12, 12),
        }
        batch, height, width, text = 2, 6, 8, 7
    else:
        sizes = {"num_layers": 4, "num_single_layers": 8}
        batch, height, width, text = 1, 64, 64, 512
    transformer = run.model("transformer", lambda: FluxTransformer2DModel(guidance_embeds=True, **sizes))
    config = transformer.config
    fixed = {
        "encoder_hidden_states": run.normal("text", batch, text, config.joint_attention_dim),
        "pooled_projections": run.normal("pooled text", batch, config.pooled_projection_dim),
        "txt_ids": torch.zeros(text, 3, device=run.device),
        "img_ids": grid(1, height, width, device=run.device),
        "guidance": torch.full((batch,), 3.5, device=run.device),
    }

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(hidden_states=latents, timestep=time / 1000, return_dict=False, **fixed)[0]
        return velocity

    return predict, run.normal("image", batch, height * width, config.in_channels)


@fg.preset("flux1", sizes=("tiny", "real"), needs=NEEDS)
def flux1(run: Run) -> Steps:
    """FLUX.1: double and single blocks, modulated by AdaLayerNormZero and its kin."""
    predict, latents = flux1_inputs(run)
    yield from _loop(latents, predict)


@fg.preset("flux2", needs=NEEDS)
def flux2(run: Run) -> Steps:
    """FLUX.2: modulations that all blocks share, scale before the activations."""
    from diffusers import Flux2Transformer2DModel

    transformer = run.model(
        "transformer",
        lambda: Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
        ),
    )
    batch, height, width, text = 2, 6, 8, 7
    fixed = {
        "encoder_hidden_states": run.normal("text", batch, text, 48),
        "txt_ids": grid(1, 1, 1, text, device=run.device),
        "img_ids": grid(1, height, width, 1, device=run.device),
        "guidance": torch.full((batch,), 4.0, device=run.device),
    }

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(hidden_states=latents, timestep=time / 1000, return_dict=False, **fixed)[0]
        return velocity

    yield from _loop(run.normal("image", batch, height * width, 16), predict)


@fg.preset("sana", needs=NEEDS)
def sana(run: Run) -> Steps:
    """Sana: linear attention, a modulation of its own class at the end."""
    from diffusers import SanaTransformer2DModel

    transformer = run.model(
        "transformer",
        lambda: SanaTransformer2DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=32,
            num_layers=2,
            num_cross_attention_heads=4,
            cross_attention_head_dim=32,
            cross_attention_dim=128,
            caption_channels=24,
            sample_size=8,
        ),
    )
    text = run.normal("text", 2, 7, 24)

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(latents, encoder_hidden_states=text, timestep=time, return_dict=False)[0]
        return velocity

    yield from _loop(run.normal("image", 2, 8, 8, 8), predict)


@fg.preset("ernie-image", needs=NEEDS)
def ernie_image(run: Run) -> Steps:
    """ERNIE-Image: sequence first, and the chain in fp32."""
    from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModel

    transformer = run.model(
        "transformer",
        lambda: ErnieImageTransformer2DModel(
            hidden_size=128,
            num_attention_heads=4,
            num_layers=2,
            ffn_hidden_size=256,
            in_channels=16,
            out_channels=16,
            text_in_dim=24,
            rope_axes_dim=(8, 12, 12),
        ),
    )
    text, lengths = run.normal("text", 1, 7, 24), torch.tensor([7], device=run.device)

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(latents, time, text, lengths, return_dict=False)[0]
        return velocity

    yield from _loop(run.normal("image", 1, 16, 6, 8), predict)


@fg.preset("ideogram4", needs=NEEDS, fused=False)
def ideogram4(run: Run) -> Steps:
    """Ideogram 4: a scale without a shift, for which no kernel is shipped, as every site says."""
    from diffusers.models.transformers import transformer_ideogram4 as source

    transformer = run.model(
        "transformer",
        lambda: source.Ideogram4Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            intermediate_size=256,
            adaln_dim=32,
            llm_features_dim=48,
            mrope_section=(6, 5, 5),
        ),
    )
    text, height, width = 7, 6, 8
    length = text + height * width
    places = torch.cat([grid(1, 1, text, device=run.device), grid(1, height, width, device=run.device)])
    roles = torch.full((1, length), source.OUTPUT_IMAGE_INDICATOR, device=run.device)
    roles[:, :text] = source.LLM_TOKEN_INDICATOR
    fixed = {
        "encoder_hidden_states": run.normal("text", 1, length, 48),
        "position_ids": places[None].long(),
        "segment_ids": torch.zeros(1, length, dtype=torch.long, device=run.device),
        "indicator": roles,
    }

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(latents, (1 - time / 1000).to(latents.dtype), return_dict=False, **fixed)[0]
        return velocity

    yield from _loop(run.normal("image", 1, length, 16), predict)


@fg.preset("qwen-image", needs=NEEDS)
def qwen_image(run: Run) -> Steps:
    """Qwen-Image: one method modulates both streams."""
    from diffusers import QwenImageTransformer2DModel

    transformer = run.model(
        "transformer",
        lambda: QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=48,
            axes_dims_rope=(8, 12, 12),
        ),
    )
    batch, height, width, text = 2, 6, 8, 7
    fixed = {
        "encoder_hidden_states": run.normal("text", batch, text, 48),
        "encoder_hidden_states_mask": torch.ones(batch, text, dtype=torch.bool, device=run.device),
        "img_shapes": [[(1, height, width)]] * batch,
    }

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        velocity: Tensor = transformer(hidden_states=latents, timestep=time / 1000, return_dict=False, **fixed)[0]
        return velocity

    yield from _loop(run.normal("image", batch, height * width, 16), predict)
