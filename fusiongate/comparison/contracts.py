"""Contracts: what "same" means for two tensors, and where they break it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusiongate.errors import UsageError

from .bits import ulp_at, unequal_bits

__all__ = ["Contract", "Exact", "Ulp", "described", "magnitude_of", "outside_of"]


@dataclass(frozen=True, slots=True)
class Exact:
    """Bits, dtype, shape, device and normalised strides are equal; NaN equals NaN by position, and -0.0 is not 0.0."""

    def __str__(self) -> str:
        return "bit for bit"


@dataclass(frozen=True, slots=True)
class Ulp:
    """Each element is within some ULPs of the output dtype; dtype, shape, device and normalised strides are equal.

    Infinities equal only themselves, NaN equals NaN by position. Integers and bools have no ULP and must be equal.
    """

    n: float
    """How many ULPs."""
    scale: Callable[..., Tensor] | None = None
    """Called as ``scale(*args, expected)``, gives the magnitudes at which the ULP is taken, of a shape that broadcasts
    to the output's; without it they are ``|expected|``."""

    def __post_init__(self) -> None:
        n: object = self.n
        if isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 <= n < math.inf:
            raise UsageError(f"Ulp(n={n!r}): n is a finite number of ULPs, 0 or more")
        if self.scale is not None and not callable(self.scale):
            raise UsageError(
                f"Ulp(scale={self.scale!r}): scale is a callable scale(*args, expected) that returns the magnitudes"
            )

    def __str__(self) -> str:
        where = "|expected|" if self.scale is None else getattr(self.scale, "__name__", "the scale's magnitude")
        return f"within {self.n:g} ULP at {where}"


Contract = Exact | Ulp


def described(value: object) -> str:
    """What an object is that should have been a dense tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def magnitude_of(contract: Contract, args: Sequence[Any], expected: Tensor) -> Tensor | None:
    """The contract's magnitudes, broadcast to the output's shape; None where they are ``|expected|``."""
    if isinstance(contract, Exact) or contract.scale is None:
        return None
    magnitude = contract.scale(*args, expected)
    if not isinstance(magnitude, Tensor):
        raise UsageError(f"{contract}: the scale returned {described(magnitude)}, not a tensor of magnitudes")
    try:
        broadcast = magnitude.detach().abs().broadcast_to(expected.shape)
    except RuntimeError as error:
        raise UsageError(
            f"{contract}: the scale returned shape {tuple(magnitude.shape)}, which does not broadcast to the output's "
            f"shape {tuple(expected.shape)}"
        ) from error
    return broadcast.unsqueeze(-1).expand(*expected.shape, 2) if expected.is_complex() else broadcast


def outside_of(
    actual: Tensor, expected: Tensor, contract: Contract, magnitude: Tensor | None
) -> Callable[[tuple[int | slice, ...]], tuple[Tensor, Tensor | None]]:
    """A function from a slab's index to where it breaks the contract, and to the distances in the contract's unit."""

    def outside(index: tuple[int | slice, ...]) -> tuple[Tensor, Tensor | None]:
        first, second = actual[index], expected[index]
        if isinstance(contract, Exact) or not second.is_floating_point():
            return unequal_bits(first, second), None
        distance = _ulps(first, second, None if magnitude is None else magnitude[index])
        return distance > contract.n, distance

    return outside


def _ulps(actual: Tensor, expected: Tensor, magnitude: Tensor | None) -> Tensor:
    """``|actual - expected|`` in ULPs at the magnitudes, in float64.

    It is 0 where the bits agree or both are NaN, and otherwise infinite where either is not finite.
    """
    equal = ~unequal_bits(actual, expected)
    first, second = actual.to(torch.float64), expected.to(torch.float64)
    # A magnitude that is no number measures nothing; the output's own does.
    at = second if magnitude is None else torch.where(magnitude.isnan(), second, magnitude.to(torch.float64))
    distance = (first - second).abs() / ulp_at(at, expected.dtype)
    # torch.where would copy its scalar to the device, and wait for that.
    finite = first.isfinite() & second.isfinite()
    return distance.masked_fill(~finite, math.inf).masked_fill(equal, 0.0)
