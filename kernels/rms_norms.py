"""``F.rms_norm(x, (D,), weight, eps) * (1 + scale) + shift``: exact, and within ULPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Ulp
from fusiongate.gate.fusion import Fusion

from .launching import Entry, Launcher
from .orders import row_kernel_rstd
from .predicates import declined_norm, declined_weight, row_bucket
from .sources import source

__all__ = [
    "rms_norm_modulate",
    "rms_norm_modulate_high",
    "rms_norm_modulate_high_reference",
    "rms_norm_modulate_reference",
]

_LONGEST_ROW = 32768
"""The largest D for which the order of ATen's row kernel was seen."""


def rms_norm_modulate_reference(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None
) -> Tensor:
    """``F.rms_norm(x, (D,), weight, eps) * (1 + scale) + shift``.

    Parameters
    ----------
    x
        (B, S, D).
    scale, shift
        (B, 1, D), of any batch stride.
    eps
        Added to the mean square.
    weight
        (D,), in x's dtype.
    """
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * (1 + scale) + shift


def rms_norm_modulate_high_reference(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``F.rms_norm(x, (D,), eps=eps) * (1 + scale) + shift``; parameters as for the exact one."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * (1 + scale) + shift


def _emulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """The reference of the host build: the GPU's order, which CPU eager does not have."""
    normalized = row_kernel_rstd(x, eps).reshape(*x.shape[:-1], 1) * x.float()
    if weight is not None:
        normalized = weight.float() * normalized
    return normalized.to(x.dtype) * (1 + scale) + shift


def _declines(
    x: Any, scale: Any, shift: Any, eps: Any, weight: Any = None, *, host: bool, any_order: bool = False
) -> str | None:
    reason = declined_norm(x, scale, shift, eps, host=host)
    if reason is not None:
        return reason
    if any_order and x.dtype == torch.float32:
        # The contract is for what 16 bits keep of a sum; fp32 shows its order.
        return "dtype"
    if x.shape[2] % 4:
        # ATen takes other kernels for such rows, which overflow on other inputs too.
        return "reduction-order"
    if not any_order and x.shape[2] > _LONGEST_ROW:
        return "too-large"
    return declined_weight(weight, x)


def _operands(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> tuple[Any, ...]:
    return x, scale, shift, weight, float(eps), None


def _operands_high(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Any, ...]:
    return x, scale, shift, float(eps)


def _reference_rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    rstd: Tensor = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)[1]
    return rstd.reshape(-1)


def _emulated_rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return row_kernel_rstd(x, eps)


def _kernel_rstd(entry: Entry) -> Callable[..., Tensor]:
    def rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
        statistic = torch.empty(x.shape[0] * x.shape[1], dtype=torch.float32, device=x.device)
        entry.on(x.device)(torch.empty_like(x), x, scale, shift, weight, eps, statistic)
        return statistic

    return rstd


def _exact() -> Fusion:
    entry = Entry(source("rms_norm_modulate"), "rms_norm_modulate")

    def build(label: str, reference: Callable[..., Tensor], rstd: Callable[..., Tensor], host: Fusion | None) -> Fusion:
        return Fusion(
            label,
            reference=reference,
            fused=Launcher(entry, _operands),
            declines=partial(_declines, host=host is None),
            signature=row_bucket,
            witness=(rstd, _kernel_rstd(entry)),
            host=host,
        )

    host = build("rms_norm_modulate.host", _emulated, _emulated_rstd, None)
    return build("rms_norm_modulate", rms_norm_modulate_reference, _reference_rstd, host)


def largest_intermediate(x: Tensor, scale: Tensor, shift: Tensor, eps: float, expected: Tensor) -> Tensor:
    """max(|y * (1 + scale)|, |shift|, |out|), of the output's shape, in fp32: where the variant's ULPs are taken.

    One ULP of the norm's output y becomes one of the product; after cancellation with shift it can be hundreds of the
    result.
    """
    product = (torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * (1 + scale)).float()
    return torch.maximum(torch.maximum(product.abs(), shift.float().abs()), expected.float().abs())


def _high() -> Fusion:
    def build(label: str, host: Fusion | None) -> Fusion:
        return Fusion(
            label,
            reference=rms_norm_modulate_high_reference,
            fused=Launcher(Entry(source("rms_norm_modulate"), "rms_norm_modulate_high"), _operands_high),
            declines=partial(_declines, host=host is None, any_order=True),
            signature=row_bucket,
            contract=Ulp(2, scale=largest_intermediate),
            compile="op",
            host=host,
        )

    return build("rms_norm_modulate_high", build("rms_norm_modulate_high.host", None))


rms_norm_modulate = _exact()
rms_norm_modulate_high = _high()
