"""Every lifecycle in every mode: cells that no matrix expands to, because one kernel's stand for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from fusiongate.gate.fusion import Fusion
from fusiongate.matrix import Cell, CellResult, Matrix, NotRun, Selected
from fusiongate.matrix.lifecycles import LIFECYCLES
from fusiongate.matrix.modes import MODES

__all__ = ["Crossing", "crossings"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A lifecycle in a mode."""

    matrix: Matrix
    """Whose kernel goes through it."""
    cell: Cell
    """Names both."""

    def __str__(self) -> str:
        return self.cell.id

    def check(self, device: torch.device) -> CellResult:
        """Run the cell, which no path table knows; skip it where this machine lacks what it needs.

        Parameters
        ----------
        device
            The selected one: the CPU stands for the host builds.

        Raises
        ------
        CellFailure
            The path, the reason, the launches or the bits of a call are others than they have to be.
        """
        __tracebackhide__ = True
        selected = Selected("host") if device.type == "cpu" else Selected("cuda", device.index)
        try:
            return self.matrix.prepare(self.cell, selected).check()
        except NotRun as missing:
            pytest.skip(f"not run: {missing}")


def crossings(op: Fusion, size: dict[str, int], devices: Sequence[str]) -> Iterator[Crossing]:
    """Every lifecycle in every mode, on every device.

    Parameters
    ----------
    op
        The kernel.
    size
        The extents of its operands.
    devices
        Names of the matrix: ``current`` and ``other``.
    """
    matrix = Matrix(op, sizes=[size])
    base = matrix.cells()[0]
    for device in devices:
        for lifecycle in LIFECYCLES:
            for mode in MODES:
                yield Crossing(matrix, dataclasses.replace(base, device=device, mode=mode, lifecycle=lifecycle))
