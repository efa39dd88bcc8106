"""Symbolic inputs: ``{"x": "B S D", "scale": "B 1 D"}``, the sizes of their symbols, and their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fusiongate.errors import UsageError

from .operands import Operand, parsed

__all__ = [
    "ADALN_SIZES",
    "DTYPES",
    "HUGE_ELEMENTS",
    "LARGE_ELEMENTS",
    "DtypePlan",
    "Factory",
    "Inputs",
    "Role",
    "Size",
    "dtypes_for",
    "sizes_for",
]

Role = Literal["full", "row", "part"]
Factory = Callable[..., tuple[Any, ...]]

_MOST_ELEMENTS = 2**62

LARGE_ELEMENTS = 1 << 22
"""From here on a size stands on the base row only: its pairs would cost seconds and show nothing new."""

HUGE_ELEMENTS = 1 << 28
"""From here on a size needs a GPU."""

ADALN_SIZES: tuple[dict[str, int], ...] = (
    {"B": 2, "S": 33, "D": 512},
    # LTX-2: video tokens at its width, and audio at its own.
    {"B": 2, "S": 517, "D": 4096},
    {"B": 1, "S": 126, "D": 2048},
    # Odd tails, in both directions.
    {"B": 2, "S": 1, "D": 512},
    {"B": 2, "S": 127, "D": 132},
    {"B": 3, "S": 129, "D": 516},
    {"B": 2, "S": 5, "D": 130},
    {"B": 1, "S": 33, "D": 2240},
    {"B": 1, "S": 7, "D": 4100},
    # A grid's second and third dimension end at 65,535 blocks.
    {"B": 1, "S": 65_600, "D": 64},
    {"B": 65_600, "S": 1, "D": 64},
    # 2**31 + 4096 elements: an offset of 32 bits has wrapped.
    {"B": 1, "S": 524_289, "D": 4096},
)


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
class Inputs:
    """The arguments of a subject: operands described by symbols, and live values passed as they are."""

    arguments: tuple[tuple[str, Any], ...] = ()
    """Pairs of name and `Operand` or live value, in positional order."""
    factory: Factory | None = None
    """Makes the arguments instead: ``f(size, dtype, device, generator) -> args``."""
    operands: tuple[Operand, ...] = field(init=False)
    """The tensor arguments, in positional order."""
    symbols: tuple[str, ...] = field(init=False)
    """The symbols, in the order in which they first appear."""

    def __post_init__(self) -> None:
        operands = tuple(value for _, value in self.arguments if isinstance(value, Operand))
        dims = [dim for operand in operands for dim in (*operand.dims, *operand.bounds)]
        symbols = tuple(dict.fromkeys(dim for dim in dims if dim != "1"))
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "symbols", symbols)

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
        for name in spec:
            if not (isinstance(name, str) and name.isidentifier()):
                raise UsageError(f"input {name!r}: expected the name of an argument")
        inputs = cls(tuple((name, _argument(name, value)) for name, value in spec.items()))
        if not inputs.operands:
            raise UsageError(
                f"inputs {dict(spec)!r} describe no tensor; a tensor argument is written as a string of symbols, "
                f'such as "x": "B S D"'
            )
        return inputs

    @property
    def plain(self) -> tuple[Operand, ...]:
        """The operands whose values are the cell's data."""
        return tuple(operand for operand in self.operands if operand.plain)

    @property
    def bounds(self) -> frozenset[str]:
        """The symbols whose extents bound an operand's values."""
        return frozenset(symbol for operand in self.operands for symbol in operand.bounds)

    @property
    def differentiable(self) -> bool:
        """Whether an argument can have a gradient, as far as that is known before it is made."""
        tensors = [value for _, value in self.arguments if isinstance(value, torch.Tensor)]
        return self.factory is not None or bool(self.plain or any(tensor.is_floating_point() for tensor in tensors))

    def having(self, role: Role) -> tuple[Operand, ...]:
        """The operands of one role.

        A ``row`` has a literal 1 among its dimensions, a ``full`` operand has every symbol; a ``part`` has neither,
        such as a norm's weight, "D". What is drawn from a range, such as an index, has no role.
        """
        return tuple(operand for operand in self.plain if self._role(operand) == role)

    def _role(self, operand: Operand) -> Role:
        if "1" in operand.dims:
            return "row"
        symbols = {dim for one in self.plain for dim in one.dims if dim != "1"}
        return "full" if len(operand.dims) == len(symbols) else "part"

    def positional(self, tensors: Mapping[str, Any], device: torch.device | None = None) -> tuple[Any, ...]:
        """The arguments in order: what ``tensors`` holds for each operand, and the live values.

        A live tensor is copied, to ``device`` if one is given: what a call leaves in it is no other call's.
        """

        def given(name: str, value: Any) -> Any:
            if isinstance(value, Operand):
                return tensors[name]
            return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value

        return tuple(given(name, value) for name, value in self.arguments)

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
    if isinstance(value, Operand):
        return replace(value, name=name)
    return parsed(name, value) if isinstance(value, str) else value


