"""The tests that such code usually comes with: row-broadcast, strided unbind, per-token, fall-back. They pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from . import once_for_all, per_signature
from .once_for_all import reference_modulate


@pytest.fixture(autouse=True)
def new_gates() -> Iterator[None]:
    once_for_all.reset()
    per_signature.reset()
    yield
    once_for_all.reset()
    per_signature.reset()


@pytest.fixture(params=[once_for_all, per_signature], ids=["once-for-all", "per-signature"])
def fused_modulate(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = request.param.fused_modulate
    return function


def operands(rows: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 97, 256, generator=generator, dtype=torch.float32).bfloat16()
    scale, shift = torch.randn(2, 2, rows, 256, generator=generator).bfloat16()
    return x, scale, shift


def test_row_broadcast(fused_modulate: Callable[..., torch.Tensor]) -> None:
    x, scale, shift = operands()
    for _ in range(2):
        assert torch.equal(fused_modulate(x, scale, shift), reference_modulate(x, scale, shift))


def test_strided_unbind(fused_modulate: Callable[..., torch.Tensor]) -> None:
    x = operands()[0]
    table = torch.randn(2, 1, 6, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    shift, scale, *_ = table.unbind(dim=2)
    for _ in range(2):
        assert torch.equal(fused_modulate(x, scale, shift), reference_modulate(x, scale, shift))


def test_per_token_rows_fall_back(fused_modulate: Callable[..., torch.Tensor]) -> None:
    x, scale, shift = operands(rows=97)
    assert torch.equal(fused_modulate(x, scale, shift), reference_modulate(x, scale, shift))


def test_fp64_falls_back(fused_modulate: Callable[..., torch.Tensor]) -> None:
    x, scale, shift = (operand.double() for operand in operands())
    assert torch.equal(fused_modulate(x, scale, shift), reference_modulate(x, scale, shift))
