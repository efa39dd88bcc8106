"""What is tried of the two modulations, stage by stage, and what follows when all results are eager's.

In a 16-bit type a stage of two operands has 2**32 pairs, and all of them are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view
from fusiongate.gate.fusion import Fusion

__all__ = [
    "EVERY_OP",
    "ONCE",
    "VALUES",
    "Bench",
    "Schedule",
    "Stage",
    "all_values",
    "blocks",
    "chosen",
    "fp32_from",
    "on_ties",
    "rows",
]

Arguments = tuple[Tensor, ...]

_RANDOM_BLOCKS = 64
_SAMPLED_TRIPLES = 1 << 13
_LANES = 8
"""The elements of the widest vector."""
_COLUMNS = (1, 2, 3, 5, 8, 12, 132, 512, 4096)
"""Row lengths for vectors of eight, of four and of one element, below and above a block's width; and longer ones."""
_TOKENS = 17
"""One more than the rows that a thread has in flight, four times over."""

VALUES = 1 << 16
"""How many values a 16-bit type has."""

_SEED = 0x5EED


def all_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All values of a 16-bit type, (65536,), in the order of their bits: zero first, NaN with every payload."""
    return torch.arange(VALUES, dtype=torch.int32, device=device).to(torch.int16).view(dtype)


def chosen(dtype: torch.dtype, device: torch.device, number: int | None) -> Tensor:
    """The values that are paired with all others: all of them, or so many, the special ones first.

    Parameters
    ----------
    number
        At least 1; None for all.
    """
    values = all_values(dtype, device)
    if number is None:
        return values
    finfo = torch.finfo(dtype)
    special = [1.0, 0.0, math.inf, math.nan, finfo.max, finfo.smallest_normal, finfo.tiny / 2, 1.984375, -1.0, -0.0]
    # In double, because the smallest of them are subnormal in float32 too.
    first = torch.tensor(special, dtype=torch.float64).to(dtype)
    order = torch.randperm(VALUES, generator=torch.Generator().manual_seed(_SEED))
    rest = values.cpu()[order]
    return torch.cat([first, rest])[:number].to(device)


def blocks(values: Tensor) -> Iterator[Tensor]:
    """The values, so many at a time that a block of them against all others takes little of the device's memory."""
    yield from values.split(1024 if values.is_cuda else 32)


def rows(block: Tensor, columns: int) -> Tensor:
    """(n, columns): each value of a block along a row."""
    return block[:, None].expand(-1, columns).contiguous()


def fp32_from(block: Tensor, device: torch.device) -> Tensor:
    """(n, 65536) in float32: all bit patterns whose upper half is one of the block's."""
    upper = integer_view(block).to(torch.int32)[:, None] << 16
    lower = torch.arange(VALUES, dtype=torch.int32, device=device)
    return (upper | lower).view(torch.float32)


def on_ties(dtype: torch.dtype, device: torch.device, *, odd: bool) -> Tensor:
    """For every value p, in the order of `all_values`, an addend h that puts p + h half-way between two values.

    There the slightest thing that p has lost or kept decides how the sum is rounded. h has twice the lowest set bit of
    p for its own last place, p's sign, and the smallest mantissa of its binade, or the next one if ``odd``. -0.0 where
    p is zero or not finite.
    """
    values = all_values(dtype, torch.device("cpu")).double()
    usable = values.isfinite() & (values != 0)
    mantissa, exponent = torch.frexp(torch.where(usable, values, 1.0))
    digits = (mantissa.abs() * 2.0**53).to(torch.int64)
    lowest = torch.ldexp((digits & -digits).double(), exponent.double() - 53)
    precision = 1 - round(math.log2(torch.finfo(dtype).eps))
    addend = 2 * lowest * (2 ** (precision - 1) + odd)
    return torch.where(usable, addend.copysign(values), -0.0).to(dtype).to(device)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the operands are made for."""

    fusion: Fusion
    """The kernel, whose reference the stages ask for products."""
    dtype: torch.dtype
    """The dtype of x."""
    device: torch.device
    """Where the operands lie."""
    number: int | None
    """How many values of x are tried; None for all."""

    @property
    def all(self) -> Tensor:
        """(1, 1, 65536): every value along a row."""
        return all_values(self.dtype, self.device).view(1, 1, -1)

    def constant(self, value: float, dtype: torch.dtype | None = None, columns: int = VALUES) -> Tensor:
        """(1, 1, columns): one value along a row."""
        return torch.full((1, 1, columns), value, dtype=dtype or self.dtype, device=self.device)

    def blocks(self) -> Iterator[Tensor]:
        """The values of x, some at a time."""
        return blocks(chosen(self.dtype, self.device, self.number))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    name: str
    """A word for it."""
    what: str
    """What is tried, in words."""
    operands: Callable[[Bench], Iterator[Arguments]]
    """The arguments, call after call."""
    exhaustive: bool = True
    """Whether it tries all that there are, if all values of x are tried."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where a chain rounds, and what certifies it."""

    stages: tuple[Stage, ...]
    """What is tried."""
    claim: str
    """What follows."""
    is_proof: bool
    """Whether it follows for every input."""
    assumptions: tuple[str, ...]
    """What is taken for granted."""


