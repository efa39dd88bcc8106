"""Steps: the path and the reason that each call of a cell has to take, worked out before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusiongate.gate.signatures import tensors_of
from fusiongate.subjects import Subject

from .cells import Path
from .lifecycles import Lifecycle
from .modes import Mode

__all__ = ["Step", "calls_told", "launches_told", "steps_due"]


@dataclass(frozen=True, slots=True)
class Step:
    """One arrival at the gate."""

    path: Path
    """The path that it takes."""
    reason: str
    """The published reason; the exception's name where eager raises."""


def steps_due(
    subject: Subject,
    mode: Mode,
    lifecycle: Lifecycle,
    layout_forces: str | None,
    args: tuple[Any, ...],
    raised: Exception | None,
) -> tuple[tuple[Step, ...], ...]:
    """The steps of each of a cell's calls, as often as the mode reaches the gate there.

    Parameters
    ----------
    subject, mode, lifecycle
        What is called, how, and what its gate goes through.
    layout_forces
        The reason for which no gate may launch on the layout, whatever its predicate says.
    args
        The arguments of the first call; the others have the same signature.
    raised
        What eager raises on them.
    """
    if raised is not None:
        # The next call would only raise again.
        return ((Step("raises", type(raised).__name__),),)
    reached = mode.gate_calls[: lifecycle.calls]
    whatever = _before_any_verdict(subject, mode, lifecycle, layout_forces, args)
    if whatever is not None:
        return tuple((whatever,) * calls for calls in reached)
    return tuple(_through_the_lifecycle(mode, lifecycle))


def _before_any_verdict(
    subject: Subject, mode: Mode, lifecycle: Lifecycle, layout_forces: str | None, args: tuple[Any, ...]
) -> Step | None:
    """What every call has to do, whatever the gate has been through: the first that applies, as on its ladder."""
    if mode.forced is not None and mode.forced.rung == "before declines":
        return Step("reference", mode.forced.reason)
    if layout_forces is not None:
        return Step("reference", layout_forces)
    if lifecycle.before_declines:
        return Step(*lifecycle.later)
    if any(tensor.numel() == 0 for tensor in tensors_of(args)):
        return Step("reference", "empty")
    try:
        declined = subject.declined(*args)
    except Exception:
        return Step("reference", "declines-raised")
    return None if declined is None else Step("reference", declined)


def _through_the_lifecycle(mode: Mode, lifecycle: Lifecycle) -> Iterator[tuple[Step, ...]]:
    looks = 0
    for calls, captured in zip(mode.gate_calls[: lifecycle.calls], mode.captures, strict=False):
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


def launches_told(number: int) -> str:
    """A number of launches, such as ``no launch``."""
    return f"{number or 'no'} {'launch' if number in (0, 1) else 'launches'}"


def calls_told(counts: Mapping[tuple[str, str], int]) -> str:
    """Counted calls, such as ``1 × reference (stride)``."""
    calls = (f"{count} × {path} ({reason})" for (path, reason), count in sorted(counts.items()))
    return ", ".join(calls) or "no call that is counted"
