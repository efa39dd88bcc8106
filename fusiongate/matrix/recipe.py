"""Recipes: everything that a cell's names stand for, and the path that it has to take because of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusiongate.matrix.cells import Cell, Path
from fusiongate.matrix.lifecycles import Lifecycle
from fusiongate.matrix.modes import Mode, tensors_of
from fusiongate.subjects import Subject

__all__ = ["Recipe", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call has to do."""

    path: Path
    """The path that it takes."""
    reason: str
    """The published reason; the exception's name where eager raises."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a cell's names stand for."""

    cell: Cell
    """The cell."""
    subject: Subject
    """The subject that runs: the host build on the host."""
    mode: Mode
    """How it is called."""
    lifecycle: Lifecycle
    """What its gate goes through."""
    device: torch.device
    """The device of the call."""
    draw: Callable[[int], tuple[Any, ...]]
    """The arguments of a call by its number: other data, the same signature."""
    elsewhere: Callable[[], tuple[Any, ...]]
    """Arguments of another signature."""
    layout_forces: str | None
    """The reason for which no gate may launch on the layout, whatever its predicate says."""
    must_launch: bool
    """Whether the cell has to launch, whatever the predicate says."""
    may_decline: str | None
    """The reason for which the cell is documented to be declined."""

    def last_step(self, args: tuple[Any, ...], raised: Exception | None) -> Step:
        """What the cell's last call has to do: the first of these that applies, as on the gate's own ladder.

        Parameters
        ----------
        args
            The arguments of the cell's first call; the others have the same signature.
        raised
            What eager raises on them.
        """
        forced = self.mode.forced
        if raised is not None:
            return Step("raises", type(raised).__name__)
        if forced is not None and forced.rung == "before declines":
            return Step("reference", forced.reason)
        if self.layout_forces is not None:
            return Step("reference", self.layout_forces)
        if self.lifecycle.before_declines:
            return Step(*self.lifecycle.later)
        if any(tensor.numel() == 0 for tensor in tensors_of(args)):
            return Step("reference", "empty")
        try:
            declined = self.subject.declined(*args)
        except Exception:
            return Step("reference", "declines-raised")
        if declined is not None:
            return Step("reference", declined)
        if forced is not None:
            return Step("reference", forced.reason)
        return Step(*self.lifecycle.later)

    def step(self, last: Step, number: int) -> Step:
        """What the call of that number has to do, from what the last one has to."""
        if number == 0 and last == Step(*self.lifecycle.later):
            return Step(*self.lifecycle.first)
        return last
