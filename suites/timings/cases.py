"""The shapes of real models that kernels are timed on, and their operands."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

import fusiongate as fg

__all__ = ["CASES", "KERNELS", "Case", "operands"]

KERNELS = {op.name: op for op in fg.kernels.FUSIONS}
"""Every kernel by name."""


@dataclass(frozen=True, slots=True)
class Case:
    """A place in a model, as the kernels see it."""

    shape: tuple[int, int, int]
    """Batch, tokens, width."""
    on_host: bool = False
    """Whether a host build is timed on it too: small enough for one core."""


CASES = {
    # LTX-2 is 4096 wide for video and 2048 for audio; the large one is five seconds at 768 × 512.
    "ltx2-video": Case((1, 14592, 4096)),
    "ltx2-video-small": Case((2, 517, 4096)),
    "ltx2-audio": Case((1, 126, 2048), on_host=True),
    # FLUX.1 is 3072 wide: an image of 1024 × 1024 with 512 tokens of text, and the text alone.
    "flux": Case((1, 4608, 3072)),
    "flux-text": Case((1, 512, 3072)),
    # Sana is 2240 wide: images of 4096 × 4096 and of 1024 × 1024, both halves of a guided batch.
    "sana-4k": Case((2, 16384, 2240)),
    "sana-1k": Case((2, 1024, 2240)),
    # MiniMax-H3 is 5376 wide, over one packed sequence.
    "h3": Case((1, 32768, 5376)),
    "h3-small": Case((1, 1024, 5376)),
}
"""The cases by name."""


def operands(kernel: str, case: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """The arguments of a kernel in a case: activations, and rows that are views of one table, as models make them."""
    batch, tokens, width = CASES[case].shape
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.encode()))
    x = torch.randn(batch, tokens, width, generator=generator, device=device).to(dtype)
    table = torch.randn(batch, 1, 6, width, generator=generator, device=device).to(dtype)
    shift, scale = table.unbind(2)[:2]
    return (x, scale, shift, 1e-6) if "norm" in kernel else (x, scale, shift)
