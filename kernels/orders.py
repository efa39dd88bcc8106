"""RMSNorm in the orders of ATen's kernels, emulated with torch ops on any device.

A host build of a norm kernel repeats the order of a GPU's reduction, which CPU eager does not have: these are what it
is held against. Every step is one IEEE operation on fp32, in the order that the kernel's source describes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["composite_rstd", "fused_multiply_add", "lane_grid", "plus_square", "row_kernel_rstd"]

_WARP = 32
_WARPS = 4
_VECTOR = 4
_MOST_LANES = 512
_ROWS_AT_ONCE = 256
"""Rows whose emulation stays in a CPU's cache: the many small steps are several times faster there."""


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors with one rounding.

    The product is exact in fp64. The sum is rounded to odd there, by which the second rounding, to fp32, gives what one
    would have given (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Knuth's two-sum: what the addition lost.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    # A sum that overflows has lost NaN.
    inexact = (lost != 0) & (lost == lost)
    away_from_zero = inexact & ((lost < 0) == (total > 0))
    odd = (total.view(torch.int64) - away_from_zero.long()) | inexact.long()
    return odd.view(torch.float64).float()


def plus_square(value: Tensor, addend: Tensor) -> Tensor:
    """``value * value + addend`` of fp32 tensors with one rounding, for values that 16 bits hold.

    Their squares have 22 significant bits at most. Where fp64 loses bits of such a sum, the smaller operand ends below
    the 53rd and so begins below the 28th, while the larger one ends above the 25th: all bits between are zero, and the
    second rounding, to fp32, decides as it would have on the exact sum.
    """
    return (value.double().square() + addend.double()).float()


def _reciprocal_square_root(value: Tensor) -> Tensor:
    """``1 / sqrt(value)`` in fp32, each step rounded once; by way of fp64: a CPU's vector library may be an ULP off."""
    root = value.double().sqrt().float()
    return (1.0 / root.double()).float()


def _folded(values: Tensor) -> Tensor:
    """The last dimension added up by halves: the upper onto the lower, until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def _vectors(x: Tensor, lanes: int) -> Tensor:
    """(..., D) as (rows, steps, lanes, 4) in fp32: lane l's vectors, one a step; zeros fill the last step."""
    rows = x.reshape(-1, x.shape[-1]).float()
    # Not by `pad`: Inductor repeats a padded read wherever it is used, and makes megabytes of C++ of one row's order.
    width = lanes * _VECTOR
    full = torch.cat((rows, rows.new_zeros(len(rows), -rows.shape[-1] % width)), -1)
    return full.reshape(len(rows), full.shape[-1] // width, lanes, _VECTOR)


def row_kernel_rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / rms`` of each row in the order of ATen's vectorised row kernel (layer_norm_kernel.cu), (rows,) in fp32.

    Parameters
    ----------
    x
        (..., D), with D a multiple of 4.
    eps
        Added to the mean square.
    """
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([_row_kernel_rstd(some, eps) for some in rows.split(_ROWS_AT_ONCE)])


def _row_kernel_rstd(rows: Tensor, eps: float) -> Tensor:
    vectors = _vectors(rows, _WARP * _WARPS)
    short = rows.dtype in (torch.float16, torch.bfloat16)
    sums = vectors.new_zeros(vectors.shape[0], vectors.shape[2])
    for step in vectors.unbind(1):
        for element in step.unbind(-1):
            sums = plus_square(element, sums) if short else fused_multiply_add(element, element, sums)
    warps = _folded(sums.reshape(-1, _WARPS, _WARP))
    total = (warps[:, 0] + warps[:, 2]) + (warps[:, 1] + warps[:, 3])
    return _reciprocal_square_root(total / total.new_full((), rows.shape[-1]) + eps)


def _last_power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _lane_grid(rows: int, columns: int) -> tuple[int, int]:
    """The width and height, in lanes, of the grid by which ATen's mean sums a row of a contiguous fp32 tensor.

    Source: ``setReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh: a block of at most 512 threads is as wide as a
    warp, or wider where few rows leave threads over; its height goes to other rows, unless a thread would then add up
    too many elements.

    Parameters
    ----------
    rows, columns
        Of the tensor; columns at least 128 and a multiple of 4.
    """
    widest = min(_MOST_LANES, _last_power_of_two(columns // _VECTOR))
    width = min(widest, _WARP)
    height = min(_last_power_of_two(min(rows, _MOST_LANES)), _MOST_LANES // width)
    width = min(widest, _MOST_LANES // height)
    elements = -(-columns // width)
    return width, height if elements >= min(16 * height, 256) else 1


# For launches. The emulation goes without: a compiler that sees through it would warn of the cache.
lane_grid = functools.lru_cache(maxsize=1024)(_lane_grid)


def composite_rstd(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(x.float().pow(2).mean(-1) + eps)`` of each row in the order of ATen's mean, (rows,) in fp32.

    Parameters
    ----------
    x
        (..., D), with D a multiple of 4 and at least 128.
    eps
        Added to the mean square.
    """
    columns = x.shape[-1]
    width, height = _lane_grid(x.numel() // columns, columns)
    squares = _vectors(x, width * height).square()
    accumulators = torch.zeros_like(squares[:, 0])
    for step in squares.unbind(1):
        accumulators = accumulators + step
    first, second, third, fourth = accumulators.unbind(-1)
    lanes = ((first + second) + third) + fourth
    total = _folded(_folded(lanes.reshape(-1, height, width)))
    return _reciprocal_square_root(total * total.new_full((), 1.0 / columns) + eps)
