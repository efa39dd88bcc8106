"""The adaLN chain, right and wrong: kernels in plain torch, each with one fault that a gate has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import State

__all__ = [
    "FAULTS",
    "Fault",
    "chain",
    "fresh_rows",
    "fusion",
    "right",
    "rows",
    "same_bits",
    "state_of",
    "strict",
    "wrong_at_two",
]

Rows = tuple[Tensor, Tensor, Tensor]


def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The reference."""
    return x * (1 + scale) + shift


def right(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A kernel without a fault, told apart from the reference by its allocation."""
    out = torch.empty_like(x)
    return torch.add(torch.mul(x, 1 + scale), shift, out=out)


def wrong_at_two(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A kernel that is wrong on a batch of two, and on no other."""
    out = right(x, scale, shift)
    return out + 1 if x.shape[0] == 2 else out


def strict(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The chain, which raises where scale is a number."""
    return x * (1 + scale.view(x.shape[0], 1, -1)) + shift


def rows(
    batch: int = 2, tokens: int = 5, columns: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Rows:
    """x in C order, and scale and shift as strided rows of one table."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, columns, generator=generator).to(dtype)
    table = torch.randn(batch, 6, columns, generator=generator).to(dtype)
    return x, table[:, 1:2], table[:, 0:1]


def fresh_rows(count: int, **options: Any) -> list[Rows]:
    """Several sets of other numbers with one signature."""
    return [rows(seed=seed, **options) for seed in range(count)]


def fusion(fused: Callable[..., Any] = right, *, reference: Callable[..., Any] = chain, **options: Any) -> Fusion:
    """A fusion of the chain."""
    return Fusion("planted", reference=reference, fused=fused, **options)


def state_of(op: Fusion, *args: Any) -> State:
    """What the gate knows of these arguments' signature; of those of `rows()` where none are given."""
    signature = op.explain(*(args or rows())).signature
    assert signature is not None
    return op.gate.state(signature)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same dtype and the same bytes, NaN payloads included."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(
        actual.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong kernel."""

    name: str
    """For the test's id."""
    fused: Callable[..., Any]
    """The kernel."""
    tells: str
    """What the warning has to say."""


def _mutates(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = right(x, scale, shift)
    shift.zero_()
    return out


def _in_place(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x.mul_(1 + scale).add_(shift)


def _writes_past_the_end(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = right(x, scale, shift)
    x.as_strided((8,), (1,), x.storage_offset() + x.numel()).zero_()
    return out


def _stores_nothing(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.empty_like(x)


def _skips_the_last_tile(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = torch.empty_like(x)
    done = max(x.numel() - 32, 0)
    out.view(-1)[:done] = right(x, scale, shift).view(-1)[:done]
    return out


_buffers: dict[torch.Size, Tensor] = {}


def _keeps_its_output(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    buffer = _buffers.setdefault(x.shape, torch.empty_like(x))
    return buffer.copy_(right(x, scale, shift))


def _returns_a_view_of_its_input(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    # The values are right and nothing is changed that can be read: only the memory is not the kernel's own.
    out = right(x, scale, shift)
    return x.as_strided(x.shape, x.stride()) if torch.equal(out, x) else out


def _raises(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    raise RuntimeError("invalid configuration argument")


def _keeps_the_product(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale).float() + shift.float()).to(x.dtype)


def _keeps_the_scale(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float())).to(x.dtype) + shift


def _all_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def _one_element(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = right(x, scale, shift)
    out.view(-1)[-1:].view(torch.int16).bitwise_xor_(1)
    return out


def _swallows_nan(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = right(x, scale, shift)
    return torch.where(out.isnan(), torch.zeros_like(out), out)


def _loses_the_sign_of_zero(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return right(x, scale, shift) + 0.0


def _flushes_to_zero(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = right(x, scale, shift)
    return torch.where(out.abs() < torch.finfo(out.dtype).smallest_normal, torch.zeros_like(out).copysign(out), out)


def _clamps(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    largest = torch.finfo(x.dtype).max
    return right(x, scale, shift).clamp(-largest, largest)


def _draws(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    torch.rand(1)
    return right(x, scale, shift)


def _promotes(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return right(x, scale, shift).float()


def _transposes(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return right(x, scale, shift).transpose(1, 2).contiguous().transpose(1, 2)


def _returns_nothing(x: Tensor, scale: Tensor, shift: Tensor) -> None:
    return None


def _mixes_batches(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return right(x, scale.roll(1, 0), shift)


FAULTS = (
    Fault("changes-an-input", _mutates, "the kernel changed its input `shift`"),
    Fault("works-in-place", _in_place, "the kernel changed its input `x`"),
    Fault("writes-past-the-end", _writes_past_the_end, "the kernel wrote outside of `x`"),
    Fault("stores-nothing", _stores_nothing, "unwritten output"),
    Fault("skips-the-last-tile", _skips_the_last_tile, "unwritten output"),
    Fault("keeps-its-output", _keeps_its_output, "the kernel's output shares memory with an earlier call's result"),
    Fault("raises", _raises, "the kernel raised RuntimeError: invalid configuration argument"),
    Fault("keeps-the-product", _keeps_the_product, "`x * (1 + scale)` is not rounded to bfloat16"),
    Fault("keeps-the-scale", _keeps_the_scale, "`1 + scale` is not rounded to bfloat16"),
    Fault("all-fp32", _all_fp32, "no intermediate is rounded to bfloat16"),
    Fault("one-element", _one_element, "1 of 640 elements"),
    Fault("swallows-nan", _swallows_nan, "NaN is swallowed"),
    Fault("loses-the-sign-of-zero", _loses_the_sign_of_zero, "the sign of zero is lost"),
    Fault("flushes-to-zero", _flushes_to_zero, "flush to zero"),
    Fault("clamps", _clamps, "overflow is 'improved'"),
    Fault("draws", _draws, "the kernel draws random numbers"),
    Fault("promotes", _promotes, "dtype differs: got float32, expected bfloat16"),
    Fault("transposes", _transposes, "strides differs"),
    Fault("returns-nothing", _returns_nothing, "type differs: got None"),
    Fault("mixes-batches", _mixes_batches, "`scale` is read from another batch row"),
)
"""Every fault that shows on any call with a batch of at least two."""
