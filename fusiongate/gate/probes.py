"""The operands of a probe: fresh numbers in the layout of a live call, or of another call with the same signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from .guarded import GuardedOperand, mostly_gaps, span_length, span_of
from .probe_values import numbers

__all__ = ["Operands", "live_copies", "redrawn", "resized", "sharing", "taller"]

_MOST_ELEMENTS = 1 << 25
"""A taller probe stays below this, so that a first sight of a large call is not a much larger one."""

_GROWTH = 2
"""How many times the live rows a probe of the same bucket may have."""
_SEVERAL_ROWS = 1 << 22
"""Elements of a call up to which more row counts of its bucket are tried than the most and the fewest."""


class Operands:
    """One set of arguments for a kernel on trial, its tensors guarded."""

    def __init__(self, args: tuple[Any, ...], guards: dict[int, GuardedOperand]) -> None:
        self.args = args
        self._guards = guards

    def fault(self, name: Callable[[int], str], written: Collection[int] = ()) -> tuple[str, str] | None:
        """What the kernel did to memory that is not its output: a word for it and a sentence; None if nothing.

        Parameters
        ----------
        name
            The name of an argument, by its position.
        written
            The positions of those that the kernel is to write.
        """
        flags = [guard.disturbed(written=position in written) for position, guard in self._guards.items()]
        if not written and len({flag.device for flag in flags}) == 1 and not torch.stack(flags).any():
            # All of them at once: each question is a wait for the device.
            return None
        for position, guard in self._guards.items():
            if guard.overrun():
                return "overrun", f"the kernel wrote outside of `{name(position)}`"
            if position in written:
                if guard.changed_in_its_gaps():
                    return "overrun", f"the kernel wrote between the elements of `{name(position)}`"
            elif guard.changed():
                return "input-changed", f"the kernel changed its input `{name(position)}`"
        return None

    def tensors(self) -> list[Tensor]:
        """The guarded tensors."""
        return [guard.view for guard in self._guards.values()]

    def batch(self, dimensions: int) -> int:
        """The batch: the largest first dimension of the tensors that have so many dimensions."""
        return max(tensor.shape[0] for tensor in self.tensors() if tensor.dim() == dimensions)

    def refill(self, rng: Random, *, special: bool = True) -> None:
        """Put other numbers into the same memory; only for operands that :func:`redrawn` gave."""
        for guard in self._guards.values():
            if is_drawn(guard.view):
                guard.refill(numbers(guard.view, guard.memory.shape, rng, special=special))


Layout = Callable[[Tensor], tuple[Sequence[int], Sequence[int]]]
"""Gives shape and strides of the tensor that stands for another one."""


def _as_it_is(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    return tensor.shape, tensor.stride()


def _guarded(args: Sequence[Any], source: Callable[[Tensor, Sequence[int]], Tensor], layout: Layout) -> Operands:
    guards: dict[int, GuardedOperand] = {}
    fresh = list(args)
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            shape, strides = layout(arg)
            guards[position] = GuardedOperand.of(arg, shape, strides, functools.partial(source, arg))
            fresh[position] = guards[position].view
    return Operands(tuple(fresh), guards)


def _memory_of(tensor: Tensor, _size: Sequence[int]) -> Tensor:
    apart = mostly_gaps(tensor.shape, tensor.stride(), tensor.element_size())
    return tensor.detach().clone() if apart else span_of(tensor)


def live_copies(args: Sequence[Any]) -> Operands:
    """The arguments, their tensors copied with layout and alignment."""
    return _guarded(args, _memory_of, _as_it_is)


def is_drawn(tensor: Tensor) -> bool:
    """Whether a probe has other numbers in the place of a tensor's."""
    return tensor.is_floating_point() or tensor.is_complex()


def redrawn(args: Sequence[Any], rng: Random, layout: Layout = _as_it_is) -> Operands:
    """Floating tensors with fresh normal numbers; integers, bools and scalars live.

    Parameters
    ----------
    args
        The live arguments.
    rng
        Says which numbers.
    layout
        Gives each tensor's; a tensor of integers has to keep its own.
    """
    return _drawn(args, rng, layout, special=False)


def _drawn(args: Sequence[Any], rng: Random, layout: Layout, *, special: bool) -> Operands:
    def source(tensor: Tensor, size: Sequence[int]) -> Tensor:
        return numbers(tensor, size, rng, special=special) if is_drawn(tensor) else _memory_of(tensor, size)

    return _guarded(args, source, layout)


