"""LTX-2's two adaLN sites: a bare modulation, and an RMSNorm with the modulation behind it.

A block calls :func:`ltx2_modulate` where it writes ``x * (1 + scale) + shift``, and :func:`ltx2_rms_norm_modulate`
where a norm stands in front. Both give the bits of the eager chain, whichever kernel runs; only a block that
:func:`attach_high` has marked, in a tree that is mounted at ``quality="high"``, may be within ULPs of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fusiongate.errors import FusiongateError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Reason, State, free_after_fork
from fusiongate.kernels import composite_rms_norm_modulate, modulate, rms_norm_modulate, rms_norm_modulate_high
from fusiongate.sites import attach, site_of

__all__ = ["Norm", "attach_high", "ltx2_modulate", "ltx2_rms_norm_modulate"]

Norm: TypeAlias = Callable[[Tensor, float], Tensor]
"""A weightless RMSNorm, called as ``norm(x, eps)``."""

_ONE_LAUNCH = (rms_norm_modulate, composite_rms_norm_modulate)
"""The exact kernels, each for norms that sum in its order."""
_NORMS = 64
"""Norms that are remembered: a model has a handful, and one that makes a function a call must not fill the memory."""


def attach_high(block: nn.Module) -> None:
    """Mark a block: its norm sites may take the 1-ULP kernel while ``quality="high"`` is mounted."""
    attach(block, rms_norm_modulate_high)


def ltx2_modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * (1 + scale) + shift``, bit for bit.

    Parameters
    ----------
    x
        (B, S, D).
    scale, shift
        (B, 1, D) rows of any batch stride take the kernel; every other layout that broadcasts takes the eager chain.
    """
    return modulate(x, scale, shift)


def ltx2_rms_norm_modulate(
    block: nn.Module, rms_norm: Norm, x: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> Tensor:
    """``rms_norm(x, eps) * (1 + scale) + shift``, by the fastest way that is allowed here.

    In this order: the 1-ULP kernel, if the block is marked, mounted at ``quality="high"``, and the kernel takes the
    operands; the exact kernel in one launch, if one repeats what this very norm computes; the norm itself and the
    modulation in one launch; eager.

    Parameters
    ----------
    block
        The module that the site is in.
    rms_norm
        The site's own norm, weightless, called as ``rms_norm(x, eps)``.
    x
        (B, S, D).
    scale, shift
        (B, 1, D) rows of any batch stride take a kernel.
    eps
        Added to the mean square.
    """
    site = site_of(block)
    high = site is not None and site.allows(rms_norm_modulate_high)
    if torch.compiler.is_compiling():
        if high:
            return rms_norm_modulate_high(x, scale, shift, eps)
        return rms_norm(x, eps) * (1 + scale) + shift
    if high and rms_norm_modulate_high.standing(x, scale, shift, eps) in (State.UNSEEN, State.VERIFIED):
        return rms_norm_modulate_high(x, scale, shift, eps)
    for fusion in _exact_for(rms_norm):
        if _repeats(fusion, x, scale, shift, eps):
            return fusion(x, scale, shift, eps)
    return modulate(rms_norm(x, eps), scale, shift)


def _repeats(fusion: Fusion, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> bool:
    """Whether a kernel computes what this norm does.

    It is found out once a signature, and quietly: most norms fail all kernels but one.
    """
    standing = fusion.standing(x, scale, shift, eps)
    if standing is State.UNSEEN and fusion.explain(x, scale, shift, eps).reason == Reason.FIRST_SIGHT:
        with contextlib.suppress(FusiongateError):
            fusion.verify(x, scale, shift, eps, quiet=True)
        standing = fusion.standing(x, scale, shift, eps)
    return standing is State.VERIFIED


def _at_site(op: Fusion, norm: Norm) -> Fusion:
    """The kernel of ``op``, with a site's norm and modulation as its reference."""

    def reference(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        return norm(x, eps) * (1 + scale) + shift

    # In fp32 the norm's result has all bits of its statistic. The kernel has to add a shift, so both add zero.
    def norm_in_fp32(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        return norm(x.float(), eps) + 0.0

    def kernel_in_fp32(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        zeros = torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.float32, device=x.device)
        return op.fused(x.float(), zeros, zeros, eps)

    return op.with_reference(reference, name=f"ltx2.{op.name}", witness=(norm_in_fp32, kernel_in_fp32))


_fusions: OrderedDict[Norm, tuple[Fusion, ...]] = OrderedDict()
lock = threading.RLock()
free_after_fork(sys.modules[__name__])


def _exact_for(norm: Norm) -> tuple[Fusion, ...]:
    fusions = _fusions.get(norm)
    if fusions is None:
        with lock:
            fusions = _fusions.setdefault(norm, tuple(_at_site(op, norm) for op in _ONE_LAUNCH))
            while len(_fusions) > _NORMS:
                _fusions.popitem(last=False)
    return fusions
