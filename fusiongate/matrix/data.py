"""Data: which values the operands of a cell hold.

Values are drawn on the CPU by a generator that is seeded with the cell and the call, so that the same numbers come on
every machine. Each kind is drawn in fp32 and rounded once to the operand's dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .cells import NotRun
from .inputs import HUGE_ELEMENTS, Inputs, Size

__all__ = ["DATA", "Draw", "Kind", "can_cancel", "generator_for", "normal"]

Tensors = dict[str, torch.Tensor]

# Prime, so that no row, tile or block of a huge operand repeats another.
_TILE = 16_777_213


@dataclass(frozen=True, slots=True)
class Draw:
    """What the values are drawn for."""

    inputs: Inputs
    """The inputs, which name the operands."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each operand."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each operand."""
    size: Size
    """The extents, which bound the values of some operands."""
    reference: Callable[..., torch.Tensor]
    """The eager chain, which `cancellation` asks what to cancel."""
    call: int
    """The number of the call, from 0."""
    generator: torch.Generator
    """The CPU generator for this cell and call."""

    @property
    def modulators(self) -> tuple[str, ...]:
        """The operands that act on the others: the rows, or the last operand where there are none."""
        rows = tuple(operand.name for operand in self.inputs.having("row"))
        return rows or (self.inputs.plain[-1].name,)

    @property
    def activation(self) -> str:
        """The first operand that holds data."""
        return self.inputs.plain[0].name

    def others(self) -> Tensors:
        """The values of the operands that are drawn from ranges of their own, whatever the data."""
        generator = self.generator.clone_state()
        return {
            one.name: one.drawn(self.shapes[one.name], self.dtypes[one.name], self.size, generator)
            for one in self.inputs.operands
            if not one.plain
        }


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of data."""

    name: str
    """The kind as it stands in a cell's id."""
    draw: Callable[[Draw], Tensors]
    """Draws the operands' values on the CPU."""


