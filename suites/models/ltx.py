"""LTX-2 and LTX-2.3: video and audio denoised together, in one stage and in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fusiongate as fg

from .denoising import denoise

if TYPE_CHECKING:
    from fusiongate.presets import Run, Steps

__all__ = ["Clip", "clip_of", "forward_call", "ltx2", "ltx23_one_stage", "ltx23_two_stage", "model", "start"]

NEEDS = ("diffusers",)

_TINY: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 128,
    "caption_channels": 24,
}
_VERSION_2_3: dict[str, Any] = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}


@dataclass(frozen=True, slots=True)
class Clip:
    """How much is generated, in latents."""

    batch: int
    """Clips at a time."""
    frames: int
    """Frames."""
    height: int
    """Rows of tokens in a frame."""
    width: int
    """Tokens in a row."""
    audio: int
    """Audio tokens."""
    text: int
    """Text tokens."""

    @property
    def video(self) -> int:
        """Video tokens."""
        return self.frames * self.height * self.width


def clip_of(size: str, batch: int) -> Clip:
    """A clip of the preset's size: 14,592 video tokens where it is real."""
    if size == "tiny":
        return Clip(batch, 2, 4, 6, 10, 7)
    return Clip(batch, 19, 24, 32, 126, 256)


def model(run: Run, version: str) -> nn.Module:
    """The transformer of a version, ``2`` or ``2.3``, with 2 layers or 12 of the real widths."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel

    further = _VERSION_2_3 if version == "2.3" else {}
    sizes = {**_TINY, "num_layers": 2} if run.size == "tiny" else {"num_layers": 12}
    made: nn.Module = run.model(
        "transformer", lambda: LTX2VideoTransformer3DModel(rope_type="split", **sizes, **further)
    )
    return made


def _texts(run: Run, transformer: Any, clip: Clip) -> tuple[Tensor, Tensor]:
    config = transformer.config
    if config.use_prompt_embeddings:
        widths = (config.caption_channels, config.caption_channels)
    else:
        widths = (config.cross_attention_dim, config.audio_cross_attention_dim)
    video, audio = (
        run.normal(f"{kind} text", clip.batch, clip.text, width)
        for kind, width in zip(("video", "audio"), widths, strict=True)
    )
    return video, audio


def forward_call(
    run: Run, transformer: Any, clip: Clip, latents: dict[str, Tensor], time: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward pass: the velocities of video and audio."""
    video_text, audio_text = _texts(run, transformer, clip)
    times = time.expand(clip.batch)
    video, audio = transformer(
        hidden_states=latents["video"],
        audio_hidden_states=latents["audio"],
        encoder_hidden_states=video_text,
        audio_encoder_hidden_states=audio_text,
        timestep=times,
        sigma=times,
        num_frames=clip.frames,
        height=clip.height,
        width=clip.width,
        audio_num_frames=clip.audio,
        use_cross_timestep=not transformer.config.use_prompt_embeddings,
        return_dict=False,
    )
    return video, audio


def start(run: Run, transformer: Any, clip: Clip) -> dict[str, Tensor]:
    """Latents of noise to begin with."""
    config = transformer.config
    return {
        "video": run.normal("video", 1, clip.video, config.in_channels),
        "audio": run.normal("audio", 1, clip.audio, config.audio_in_channels),
    }


def _generate(run: Run, transformer: Any, clip: Clip, latents: dict[str, Tensor], steps: int, label: str) -> Steps:
    """A loop with classifier-free guidance where the batch is two: the second text then guides."""

    def predict(now: Any, time: Tensor) -> dict[str, Tensor]:
        batched = {name: tensor.expand(clip.batch, -1, -1).contiguous() for name, tensor in now.items()}
        video, audio = forward_call(run, transformer, clip, batched, time)
        guided = {"video": video, "audio": audio}
        if clip.batch == 1:
            return guided
        return {name: tensor[:1] + 3.0 * (tensor[1:] - tensor[:1]) for name, tensor in guided.items()}

    for number, now in denoise(latents, predict, steps):
        latents.update(now)
        yield f"{label}{number}", now


@fg.preset("ltx2", sizes=("tiny", "real"), needs=NEEDS)
def ltx2(run: Run) -> Steps:
    """LTX-2 in one stage, with guidance: two texts in a batch."""
    transformer, clip = model(run, "2"), clip_of(run.size, batch=2 if run.size == "tiny" else 1)
    latents = start(run, transformer, clip)
    yield from _generate(run, transformer, clip, latents, 4, "step ")
    yield "output", latents


@fg.preset("ltx23-one-stage", sizes=("tiny", "real"), needs=NEEDS)
def ltx23_one_stage(run: Run) -> Steps:
    """LTX-2.3 in one stage: the text is modulated as well, so that all fourteen sites run."""
    transformer, clip = model(run, "2.3"), clip_of(run.size, batch=2 if run.size == "tiny" else 1)
    latents = start(run, transformer, clip)
    yield from _generate(run, transformer, clip, latents, 4, "step ")
    yield "output", latents


@fg.preset("ltx23-two-stage", sizes=("tiny", "real"), needs=NEEDS)
def ltx23_two_stage(run: Run) -> Steps:
    """LTX-2.3 at half the height and width first; then enlarged, noised again, and denoised at full size."""
    transformer, full = model(run, "2.3"), clip_of(run.size, batch=1)
    half = Clip(1, full.frames, full.height // 2, full.width // 2, full.audio, full.text)
    latents = start(run, transformer, half)
    yield from _generate(run, transformer, half, latents, 3, "first stage, step ")
    small = latents["video"].view(1, half.frames, half.height, half.width, -1)
    large = small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3).reshape(1, full.video, -1)
    noise = run.normal("noise", 1, full.video, large.shape[-1])
    latents["video"] = torch.lerp(large, noise, 0.5)
    yield "enlarged", {"video": latents["video"]}
    yield from _generate(run, transformer, full, latents, 3, "second stage, step ")
    yield "output", latents
