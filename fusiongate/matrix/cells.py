"""Cells: the points of a subject's matrix, and what came of running one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from fusiongate.errors import FusiongateError, UsageError
from fusiongate.io import visible

if TYPE_CHECKING:
    import torch

__all__ = ["AXES", "BASE", "Cell", "CellFailure", "CellResult", "NotRun", "Outcome", "Path", "Selected", "described"]

Path = Literal["fused", "reference", "raises"]
Outcome = Literal["fused", "reference", "refused", "raises", "not run"]

AXES = ("layout", "dtype", "size", "device", "mode", "data", "lifecycle")

# A subject without row operands has no rows to broadcast, and a factory's layout is its own: each has another base.
BASE: dict[str, frozenset[str]] = {
    "layout": frozenset({"row-broadcast", "contiguous", "as-given"}),
    "dtype": frozenset({"bf16"}),
    "device": frozenset({"current"}),
    "mode": frozenset({"eager"}),
    "data": frozenset({"normal"}),
    "lifecycle": frozenset({"verified"}),
}


class NotRun(FusiongateError):
    """A cell cannot run on this machine; its text says what is missing."""


class CellFailure(AssertionError):
    """A cell took another path, or gave other bits, than it has to."""

    @classmethod
    def at(cls, cell: Cell, where: str, happened: str, expected: str, more: str = "", run: str | None = None) -> Self:
        """A failure that says what happened, what was expected, and what to run.

        Parameters
        ----------
        cell
            The cell.
        where
            At which call; may be empty.
        happened, expected
            In a few words each.
        more
            A verdict, or what the gate recorded, in any number of lines.
        run
            The command that helps; None: the one that runs this cell again.
        """
        test, _, _phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
        again = f'pytest "{test}"' if test else f'pytest -k "{cell.id}"'
        lines = [
            f"{cell.subject}[{cell.id}]{where}",
            f"  happened: {happened}",
            f"  expected: {expected}",
            *(f"  {line}" for line in more.splitlines()),
            f"  run: {run or again}",
        ]
        return cls(visible("\n".join(lines)))


@dataclass(frozen=True, slots=True)
class Selected:
    """The device that ``--fusiongate-device`` selected."""

    kind: Literal["host", "cuda"]
    """``host`` runs the host builds on CPU tensors; ``cuda`` is a GPU of either vendor."""
    index: int | None = None
    """The GPU's index; None for the host."""

    def __post_init__(self) -> None:
        if (self.kind == "cuda") != (self.index is not None):
            raise UsageError(f"a selected device is the host, or cuda with an index, not {self.kind}:{self.index}")

    @property
    def torch_device(self) -> torch.device:
        """The device that operands are made on."""
        import torch

        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a subject's matrix: a name on each axis."""

    subject: str
    """The subject's name."""
    layout: str
    """How the operands lie in memory."""
    dtype: str
    """The dtypes of full and row operands."""
    size: str
    """The sizes of the symbols, such as ``B2S33D512``."""
    device: str = "current"
    """Where the operands stand, relative to the selected device."""
    mode: str = "eager"
    """How the subject is called."""
    data: str = "normal"
    """What values the operands hold."""
    lifecycle: str = "verified"
    """What the gate has been through."""
    base_size: str = ""
    """The matrix's base size, which is left out of the id; no axis of its own."""
    base_dtype: str = "bf16"
    """The matrix's base dtype, likewise."""

    away: tuple[str, ...] = field(init=False, compare=False)
    """The axes on which this cell is away from the base cell, in the order of `AXES`."""
    id: str = field(init=False, compare=False)
    """The values away from the base, joined by ``-``; ``base`` for the base cell.

    It depends on names only, so that it is the same from a checkout, a wheel, and every machine.
    """

    def __post_init__(self) -> None:
        base = {**BASE, "size": {self.base_size}, "dtype": {self.base_dtype}}
        away = tuple([axis for axis in AXES if getattr(self, axis) not in base[axis]])
        object.__setattr__(self, "away", away)
        object.__setattr__(self, "id", "-".join([getattr(self, axis) for axis in away]) or "base")


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of one cell."""

    cell: Cell
    """The cell."""
    outcome: Outcome
    """The path of the last call; ``refused`` is the reference path of a refused signature."""
    reason: str
    """The published reason for that path, or why the cell was not run."""
    launches: int
    """Kernel launches completed over all of the cell's calls, counted at the launcher."""
    checks: int
    """How many calls were compared with the reference."""
    seconds: float
    """Wall-clock seconds of the whole cell."""

    def to_json(self) -> dict[str, Any]:
        """The result as basic types; the cell's values stand beside its id."""
        names = {axis: getattr(self.cell, axis) for axis in ("subject", *AXES)}
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "cell"}
        return {"id": self.cell.id, **names, **own}


def described(error: BaseException) -> str:
    """An exception by its type and first line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
