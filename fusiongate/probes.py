"""The operands of a probe: fresh numbers in the layout of a live call, taller where that call is too small to prove much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .guarded import GuardedOperand, span_of

__all__ = ["Operands", "live_copies", "redrawn", "taller"]

_SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)
_MOST_ELEMENTS = 1 << 25
"""A taller probe stays below this, so that a first sight of a large call is not a much larger one."""


class Operands:
    """One set of arguments for a kernel on trial, its tensors guarded."""

    def __init__(self, args: tuple[Any, ...], guards: dict[int, GuardedOperand]) -> None:
        self.args = args
        self._guards = guards

    def fault(self, name: Callable[[int], str]) -> tuple[str, str] | None:
        """What the kernel did to memory that is not its output: a word for it and a sentence; None if nothing."""
        for position, guard in self._guards.items():
            if guard.overrun():
                return "overrun", f"the kernel wrote outside of `{name(position)}`"
            if guard.changed():
                return "input-changed", f"the kernel changed its input `{name(position)}`"
        return None

    def tensors(self) -> list[Tensor]:
        """The guarded tensors."""
        return [guard.view for guard in self._guards.values()]


def _guarded(args: Sequence[Any], source: Callable[[Tensor], Tensor], layouts: Callable[[Tensor], tuple[Any, Any]]) -> Operands:
    guards: dict[int, GuardedOperand] = {}
    fresh = list(args)
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            shape, strides = layouts(arg)
            guards[position] = GuardedOperand.of(source(arg), arg, shape, strides)
            fresh[position] = guards[position].view
    return Operands(tuple(fresh), guards)


def live_copies(args: Sequence[Any]) -> Operands:
    """The live arguments, copied with their layout and alignment."""
    return _guarded(args, span_of, lambda tensor: (tensor.shape, tensor.stride()))


def _span_length(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _draw(like: Tensor, length: int, generator: torch.Generator, special: bool) -> Tensor:
    """Fresh numbers for a floating tensor: normal, and if asked for with what arithmetic treats specially strewn in."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if like.is_complex():
        return torch.randn(length, dtype=like.dtype, device=like.device, generator=generator)
    values = torch.randn(length, dtype=wide, device=like.device, generator=generator).to(like.dtype)
    if special:
        finfo = torch.finfo(like.dtype)
        numbers = [*_SPECIALS, finfo.max, -finfo.max, finfo.smallest_normal, finfo.smallest_normal / 2, -finfo.tiny]
        # Few enough to leave most rows of a norm clean: one NaN spoils its whole row.
        where = torch.randint(length, (2 * len(numbers),), device=like.device, generator=generator)
        values[where] = torch.tensor(numbers * 2, dtype=wide, device=like.device).to(like.dtype)
    return values


def redrawn(args: Sequence[Any], generator: torch.Generator, *, special: bool) -> Operands:
    """Floating tensors with fresh numbers; integers, bools and scalars live."""

    def source(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return _draw(tensor, _span_length(tensor.shape, tensor.stride()), generator, special)
        return span_of(tensor)

    return _guarded(args, source, lambda tensor: (tensor.shape, tensor.stride()))


def taller(args: Sequence[Any], output: Tensor, factor: int, generator: torch.Generator) -> Operands | None:
    """As :func:`redrawn`, with more in the batch's direction, the output's first dimension.

    An operand that spans the batch gets ``factor`` times as many entries; so does one row that all entries share where the batch
    has one entry, which tells rows apart that a batch of one cannot. None where the layout does not allow it: the
    operands hold integers (which may be indices), or the output has no batch.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if output.dim() < 2 or output.numel() * factor > _MOST_ELEMENTS:
        return None
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    batch = output.shape[0]

    def layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if tensor.dim() != output.dim() or shape[0] != batch:
            return shape, strides
        stride = strides[0]
        if batch == 1:
            stride = _span_length(shape[1:], strides[1:])
            if not tensor.is_contiguous():
                # Whole 128-byte steps keep every entry in the alignment class of the first.
                stride = -(-stride // 128) * 128
        return (shape[0] * factor, *shape[1:]), (stride, *strides[1:])

    return _guarded(
        args, lambda tensor: _draw(tensor, _span_length(*layout(tensor)), generator, special=False), layout
    )
