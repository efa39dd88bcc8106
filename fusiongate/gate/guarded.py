"""Memory for a kernel that nobody trusts yet: between canaries, and outputs start out wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusiongate.comparison.bits import as_real, integer_view, is_nan, raw_bits

from .hidden_inputs import DrawsRandomNumbers, draws
from .signatures import ALIGNMENT, extent, share_memory

__all__ = [
    "GuardedOperand",
    "LaunchGuard",
    "aliasing",
    "is_dense",
    "mostly_gaps",
    "span_length",
    "span_of",
    "storage_range",
]

_CANARY = 0xA5
_INSTEAD_OF_NAN = 0x5A
_MARGIN = 4096
"""Bytes of canary on either side: as far as a kernel that runs a tile too long is likely to reach."""
_GAPS = 8
"""Elements of memory to an element of the tensor from which on only the tensor's own are held, in large memory."""
_LARGE = 1 << 24
"""Bytes."""


def span_length(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first one to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def span_of(tensor: Tensor) -> Tensor:
    """The memory from the tensor's first element to its last, gaps included, as one dimension."""
    return tensor.detach().as_strided((span_length(tensor.shape, tensor.stride()),), (1,))


def mostly_gaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether a tensor's elements lie so far apart that what is between them is neither copied nor filled."""
    length = span_length(shape, strides)
    return length * itemsize > _LARGE and length > _GAPS * math.prod(shape)


def storage_range(tensor: Tensor) -> tuple[int, int]:
    """Where the tensor's storage begins and ends, as addresses."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether something is a tensor in memory of its own."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def aliasing(
    outputs: Sequence[tuple[object, Tensor]], others: Mapping[str, Iterable[object]]
) -> tuple[str, str] | None:
    """What an output of a kernel's shares its memory with: a word for it and a sentence; None if with nothing.

    Parameters
    ----------
    outputs
        The outputs, each with the reference's: two of those may share memory where the reference's do.
    others
        What was there before, by what it is called.
    """
    dense = [(output, expected) for output, expected in outputs if is_dense(output)]
    for output, _ in dense:
        begin, end = storage_range(output)
        for what, values in others.items():
            for other_begin, other_end in map(storage_range, filter(is_dense, values)):
                if begin < other_end and other_begin < end:
                    return "aliasing", f"the kernel's output shares memory with {what}"
    for (one, like_one), (other, like_other) in itertools.combinations(dense, 2):
        if share_memory(one, other) and not share_memory(like_one, like_other):
            return "aliasing", "two outputs of the kernel share memory"
    return None


@dataclass(frozen=True, slots=True)
class _Slab:
    """Memory between two canaries."""

    memory: Tensor
    """All of it, as bytes."""
    start: int
    """Where what is guarded begins."""
    size: int
    """And its size, both in bytes."""

    @classmethod
    def of(cls, size: int, device: torch.device, alignment_of: int = 0) -> _Slab:
        """New memory whose address is, to whole cache lines, as far off as the given one is."""
        memory = torch.empty(size + 2 * (_MARGIN + ALIGNMENT), dtype=torch.uint8, device=device)
        start = _MARGIN + (alignment_of - memory.data_ptr() - _MARGIN) % ALIGNMENT
        memory[:start].fill_(_CANARY)
        memory[start + size :].fill_(_CANARY)
        return cls(memory, start, size)

    def typed(self, dtype: torch.dtype) -> Tensor:
        """What is guarded, as one dimension of a dtype."""
        return self.memory[self.start : self.start + self.size].view(dtype)

    def overrun(self) -> Tensor:
        """Whether a canary was written over, as a bool on the device."""
        before, after = self.memory[: self.start], self.memory[self.start + self.size :]
        return (before != _CANARY).any() | (after != _CANARY).any()


@dataclass(slots=True)
class GuardedOperand:
    """A tensor in memory of the gate's own, between canaries, aligned as the one that it stands for."""

    view: Tensor
    """What the kernel gets."""
    memory: Tensor
    """What is held: from the view's first element to its last, gaps included, as one dimension; the view itself where
    that is mostly gaps."""
    source: Tensor
    """What the memory holds, and has to hold afterwards."""
    slab: _Slab

    @classmethod
    def of(
        cls, like: Tensor, shape: Sequence[int], strides: Sequence[int], values: Callable[[Sequence[int]], Tensor]
    ) -> GuardedOperand:
        """Make an operand.

        Parameters
        ----------
        like
            The tensor whose dtype, device and alignment it gets.
        shape, strides
            The view's.
        values
            Gives what the memory is to hold, by the memory's shape.
        """
        itemsize = like.element_size()
        length = span_length(shape, strides)
        slab = _Slab.of(length * itemsize, like.device, like.data_ptr())
        span = slab.typed(like.dtype)
        view = span.as_strided(tuple(shape), tuple(strides))
        memory = view if mostly_gaps(shape, strides, itemsize) else span
        source = values(memory.shape)
        memory.copy_(source)
        return cls(view, memory, source, slab)

    def disturbed(self, *, written: bool) -> Tensor:
        """Whether anything is wrong with it, as a bool on its device; see what follows."""
        overrun = self.slab.overrun()
        return overrun if written else overrun | (raw_bits(self.memory) != raw_bits(self.source)).any()

    def changed(self) -> bool:
        """Whether the operand's own memory differs from what it held."""
        return not torch.equal(raw_bits(self.memory), raw_bits(self.source))

    def changed_in_its_gaps(self) -> bool:
        """Likewise for an operand that is to be written: only what lies between its elements counts."""
        if self.memory is self.view:
            return False
        after = self.memory.clone()
        before = self.source.as_strided(self.view.shape, self.view.stride())
        after.as_strided(self.view.shape, self.view.stride()).copy_(before)
        return not torch.equal(raw_bits(after), raw_bits(self.source))

    def refill(self, values: Tensor) -> None:
        """Put other values, of the memory's shape, into the memory."""
        self.source = values
        self.memory.copy_(values)

    def overrun(self) -> bool:
        """Whether something was written before or after it."""
        return bool(self.slab.overrun().item())


_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_FILLED = {
    _aten.clone.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.ones.default,
    _aten.ones_like.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
}


class LaunchGuard(TorchDispatchMode):
    """Watches what a kernel's launcher has torch do in this thread: what it allocates, and whether it draws.

    What it allocates lies between canaries, and holds what is certainly wrong: an allocation of an expected output's
    dtype and shape gets the complement of that output's bits; any other gets ones. Memory that does not come from
    torch's own allocation functions is out of reach: such a kernel wants a ``probe``. An op that would draw raises
    ``DrawsRandomNumbers``, so that the caller's generator stays as it is.

    Parameters
    ----------
    expected
        The outputs that the kernel has to give.
    """

    fusiongate_transparent = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: keeping the compiler out of this mode would import it, for seconds, in processes that compile nothing."""
        return False

    def __init__(self, expected: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = expected
        self._device = expected[0].device
        self._slabs: list[_Slab] = []
        self._of_ones: set[int] = set()
        self.drew = False
        """Whether the launcher was about to draw from a default random generator, and was stopped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs):
            self.drew = True
            raise DrawsRandomNumbers
        result = func(*args, **(kwargs or {}))
        if func not in _EMPTY and func not in _FILLED:
            return result
        pinned = bool((kwargs or {}).get("pin_memory"))
        if pinned or result.device != self._device or result.layout is not torch.strided or not result.numel():
            return result
        slab = _Slab.of(extent(result), self._device)
        self._slabs.append(slab)
        # As a new tensor, and no view of a slab: its user may ask.
        guarded = torch.empty(0, dtype=result.dtype, device=self._device)
        offset = slab.start // result.element_size()
        guarded.set_(slab.memory.untyped_storage(), offset, result.shape, result.stride())
        if func in _EMPTY:
            self._poison(guarded)
        else:
            guarded.copy_(result)
        return guarded

    def _poison(self, fresh: Tensor) -> None:
        address, _ = storage_range(fresh)
        for expected in self._expected:
            if fresh.dtype == expected.dtype and fresh.shape == expected.shape:
                integer_view(as_real(fresh)).copy_(_wrong_everywhere(as_real(expected)))
                # Memory that was freed may be handed out again.
                self._of_ones.discard(address)
                return
        scattered = mostly_gaps(fresh.shape, fresh.stride(), fresh.element_size())
        integer_view(as_real(fresh if scattered else span_of(fresh))).fill_(-1)
        self._of_ones.add(address)

    def overrun(self) -> bool:
        """Whether something was written before or after an allocation."""
        flags = [slab.overrun() for slab in self._slabs]
        return bool(flags) and bool(torch.stack(flags).any().item())

    def poison(self, output: object, expected: Tensor) -> Tensor | None:
        """What an output held before the launch, of its shape and dtype; None for a complex or sparse one.

        Parameters
        ----------
        output
            What the kernel returned: a part of a larger allocation, or one of another shape, held ones.
        expected
            What was expected.
        """
        if expected.is_complex() or expected.layout is not torch.strided:
            return None
        held = _wrong_everywhere(as_real(expected))
        if isinstance(output, Tensor) and output.layout is torch.strided and storage_range(output)[0] in self._of_ones:
            held.fill_(-1)
        return held.view(expected.dtype)


def _wrong_everywhere(expected: Tensor) -> Tensor:
    """The complement of each element's bits, as integers."""
    poison = ~integer_view(expected)
    if expected.is_floating_point():
        # The complement of a NaN of ones is zero, which a kernel that swallows NaN writes too.
        poison.masked_fill_(is_nan(expected), _INSTEAD_OF_NAN)
    return poison