def _listed(symbols: Iterable[str]) -> str:
    return ", ".join(sorted(symbols)) or "no symbols"


# Sizes --------------------------------------------------------------------------------------------------------------


def sizes_for(inputs: Inputs, given: Iterable[Mapping[str, int]] | None) -> tuple[Size, ...]:
    """The sizes of a matrix, the base first: the given ones, else those of adaLN.

    The base is the one with the fewest elements among those given, so that the many cells at the base size are cheap.

    Raises
    ------
    UsageError
        No sizes for symbols other than B, S and D, sizes that repeat, or sizes whose symbols are not the inputs'.
    """
    if given is None:
        if inputs.factory is not None or set(inputs.symbols) != {"B", "S", "D"}:
            asked = "a factory" if inputs.factory is not None else f"the symbols {', '.join(inputs.symbols)}"
            raise UsageError(
                f"the default sizes are for the symbols B, S and D, but the inputs have {asked}: give sizes=[{{...}}]"
            )
        return tuple(Size.of(extents) for extents in ADALN_SIZES)
    sizes = tuple(Size.of(extents) for extents in given)
    if not sizes:
        raise UsageError("sizes=[] gives no cell anything to run on: give at least one size")
    if len(set(sizes)) != len(sizes):
        raise UsageError(f"sizes repeat: {', '.join(size.name for size in sizes)}; give each once")
    inputs.check_sizes(sizes)
    base = min(sizes, key=lambda size: size.elements)
    return (base, *(size for size in sizes if size is not base))


# Dtypes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Which operand gets which dtype."""

    name: str
    """The plan as it stands in a cell's id."""
    main: torch.dtype
    """The dtype of every operand that has no other."""
    rows: torch.dtype | None = None
    """The dtype of all row operands, where it is another."""
    last: torch.dtype | None = None
    """The dtype of the last operand alone, where it is another."""

    @property
    def mixed(self) -> bool:
        """Whether the operands' dtypes differ."""
        return self.rows is not None or self.last is not None

    def assign(self, inputs: Inputs) -> dict[str, torch.dtype]:
        """The dtype of each operand."""
        dtypes = {operand.name: operand.dtype or self.main for operand in inputs.operands}
        varying = [operand for operand in inputs.plain if operand.dtype is None]
        if self.rows is not None:
            dtypes.update({row.name: self.rows for row in inputs.having("row") if row in varying})
        if self.last is not None and varying:
            dtypes[varying[-1].name] = self.last
        return dtypes


DTYPES: dict[str, DtypePlan] = {
    plan.name: plan
    for plan in (
        DtypePlan("bf16", torch.bfloat16),
        DtypePlan("fp16", torch.float16),
        DtypePlan("fp32", torch.float32),
        DtypePlan("fp64", torch.float64),
        DtypePlan("mixed", torch.bfloat16, rows=torch.float32),
        DtypePlan("mixed-last", torch.bfloat16, last=torch.float32),
    )
}
"""Every plan by name. ``mixed`` is bf16 under fp32 rows; in ``mixed-last`` the last operand alone is fp32."""


def dtypes_for(inputs: Inputs) -> tuple[DtypePlan, ...]:
    """The plans that differ from one another on these inputs."""
    plans: dict[tuple[torch.dtype, ...], DtypePlan] = {}
    for plan in DTYPES.values():
        if plan.mixed and inputs.factory is not None:
            continue
        key = tuple(plan.assign(inputs).values()) or (plan.main,)
        plans.setdefault(key, plan)
    return tuple(plans.values())
