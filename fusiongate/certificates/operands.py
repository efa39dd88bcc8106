"""The operands of exhaustive trials: every value of a 16-bit type, and blocks of them against every other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view

__all__ = ["VALUES", "all_values", "blocks", "chosen", "fp32_from", "on_ties", "rows"]

VALUES = 1 << 16
"""How many values a 16-bit type has."""

_SEED = 0x5EED


def all_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All values of a 16-bit type, (65536,), in the order of their bits: zero first, NaN with every payload."""
    return torch.arange(VALUES, dtype=torch.int32, device=device).to(torch.int16).view(dtype)


def chosen(dtype: torch.dtype, device: torch.device, number: int | None) -> Tensor:
    """The values that are paired with all others: all of them, or so many, the special ones first.

    Parameters
    ----------
    number
        At least 1; None for all.
    """
    values = all_values(dtype, device)
    if number is None:
        return values
    finfo = torch.finfo(dtype)
    special = [1.0, 0.0, math.inf, math.nan, finfo.max, finfo.smallest_normal, finfo.tiny / 2, 1.984375, -1.0, -0.0]
    # In double, because the smallest of them are subnormal in float32 too.
    first = torch.tensor(special, dtype=torch.float64).to(dtype)
    order = torch.randperm(VALUES, generator=torch.Generator().manual_seed(_SEED))
    rest = values.cpu()[order]
    return torch.cat([first, rest])[:number].to(device)


def blocks(values: Tensor) -> Iterator[Tensor]:
    """The values, so many at a time that a block of them against all others takes little of the device's memory."""
    yield from values.split(1024 if values.is_cuda else 32)


def rows(block: Tensor, columns: int) -> Tensor:
    """(n, columns): each value of a block along a row."""
    return block[:, None].expand(-1, columns).contiguous()


def fp32_from(block: Tensor, device: torch.device) -> Tensor:
    """(n, 65536) in float32: all bit patterns whose upper half is one of the block's."""
    upper = integer_view(block).to(torch.int32)[:, None] << 16
    lower = torch.arange(VALUES, dtype=torch.int32, device=device)
    return (upper | lower).view(torch.float32)


def on_ties(dtype: torch.dtype, device: torch.device, *, odd: bool) -> Tensor:
    """For every value p, in the order of `all_values`, an addend h that puts p + h half-way between two values.

    There the slightest thing that p has lost or kept decides how the sum is rounded. h has twice the lowest set bit of
    p for its own last place, p's sign, and the smallest mantissa of its binade, or the next one if ``odd``. -0.0 where
    p is zero or not finite.
    """
    values = all_values(dtype, torch.device("cpu")).double()
    usable = values.isfinite() & (values != 0)
    mantissa, exponent = torch.frexp(torch.where(usable, values, 1.0))
    digits = (mantissa.abs() * 2.0**53).to(torch.int64)
    lowest = torch.ldexp((digits & -digits).double(), exponent.double() - 53)
    precision = 1 - round(math.log2(torch.finfo(dtype).eps))
    addend = 2 * lowest * (2 ** (precision - 1) + odd)
    return torch.where(usable, addend.copysign(values), -0.0).to(dtype).to(device)
