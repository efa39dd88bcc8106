"""Operands for a kernel that nobody trusts yet: copies between canaries, and outputs that start out wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusiongate.comparison.bits import as_real, integer_view, is_nan

from .signatures import ALIGNMENT

__all__ = ["GuardedOperand", "PoisonedAllocations", "span_of", "storage_range"]

_CANARY = 0xA5
_INSTEAD_OF_NAN = 0x5A
_MARGIN = 4096
"""Bytes of canary on either side: as far as a kernel that runs a tile too long is likely to reach."""


def span_of(tensor: Tensor) -> Tensor:
    """The memory from the tensor's first element to its last, gaps included, as one dimension."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((length,), (1,))


def storage_range(tensor: Tensor) -> tuple[int, int]:
    """Where the tensor's storage begins and ends, as addresses."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@dataclass(frozen=True, slots=True)
class GuardedOperand:
    """A tensor in memory of the gate's own, between canaries, aligned as the one that it stands for."""

    view: Tensor
    """What the kernel gets."""
    span: Tensor
    """The memory from the view's first element to its last, gaps included, as one dimension."""
    source: Tensor
    """What the span holds, and has to hold afterwards."""
    slab: Tensor
    """The memory, as bytes."""
    start: int
    """Where the span begins in the slab, in bytes."""

    @classmethod
    def of(cls, source: Tensor, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> GuardedOperand:
        """Copy a span.

        Parameters
        ----------
        source
            The span's values, (n,), in the operand's dtype and on its device.
        like
            The tensor whose alignment the copy gets.
        shape, strides
            The view on the span.
        """
        size = source.numel() * source.element_size()
        slab = torch.empty(size + 2 * (_MARGIN + ALIGNMENT), dtype=torch.uint8, device=source.device)
        slab.fill_(_CANARY)
        start = _MARGIN + (like.data_ptr() - slab.data_ptr() - _MARGIN) % ALIGNMENT
        span = slab[start : start + size].view(source.dtype)
        span.copy_(source)
        return cls(span.as_strided(shape, strides), span, source, slab, start)

    def changed(self) -> bool:
        """Whether the operand's own memory differs from what it held."""
        return not torch.equal(integer_view(self.span), integer_view(self.source))

    def refill(self, values: Tensor) -> None:
        """Put other values, (n,), into source and span; the source is no live memory."""
        self.source.copy_(values)
        self.span.copy_(values)

    def overrun(self) -> bool:
        """Whether something was written before or after it."""
        size = self.source.numel() * self.source.element_size()
        before, after = self.slab[: self.start], self.slab[self.start + size :]
        return not bool(((before == _CANARY).all() & (after == _CANARY).all()).item())


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class PoisonedAllocations(TorchDispatchMode):
    """Fills what torch allocates in this thread, so that an element which the kernel does not write is certainly wrong.

    An allocation of the expected output's size gets the complement of that output's bits; any other gets ones. Memory
    that does not come from torch's own allocation functions is out of reach: such a kernel wants a ``probe``.
    """

    fusiongate_transparent = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: keeping the compiler out of this mode would import it, for seconds, in processes that compile nothing."""
        return False

    def __init__(self, expected: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = expected
        self._of_ones: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and result.device == self._expected.device and result.numel():
            self._poison(result)
        return result

    def _poison(self, fresh: Tensor) -> None:
        address, _ = storage_range(fresh)
        if fresh.dtype == self._expected.dtype and fresh.shape == self._expected.shape:
            integer_view(as_real(fresh)).copy_(_wrong_everywhere(as_real(self._expected)))
            # Memory that was freed may be handed out again.
            self._of_ones.discard(address)
        else:
            integer_view(as_real(span_of(fresh))).fill_(-1)
            self._of_ones.add(address)

    def poison(self, output: object = None) -> Tensor | None:
        """What an output of the expected shape and dtype holds before the launch; None for a complex or sparse one.

        Parameters
        ----------
        output
            What the kernel returned: a part of a larger allocation, or one of another shape, held ones. None: an
            allocation of the output's own.
        """
        if self._expected.is_complex() or self._expected.layout is not torch.strided:
            return None
        held = _wrong_everywhere(self._expected.detach())
        if isinstance(output, Tensor) and output.layout is torch.strided and storage_range(output)[0] in self._of_ones:
            held.fill_(-1)
        return held.view(self._expected.dtype)


def _wrong_everywhere(expected: Tensor) -> Tensor:
    """The complement of each element's bits, as integers."""
    poison = ~integer_view(expected)
    if expected.is_floating_point():
        # The complement of a NaN of ones is zero, which a kernel that swallows NaN writes too.
        poison.masked_fill_(is_nan(expected), _INSTEAD_OF_NAN)
    return poison
