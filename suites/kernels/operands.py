"""Operands of the adaLN shape as models make them, and bits as they are compared here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusiongate as fg

__all__ = ["DTYPES", "EPS", "HOSTS", "arguments", "keeps_contract", "operands", "refill", "same_bits"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6

Rows = tuple[Tensor, Tensor, Tensor]


def _host(op: fg.Fusion) -> fg.Fusion:
    assert op.host is not None
    return op.host


HOSTS = tuple(map(_host, fg.kernels.FUSIONS))
"""Every kernel as it is built for the host."""


def operands(
    batch: int, tokens: int, columns: int, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, device: str = "cpu"
) -> Rows:
    """x, and scale and shift as strided rows of one (B, 6, D) table, as an adaLN projection gives them."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(batch, tokens, columns, device=device, generator=generator).to(dtype)
    table = torch.randn(batch, 6, columns, device=device, generator=generator).to(dtype)
    return x, table[:, 1:2], table[:, 0:1]


def arguments(op: fg.Fusion, rows: Rows, eps: float = EPS) -> tuple[Any, ...]:
    """The arguments of a fusion on these operands: the norms take an eps too."""
    return (*rows, eps) if "norm" in op.name else rows


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are the same in dtype, shape and bits, NaN by position."""
    return bool(fg.compare(actual, expected))


def keeps_contract(op: fg.Fusion, result: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result is what the fusion's contract makes of its reference's on these arguments."""
    return bool(fg.compare(result, op.reference(*args), op.contract, op.reference, args))


def refill(args: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Give the tensors among some arguments the values of those among others, where they lie."""
    for live, other in zip(args, others, strict=True):
        if isinstance(live, Tensor):
            live.copy_(other)
