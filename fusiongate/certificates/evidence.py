"""Evidence for the norms: their witness over many rows. A sum of D squares has too many operands to try them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusiongate.comparison.verdicts import compare
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion

from .records import Counterexample, StageResult
from .trials import Found

__all__ = ["ROWS", "WITNESS", "evidence"]

ROWS = 10_000_000
"""Rows in all."""
WITNESS = "rstd"
"""The name of the only stage."""

_COLUMNS = (128, 132, 512, 1024, 1536, 2048, 3072, 4096, 5120)
_EPSILONS = (1e-6, 0.0)
_BLOCK = 1 << 26
_BLOCK_ON_HOST = 1 << 19


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
