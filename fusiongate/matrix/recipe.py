"""Recipes: everything that a cell's names stand for, and the path that it has to take because of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusiongate.gate.signatures import tensors_of
from fusiongate.subjects import Subject

from .cells import Cell, Path
from .lifecycles import Lifecycle
from .modes import Mode

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

    def steps(self, args: tuple[Any, ...], raised: Exception | None) -> tuple[tuple[Step, ...], ...]:
        """What the gate has to do at each of the cell's calls, as often as the mode reaches it there.

        Parameters
        ----------
        args
            The arguments of the cell's first call; the others have the same signature.
        raised
            What eager raises on them.
        """
        if raised is not None:
            # The next call would only raise again.
            return ((Step("raises", type(raised).__name__),),)
        reached = self.mode.gate_calls[: self.lifecycle.calls]
        whatever = self._before_any_verdict(args)
        if whatever is not None:
            return tuple((whatever,) * calls for calls in reached)
        return tuple(self._through_the_lifecycle(reached))

    def _before_any_verdict(self, args: tuple[Any, ...]) -> Step | None:
        """What every call has to do, whatever the gate has been through: the first that applies, as on its ladder."""
        forced = self.mode.forced
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
        return None if declined is None else Step("reference", declined)

    def _through_the_lifecycle(self, reached: Sequence[int]) -> Iterator[tuple[Step, ...]]:
        lifecycle, looks = self.lifecycle, 0
        for calls, captured in zip(reached, self.mode.captures, strict=False):
            steps = []
            for number in range(calls):
                if looks >= lifecycle.looks or lifecycle.before_capturing:
                    steps.append(Step(*lifecycle.later))
                elif number in captured:
                    steps.append(Step("reference", "capturing"))
                else:
                    looks += 1
                    steps.append(Step(*lifecycle.first))
            yield tuple(steps)
