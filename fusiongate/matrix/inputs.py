"""Symbolic inputs: ``{"x": "B S D", "scale": "B 1 D"}`` and the sizes of their symbols."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusiongate.errors import UsageError

__all__ = ["Factory", "Inputs", "Operand", "Role", "Size"]

Role = Literal["full", "row", "part"]
Factory = Callable[..., tuple[Any, ...]]


_MOST_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True)
class Size:
    """The extent of each symbol."""

    extents: tuple[tuple[str, int], ...]
    """Pairs of symbol and extent, in the order in which they were given."""

    @classmethod
    def of(cls, extents: Mapping[str, int]) -> Size:
        """A size from a mapping such as ``{"B": 2, "S": 517, "D": 4096}``.

        Raises
        ------
        UsageError
            An extent is not an integer of at least 1; the ``empty`` layouts make the empty ones. Or they are more
            elements than a tensor can have.
        """
        if not isinstance(extents, Mapping):
            raise UsageError(f"size {extents!r}: expected a mapping of symbols to extents, such as {{'B': 2, 'S': 33}}")
        for symbol, extent in extents.items():
            if type(extent) is not int or extent < 1:
                raise UsageError(f"size {dict(extents)}: {symbol!r} has to be an integer of at least 1, not {extent!r}")
        size = cls(tuple(extents.items()))
        if size.elements > _MOST_ELEMENTS:
            raise UsageError(f"size {dict(extents)}: {size.elements:,} elements are more than a tensor has")
        return size

    @property
    def name(self) -> str:
        """The size as it stands in a cell's id, such as ``B2S517D4096``."""
        return "".join(f"{symbol}{extent}" for symbol, extent in self.extents)

    @property
    def elements(self) -> int:
        """Elements of an operand that has every symbol once."""
        product = 1
        for _, extent in self.extents:
            product *= extent
        return product

    def __getitem__(self, symbol: str) -> int:
        return dict(self.extents)[symbol]


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument."""

    name: str
    """The argument's name; arguments are passed by position."""
    dims: tuple[str, ...]
    """A symbol or ``"1"`` for each dimension."""

    def shape(self, size: Size) -> tuple[int, ...]:
        """The operand's shape at a size."""
        return tuple(1 if dim == "1" else size[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a subject: operands described by symbols, and live values passed as they are."""

    arguments: tuple[tuple[str, Any], ...] = ()
    """Pairs of name and `Operand` or live value, in positional order."""
    factory: Factory | None = None
    """Makes the arguments instead: ``f(size, dtype, device, generator) -> args``."""

    @classmethod
    def of(cls, spec: Mapping[str, Any] | Factory) -> Inputs:
        """Inputs from a mapping of argument names to symbolic shapes or live values, or from a factory.

        Raises
        ------
        UsageError
            A shape cannot be read, or no argument is a tensor.
        """
        if not isinstance(spec, Mapping):
            if not callable(spec):
                raise UsageError(f"inputs have to be a mapping of names to shapes, or a callable, not {spec!r}")
            return cls(factory=spec)
        inputs = cls(tuple((name, _argument(name, value)) for name, value in spec.items()))
        if not inputs.operands:
            raise UsageError(
                f"inputs {dict(spec)!r} describe no tensor; a tensor argument is written as a string of symbols, "
                f'such as "x": "B S D"'
            )
        return inputs

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensor arguments, in positional order."""
        return tuple(value for _, value in self.arguments if isinstance(value, Operand))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols, in the order in which they first appear."""
        return tuple(dict.fromkeys(dim for operand in self.operands for dim in operand.dims if dim != "1"))

    def having(self, role: Role) -> tuple[Operand, ...]:
        """The operands of one role.

        A ``row`` has a literal 1 among its dimensions, a ``full`` operand has every symbol; a ``part`` has neither,
        such as a norm's weight, "D".
        """
        return tuple(operand for operand in self.operands if self._role(operand) == role)

    def _role(self, operand: Operand) -> Role:
        if "1" in operand.dims:
            return "row"
        return "full" if len(operand.dims) == len(self.symbols) else "part"

    def positional(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in order: what ``tensors`` holds for each operand, and the live values."""
        return tuple(tensors[name] if isinstance(value, Operand) else value for name, value in self.arguments)

    def check_sizes(self, sizes: Iterable[Size]) -> None:
        """Raise `UsageError` unless each size has exactly the symbols of these inputs."""
        if self.factory is not None:
            return
        for size in sizes:
            given = {symbol for symbol, _ in size.extents}
            if given != set(self.symbols):
                raise UsageError(
                    f"size {dict(size.extents)} gives {_listed(given)}, but the inputs have the symbols "
                    f"{_listed(self.symbols)}; give each of them, and no other"
                )


def _argument(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    dims = tuple(value.split())
    for dim in dims:
        if not re.fullmatch(r"1|[A-Za-z]+", dim):
            raise UsageError(
                f'input {name!r}: "{value}" has the dimension {dim!r}; a dimension is a symbol of letters, or 1'
            )
    symbols = [dim for dim in dims if dim != "1"]
    if not symbols:
        raise UsageError(f'input {name!r}: "{value}" has no symbol; a shape is written as "B S D", a number as itself')
    if len(symbols) != len(set(symbols)):
        raise UsageError(f'input {name!r}: "{value}" repeats a symbol; give equal extents different symbols')
    return Operand(name, dims)


def _listed(symbols: Iterable[str]) -> str:
    return ", ".join(sorted(symbols)) or "no symbols"
