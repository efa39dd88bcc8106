"""Trials: a kernel's results on given operands, compared with eager's and boiled down to an md5.

Of a norm, whose sum has too many operands to try them all, the witness over many rows is evidence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view
from fusiongate.comparison.verdicts import bits_differ
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion

__all__ = ["ROWS", "WITNESS", "Counterexample", "Found", "StageResult", "Trials", "evidence"]

Arguments = tuple[Tensor, ...]

_OPERANDS = ("x", "scale", "shift")
_PENDING = 8
"""Blocks that are under way before the host looks at what came of them."""

ROWS = 10_000_000
"""Rows in all."""
WITNESS = "rstd"
"""The name of the only stage."""

_COLUMNS = (128, 132, 512, 1024, 1536, 2048, 3072, 4096, 5120)
_EPSILONS = (1e-6, 0.0)
_BLOCK = 1 << 26
_BLOCK_ON_HOST = 1 << 19


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage that found no difference."""

    name: str
    """The stage."""
    what: str
    """What was tried, in words."""
    tried: int
    """How many results were compared with eager's."""
    complete: bool
    """Whether these are all that there are."""
    md5: str
    """Over the results: cards on which it is the same share this arithmetic. All NaN count as one."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Operands on which a kernel's result is not eager's."""

    kernel: str
    """The kernel."""
    stage: str
    """The stage that found it."""
    operands: Mapping[str, str] = field(hash=False)
    """Each operand's value and bits at that element."""
    actual: str
    """The kernel's result there, with its bits."""
    expected: str
    """Eager's, likewise."""

    def __str__(self) -> str:
        operands = ", ".join(f"{name}={value}" for name, value in self.operands.items())
        return f"{self.stage}: {self.kernel}({operands}) is {self.actual}, and eager gives {self.expected}"

    @classmethod
    def at(
        cls, kernel: str, stage: str, operands: Mapping[str, Tensor], actual: Tensor, expected: Tensor
    ) -> Counterexample:
        """The counterexample in scalars."""
        named = {name: spelled(operand) for name, operand in operands.items()}
        return cls(kernel, stage, named, spelled(actual), spelled(expected))


def spelled(element: Tensor) -> str:
    """A scalar's value and bits: ``1.984375 (0x3ffe)``."""
    width = element.dtype.itemsize
    pattern = int(integer_view(element).item()) & ((1 << (8 * width)) - 1)
    value = f"{element.item():.9g}" if element.dtype == torch.float32 else str(element.item())
    return f"{value} (0x{pattern:0{2 * width}x})"


class Found(Exception):
    """A kernel's result is not eager's."""

    def __init__(self, counterexample: Counterexample) -> None:
        super().__init__(str(counterexample))
        self.counterexample = counterexample


class Trials:
    """Tries one kernel, without its gate.

    Parameters
    ----------
    kernel
        Its name in results.
    fusion
        The kernel and its reference.
    """

    def __init__(self, kernel: str, fusion: Fusion) -> None:
        self._kernel = kernel
        self._fusion = fusion

    def run(self, name: str, what: str, trials: Iterable[Arguments], *, complete: bool) -> StageResult:
        """Compare all results.

        Parameters
        ----------
        name, what
            The stage, in a word and in words.
        trials
            Arguments, call after call.
        complete
            Whether these are all that there are.

        Raises
        ------
        Found
            One is not eager's.
        UsageError
            The kernel declines the operands.
        """
        digest = hashlib.md5(usedforsecurity=False)
        tried = 0
        pending: list[tuple[Arguments, Tensor, Tensor]] = []
        for args in trials:
            reason = self._fusion.declines(*args)
            if reason is not None:
                raise UsageError(f"{self._fusion.name} cannot be certified here: it declines its operands ({reason})")
            expected = self._fusion.reference(*args)
            actual = self._fusion.fused(*args)
            pending.append((args, bits_differ(actual, expected), _checksums(actual)))
            tried += expected.numel()
            # To ask after each block would leave the device waiting for the host.
            if len(pending) == (_PENDING if expected.is_cuda else 1):
                self._settle(name, pending, digest)
        self._settle(name, pending, digest)
        return StageResult(name, what, tried, complete, digest.hexdigest())

    def _settle(self, stage: str, pending: list[tuple[Arguments, Tensor, Tensor]], digest: hashlib._Hash) -> None:
        if not pending:
            return
        differing = torch.stack([differs for _, differs, _ in pending]).tolist()
        if any(differing):
            raise Found(self._counterexample(stage, pending[differing.index(True)][0]))
        for _, _, checksums in pending:
            digest.update(bytes(checksums.cpu().contiguous().view(torch.uint8).tolist()))
        pending.clear()

    def _counterexample(self, stage: str, args: Arguments) -> Counterexample:
        actual, expected = self._fusion.fused(*args), self._fusion.reference(*args)
        index = compare(actual, expected).first_index
        assert index is not None
        operands = {name: operand.expand_as(expected)[index] for name, operand in zip(_OPERANDS, args, strict=True)}
        return Counterexample.at(self._kernel, stage, operands, actual[index], expected[index])