def _scales(bench: Bench) -> Iterator[Arguments]:
    yield bench.constant(1.0), bench.all, bench.constant(-0.0)


def _products(bench: Bench) -> Iterator[Arguments]:
    for block in bench.blocks():
        yield rows(block, VALUES)[None], bench.all, bench.constant(-0.0)


def _with_shift(shift: Callable[[Bench], Callable[[Tensor], Tensor]]) -> Callable[[Bench], Iterator[Arguments]]:
    """All pairs of x and scale, one x a batch entry, each with a shift made from eager's product of the two."""

    def operands(bench: Bench) -> Iterator[Arguments]:
        made = shift(bench)
        for block in bench.blocks():
            x = rows(block, VALUES)[:, None]
            yield x, bench.all, made(bench.fusion.reference(x, bench.all, bench.constant(-0.0)))

    return operands


def _tie(*, odd: bool) -> Callable[[Bench], Callable[[Tensor], Tensor]]:
    def made(bench: Bench) -> Callable[[Tensor], Tensor]:
        table = on_ties(bench.dtype, bench.device, odd=odd)

        def addend(product: Tensor) -> Tensor:
            index = integer_view(product).to(torch.int32).bitwise_and_(VALUES - 1)
            return table.index_select(0, index.view(-1)).view(product.shape)

        return addend

    return made


def _sums(bench: Bench) -> Iterator[Arguments]:
    for block in bench.blocks():
        yield rows(block, VALUES)[None], bench.constant(0.0), bench.all


