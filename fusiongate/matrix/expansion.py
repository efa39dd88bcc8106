"""Expansion: which points of the matrix become cells.

The base cell, each axis alone, then pairs. A cell is away from the base on two axes at most, so that a failure is easy
to read: what fails in a pair and in neither of its halves is the pair's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from .data import DATA
from .devices import DEVICES
from .lifecycles import LIFECYCLES
from .modes import MODES

__all__ = ["PAIRINGS", "Pairing", "expand"]

_UNBOUND = ("strided-unbind-4d", "strided-unbind-3d")
_TELLING_LAYOUTS = (*_UNBOUND, "per-token", "sliced", "permuted")
_TELLING_DTYPES = ("fp16", "fp32", "mixed")
_TELLING_DATA = ("zeros-first", "nan-inf", "signed-zeros", "overflow", "cancellation")
_MODES = tuple(name for name, mode in MODES.items() if mode.expands)
_LAUNCHING_MODES = tuple(name for name in _MODES if MODES[name].forced is None)
_COMPILED = ("compile",)
_NOT_COMPILED = tuple(name for name in _MODES if name not in _COMPILED)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which values of two axes are crossed, and why not all of them."""

    first: str
    """An axis."""
    second: str
    """Another axis."""
    why: str
    """Why the rest is left out."""
    only_first: tuple[str, ...] | None = None
    """The values of the first axis; None for all."""
    only_second: tuple[str, ...] | None = None
    """The values of the second axis; None for all."""


PAIRINGS: tuple[Pairing, ...] = (
    Pairing("layout", "dtype", "fp64 and mixed rows stop at the dtype, whatever the layout", None, _TELLING_DTYPES),
    Pairing("layout", "size", "other layouts are declined at every size alike", _TELLING_LAYOUTS),
    Pairing(
        "layout",
        "mode",
        "a mode that forces its path does not look at the layout; compiling takes seconds a cell",
        _TELLING_LAYOUTS,
        _NOT_COMPILED,
    ),
    Pairing("layout", "mode", "compiling takes seconds a cell", _UNBOUND[:1], _COMPILED),
    Pairing("layout", "data", "values that one dimension holds are no more telling in another", None, _TELLING_DATA),
    Pairing("dtype", "size", "fp64 and mixed rows stop at the dtype, whatever the size", _TELLING_DTYPES),
    Pairing(
        "dtype",
        "mode",
        "compiling takes seconds a cell",
        _TELLING_DTYPES,
        _NOT_COMPILED,
    ),
    Pairing("dtype", "data", "mixed rows promote the same data"),
    Pairing("size", "data", "specials do not depend on the size; tails and roundings do", None, ("cancellation",)),
    Pairing("mode", "data", "a forced path runs the reference on any data", _LAUNCHING_MODES, _TELLING_DATA),
    Pairing("layout", "lifecycle", "a declined layout reaches no verdict", _UNBOUND),
    Pairing("dtype", "lifecycle", "a declined dtype reaches no verdict", ("fp16", "fp32")),
    Pairing("data", "lifecycle", "a verdict depends on data that hide a fault", ("zeros-first", "nan-first")),
    Pairing("layout", "device", "a device changes no layout; what models use has to work on each", _UNBOUND[:1]),
    Pairing("dtype", "device", "a device changes no arithmetic", ("fp16", "fp32")),
)
"""Every pairing. Axes that do not stand here together are not crossed: a device with a size or a mode, or a lifecycle
with a size, says nothing that they don't say alone. Lifecycles and modes meet in the gate, whatever the kernel, so that
the crossings of one kernel stand for all: suites/kernels/test_lifecycles.py has them."""


def axis_values() -> dict[str, tuple[str, ...]]:
    """The axes that are the same for every subject, each with its base value first."""
    lifecycles = tuple(name for name, lifecycle in LIFECYCLES.items() if lifecycle.expands)
    return {"device": tuple(DEVICES), "mode": _MODES, "data": tuple(DATA), "lifecycle": lifecycles}


def expand(
    axes: Mapping[str, tuple[str, ...]], unpaired: frozenset[str] = frozenset(), *, pairs: bool = True
) -> Iterator[dict[str, str]]:
    """The base point, each axis alone, and the pairs of `PAIRINGS`, as mappings of axis to value.

    Parameters
    ----------
    axes
        The values of each axis, the base value first.
    unpaired
        Values that stand alone.
    pairs
        Whether any pairs are made.
    """
    base = {axis: values[0] for axis, values in axes.items()}
    yield dict(base)
    for axis, values in axes.items():
        for value in values[1:]:
            yield base | {axis: value}
    for pairing in PAIRINGS if pairs else ():
        firsts = _chosen(axes[pairing.first], pairing.only_first, unpaired)
        seconds = _chosen(axes[pairing.second], pairing.only_second, unpaired)
        for first, second in product(firsts, seconds):
            yield base | {pairing.first: first, pairing.second: second}


def _chosen(values: tuple[str, ...], only: tuple[str, ...] | None, unpaired: frozenset[str]) -> list[str]:
    return [value for value in values[1:] if value not in unpaired and (only is None or value in only)]
