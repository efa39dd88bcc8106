"""The sizes that a matrix takes unless it is given others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusiongate.errors import UsageError

from .inputs import Inputs, Size

__all__ = ["ADALN_SIZES", "HUGE_ELEMENTS", "LARGE_ELEMENTS", "sizes_for"]

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
