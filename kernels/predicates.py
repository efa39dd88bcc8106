"""Why a kernel declines its operands: the checks of ``common/operands.cuh``, in words, before anything is built.

Shapes: x is (B, S, D); scale and shift are (B, 1, D) or (1, 1, D); a weight is (D,).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLOATS", "declined_device", "declined_modulation", "declined_norm", "declined_weight", "row_bucket"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_VECTOR = 4
"""Elements of the narrowest vector load; rows whose D it does not divide go element by element, at any alignment."""
_BLOCK = 1024
"""Elements that a block of a modulation takes; half as many of fp32, or where it takes them one by one."""
_MOST_ROWS = 1 << 31
"""Blocks of a grid: a norm takes one a row."""
_MOST_COLUMNS = 1 << 29
"""A modulation numbers a few rows' vectors with 31 bits; longer lines take more launches."""


def declined_device(tensor: Tensor, *, host: bool) -> str | None:
    """``cpu`` for a device kernel on a CPU tensor, ``device`` for anything else that the build is not for."""
    if host:
        return None if tensor.device.type == "cpu" else "device"
    if tensor.device.type == "cpu":
        return "cpu"
    return None if tensor.device.type == "cuda" else "device"


def _is_misaligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % (_VECTOR * tensor.element_size()) != 0


def _declined_row(row: Any, x: Tensor) -> str | None:
    if not isinstance(row, Tensor) or row.dim() != 3:
        return "rank"
    if row.shape[1] != 1:
        return "per-token"
    if row.shape[2] != x.shape[2] or row.shape[0] not in (1, x.shape[0]):
        return "shape"
    if row.shape[2] != 1 and row.stride(2) != 1:
        return "stride"
    batch_stride = row.stride(0) if row.shape[0] != 1 else 0
    if x.shape[2] % _VECTOR == 0 and (_is_misaligned(row) or batch_stride % _VECTOR):
        return "alignment"
    return None


def declined_modulation(x: Any, scale: Any, shift: Any, *, host: bool, fp32_rows: bool = False) -> str | None:
    """Why the operands of a modulation are declined.

    Parameters
    ----------
    x, scale, shift
        As the module says.
    host
        Whether the kernel is the host's build.
    fp32_rows
        Whether rows in fp32 beside an x in another dtype are taken.
    """
    if not isinstance(x, Tensor):
        return "rank"
    if (reason := declined_device(x, host=host)) is not None:
        return reason
    if any(isinstance(row, Tensor) and row.device != x.device for row in (scale, shift)):
        return "mixed-device"
    if x.dtype not in FLOATS:
        return "dtype"
    dtypes = {row.dtype for row in (scale, shift) if isinstance(row, Tensor)}
    if dtypes and dtypes != {x.dtype} and not (fp32_rows and dtypes == {torch.float32}):
        return "mixed-dtype"
    if x.dim() != 3:
        return "rank"
    for row in (scale, shift):
        if (reason := _declined_row(row, x)) is not None:
            return reason
    if not x.is_contiguous():
        return "stride"
    if x.shape[2] % _VECTOR == 0 and _is_misaligned(x):
        return "alignment"
    if x.shape[0] * x.shape[1] >= _MOST_ROWS or x.shape[2] >= _MOST_COLUMNS:
        return "too-large"
    return None


def declined_norm(x: Any, scale: Any, shift: Any, eps: Any, *, host: bool) -> str | None:
    """Why the operands of a norm with a modulation are declined, as far as all norms agree; parameters as above.

    ``eps`` is added to the mean square. None means another number in another release, so only a number says what the
    reference computes.
    """
    reason = declined_modulation(x, scale, shift, host=host)
    if reason is not None:
        return reason
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        return "eps"
    return "autocast" if torch.is_autocast_enabled(x.device.type) else None


def declined_weight(weight: Any, x: Tensor) -> str | None:
    """Why a norm's weight is declined; None is no weight."""
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or weight.shape != x.shape[2:]:
        return "shape"
    if weight.device != x.device:
        return "mixed-device"
    if weight.dtype != x.dtype:
        return "mixed-dtype"
    if not weight.is_contiguous():
        return "stride"
    return "alignment" if _is_misaligned(weight) else None


def row_bucket(x: Tensor, scale: Tensor, shift: Tensor, *rest: Any) -> Hashable:
    """What stands for the shapes in a signature: a launch of these kernels depends on no more.

    The batch counts as one or several (several is where rows can be mixed up), the tokens by their power of two, and D
    as it is. Where rows end between the multiples of 16 bytes, x may too, and its last vector is a case of its own; so
    is a last block that x fills only in part.
    """
    batch, tokens, columns = x.shape
    return (
        min(batch, 2),
        tokens.bit_length(),
        x.numel().bit_length(),
        columns,
        scale.shape[0] == 1,
        shift.shape[0] == 1,
        columns % (2 * _VECTOR) == _VECTOR and batch * tokens % 2 == 1,
        x.numel() % (_BLOCK if x.element_size() == 2 and columns % _VECTOR == 0 else _BLOCK // 2) == 0,
    )
