"""A mismatch explained by its reference: which rounding, or which operand, gives the kernel's bits when changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import as_real, unequal_bits
from fusiongate.comparison.mismatch_stats import MismatchStats

from .op_trace import Program, parameter_names, record
from .operands import operand_variants
from .roundings import replay, rounding_variants

__all__ = ["explained"]

# Replays look at a sample of about this size where the reference lets its rows be taken apart …
_SAMPLE = 1 << 20
# … and at everything where it does not, up to this size.
_WHOLE = 1 << 22

# A replay in a wider type is no perfect copy of a kernel: its own last bits may differ in rare places.
_REPRODUCED = 0.99
_NEW = 0.01
# With fewer mismatches than this, a variant that explains only some of them, or predicts others, may do so by luck.
_EVIDENCE = 64
# Seconds: combinations of roundings grow with the square of a chain's length, and a gate's caller waits for the hint.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class _Sample:
    """The part of a comparison that replays look at."""

    actual: Tensor
    expected: Tensor
    args: list[Any]
    whole: list[bool]
    """Which arguments are not cut."""


def _samples(stats: MismatchStats, actual: Tensor, expected: Tensor, args: Sequence[Any]) -> Iterator[_Sample]:
    """What to try replaying, best first."""
    if expected.numel() > _SAMPLE and (cut := _cut(stats, actual, expected, args)) is not None:
        yield cut
    if expected.numel() <= _WHOLE:
        yield _Sample(actual, expected, list(args), [True] * len(args))


def _cut(stats: MismatchStats, actual: Tensor, expected: Tensor, args: Sequence[Any]) -> _Sample | None:
    """A window of rows around the first mismatch, cut from every operand that has them; None where one does not fit."""
    assert stats.first is not None
    rank = expected.dim()
    if rank < 2:
        return None
    dimension = max(range(rank - 1), key=lambda d: expected.shape[d])
    size = expected.shape[dimension]
    length = max(1, _SAMPLE // (expected.numel() // size))
    inner = 1
    for other in expected.shape[dimension + 1 :]:
        inner *= other
    start = min(max(0, stats.first // inner % size - length // 2), max(0, size - length))
    length = min(length, size - start)
    sliced, whole = [], []
    for arg in args:
        own = dimension - rank + arg.dim() if isinstance(arg, Tensor) else -1
        uncut = own < 0 or arg.shape[own] == 1
        if not uncut and arg.shape[own] != size:
            return None
        sliced.append(arg if uncut else arg.narrow(own, start, length))
        whole.append(uncut)
    return _Sample(actual.narrow(dimension, start, length), expected.narrow(dimension, start, length), sliced, whole)


def explained(
    stats: MismatchStats,
    actual: Tensor,
    expected: Tensor,
    reference: Callable[..., Tensor],
    args: Sequence[Any],
    *,
    witnessed: bool,
) -> tuple[str | None, Program | None]:
    """The variant of the reference that gives the kernel's bits, in words; and the program, if it could be recorded.

    Parameters
    ----------
    stats
        How the two differ.
    actual, expected
        Real tensors of one shape, dtype and device.
    reference, args
        The eager chain that gave ``expected``, and its arguments.
    witnessed
        Whether the statistic of its reduction is known to be right.

    Raises
    ------
    Exception
        Whatever the reference raises, and :exc:`NotReplayable`.
    """
    names = parameter_names(reference, len(args))
    floats = [a for a in args if isinstance(a, float)]
    numbers = {a: n for n, a in zip(names, args, strict=True) if isinstance(a, float) and floats.count(a) == 1}
    for sample in _samples(stats, actual, expected, args):
        program = record(reference, sample.args, numbers)
        if _same(program.values[program.output], sample.expected):
            matcher = _Matcher(sample)
            sentence = _by_rounding(program, matcher, witnessed=witnessed)
            if sentence is None and not _is_scatter(stats, program, matcher.number):
                sentence = _by_operand(reference, names, sample, matcher)
            return sentence or matcher.partial, program
    return None, None


def _is_scatter(stats: MismatchStats, program: Program, number: int) -> bool:
    """Whether a few last bits behind a reduction differ: another eps moves some such, and so does another order."""
    return stats.max_ulp <= 2 and number < _EVIDENCE and any(step.sums for step in program.steps)


def _same(result: object, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.is_complex():
        return False
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    return not unequal_bits(as_real(result), expected).any()


class _Matcher:
    """How well variants of the reference reproduce the kernel's bits, also where these are the reference's."""

    def __init__(self, sample: _Sample) -> None:
        self.actual = sample.actual
        self.wrong = unequal_bits(sample.actual, sample.expected)
        self.number = int(self.wrong.sum())
        self.partial: str | None = None
        """The first variant that explains a part of the output, in words."""

    def match(self, result: Tensor) -> tuple[float, float]:
        """The share of the mismatching elements reproduced, and how many others are wrong, as a share of the former."""
        if result.shape != self.actual.shape or result.dtype != self.actual.dtype or not self.number:
            return 0.0, 1.0
        off = unequal_bits(as_real(result), self.actual)
        missed, new = torch.stack([(off & self.wrong).sum(), (off & ~self.wrong).sum()]).tolist()
        return 1 - missed / self.number, new / self.number

    def is_close(self, reproduced: float, new: float) -> bool:
        """Whether a match is as good as one that is perfect."""
        nearly = self.number >= _EVIDENCE and reproduced >= _REPRODUCED and new <= _NEW
        return nearly or (reproduced == 1 and new == 0)

    def is_apart(self, result: Tensor) -> bool:
        """Whether the elements that a variant gets wrong have a place of their own, along some dimension."""
        if self.number < _EVIDENCE:
            return False
        elsewhere = unequal_bits(as_real(result), self.actual) & ~self.wrong
        others = [tuple(d for d in range(self.wrong.dim()) if d != kept) for kept in range(self.wrong.dim())]
        return any(not (self.wrong.sum(dims).bool() & elsewhere.sum(dims).bool()).any() for dims in others if dims)


def _by_rounding(program: Program, matcher: _Matcher, *, witnessed: bool) -> str | None:
    close: list[tuple[float, str]] = []
    perfect: list[str] = []
    deadline = time.monotonic() + _PATIENCE
    for variant in rounding_variants(program, witnessed=witnessed):
        if (perfect and not variant.single) or time.monotonic() > deadline:
            break
        result = replay(program, variant.roundings)
        reproduced, new = matcher.match(result)
        if reproduced == 1 and new == 0:
            perfect.append(variant.sentence)
            if not variant.single:
                break
        elif matcher.is_close(reproduced, new):
            close.append((reproduced - new, variant.sentence))
        elif reproduced >= _REPRODUCED and matcher.partial is None and matcher.is_apart(result):
            matcher.partial = f"{variant.sentence}, in a part of the output only"
    if perfect:
        return " — or ".join(perfect[:2])
    return max(close)[1] if close else None


def _by_operand(
    reference: Callable[..., Tensor], names: Sequence[str], sample: _Sample, matcher: _Matcher
) -> str | None:
    for sentence, args in operand_variants(names, sample.args, sample.expected, sample.whole):
        if matcher.is_close(*matcher.match(reference(*args))):
            return sentence
    return None