def _checksums(results: Tensor) -> Tensor:
    """A sum for each row of results, in int64 modulo 2**64: in any order the same, and other where one bit is other.

    An md5 of all bits would take a minute on the host for each second of the device's.
    """
    flat = results.masked_fill(results.isnan(), float("nan")).view(-1)
    width = 8 // flat.element_size()
    words = flat[: flat.numel() // width * width].view(torch.int64)
    rest = integer_view(flat[words.numel() * width :]).long().sum()
    rows = words.view(results.shape[0], -1) if words.numel() % results.shape[0] == 0 else words.view(1, -1)
    weights = torch.arange(rows.shape[1], device=results.device).mul_(0x9E3779B97F4A7C15 - (1 << 64)).bitwise_or_(1)
    return torch.cat([(rows * weights).sum(1), rest.view(1)])


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator)


def _of_all_sizes(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Each element of another magnitude, from 2**-12 to 2**12: sums that lose much."""
    exponents = torch.randint(-12, 13, shape, device=generator.device, generator=generator)
    return torch.ldexp(_normal(shape, generator), exponents)


def _one_large(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """One element a row that outweighs the others: where it stands decides what is lost before it and after it."""
    values = _normal(shape, generator)
    place = torch.randint(shape[1], (shape[0], 1), device=generator.device, generator=generator)
    return values.scatter_(1, place, 96.0)


def _rising(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Elements in the order of their magnitude."""
    values = _normal(shape, generator)
    return values * torch.linspace(0.01, 2.0, shape[1], device=generator.device)


def _tiny(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Squares beside eps, and below it."""
    return _normal(shape, generator) * 1e-3


_KINDS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "of all sizes": _of_all_sizes,
    "one large": _one_large,
    "rising": _rising,
    "tiny": _tiny,
}


def evidence(kernel: str, fusion: Fusion, dtype: torch.dtype, device: torch.device, total: int) -> StageResult:
    """Compare the witness over at least so many rows.

    Raises
    ------
    Found
        A row's statistic is not the reference's.
    UsageError
        The fusion has no witness, or declines the operands.
    """
    if fusion.witness is None:
        raise UsageError(
            f"{kernel} names no witness, so there is nothing to compare but outputs: pytest compares those"
        )
    of_reference, of_kernel = fusion.witness
    digest = hashlib.md5(usedforsecurity=False)
    tried = 0
    for args in _arguments(dtype, device, total):
        reason = fusion.declines(*args)
        if reason is not None:
            raise UsageError(f"{kernel} cannot be tried here: it declines its operands ({reason})")
        actual, expected = of_kernel(*args), of_reference(*args)
        verdict = compare(actual, expected)
        if not verdict:
            assert verdict.first_index is not None
            row = verdict.first_index
            operands = {"x": _described(args[0], row[0]), "eps": str(args[3])}
            raise Found(Counterexample(kernel, "rstd", operands, verdict.actual, verdict.expected))
        tried += expected.numel()
        digest.update(bytes(actual.cpu().view(torch.uint8).tolist()))
    what = f"1/rms of rows of {', '.join(map(str, _COLUMNS))} elements; data {', '.join(_KINDS)}"
    return StageResult(WITNESS, what, tried, False, digest.hexdigest())


def _described(x: Tensor, row: int) -> str:
    first = ", ".join(f"{value:.6g}" for value in x[0, row, :4].tolist())
    return f"row {row} of {x.shape[1]} × {x.shape[2]}: {first}, …"


def _arguments(dtype: torch.dtype, device: torch.device, total: int) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    generator = torch.Generator(device).manual_seed(2)
    share = -(-total // (len(_COLUMNS) * len(_KINDS) * len(_EPSILONS)))
    largest = _BLOCK if device.type == "cuda" else _BLOCK_ON_HOST
    for columns in _COLUMNS:
        row = torch.zeros(1, 1, columns, dtype=dtype, device=device)
        for make in _KINDS.values():
            for eps in _EPSILONS:
                left = share
                while left:
                    count = min(left, largest // columns)
                    yield make((count, columns), generator).to(dtype)[None], row, row, eps
                    left -= count
