"""Operands: the tensor arguments of a subject, as symbols of extents, and what else a matrix has to know of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fusiongate.comparison.bits import normalised_strides
from fusiongate.comparison.verdicts import bits_differ
from fusiongate.errors import UsageError
from fusiongate.gate.signatures import tensors_of

if TYPE_CHECKING:
    from .inputs import Size

__all__ = [
    "Operand",
    "Place",
    "Watched",
    "floating",
    "metadata_of",
    "operand",
    "parsed",
    "results_of",
    "shares_memory",
]

Bound = int | float | str

LAYOUTS = ("permuted", "sliced", "strided-channels", "offset")
"""The layouts that one operand can have in every cell whose own layout leaves it as it is."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument; :func:`operand` makes one with more than a shape."""

    name: str
    """The argument's name; arguments are passed by position."""
    dims: tuple[str, ...]
    """A symbol or ``"1"`` for each dimension."""
    dtype: torch.dtype | None = None
    """Its dtype in every cell; ``None``: the cell's."""
    low: Bound | None = None
    """The smallest value, or the symbol whose extent that is."""
    high: Bound | None = None
    """What all values are below, or the symbol whose extent that is."""
    layout: str | None = None
    """How it lies in memory where the cell's layout does not say."""
    value: float | None = None
    """What each element is."""
    optional: bool = False
    """Whether ``None`` may stand in its place."""

    def shape(self, size: Size) -> tuple[int, ...]:
        """The operand's shape at a size."""
        return tuple(1 if dim == "1" else size[dim] for dim in self.dims)

    @property
    def plain(self) -> bool:
        """Whether the cell's data are its values: floating numbers of any size."""
        floating = self.dtype is None or self.dtype.is_floating_point
        return floating and self.low is None and self.high is None and self.value is None

    @property
    def bounds(self) -> tuple[str, ...]:
        """The symbols whose extents bound its values."""
        return tuple(bound for bound in (self.low, self.high) if isinstance(bound, str))

    def drawn(self, shape: tuple[int, ...], dtype: torch.dtype, size: Size, generator: torch.Generator) -> torch.Tensor:
        """Values in its range, evenly; of an operand that is not plain."""
        chosen = self.dtype or dtype
        if self.value is not None:
            return torch.full(shape, self.value, dtype=chosen)
        low, high = (size[bound] if isinstance(bound, str) else bound for bound in (self.low, self.high))
        if chosen is torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if not chosen.is_floating_point:
            return torch.randint(int(low or 0), int(high or 0), shape, generator=generator, dtype=chosen)
        first, last = low or 0.0, 1.0 if high is None else high
        return (first + (last - first) * torch.rand(shape, generator=generator)).to(chosen)


def operand(
    shape: str,
    *,
    dtype: torch.dtype | None = None,
    low: Bound | None = None,
    high: Bound | None = None,
    layout: str | None = None,
    value: float | None = None,
    optional: bool = False,
) -> Operand:
    """An input of the matrix that is more than a shape: ``fg.operand("B S", dtype=torch.int64, low=0, high="V")``.

    Parameters
    ----------
    shape
        A symbol or 1 for each dimension, such as ``"B S D"``.
    dtype
        Its dtype in every cell, such as an index's or a table's in fp32; by default the cell's.
    low, high
        The range of its values, ``high`` left out: numbers, or symbols whose extents they are. Integers need ``high``;
        bools have no range; floating numbers in a range take no part in the kinds of data (NaN, infinities, …).
    layout
        How it lies in every cell whose own layout leaves it as it is: ``permuted``, ``sliced``, ``strided-channels`` or
        ``offset`` (misaligned); by default dense and aligned.
    value
        What each element is, in every call.
    optional
        Whether ``None`` may be given for it: the layout ``without-<name>`` does.

    Raises
    ------
    UsageError
        They do not go together.
    """
    made = replace(parsed("", shape), dtype=dtype, low=low, high=high, layout=layout, value=value, optional=optional)
    whole = dtype is not None and not dtype.is_floating_point
    if dtype is torch.bool and (low is not None or high is not None):
        raise _unfit(shape, "a bool has no range: leave out low= and high=")
    if whole and dtype is not torch.bool and value is None and high is None:
        raise _unfit(shape, f"a range is needed for {dtype}: give high=, a number or the symbol that it indexes")
    if value is not None and (low is not None or high is not None):
        raise _unfit(shape, "a value and a range exclude each other: give value=, or low= and high=")
    if layout is not None and layout not in LAYOUTS:
        raise _unfit(shape, f"no layout {layout!r} of one operand: expected {', '.join(LAYOUTS)}")
    if layout in ("permuted", "sliced") and len(made.dims) < 2:
        raise _unfit(shape, f"the layout {layout!r} takes two dimensions")
    for bound in (low, high):
        if isinstance(bound, str) and not re.fullmatch(r"[A-Za-z]+", bound):
            raise _unfit(shape, f"the bound {bound!r} is no symbol: expected a number, or letters")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        raise _unfit(shape, f"nothing lies between low={low} and high={high}")
    return made


def _unfit(shape: str, why: str) -> UsageError:
    return UsageError(f'operand("{shape}"): {why}')


def parsed(name: str, shape: str) -> Operand:
    """The operand that symbols describe.

    Raises
    ------
    UsageError
        They describe none.
    """
    dims = tuple(shape.split())
    for dim in dims:
        if not re.fullmatch(r"1|[A-Za-z]+", dim):
            raise UsageError(
                f'input {name!r}: "{shape}" has the dimension {dim!r}; a dimension is a symbol of letters, or 1'
            )
    symbols = [dim for dim in dims if dim != "1"]
    if not symbols:
        raise UsageError(f'input {name!r}: "{shape}" has no symbol; a shape is written as "B S D", a number as itself')
    if len(symbols) != len(set(symbols)):
        raise UsageError(f'input {name!r}: "{shape}" repeats a symbol; give equal extents different symbols')
    return Operand(name, dims)


def floating(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The floating tensors among a call's arguments: those that can have a gradient, or any rounding."""
    return [one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()]


def results_of(result: Any) -> tuple[torch.Tensor, ...]:
    """What a call gave, or several calls, one after another."""
    if not isinstance(result, tuple):
        return (result,)
    return tuple(one for part in result for one in results_of(part))


Place = Callable[[torch.Tensor], torch.Tensor]
"""Lays a tensor out in another way; its values stay."""


class Watched:
    """An input and what it held."""

    def __init__(self, tensor: torch.Tensor, *, is_huge: bool) -> None:
        self._tensor = tensor
        # A copy of a huge operand could be what no longer fits.
        self._before = None if is_huge else tensor.detach().clone()

    def changed(self) -> bool:
        """Whether it holds something else."""
        return self._before is not None and bool(bits_differ(self._tensor.detach().clone(), self._before))


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its values."""
    strides = normalised_strides(tensor.shape, tensor.stride())
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), strides, tensor.device.type


def shares_memory(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result lies in an argument's memory."""
    memory = result.untyped_storage().data_ptr()
    return bool(result.numel()) and any(memory == tensor.untyped_storage().data_ptr() for tensor in tensors_of(args))