def generator_for(cell_id: str, call: int) -> torch.Generator:
    """A CPU generator for one call of one cell, the same on every machine."""
    seed = hashlib.sha256(f"{cell_id}:{call}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)


def normal(draw: Draw) -> Tensors:
    """Activations of mean 0 and variance 1, modulators of variance 1/4."""
    return _normal(draw, 1.0, 0.5)


def _normal(draw: Draw, activations: float, modulators: float) -> Tensors:
    if not draw.inputs.plain:
        return {}
    spread = dict.fromkeys(draw.modulators, modulators)
    return {
        one.name: _bell(draw.shapes[one.name], draw.generator, spread.get(one.name, activations), draw.dtypes[one.name])
        for one in draw.inputs.plain
    }


def _bell(shape: tuple[int, ...], generator: torch.Generator, spread: float, dtype: torch.dtype) -> torch.Tensor:
    elements = torch.Size(shape).numel()
    if elements < HUGE_ELEMENTS:
        return _sum_of_uniforms(elements, generator, spread).to(dtype).view(shape)
    tile = _sum_of_uniforms(_TILE, generator, spread).to(dtype)
    values = torch.empty(elements, dtype=dtype)
    for start in range(0, elements, _TILE):
        block = values[start : start + _TILE]
        block.copy_(tile[: block.numel()])
    return values.view(shape)


def _sum_of_uniforms(elements: int, generator: torch.Generator, spread: float) -> torch.Tensor:
    """Four uniforms have variance 1/3. `torch.randn` will not do: its bits depend on the CPU's vector instructions."""
    values = torch.rand(elements, generator=generator)
    for _ in range(3):
        values += torch.rand(elements, generator=generator)
    return values.sub_(2).mul_(spread * 3**0.5)


def _zeros(draw: Draw) -> Tensors:
    """Modulators of zero, as adaLN-zero starts: almost any kernel is right on them."""
    values = normal(draw)
    return values | {name: torch.zeros_like(values[name]) for name in draw.modulators}


def _zeros_first(draw: Draw) -> Tensors:
    """A dummy warm-up with modulators of zero, then live data."""
    return _zeros(draw) if draw.call == 0 else normal(draw)


def _nan_inf(draw: Draw) -> Tensors:
    """NaN and both infinities in one element of each eight, in every operand."""
    values = normal(draw)
    for tensor in values.values():
        _sprinkle(draw, tensor, (float("nan"), float("inf"), float("-inf")), share=8)
    return values


def _sprinkle(draw: Draw, tensor: torch.Tensor, specials: tuple[float, ...], share: int) -> None:
    choice = torch.randint(0, share * len(specials), tensor.shape, generator=draw.generator)
    for index, special in enumerate(specials):
        tensor.masked_fill_(choice == index, special)


def _one_nan(draw: Draw) -> Tensors:
    """One NaN in the activations."""
    values = normal(draw)
    flat = values[draw.activation].view(-1)
    if flat.numel():
        flat[flat.numel() // 2] = float("nan")
    return values


def _nan_first(draw: Draw) -> Tensors:
    """One NaN on first sight, then live data."""
    return _one_nan(draw) if draw.call == 0 else normal(draw)


def _signed_zeros(draw: Draw) -> Tensors:
    """Zeros of both signs in half the elements of every operand, so that every pairing of them occurs."""
    values = normal(draw)
    for tensor in values.values():
        _sprinkle(draw, tensor, (0.0, -0.0), share=2)
    return values


def _subnormals(draw: Draw) -> Tensors:
    """Activations and every second modulator below the dtype's smallest normal number."""
    values = normal(draw)
    for position, name in enumerate(values):
        if name not in draw.modulators or position % 2 == 0:
            # By an exact power of two in two steps: the scale itself would underflow fp32.
            tiny = torch.finfo(draw.dtypes[name]).tiny
            values[name] = values[name].double().mul_(tiny / 2).to(draw.dtypes[name])
    return values


def _overflow(draw: Draw) -> Tensors:
    """Values near the dtype's largest: sums and products of them overflow, and eager's infinities are right."""
    values = normal(draw)
    for name, tensor in values.items():
        largest = torch.finfo(draw.dtypes[name]).max
        big = torch.rand(tensor.shape, generator=draw.generator).mul_(0.45).add_(0.5).double() * largest
        chosen = torch.randint(0, 4, tensor.shape, generator=draw.generator) == 0
        values[name] = torch.where(chosen, torch.copysign(big.to(tensor.dtype), tensor), tensor)
    return values


def _large(draw: Draw) -> Tensors:
    """Activations around 1e4, which every dtype of the matrix can hold."""
    return _normal(draw, 1e4 / 4, 0.5)


def _small(draw: Draw) -> Tensors:
    """Activations around 1e-4 under modulators of the same magnitude."""
    return _normal(draw, 1e-4, 1e-4)


def _cancellation(draw: Draw) -> Tensors:
    """The last operand that can cancel the result does: what a contraction leaves unrounded stands alone.

    With the operand at zero the reference gives r; the operand becomes -r, and eager gives exactly zero. Where the
    operand is broadcast, the others repeat along its dimensions, so that one value fits all.
    """
    values = normal(draw)
    for operand in reversed(draw.inputs.plain):
        cancelled = _cancelled(draw, values, operand.name)
        if cancelled is not None:
            return cancelled
    raise _NothingCancels("no operand can cancel the result")


class _NothingCancels(NotRun):
    """The subject is none whose result can be cancelled."""


def can_cancel(draw: Draw) -> bool:
    """Whether an operand can cancel the result; true where that cannot be found out on the CPU."""
    try:
        _cancellation(draw)
    except _NothingCancels:
        return False
    except NotRun:
        pass
    return True


def _cancelled(draw: Draw, values: Tensors, name: str) -> Tensors | None:
    target = values[name]
    broadcast = [dimension - target.dim() for dimension, length in enumerate(target.shape) if length == 1]
    repeated = {
        other: target if other == name else _repeat(tensor, broadcast, target.dim()) for other, tensor in values.items()
    }
    try:
        remainder = _on_cpu(draw, repeated | {name: torch.zeros_like(target)})
        for dimension in broadcast:
            remainder = remainder.narrow(dimension, 0, min(1, remainder.shape[dimension]))
        if remainder.shape != target.shape:
            return None
        filled = repeated | {name: remainder.neg().to(target.dtype).contiguous()}
        result = _on_cpu(draw, filled)
    except Exception as error:
        raise NotRun(f"cancellation needs a reference that runs on the CPU, and it raised {error!r}") from error
    trivial = not bool((remainder != 0).any())
    return None if trivial or bool((result != 0).any()) else filled


def _repeat(tensor: torch.Tensor, dimensions: list[int], rank: int) -> torch.Tensor:
    for dimension in dimensions:
        if tensor.dim() == rank and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1).expand_as(tensor).contiguous()
    return tensor


def _on_cpu(draw: Draw, values: Tensors) -> torch.Tensor:
    with torch.no_grad():
        return draw.reference(*draw.inputs.positional(values | draw.others()))


DATA: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("normal", normal),
        Kind("zeros", _zeros),
        Kind("zeros-first", _zeros_first),
        Kind("nan-inf", _nan_inf),
        Kind("one-nan", _one_nan),
        Kind("nan-first", _nan_first),
        Kind("signed-zeros", _signed_zeros),
        Kind("subnormals", _subnormals),
        Kind("overflow", _overflow),
        Kind("cancellation", _cancellation),
        Kind("large", _large),
        Kind("small", _small),
    )
}
"""Every kind by name."""
