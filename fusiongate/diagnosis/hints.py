"""The comparison that users call: a verdict, and a hint at what went wrong from how the bits differ.

A hint is a help, never a verdict: what cannot be told is ``None``, and none of it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import as_real, dtype_name
from fusiongate.comparison.contracts import Contract, Exact
from fusiongate.comparison.mismatch_stats import MismatchStats
from fusiongate.comparison.verdicts import Verdict, compared

from .explanations import explained
from .expressions import shortened
from .op_trace import Program

__all__ = ["compare"]

_LOGGER = logging.getLogger("fusiongate")

_REPRODUCED = 0.99
"""The share of the mismatching elements that have to show a fault by their place or value."""


def compare(
    actual: object,
    expected: Tensor,
    contract: Contract = Exact(),  # noqa: B008  # frozen, and the default is part of the signature that users read
    reference: Callable[..., Tensor] | None = None,
    args: Sequence[Any] = (),
    *,
    poison: Tensor | None = None,
    witnessed: bool = False,
) -> Verdict:
    """Compare two tensors under a contract, metadata before values.

    Where all bits are equal this costs one pass and one wait for the device.

    Parameters
    ----------
    actual
        What the kernel returned, of any strides; anything but a tensor is a mismatch.
    expected
        What the reference returned.
    contract
        ``Exact()`` or ``Ulp(...)``.
    reference, args
        The eager chain that gave ``expected``, and its arguments. They sharpen the hint: the chain is run again with
        single roundings changed. ``args`` go to the contract's ``scale`` too.
    poison
        What the output's memory held before the launch, of the output's shape and dtype: makes "unwritten" certain.
    witnessed
        Whether the statistic of the reference's reduction is known to be right: last bits are no matter of order then.

    Raises
    ------
    UsageError
        If ``expected`` is no dense tensor, or the contract's ``scale`` does not fit.
    """
    verdict, stats = compared(actual, expected, contract, args, poison=poison)
    if verdict:
        return verdict
    if stats is None:
        return replace(verdict, hint=_of_metadata(verdict.reason, actual, expected))
    assert isinstance(actual, Tensor)
    hint = _of_values(stats, as_real(actual), as_real(expected), reference, args, witnessed=witnessed)
    return replace(verdict, hint=hint)


def _of_metadata(reason: str, actual: object, expected: Tensor) -> str | None:
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


def _of_values(
    stats: MismatchStats,
    actual: Tensor,
    expected: Tensor,
    reference: Callable[..., Tensor] | None,
    args: Sequence[Any],
    *,
    witnessed: bool,
) -> str | None:
    """What a difference in values means; both tensors real, of one shape, dtype and device."""
    try:
        certain = _pattern(stats)
        if certain is not None:
            return certain
        sentence = program = None
        if reference is not None and actual.is_floating_point():
            with torch.no_grad():
                sentence, program = explained(stats, actual, expected, reference, args, witnessed=witnessed)
        return sentence or _place(stats) or _neutral(stats, program)
    except Exception as error:  # a hint that fails must not hide the mismatch that it was to explain
        _LOGGER.debug("no hint: %s: %s", type(error).__name__, error)
        return None


def _pattern(stats: MismatchStats) -> str | None:
    """What the mismatching values show by themselves, when all of them show it."""
    number = stats.mismatched
    if stats.unwritten >= _REPRODUCED * number:
        return (
            f"unwritten output: {stats.unwritten:,} elements hold what the buffer held before the launch{_tail(stats)}"
        )
    if stats.nan_lost == number:
        return "NaN is swallowed: the reference gives NaN there, the kernel a number"
    if stats.nan_spread == number:
        return "NaN is spread: the kernel gives NaN where the reference gives a number"
    if stats.zero_sign == number:
        return "the sign of zero is lost: -0.0 is not 0.0"
    if stats.flushed == number:
        return "flush to zero: the reference gives subnormal numbers there, the kernel zero"
    return None


def _tail(stats: MismatchStats) -> str:
    assert stats.first is not None
    if stats.first > 0 and stats.mismatched >= _REPRODUCED * (stats.total - stats.first):
        return f", from element {stats.first:,} of {stats.total:,} on"
    return ""


def _place(stats: MismatchStats) -> str | None:
    """What the mismatches' place shows when their values say nothing."""
    if stats.overflow_lost == stats.mismatched:
        return "overflow is 'improved': the reference overflows to infinity there, and that is the right result"
    if stats.mismatched > 1 and (tail := _tail(stats)):
        return f"only the tail differs{tail}: it looks unwritten, or computed by another path"
    column = stats.first_column
    in_tail = (stats.total // stats.row) * (stats.row - column) if column else 0
    if column and in_tail > 1 and stats.mismatched >= _REPRODUCED * in_tail:
        return f"only the last {stats.row - column} of each row's {stats.row:,} elements differ: the row's tail"
    return None


def _neutral(stats: MismatchStats, program: Program | None) -> str | None:
    """A scatter of last-bit differences that no rounding explains."""
    if stats.mismatched < 2 or stats.max_ulp > 2 or stats.nan_lost or stats.nan_spread:
        return None
    if program is None:
        return "last-bit differences only: a rounding, or the order of a reduction"
    sums = next((step for step in program.steps if step.sums), None)
    if sums is None:
        return "last-bit differences that no single rounding of the reference explains"
    root = " or another reciprocal square root" if any(step.name == "rsqrt" for step in program.steps) else ""
    return (
        f"last-bit differences that no single rounding explains: possibly another order of the reduction in"
        f" `{shortened(sums.expression)}`{root}"
    )
