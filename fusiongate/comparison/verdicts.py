"""The verdict on two tensors under a contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusiongate.errors import UsageError

from .bits import as_real, dtype_name, integer_view, normalised_strides, slabs, unequal_bits
from .contracts import Contract, Exact, Ulp, described, magnitude_of, outside_of
from .mismatch_stats import SLAB, MismatchStats, count

__all__ = ["REASONS", "Verdict", "bits_differ", "compared", "unlike"]

REASONS = (
    "equal",
    "within",
    "type",
    "layout",
    "dtype",
    "shape",
    "device",
    "strides",
    "bits",
    "nan",
    "ulp",
)
"""Every reason a verdict can have; ``equal`` (bit for bit) and ``within`` (the contract's ULPs) are the good ones."""

# A comparison of bits makes one bool an element, so that this many take 256 MiB.
_BITS_SLAB = 1 << 28


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one comparison; true in a condition when the contract is kept."""

    ok: bool
    """Whether the contract is kept."""
    reason: str
    """One of :data:`REASONS`; first sight, which sees more than two tensors, adds its own words."""
    contract: Contract
    """What was asked."""
    total: int
    """Elements of the expected tensor; the parts of a complex number count one by one."""
    mismatched: int = 0
    """Elements that break the contract; 0 when metadata differ, because no value was compared then."""
    max_ulp: float = 0
    """The largest distance seen: under ``Exact`` in representable values, with infinity next to the largest finite one;
    under ``Ulp`` in the contract's ULPs, ``inf`` where just one side is infinite."""
    first_index: tuple[int, ...] | None = None
    """Where the first such element is."""
    ulp_histogram: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Mismatching elements by distance, such as ``{"1": 10, "3-4": 2, "nan": 1}``."""
    actual: str = ""
    """What was got, in words: the metadata that differ, or the first differing value and its bits."""
    expected: str = ""
    """What was expected, likewise."""
    hint: str | None = None
    """What probably went wrong, where that can be told."""
    output: str = ""
    """Which of several outputs, in words."""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.reason == "equal":
            return f"equal bit for bit: {self.total:,} elements"
        if self.ok:
            return f"{self.contract}: {self.total:,} elements, at most {self.max_ulp:.4g} ULP apart"
        if self.first_index is None and not self.expected:
            lines = [f"{self.reason}: {self.actual}"]
        elif self.first_index is None:
            lines = [f"{self.reason} differs: got {self.actual}, expected {self.expected}"]
        else:
            share = 100 * self.mismatched / self.total
            kept = f"{'equal ' if isinstance(self.contract, Exact) else ''}{self.contract} (reason: {self.reason})"
            furthest = f"at most {self.max_ulp:.4g} ULP apart"
            lines = [
                f"{self.mismatched:,} of {self.total:,} elements ({share:.3g} %) are not {kept}, {furthest}",
                f"first at {self.first_index}: got {self.actual}, expected {self.expected}",
                "elements by ULPs: " + ", ".join(f"{label}: {n:,}" for label, n in self.ulp_histogram.items()),
            ]
        if self.output:
            lines[0] = f"{self.output}: {lines[0]}"
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def compared(
    actual: object, expected: Tensor, contract: Contract, args: Sequence[Any] = (), *, poison: Tensor | None = None
) -> tuple[Verdict, MismatchStats | None]:
    """Compare two tensors under a contract, metadata before values; a verdict without a hint, and what to find one by.

    Where all bits are equal this costs one pass and one wait for the device.

    Parameters
    ----------
    actual
        What the kernel returned, of any strides; anything but a tensor is a mismatch.
    expected
        What the reference returned.
    contract
        ``Exact()`` or ``Ulp(...)``.
    args
        The reference's arguments, for the contract's ``scale``.
    poison
        What the output's memory held before the launch, of the output's shape and dtype: makes "unwritten" certain.

    Raises
    ------
    UsageError
        If ``expected`` is no dense tensor, or the contract's ``scale`` does not fit.
    """
    _check(expected, contract)
    differing = _metadata(actual, expected)
    if differing is not None:
        reason, got, wanted = differing
        return Verdict(False, reason, contract, _total(expected), actual=got, expected=wanted), None
    assert isinstance(actual, Tensor)
    with torch.no_grad():
        first, second = as_real(actual), as_real(expected)
        if not _any_unequal(first, second, _raw_unequal, _BITS_SLAB):
            return Verdict(True, "equal", contract, second.numel()), None
        magnitude = magnitude_of(contract, args, expected)
        stats = count(first, second, outside_of(first, second, contract, magnitude), _usable(poison, first))
        if not stats.mismatched:
            return _accepted(first, second, contract, magnitude), None
    return _refused(stats, first, second, contract, expected.dim()), stats


def bits_differ(
    actual: Tensor,
    expected: Tensor,
    contract: Contract = Exact(),  # noqa: B008  # frozen
    args: Sequence[Any] = (),
) -> Tensor:
    """Whether two tensors break a contract, as a 0-dim bool tensor on their device; never waits for the device.

    Raises
    ------
    UsageError
        As :func:`compared` does.
    """
    _check(expected, contract)
    if _metadata(actual, expected) is not None:
        return torch.ones((), dtype=torch.bool, device=expected.device)
    with torch.no_grad():
        first, second = as_real(actual), as_real(expected)
        if isinstance(contract, Exact) or not second.is_floating_point():
            return _any_unequal(first, second, unequal_bits, SLAB << 3)
        outside = outside_of(first, second, contract, magnitude_of(contract, args, expected))
        flag = torch.zeros((), dtype=torch.bool, device=second.device)
        for _, index in slabs(second.shape, SLAB):
            flag |= outside(index)[0].any()
        return flag


def unlike(actual: Tensor, expected: Tensor) -> str | None:
    """What a caller would notice beside layout and values: class, gradient, inference mode, lazy bits; None if nothing.

    In words, of the actual one.
    """
    if type(actual) is not type(expected):
        return f"the result is a {type(actual).__name__}, and the reference gives a {type(expected).__name__}"
    for words, told in _FLAGS.items():
        if told(actual) != told(expected):
            return f"the result {_not(told(actual))} {words}, and the reference's {_not(told(expected))}"
    return None


_FLAGS: Mapping[str, Callable[[Tensor], bool]] = {
    "one that requires a gradient": lambda tensor: tensor.requires_grad,
    "made in inference mode": lambda tensor: tensor.is_inference(),
    "lazily conjugated": lambda tensor: tensor.is_conj(),
    "lazily negated": lambda tensor: tensor.is_neg(),
}


def _not(told: bool) -> str:
    return "is" if told else "is not"


def _check(expected: object, contract: object) -> None:
    if not isinstance(expected, Tensor) or expected.layout != torch.strided:
        raise UsageError(f"compare: expected is a dense tensor, not {described(expected)}")
    if not isinstance(contract, (Exact, Ulp)):
        raise UsageError(f"compare: contract is fusiongate.Exact() or fusiongate.Ulp(n), not {contract!r}")


def _total(expected: Tensor) -> int:
    return expected.numel() * (2 if expected.is_complex() else 1)


def _metadata(actual: object, expected: Tensor) -> tuple[str, str, str] | None:
    """The first kind of metadata that differs, with both sides in words."""
    if not isinstance(actual, Tensor):
        return "type", described(actual), "a tensor"
    if actual.layout != expected.layout:
        return "layout", described(actual), described(expected)
    if actual.dtype != expected.dtype:
        return "dtype", dtype_name(actual.dtype), dtype_name(expected.dtype)
    if actual.shape != expected.shape:
        return "shape", str(tuple(actual.shape)), str(tuple(expected.shape))
    if actual.device != expected.device:
        return "device", str(actual.device), str(expected.device)
    if normalised_strides(actual.shape, actual.stride()) != normalised_strides(expected.shape, expected.stride()):
        return "strides", str(actual.stride()), str(expected.stride())
    return None


def _raw_unequal(actual: Tensor, expected: Tensor) -> Tensor:
    return integer_view(actual) != integer_view(expected)


def _any_unequal(actual: Tensor, expected: Tensor, unequal: Callable[[Tensor, Tensor], Tensor], limit: int) -> Tensor:
    flags = [unequal(actual[index], expected[index]).any() for _, index in slabs(expected.shape, limit)]
    return flags[0] if len(flags) == 1 else torch.stack(flags).any()


def _usable(poison: Tensor | None, actual: Tensor) -> Tensor | None:
    if poison is None:
        return None
    real = as_real(poison)
    fits = real.shape == actual.shape and real.dtype == actual.dtype and real.device == actual.device
    return real if fits else None


def _accepted(actual: Tensor, expected: Tensor, contract: Contract, magnitude: Tensor | None) -> Verdict:
    """The verdict on tensors that differ in bits and yet keep the contract."""
    if isinstance(contract, Exact) or not expected.is_floating_point():
        return Verdict(True, "equal", contract, expected.numel())
    outside = outside_of(actual, expected, contract, magnitude)
    largest = 0.0
    for _, index in slabs(expected.shape, SLAB):
        distance = outside(index)[1]
        assert distance is not None
        largest = max(largest, distance.max().item())
    return Verdict(True, "within", contract, expected.numel(), max_ulp=largest)


def _refused(stats: MismatchStats, actual: Tensor, expected: Tensor, contract: Contract, dimensions: int) -> Verdict:
    assert stats.first is not None
    first = stats.first
    index = []
    for size in reversed(expected.shape):
        first, position = divmod(first, size)
        index.append(position)
    index.reverse()
    if stats.nan_lost + stats.nan_spread == stats.mismatched:
        reason = "nan"
    else:
        reason = "bits" if isinstance(contract, Exact) else "ulp"
    return Verdict(
        False,
        reason,
        contract,
        stats.total,
        mismatched=stats.mismatched,
        max_ulp=stats.max_ulp,
        first_index=tuple(index[:dimensions]),
        ulp_histogram=stats.histogram,
        actual=_value(actual[tuple(index)]),
        expected=_value(expected[tuple(index)]),
    )


def _value(element: Tensor) -> str:
    """One element's value and bits: ``1.984375 (0x3ffe)``."""
    width = element.dtype.itemsize
    pattern = int(integer_view(element).item()) & ((1 << (8 * width)) - 1)
    if element.dtype == torch.float32:
        # Nine significant digits tell every float32 apart; the seventeen of a Python float only clutter.
        value = f"{element.item():.9g}"
    else:
        value = str(element.item())
    return f"{value} (0x{pattern:0{2 * width}x})"
