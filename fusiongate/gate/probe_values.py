"""The numbers of probes: normal ones, and those that arithmetic treats specially."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view

__all__ = ["numbers"]

_POOL = 262_147
"""Numbers that operands are filled from, again and again: a prime, so that no two rows of usual sizes are alike."""
_SEGMENT = 64
"""Elements of one kind of numbers where an operand has too few rows for all kinds."""
_KINDS = 4


def numbers(like: Tensor, size: Sequence[int], rng: Random, *, special: bool) -> Tensor:
    """Numbers for a floating tensor: normal ones, or with what arithmetic treats specially among them."""
    count, row = math.prod(size), like.shape[-1] if like.dim() and like.stride(-1) == 1 else 1
    block = (row if 0 < row <= min(count, _POOL) // (2 * _KINDS) else _SEGMENT) if special else 0
    pool = _pool(like.dtype, like.device, block)
    # At a whole block, so that a row is of one kind.
    start = rng.randrange(len(pool) // max(block, 1)) * max(block, 1)
    pieces = [pool[start : start + count]]
    missing = count - len(pieces[0])
    pieces += [pool] * (missing // len(pool)) + [pool[: missing % len(pool)]]
    return (torch.cat(pieces) if missing else pieces[0]).view(tuple(size))


@functools.lru_cache(maxsize=32)
def _pool(dtype: torch.dtype, device: torch.device, block: int) -> Tensor:
    """What operands are filled from, (``_POOL``,): the same numbers on all devices.

    Parameters
    ----------
    dtype, device
        The operand's.
    block
        How many numbers that follow each other are of one kind; 0 if all are to be normal.
    """
    generator = torch.Generator("cpu")
    generator.manual_seed(0x5EED + block)
    with torch.inference_mode(False), torch.no_grad():
        if dtype.is_complex:
            values = torch.randn(_POOL, dtype=dtype, device="cpu", generator=generator)
        elif not _has_normal_numbers(dtype):
            values = _any_bits(dtype, _POOL, generator)
        else:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            values = torch.randn(_POOL, dtype=wide, device="cpu", generator=generator).to(dtype)
            if block:
                _mix(values, block, generator)
        return values.to(device)


def _has_normal_numbers(dtype: torch.dtype) -> bool:
    try:
        return torch.finfo(dtype).min < 0
    except (RuntimeError, NotImplementedError):
        # Two numbers of four bits in an element, for which torch has no values.
        return False


def _any_bits(dtype: torch.dtype, count: int, generator: torch.Generator) -> Tensor:
    """Every pattern of bits alike: every exponent, subnormal, infinite and NaN."""
    bits = integer_view(torch.empty(0, dtype=dtype, device="cpu")).dtype
    limits = torch.iinfo(bits)
    # The upper bound is exclusive, and for 64 bits no integer: of those patterns, one is left out.
    high = min(limits.max + 1, torch.iinfo(torch.int64).max)
    return torch.randint(limits.min, high, (count,), dtype=bits, device="cpu", generator=generator).view(dtype)


def _mix(values: Tensor, block: int, generator: torch.Generator) -> None:
    """Let normal numbers, any exponents, rows of any scale and numbers with few bits take turns in normal numbers.

    A norm whose row holds a huge number tells little about the others, so that each row, or each part of a single one,
    is of one kind.
    """
    blocks = -(-len(values) // block)
    kinds = torch.randperm(blocks, device="cpu", generator=generator) % _KINDS
    kind = kinds.repeat_interleave(block)[: len(values)]
    candidates = (
        values.clone(),
        _spoilt(_any_bits(values.dtype, len(values), generator), generator),
        _scaled(values, blocks, block, generator),
        _halfway(values, generator),
    )
    for number, candidate in enumerate(candidates):
        integer_view(values).copy_(torch.where(kind == number, integer_view(candidate), integer_view(values)))
    # Zeros and subnormals show in a result where they meet in several operands: they have to be many, and harm no norm.
    tiny = torch.finfo(values.dtype).tiny
    _strew(values, 4, [0.0, -0.0, 0.0, -0.0, tiny, -tiny / 2, tiny / 4], generator)


def _spoilt(values: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of any exponent with more of those that spoil their whole row."""
    most = torch.finfo(values.dtype).max
    return _strew(values, 64, [math.nan, math.inf, -math.inf, most, -most], generator)


def _exponents(dtype: torch.dtype) -> tuple[int, int, int]:
    """The smallest and the largest exponent of normal numbers, and the bits of a mantissa."""
    finfo = torch.finfo(dtype)
    return math.frexp(finfo.tiny)[1], math.frexp(finfo.max)[1], 1 - math.frexp(finfo.eps)[1]


def _scaled(values: Tensor, blocks: int, block: int, generator: torch.Generator) -> Tensor:
    """Normal numbers times a power of two that each block draws from the dtype's whole range."""
    low, high, _ = _exponents(values.dtype)
    powers = torch.randint(low, high, (blocks,), device="cpu", generator=generator)
    exponents = powers.repeat_interleave(block)[: len(values)]
    return (values.double() * torch.exp2(exponents.double())).to(values.dtype)


def _halfway(values: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers whose sums and products often lie halfway: powers of two, half of them with their last bit set."""
    *_, bits = _exponents(values.dtype)

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high, values.shape, device="cpu", generator=generator).double()

    exponents, last_bits, signs = drawn(-bits - 1, bits + 2), drawn(0, 2), drawn(0, 2)
    return ((1 - 2 * signs) * (1 + last_bits * 2.0**-bits) * torch.exp2(exponents)).to(values.dtype)


def _strew(values: Tensor, one_in: int, numbers: list[float], generator: torch.Generator) -> Tensor:
    """Put some of a few numbers into an operand, and give it back."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    where = torch.randint(len(values), (len(values) // one_in + 1,), device="cpu", generator=generator)
    pick = torch.randint(len(numbers), where.shape, device="cpu", generator=generator)
    chosen = torch.tensor(numbers, dtype=wide, device="cpu").to(values.dtype)
    # As integers: torch cannot put numbers of eight bits by index.
    integer_view(values)[where] = integer_view(chosen)[pick]
    return values
