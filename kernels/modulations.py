"""The two modulations: every op rounds to the storage dtype, or fp32 throughout with one rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fusiongate.gate.fusion import Fusion

from .launching import Entry, Launcher
from .predicates import declined_modulation, row_bucket
from .sources import source

__all__ = ["modulate", "modulate_fp32", "modulate_fp32_reference", "modulate_reference"]


def modulate_reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * (1 + scale) + shift``; each op rounds its result to the storage dtype.

    Parameters
    ----------
    x
        (B, S, D).
    scale, shift
        (B, 1, D), of any batch stride.
    """
    return x * (1 + scale) + shift


def modulate_fp32_reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)``: fp32 throughout, one rounding at the end.

    Parameters
    ----------
    x
        (B, S, D).
    scale, shift
        (B, 1, D) in x's dtype or in fp32, of any batch stride.
    """
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def _operands(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, scale, shift


def _fusion(name: str, reference: Callable[..., Tensor], *, fp32_rows: bool) -> Fusion:
    def build(label: str, *, host: Fusion | None) -> Fusion:
        return Fusion(
            label,
            reference=reference,
            fused=Launcher(Entry(source("modulate"), name), _operands),
            declines=partial(declined_modulation, host=host is None, fp32_rows=fp32_rows),
            signature=row_bucket,
            host=host,
        )

    return build(name, host=build(f"{name}.host", host=None))


modulate = _fusion("modulate", modulate_reference, fp32_rows=False)
modulate_fp32 = _fusion("modulate_fp32", modulate_fp32_reference, fp32_rows=True)
