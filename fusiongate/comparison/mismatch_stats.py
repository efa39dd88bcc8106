"""Counting how two tensors differ, slab by slab, so that temporaries stay bounded and only counts reach the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .bits import integer_view, is_nan, slabs, ulp_distance

__all__ = ["SLAB", "MismatchStats", "count"]

SLAB = 1 << 22
"""Elements that are looked at together; eight float64 temporaries of a slab take 256 MiB."""

_EDGES = (0, 1, 2, 4, 16, 256, 65536)


def _label(low: int, high: int) -> str:
    return str(high) if high - low <= 1 else f"{low + 1}-{high}"


_LABELS = (
    "0",
    *(_label(low, high) for low, high in itertools.pairwise(_EDGES)),
    f">{_EDGES[-1]}",
)


@dataclass(slots=True)
class MismatchStats:
    """What is known about the mismatching elements of one comparison."""

    total: int
    """Elements compared."""
    row: int
    """Elements of the last dimension."""
    mismatched: int = 0
    """Elements that break the contract."""
    first: int | None = None
    """Linear index, in C order, of the first of them."""
    last: int | None = None
    """Linear index of the last of them."""
    first_column: int | None = None
    """The smallest position in the last dimension that any of them has."""
    max_ulp: float = 0
    """The largest distance, over elements that are finite on both sides or infinite on one; NaN has no distance."""
    histogram: dict[str, int] = field(default_factory=dict)
    """Mismatching elements by distance; ``inf`` and ``nan`` for those where either side is that."""
    nan_lost: int = 0
    """Expected NaN, got a number."""
    nan_spread: int = 0
    """Expected a number, got NaN."""
    zero_sign: int = 0
    """A zero of the other sign."""
    flushed: int = 0
    """Expected a subnormal number, got zero."""
    overflow_lost: int = 0
    """Expected infinity, got a finite number."""
    unwritten: int = 0
    """Still holds what the buffer held before the launch."""

    def _add_histogram(self, distance: Tensor) -> None:
        below = [int(n) for n in torch.stack([(distance <= edge).sum() for edge in _EDGES]).tolist()]
        counts = [below[0], *(b - a for a, b in itertools.pairwise(below)), distance.numel() - below[-1]]
        for label, number in zip(_LABELS, counts, strict=True):
            self._add(label, number)

    def _add(self, label: str, number: int) -> None:
        if number:
            self.histogram[label] = self.histogram.get(label, 0) + number

    def add(
        self, actual: Tensor, expected: Tensor, poison: Tensor | None, positions: Tensor, distance: Tensor | None
    ) -> None:
        """Count the mismatching elements of one slab, each operand compacted to them."""
        number = positions.numel()
        self.mismatched += number
        if self.first is None:
            self.first = int(positions[0])
        self.last = int(positions[-1])
        if self.row:
            column = int((positions % self.row).min())
            self.first_column = column if self.first_column is None else min(self.first_column, column)
        if poison is not None:
            self.unwritten += int((integer_view(actual) == integer_view(poison)).sum())
        if distance is None:
            distance = ulp_distance(actual, expected)
        if actual.is_floating_point():
            distance = self._add_special(actual, expected, distance)
        if distance.numel():
            self.max_ulp = max(self.max_ulp, distance.max().item())
            self._add_histogram(distance)

    def _add_special(self, actual: Tensor, expected: Tensor, distance: Tensor) -> Tensor:
        """Count what is no matter of distance, and return the distances of the rest."""
        if actual.dtype.itemsize == 1:
            actual, expected = actual.float(), expected.float()
        actual_nan, expected_nan = is_nan(actual), is_nan(expected)
        infinite = ~(actual_nan | expected_nan) & (actual.isinf() | expected.isinf())
        tiny = torch.finfo(expected.dtype).smallest_normal
        actual_zero, expected_zero = actual == 0, expected == 0
        counts = torch.stack(
            [
                (expected_nan & ~actual_nan).sum(),
                (actual_nan & ~expected_nan).sum(),
                (actual_zero & expected_zero).sum(),
                (actual_zero & ~expected_zero & (expected.abs() < tiny)).sum(),
                (expected.isinf() & actual.isfinite()).sum(),
                infinite.sum(),
            ]
        ).tolist()
        self.nan_lost += counts[0]
        self.nan_spread += counts[1]
        self.zero_sign += counts[2]
        self.flushed += counts[3]
        self.overflow_lost += counts[4]
        self._add("nan", counts[0] + counts[1])
        self._add("inf", counts[5])
        if counts[5]:
            self.max_ulp = max(self.max_ulp, distance[infinite].max().item())
        return distance[~(infinite | actual_nan | expected_nan)]


def count(
    actual: Tensor,
    expected: Tensor,
    outside: Callable[[tuple[int | slice, ...]], tuple[Tensor, Tensor | None]],
    poison: Tensor | None = None,
) -> MismatchStats:
    """Count the elements that ``outside`` marks.

    Parameters
    ----------
    actual, expected
        Real tensors of one shape, dtype and device.
    outside
        Given a slab's index, where that slab breaks the contract, and the distances in the contract's own unit
        (``None``: in representable values).
    poison
        What ``actual`` held before the kernel was launched, if that is known.
    """
    stats = MismatchStats(total=expected.numel(), row=expected.shape[-1] if expected.dim() else 1)
    for start, index in slabs(expected.shape, SLAB):
        mask, distance = outside(index)
        where = mask.reshape(-1).nonzero().squeeze(1)
        if not where.numel():
            continue
        stats.add(
            actual[index].reshape(-1)[where],
            expected[index].reshape(-1)[where],
            None if poison is None else poison[index].reshape(-1)[where],
            where + start,
            None if distance is None else distance.reshape(-1)[where],
        )
    return stats
