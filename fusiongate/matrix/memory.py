"""Memory for operands: always at the same alignment, so that a cell's calls share one signature."""

from __future__ import annotations

import torch

__all__ = ["aligned", "aligned_copy", "realigned"]

_ALIGNMENT = 256
"""Bytes. CUDA's allocator gives no less; the CPU's gives 64, and whatever more chance has it."""

_LINE = 64
"""Bytes: what every allocator gives."""


def aligned(shape: tuple[int, ...], like: torch.Tensor, fill: float | None = None) -> torch.Tensor:
    """A dense tensor of that shape, of another's dtype and device, at an aligned address.

    Parameters
    ----------
    shape
        Its shape.
    like
        Gives dtype and device.
    fill
        What it holds, for memory that no view of it should read; None: anything.
    """
    elements = torch.Size(shape).numel()
    slack = _ALIGNMENT // like.element_size()
    memory = torch.empty(elements + slack, dtype=like.dtype, device=like.device)
    start = -memory.data_ptr() % _ALIGNMENT // like.element_size()
    tensor = memory[start : start + elements].view(shape)
    return tensor if fill is None else tensor.fill_(fill)


def aligned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A dense copy at an aligned address, on another device if one is given."""
    source = tensor if device is None else tensor.to(device)
    return aligned(tuple(source.shape), source).copy_(source)


def realigned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is laid out, moved if need be so that chance has no part in its alignment.

    What is left of its address after whole 64-byte lines is kept: that much, and no more, somebody chose.
    """
    offset = tensor.data_ptr() % _LINE
    if not tensor.numel() or tensor.data_ptr() % _ALIGNMENT == offset:
        return tensor
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    before = offset // tensor.element_size()
    memory = aligned((before + span,), tensor)[before:]
    memory.copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())
