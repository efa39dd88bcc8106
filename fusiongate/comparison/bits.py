"""Tensors as bits: integer views, NaN by position, ULP distances, and slabs that bound the temporaries.

Nothing here copies a tensor to the host or waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "as_real",
    "dtype_name",
    "integer_view",
    "is_nan",
    "normalised_strides",
    "raw_bits",
    "slabs",
    "step_from_zero",
    "step_toward_zero",
    "ulp_at",
    "ulp_distance",
    "unequal_bits",
]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INT64 = torch.iinfo(torch.int64)
_MANTISSA64 = (1 << 52) - 1
# Two four-bit floats share one element of this dtype, so that it has bits to compare but no values of its own.
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
# The only floating dtype without a sign bit.
_UNSIGNED_FLOAT = getattr(torch, "float8_e8m0fnu", None)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without the module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_real(tensor: Tensor) -> Tensor:
    """The tensor without graph and lazy conjugation; a complex one as real and imaginary parts, in a new dimension."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == _PACKED:
        return plain.view(torch.uint8)
    return torch.view_as_real(plain) if plain.is_complex() else plain


def integer_view(tensor: Tensor) -> Tensor:
    """The same memory, of any strides, as signed integers of the same width."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def raw_bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, of any dtype: those of the widest one in a new last dimension."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return integer_view(plain) if plain.dtype.itemsize in _INTEGERS else plain.unsqueeze(-1).view(torch.int64)


def is_nan(tensor: Tensor) -> Tensor:
    """Where a floating tensor holds NaN, of any payload."""
    # Not every back end implements isnan for the eight-bit floats.
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()


def unequal_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ, NaN being equal to NaN whatever its payload: a bool tensor of the operands' shape."""
    unequal = integer_view(actual) != integer_view(expected)
    if actual.is_floating_point():
        unequal &= ~(is_nan(actual) & is_nan(expected))
    return unequal


def _ordered(tensor: Tensor) -> Tensor:
    """The values as int64 in their own order; neighbouring floats map to neighbouring integers and both zeros to 0."""
    if tensor.is_floating_point() and tensor.dtype != _UNSIGNED_FLOAT:
        integers = integer_view(tensor)
        magnitude = (integers & torch.iinfo(integers.dtype).max).to(torch.int64)
        return torch.where(integers < 0, -magnitude, magnitude)
    if tensor.dtype == _UNSIGNED_FLOAT:
        return tensor.view(torch.uint8).to(torch.int64)
    if tensor.dtype == torch.uint64:
        return integer_view(tensor) ^ _INT64.min
    return tensor.to(torch.int64)


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How many representable values lie between the two, as int64, saturating at its maximum.

    Both operands have the same dtype. The two zeros are 0 apart, the largest finite value and infinity 1. For
    integers and bools it is the plain difference. Where either is NaN the distance means nothing.
    """
    first, second = _ordered(actual), _ordered(expected)
    distance = torch.maximum(first, second) - torch.minimum(first, second)
    return distance.masked_fill(distance < 0, _INT64.max)


def ulp_at(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of ``dtype`` at the given magnitudes, in float64.

    At magnitude ``m`` with ``2**e <= |m| < 2**(e + 1)`` it is ``2**e * eps``; below the smallest normal number it is
    the distance between subnormals, and above the largest finite number it is what it is there.
    """
    limits = torch.finfo(dtype)
    clamped = magnitude.to(torch.float64).abs().clamp(min=limits.smallest_normal, max=limits.max)
    # Clearing the mantissa leaves the power of two exactly, where exp2 and ldexp may round or overflow.
    power = (integer_view(clamped) & ~_MANTISSA64).view(torch.float64)
    return power * limits.eps


def step_toward_zero(tensor: Tensor) -> Tensor:
    """Each floating value's neighbour on the side of zero; infinity becomes the largest finite value."""
    return (integer_view(tensor) - 1).view(tensor.dtype)


def step_from_zero(tensor: Tensor) -> Tensor:
    """Each floating value's neighbour away from zero; the largest finite value becomes infinity."""
    return (integer_view(tensor) + 1).view(tensor.dtype)


def normalised_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides, with 0 for those that say nothing: of size-1 dimensions, and all of an empty tensor's.

    Eager operators and ``empty_like`` give such dimensions different strides, and none of them means anything.
    """
    if 0 in shape:
        return (0,) * len(shape)
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def slabs(shape: Sequence[int], limit: int) -> Iterator[tuple[int, tuple[int | slice, ...]]]:
    """Cut a shape into pieces of at most ``limit`` elements, in logical (C) order.

    Yields the linear index of each piece's first element, and the index that takes the piece out of any tensor of that
    shape as a view.
    """
    if math.prod(shape) <= limit:
        yield 0, ()
        return
    row = math.prod(shape[1:])
    if row <= limit:
        rows = max(1, limit // row)
        for start in range(0, shape[0], rows):
            yield start * row, (slice(start, start + rows),)
        return
    for index in range(shape[0]):
        for start, rest in slabs(shape[1:], limit):
            yield index * row + start, (index, *rest)
