"""``(x * rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) [* weight] * (1 + scale) + shift``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion

from .launching import Entry, Launcher
from .orders import composite_rstd, lane_grid
from .predicates import declined_norm, declined_weight, row_bucket
from .sources import source

__all__ = ["composite_rms_norm_modulate", "composite_rms_norm_modulate_reference"]

_SHORTEST_ROW = 128
_LONGEST_ROW = 32768
"""Between these D, multiples of 4, the order of ATen's mean was seen; it sums shorter rows without vectors."""


def composite_rms_norm_modulate_reference(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None
) -> Tensor:
    """RMSNorm as models write it out, then modulate.

    Parameters
    ----------
    x
        (B, S, D).
    scale, shift
        (B, 1, D), of any batch stride.
    eps
        Added to the mean square.
    weight
        (D,), in x's dtype; multiplied with the norm's rounded result.
    """
    variance = x.float().pow(2).mean(-1, keepdim=True)
    normalized = (x * torch.rsqrt(variance + eps)).to(x.dtype)
    if weight is not None:
        normalized = normalized * weight
    return normalized * (1 + scale) + shift


def _emulated(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """The reference of the host build: the GPU's order, which CPU eager does not have."""
    normalized = (x.float() * composite_rstd(x, eps).reshape(*x.shape[:-1], 1)).to(x.dtype)
    if weight is not None:
        normalized = normalized * weight
    return normalized * (1 + scale) + shift


def _declines(x: Any, scale: Any, shift: Any, eps: Any, weight: Any = None, *, host: bool) -> str | None:
    reason = declined_norm(x, scale, shift, eps, host=host)
    if reason is not None:
        return reason
    if x.shape[2] % 4 or x.shape[2] < _SHORTEST_ROW:
        return "reduction-order"
    if x.shape[2] > _LONGEST_ROW:
        return "too-large"
    return declined_weight(weight, x)


def _grid_of(x: Tensor) -> tuple[int, int]:
    return lane_grid(x.shape[0] * x.shape[1], x.shape[2])


def _summed_alike(live: Sequence[Any], probe: Sequence[Any]) -> bool:
    """Whether a probe's rows are summed in the live order: few rows have other grids than many."""
    return _grid_of(live[0]) == _grid_of(probe[0])


def _bucket(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Hashable:
    """The rows' bucket, and the grid: both the reference's order and the kernel's launch follow from it."""
    return (row_bucket(x, scale, shift), _grid_of(x))


def _operands(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> tuple[Any, ...]:
    return (x, scale, shift, weight, float(eps), None, *_grid_of(x))


def _kernel_rstd(entry: Entry) -> Callable[..., Tensor]:
    def rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
        statistic = torch.empty(x.shape[0] * x.shape[1], dtype=torch.float32, device=x.device)
        entry.on(x.device)(torch.empty_like(x), x, scale, shift, weight, eps, statistic, *_grid_of(x))
        return statistic

    return rstd


def _reference_rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).reshape(-1)


def _emulated_rstd(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return composite_rstd(x, eps)


def _composite() -> Fusion:
    entry = Entry(source("composite_rms_norm_modulate"), "composite_rms_norm_modulate")

    def build(label: str, reference: Callable[..., Tensor], rstd: Callable[..., Tensor], host: Fusion | None) -> Fusion:
        return Fusion(
            label,
            reference=reference,
            fused=Launcher(entry, _operands),
            declines=partial(_declines, host=host is None),
            signature=_bucket,
            witness=(rstd, _kernel_rstd(entry)),
            grows=_summed_alike,
            host=host,
        )

    host = build("composite_rms_norm_modulate.host", _emulated, _emulated_rstd, None)
    return build("composite_rms_norm_modulate", composite_rms_norm_modulate_reference, _reference_rstd, host)


composite_rms_norm_modulate = _composite()