def resized(args: Sequence[Any], output: Tensor, size: int) -> Layout | None:
    """The layout in which the output's last dimension but one, its rows, has another size.

    None where the layout does not allow it: the output has no such dimension, an operand that has it holds integers, or
    it is not contiguous from there on.
    """
    if output.dim() < 2:
        return None
    rows = output.shape[-2]
    place = output.dim() - 2

    def has_rows(tensor: Tensor) -> bool:
        return tensor.dim() == output.dim() and tensor.shape[place] == rows and rows > 1

    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    spanning = list(filter(has_rows, tensors))
    if not spanning or not all(is_drawn(tensor) and tensor.is_contiguous() for tensor in spanning):
        return None

    def layout(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
        if not has_rows(tensor):
            return _as_it_is(tensor)
        shape = (*tensor.shape[:place], size, *tensor.shape[place + 1 :])
        return shape, torch.empty(shape, device="meta").stride()

    return layout


def sharing(bucket: Callable[..., Hashable], args: Sequence[Any], output: Tensor) -> list[Layout]:
    """Layouts with other numbers of rows in the same bucket: the most, the fewest, and some between.

    A kernel may take another way for each, and what was seen of one says nothing about the others.

    Parameters
    ----------
    bucket
        Gives what stands for the shapes of its arguments.
    args
        The live arguments.
    output
        The live output.
    """
    if output.dim() < 2:
        return []
    rows = output.shape[-2]
    shared = bucket(*args)

    @functools.cache
    def layout(size: int) -> Layout | None:
        found = resized(args, output, size)
        if found is None or not 0 < size <= _GROWTH * rows:
            return None
        shapes = [_shape_of(arg, *found(arg)) if isinstance(arg, Tensor) else arg for arg in args]
        try:
            return found if bucket(*shapes) == shared else None
        except Exception:
            # It need not take tensors without memory; then there is nothing to go by.
            return None

    if layout(rows) is None:
        return []
    most, fewest = _furthest(rows, layout, 1), _furthest(rows, layout, -1)
    if output.numel() <= _SEVERAL_ROWS:
        sizes = [most, fewest, fewest + 1]
    else:
        # The first is run twice.
        sizes = [fewest, most]
    members = (layout(size) for size in dict.fromkeys(sizes) if size != rows or size == sizes[0])
    return [member for member in members if member is not None]


def _furthest(start: int, member: Callable[[int], object], step: int) -> int:
    """The last size from a start, in one direction, that is a member; by doubling and halving steps.

    A bucket that has holes ends before the first one that these steps meet.
    """
    reach, size = step, start
    while member(size + reach):
        size, reach = size + reach, reach * 2
    while reach:
        if member(size + reach):
            size += reach
        reach = int(reach / 2)
    return size


def _shape_of(like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor of another layout without memory, as a bucket sees it."""
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=like.dtype, device="meta")


def taller(args: Sequence[Any], output: Tensor, factor: int, rng: Random) -> Operands | None:
    """As :func:`redrawn`, special numbers included, with more in the batch's direction, the output's first dimension.

    An operand that spans the batch gets ``factor`` times as many entries, or fewer if that is too many elements; so
    does a row that all entries share where the batch has one entry, which tells rows apart as a batch of one cannot.
    None where the layout does not allow it: the operands hold integers (which may be indices), the output has no batch,
    or the batch is not the outermost dimension in memory.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    largest = max(span_length(tensor.shape, tensor.stride()) for tensor in (*tensors, output))
    factor = min(max(factor, 2), _MOST_ELEMENTS // largest)
    if output.dim() < 2 or factor < 2 or not all(map(is_drawn, tensors)):
        return None
    batch = output.shape[0]

    def spans_batch(tensor: Tensor) -> bool:
        return tensor.dim() == output.dim() and tensor.shape[0] == batch

    def inner(tensor: Tensor) -> int:
        return span_length(tensor.shape[1:], tensor.stride()[1:])

    if not any(map(spans_batch, tensors)):
        return None
    if batch > 1 and any(spans_batch(tensor) and 0 < tensor.stride(0) < inner(tensor) for tensor in tensors):
        # The entries lie between each other: more of them would overlap, as in no live call.
        return None

    def layout(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
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

    return _drawn(args, rng, layout, special=True)