def _lanes(bench: Bench) -> Iterator[Arguments]:
    """Every value of each operand in every lane of every width of vector, and at every place among the tokens."""
    count = VALUES if bench.number is None else _SAMPLED_TRIPLES
    triples = [
        all_values(bench.dtype, bench.device)[
            torch.randperm(VALUES, generator=_generator(seed))[:count].to(bench.device)
        ]
        for seed in range(3)
    ]
    for columns in (*_COLUMNS, count, count + 4, count + 1):
        batches = -(-count // columns)
        for turn in range(_LANES if columns > 1 else 1):
            x, scale, shift = (
                triple.roll(turn).repeat(-(-batches * columns // count))[: batches * columns].view(batches, 1, columns)
                for triple in triples
            )
            yield x.expand(-1, _TOKENS, -1).contiguous(), scale, shift


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _fp32_products(bench: Bench) -> Iterator[Arguments]:
    """fp32 rows: the negated product as eager has it in fp32, all its bits."""
    scale = bench.all.float()
    for block in bench.blocks():
        x = rows(block, VALUES)[:, None]
        yield x, scale, -(x.float() * (1 + scale))


def _fp32_scales(bench: Bench) -> Iterator[Arguments]:
    for block in bench.blocks():
        scale = fp32_from(block, bench.device)[:, None]
        yield bench.constant(1.0).expand(len(scale), -1, -1).contiguous(), scale, -(1 + scale)


def _fp32_roundings(bench: Bench) -> Iterator[Arguments]:
    for block in bench.blocks():
        shift = fp32_from(block, bench.device)[:, None]
        x = bench.constant(-0.0).expand(len(shift), -1, -1).contiguous()
        yield x, torch.zeros_like(shift[:1]), shift


def _random(bench: Bench) -> Iterator[Arguments]:
    """Random bit patterns for all three operands."""
    generator = torch.Generator(bench.device).manual_seed(1)
    size = len(next(bench.blocks()))
    for _ in range(_RANDOM_BLOCKS if bench.number is None else 1):
        yield tuple(
            torch.randint(
                -(1 << 15), 1 << 15, (size, 1, VALUES), dtype=torch.int16, device=bench.device, generator=generator
            ).view(bench.dtype)
            for _ in range(3)
        )


_SUM = Stage("sum", "all (x, shift) with scale 0", _sums)
_LANE = Stage(
    "lanes",
    "every value of each operand in every lane of every vector width, and at every place among the tokens of a thread",
    _lanes,
)

_ALONE = (
    "an element's result depends on its x, scale and shift alone; the stage `lanes` shows it for every value in every "
    "lane, width and token position, not for every triple there"
)
_REPEATABLE = "the device gives the same result for the same operands each time"
_STAGED = (
    "the result is a function of the product and of shift, and the product a function of x and of 1 + scale: three "
    "stages of two operands; the source, whose hash is above, has no other path"
)
_ADDED = (
    "the sum is rounded from the fp32 sum of shift and what the kernel holds for the product; the stages show that "
    "this is eager's rounded product, bit for bit where it can be seen in any result"
)
_ONE_TEMPLATE = (
    "the product of x and 1 + scale in fp32 is shown bit by bit for rows in x's dtype, by way of fp32 rows: both are "
    "one template, which differs in how a row's element is widened"
)
_IEEE_ADDITION = (
    "the sum of that product and shift has more operands than can be tried (2**32 products times 2**16 shifts): it is "
    "taken for IEEE 754 addition, as `sum` and `random` show on a part, and `fp32-product` excludes a contraction"
)
_IEEE_MULTIPLICATION = (
    "fp32 scales that x's dtype does not have are tried with x 1 only: their products are taken for IEEE 754's"
)

EVERY_OP = Schedule(
    stages=(
        Stage("scale", "all scale with x 1 and shift -0.0: 1 + scale, rounded", _scales),
        Stage("product", "all (x, scale) with shift -0.0: the product, rounded", _products),
        Stage(
            "residue",
            "all (x, scale) with shift = -product: what a product keeps that is not rounded, or is contracted, stays",
            _with_shift(lambda _: torch.neg),
        ),
        Stage(
            "tie",
            "all (x, scale) with a shift that puts the sum half-way between two values: the same, where what stays is "
            "below the smallest subnormal",
            _with_shift(_tie(odd=False)),
        ),
        Stage("tie-odd", "the same with the other neighbour even", _with_shift(_tie(odd=True))),
        _SUM,
        _LANE,
    ),
    claim="exact for every input on this arch",
    is_proof=True,
    assumptions=(_ALONE, _STAGED, _ADDED, _REPEATABLE),
)
"""Every op rounds to the storage dtype."""

ONCE = Schedule(
    stages=(
        Stage("product", "all (x, scale) with shift -0.0: the product, rounded to x's dtype", _products),
        Stage(
            "residue",
            "all (x, scale) with shift = -rounded product: the product's next bits",
            _with_shift(lambda _: torch.neg),
        ),
        _SUM,
        _LANE,
        Stage(
            "fp32-product",
            "all (x, scale) of x's dtype in fp32 rows, with shift = -product in fp32: 0 only if all bits are eager's",
            _fp32_products,
        ),
        Stage(
            "fp32-scale",
            "all fp32 scale with x 1 and shift = -(1 + scale): 0 only if all bits are eager's",
            _fp32_scales,
        ),
        Stage("fp32-rounding", "all fp32 shift with x -0.0: the last rounding", _fp32_roundings),
        Stage("random", "random bit patterns of all three operands", _random, exhaustive=False),
    ),
    claim=(
        "exact for every input on this arch whose rows are in x's dtype, if the device's fp32 addition rounds as IEEE "
        "754 says; with other fp32 rows, if its multiplication does too"
    ),
    is_proof=False,
    assumptions=(_ALONE, _ONE_TEMPLATE, _IEEE_ADDITION, _IEEE_MULTIPLICATION, _REPEATABLE),
)
"""fp32 throughout, with one rounding at the end."""
