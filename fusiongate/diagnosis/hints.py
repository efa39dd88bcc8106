"""Telling what went wrong from how the bits differ.

A hint is a help, never a verdict: what cannot be told is ``None``, and nothing in here raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import as_real, dtype_name, unequal_bits
from fusiongate.comparison.mismatch_stats import Tally

from .expressions import shortened
from .op_trace import Program, parameter_names, record
from .operands import operand_variants
from .replay import replay
from .roundings import rounding_variants

__all__ = ["of_metadata", "of_values"]

_LOGGER = logging.getLogger("fusiongate")

# Replays look at a sample of about this size where the reference lets its rows be taken apart …
_SAMPLE = 1 << 20
# … and at everything where it does not, up to this size.
_WHOLE = 1 << 22

# A replay in a wider type is no perfect copy of a kernel: its own last bits may differ in rare places.
_REPRODUCED = 0.99
_NEW = 0.01
# With fewer mismatches than this, a variant that explains them and predicts others elsewhere may do so by luck.
_LOCAL_EVIDENCE = 64


def of_metadata(reason: str, actual: object, expected: Tensor) -> str | None:
    """What a difference in metadata means."""
    if reason == "type" and actual is None:
        return "the kernel returns nothing; a fused function returns a new tensor"
    if not isinstance(actual, Tensor):
        return None
    if reason == "dtype":
        return (
            f"the result is {dtype_name(actual.dtype)} where the reference gives {dtype_name(expected.dtype)}:"
            f" mixed operands promote in eager"
        )
    if reason == "strides":
        kind = "contiguous" if actual.is_contiguous() else "strided"
        kept = "contiguous" if expected.is_contiguous() else "strided as its operand is"
        return f"the output's strides: the result is {kind}, the reference's is {kept}"
    return None


def of_values(
    tally: Tally,
    actual: Tensor,
    expected: Tensor,
    reference: Callable[..., Tensor] | None,
    args: Sequence[Any],
) -> str | None:
    """What a difference in values means; both tensors real, of one shape, dtype and device."""
    try:
        certain = _pattern(tally)
        if certain is not None:
            return certain
        program = None
        if reference is not None and actual.is_floating_point():
            with _random_state_kept(actual.device):
                replayed, program = _replayed(tally, actual, expected, reference, args)
            if replayed is not None:
                return replayed
        return _place(tally) or _neutral(tally, program)
    except Exception as error:  # a hint that fails must not hide the mismatch that it was to explain
        _LOGGER.debug("no hint: %s: %s", type(error).__name__, error)
        return None


def _random_state_kept(device: torch.device) -> Any:
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type)


def _pattern(tally: Tally) -> str | None:
    """What the mismatching values show by themselves, when all of them show it."""
    number = tally.mismatched
    if tally.unwritten >= _REPRODUCED * number:
        return (
            f"unwritten output: {tally.unwritten:,} elements hold what the buffer held before the launch{_tail(tally)}"
        )
    if tally.nan_lost == number:
        return "NaN is swallowed: the reference gives NaN there, the kernel a number"
    if tally.nan_spread == number:
        return "NaN is spread: the kernel gives NaN where the reference gives a number"
    if tally.zero_sign == number:
        return "the sign of zero is lost: -0.0 is not 0.0"
    if tally.flushed == number:
        return "flush to zero: the reference gives subnormal numbers there, the kernel zero"
    return None


def _tail(tally: Tally) -> str:
    assert tally.first is not None
    if tally.first > 0 and tally.mismatched >= _REPRODUCED * (tally.total - tally.first):
        return f", from element {tally.first:,} of {tally.total:,} on"
    return ""


def _place(tally: Tally) -> str | None:
    """What the mismatches' place shows when their values say nothing."""
    if tally.overflow_lost == tally.mismatched:
        return "overflow is 'improved': the reference overflows to infinity there, and that is the right result"
    if tally.mismatched > 1 and (tail := _tail(tally)):
        return f"only the tail differs{tail}: it looks unwritten, or computed by another path"
    column = tally.first_column
    in_tail = (tally.total // tally.row) * (tally.row - column) if column else 0
    if column and in_tail > 1 and tally.mismatched >= _REPRODUCED * in_tail:
        return f"only the last {tally.row - column} of each row's {tally.row:,} elements differ: the row's tail"
    return None


def _neutral(tally: Tally, program: Program | None) -> str | None:
    """A scatter of last-bit differences that no rounding explains."""
    if tally.mismatched < 2 or tally.max_ulp > 2 or tally.nan_lost or tally.nan_spread:
        return None
    if program is None:
        return "last-bit differences only: a rounding, or the order of a reduction"
    sums = next((step for step in program.steps if step.sums), None)
    if sums is None:
        return "last-bit differences that no single rounding of the reference explains"
    return (
        f"last-bit differences that no single rounding explains: possibly another order of the reduction in"
        f" `{shortened(sums.expression)}`"
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The part of a comparison that replays look at."""

    actual: Tensor
    expected: Tensor
    args: list[Any]
    whole: list[bool]
    """Which arguments are not cut."""


def _samples(tally: Tally, actual: Tensor, expected: Tensor, args: Sequence[Any]) -> Iterator[_Sample]:
    """What to try replaying, best first."""
    if expected.numel() > _SAMPLE and (cut := _cut(tally, actual, expected, args)) is not None:
        yield cut
    if expected.numel() <= _WHOLE:
        yield _Sample(actual, expected, list(args), [True] * len(args))


def _cut(tally: Tally, actual: Tensor, expected: Tensor, args: Sequence[Any]) -> _Sample | None:
    """A window of rows around the first mismatch, cut from every operand that has them; None where one does not fit."""
    assert tally.first is not None
    rank = expected.dim()
    if rank < 2:
        return None
    dimension = max(range(rank - 1), key=lambda d: expected.shape[d])
    size = expected.shape[dimension]
    length = max(1, _SAMPLE // (expected.numel() // size))
    inner = 1
    for other in expected.shape[dimension + 1 :]:
        inner *= other
    start = min(max(0, tally.first // inner % size - length // 2), max(0, size - length))
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


def _replayed(
    tally: Tally, actual: Tensor, expected: Tensor, reference: Callable[..., Tensor], args: Sequence[Any]
) -> tuple[str | None, Program | None]:
    """The variant of the reference that gives the kernel's bits, in words; and the program, if it could be recorded."""
    names = parameter_names(reference, len(args))
    floats = [a for a in args if isinstance(a, float)]
    numbers = {a: n for n, a in zip(names, args, strict=True) if isinstance(a, float) and floats.count(a) == 1}
    for sample in _samples(tally, actual, expected, args):
        program = record(reference, sample.args, numbers)
        if _same(program.values[program.output], sample.expected):
            return _explained(program, reference, names, sample), program
    return None, None


def _same(result: object, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.is_complex():
        return False
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    return not unequal_bits(as_real(result), expected).any()


class _Matcher:
    """How well variants of the reference reproduce the kernel's bits."""

    def __init__(self, sample: _Sample) -> None:
        self.actual = sample.actual
        self.wrong = unequal_bits(sample.actual, sample.expected)
        self.number = int(self.wrong.sum())

    def match(self, result: Tensor) -> tuple[float, float]:
        """The share of the mismatching elements reproduced, and how many others are wrong, as a share of the former."""
        if result.shape != self.actual.shape or result.dtype != self.actual.dtype or not self.number:
            return 0.0, 1.0
        off = unequal_bits(as_real(result), self.actual)
        missed, new = torch.stack([(off & self.wrong).sum(), (off & ~self.wrong).sum()]).tolist()
        return 1 - missed / self.number, new / self.number


# Seconds: combinations of roundings grow with the square of a chain's length, and a gate's caller waits for the hint.
_PATIENCE = 2.0


def _explained(program: Program, reference: Callable[..., Tensor], names: Sequence[str], sample: _Sample) -> str | None:
    matcher = _Matcher(sample)
    partial: str | None = None
    close: list[tuple[float, str]] = []
    perfect: list[str] = []
    deadline = time.monotonic() + _PATIENCE
    for variant in rounding_variants(program):
        if (perfect and not variant.single) or time.monotonic() > deadline:
            break
        reproduced, new = matcher.match(replay(program, variant.roundings))
        if reproduced == 1 and new == 0:
            perfect.append(variant.sentence)
            if not variant.single:
                break
        elif reproduced >= _REPRODUCED and new <= _NEW:
            close.append((reproduced - new, variant.sentence))
        elif reproduced >= _REPRODUCED and matcher.number >= _LOCAL_EVIDENCE and partial is None:
            partial = f"{variant.sentence}, in a part of the output only"
    if perfect:
        return " — or ".join(perfect[:2])
    if close:
        return max(close)[1]
    for sentence, args in operand_variants(names, sample.args, sample.expected, sample.whole):
        reproduced, new = matcher.match(reference(*args))
        if reproduced >= _REPRODUCED and new <= _NEW:
            return sentence
    return partial
