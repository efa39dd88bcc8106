"""Random numbers that are the same on every platform: a hash of each element's position, in integers, mapped exactly.

Torch's own generators give other numbers on a GPU than on a CPU, and may give others in the next release.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["fill", "normal", "uniform"]

_CHUNK = 1 << 22
"""Elements drawn at a time: eight bytes of working memory for each of them, a few times over."""

_LANES = 4
_LANE_BITS = 16
_MEAN = _LANES * ((1 << _LANE_BITS) - 1) // 2
_DEVIATION = math.sqrt(_LANES * ((1 << 2 * _LANE_BITS) - 1) / 12)
_UNIFORM_BITS = 24


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with Stafford's mixing constants.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shifted(bits: Tensor, distance: int) -> Tensor:
    """A logical shift to the right, which int64 has not."""
    return (bits >> distance) & ((1 << (64 - distance)) - 1)


def _hashes(seed: int, name: str, begin: int, end: int, device: torch.device) -> Tensor:
    """Sixty-four bits for each position from ``begin`` to ``end``, as int64; multiplication wraps round."""
    key = hashlib.md5(f"{seed}\0{name}".encode(), usedforsecurity=False).digest()
    start = int.from_bytes(key[:8], "little", signed=True)
    bits = torch.arange(begin + 1, end + 1, dtype=torch.int64, device=device) * _GAMMA + start
    bits = (bits ^ _shifted(bits, 30)) * _MIX[0]
    bits = (bits ^ _shifted(bits, 27)) * _MIX[1]
    return bits ^ _shifted(bits, 31)


def _chunks(out: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    flat = out.view(-1)
    for begin in range(0, flat.numel(), _CHUNK):
        end = min(begin + _CHUNK, flat.numel())
        yield flat[begin:end], begin, end


def normal(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    std: float = 1.0,
    mean: float = 0.0,
) -> Tensor:
    """Numbers of a bell-shaped distribution: sums of four 16-bit integers, within 3.47 standard deviations.

    Parameters
    ----------
    name
        What is drawn: another name or seed gives other numbers.
    shape, dtype, device
        The tensor's, in C order. The numbers are rounded to fp32 and then to the dtype.
    seed
        The run's.
    std, mean
        Of the distribution.

    Returns
    -------
    Tensor
        The same bits on every device.
    """
    out = torch.empty(shape, dtype=dtype, device=device)
    for part, begin, end in _chunks(out):
        bits = _hashes(seed, name, begin, end, out.device)
        total = torch.zeros_like(bits)
        for lane in range(_LANES):
            total += _shifted(bits, 64 - _LANE_BITS * (lane + 1)) & ((1 << _LANE_BITS) - 1)
        # Each step is one exact conversion or one IEEE operation in fp32: there is nothing to differ in.
        values = (total - _MEAN).to(torch.float32) * (std / _DEVIATION)
        part.copy_(values + mean if mean else values)
    return out


def uniform(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Numbers from 0 up to 1, multiples of 2⁻²⁴ that fp32 holds exactly.

    Parameters and result as for :func:`normal`.
    """
    out = torch.empty(shape, dtype=dtype, device=device)
    for part, begin, end in _chunks(out):
        bits = _shifted(_hashes(seed, name, begin, end, out.device), 64 - _UNIFORM_BITS)
        part.copy_(bits.to(torch.float32) * 2.0**-_UNIFORM_BITS)
    return out


@torch.no_grad()
def fill(module: nn.Module, *, seed: int = 0, name: str = "weights") -> None:
    """Give every parameter of a module numbers by its name and shape.

    Matrices and kernels have a standard deviation of ``1 / sqrt(fan in)``, biases of 0.02; the weights of norms and
    other vectors scatter around one by 0.1. Nothing is left at zero: an adaLN that modulates by zero proves nothing.
    """
    for path, parameter in module.named_parameters():
        leaf = path.rpartition(".")[2]
        std, mean = 0.1, 1.0
        if leaf.endswith("bias"):
            std, mean = 0.02, 0.0
        elif parameter.dim() > 1:
            std, mean = 1 / math.sqrt(max(1, math.prod(parameter.shape[1:]))), 0.0
        drawn = normal(
            f"{name}.{path}",
            tuple(parameter.shape),
            seed=seed,
            dtype=parameter.dtype,
            device=parameter.device,
            std=std,
            mean=mean,
        )
        parameter.copy_(drawn)
