"""The operands of a probe: fresh numbers in the layout of a live call, taller where that call is too small."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .guarded import GuardedOperand, span_of

__all__ = ["Operands", "live_copies", "redrawn", "taller"]

_MOST_ELEMENTS = 1 << 25
"""A taller probe stays below this, so that a first sight of a large call is not a much larger one."""
_STREWN = 1 << 20
"""Elements at the beginning of an operand that special numbers are strewn into: enough for coincidences."""


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

    def batch(self, dimensions: int) -> int:
        """The batch: the largest first dimension of the tensors that have so many dimensions."""
        return max(tensor.shape[0] for tensor in self.tensors() if tensor.dim() == dimensions)

    def refills(self, count: int, generator: torch.Generator) -> Refills:
        """Fresh numbers for the same operands, ``count`` times; only for those that :func:`redrawn` gave."""
        blocks = [
            (guard, _draw(guard.view, count * guard.span.numel(), generator, special=False).reshape(count, -1))
            for guard in self._guards.values()
            if _is_drawn(guard.view)
        ]
        return Refills(blocks, count)


class Refills:
    """Puts one set of numbers after another into operands; every iteration brings the same sets again."""

    def __init__(self, blocks: list[tuple[GuardedOperand, Tensor]], count: int) -> None:
        self._blocks = blocks
        self._count = count

    def __iter__(self) -> Iterator[int]:
        for index in range(self._count):
            for guard, block in self._blocks:
                guard.refill(block[index])
            yield index


def _guarded(
    args: Sequence[Any], source: Callable[[Tensor], Tensor], layouts: Callable[[Tensor], tuple[Any, Any]]
) -> Operands:
    guards: dict[int, GuardedOperand] = {}
    fresh = list(args)
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            shape, strides = layouts(arg)
            guards[position] = GuardedOperand.of(source(arg), arg, shape, strides)
            fresh[position] = guards[position].view
    return Operands(tuple(fresh), guards)


def live_copies(args: Sequence[Any]) -> Operands:
    """The arguments, their tensors copied with layout and alignment."""
    return _guarded(args, span_of, lambda tensor: (tensor.shape, tensor.stride()))


def _span_length(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _is_drawn(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _draw(like: Tensor, length: int, generator: torch.Generator, *, special: bool) -> Tensor:
    """Fresh numbers for a floating tensor: normal, and if asked for with what arithmetic treats specially strewn in."""
    if like.is_complex():
        return torch.randn(length, dtype=like.dtype, device=like.device, generator=generator)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    values = torch.randn(length, dtype=wide, device=like.device, generator=generator).to(like.dtype)
    if special:
        _strew(values[:_STREWN], generator)
    return values


def _strew(values: Tensor, generator: torch.Generator) -> None:
    finfo = torch.finfo(values.dtype)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32

    def put(where: Tensor, numbers: list[float]) -> None:
        pick = torch.randint(len(numbers), where.shape, device=values.device, generator=generator)
        values[where] = torch.tensor(numbers, dtype=wide, device=values.device).to(values.dtype)[pick]

    # Zeros and subnormals show in a result where they meet in several operands: they have to be many, and harm no norm.
    many = torch.randint(values.numel(), (values.numel() // 4 + 1,), device=values.device, generator=generator)
    put(many, [0.0, -0.0, 0.0, -0.0, finfo.tiny, -finfo.tiny / 2, finfo.tiny / 4])
    # These spoil their whole row for a norm: few leave most rows clean.
    few = torch.randint(values.numel(), (16,), device=values.device, generator=generator)
    put(few, [math.nan, math.inf, -math.inf, finfo.max, -finfo.max])


def redrawn(args: Sequence[Any], generator: torch.Generator, *, special: bool) -> Operands:
    """Floating tensors with fresh numbers; integers, bools and scalars live."""

    def source(tensor: Tensor) -> Tensor:
        if _is_drawn(tensor):
            return _draw(tensor, _span_length(tensor.shape, tensor.stride()), generator, special=special)
        return span_of(tensor)

    return _guarded(args, source, lambda tensor: (tensor.shape, tensor.stride()))


def taller(args: Sequence[Any], output: Tensor, factor: int, generator: torch.Generator) -> Operands | None:
    """As :func:`redrawn`, special numbers included, with more in the batch's direction, the output's first dimension.

    An operand that spans the batch gets ``factor`` times as many entries, or fewer if that is too many elements; so
    does a row that all entries share where the batch has one entry, which tells rows apart as a batch of one cannot.
    None where the layout does not allow it: the operands hold integers (which may be indices), the output has no batch,
    or the batch is not the outermost dimension in memory.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    factor = min(max(factor, 2), _MOST_ELEMENTS // output.numel())
    if output.dim() < 2 or factor < 2 or not all(map(_is_drawn, tensors)):
        return None
    batch = output.shape[0]

    def spans_batch(tensor: Tensor) -> bool:
        return tensor.dim() == output.dim() and tensor.shape[0] == batch

    def inner(tensor: Tensor) -> int:
        return _span_length(tensor.shape[1:], tensor.stride()[1:])

    if not any(map(spans_batch, tensors)):
        return None
    if batch > 1 and any(spans_batch(tensor) and 0 < tensor.stride(0) < inner(tensor) for tensor in tensors):
        # The entries lie between each other: more of them would overlap, as in no live call.
        return None

    def layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if not spans_batch(tensor):
            return shape, strides
        stride = strides[0]
        if batch == 1:
            stride = inner(tensor)
            if not tensor.is_contiguous():
                # Whole 128-byte steps keep every entry in the alignment class of the first.
                stride = -(-stride // 128) * 128
        return (shape[0] * factor, *shape[1:]), (stride, *strides[1:])

    return _guarded(args, lambda tensor: _draw(tensor, _span_length(*layout(tensor)), generator, special=True), layout)
