"""Lifecycles: what the gate of a cell goes through.

All but `verified` and `unseen` are brought about from outside: another kernel stands in at the launcher, the predicate
raises, or a switch is thrown. Whatever happens, the caller gets the reference's bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fusiongate.errors import BuildError
from fusiongate.subjects import Launcher, Trial

__all__ = ["LIFECYCLES", "Lifecycle", "almost_right"]

Step = tuple[str, str]


def _nothing(_trial: Trial) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What one gate goes through, on arguments that may be launched."""

    name: str
    """The lifecycle as it stands in a cell's id."""
    first: Step
    """Path and reason of the first call."""
    later: Step
    """Path and reason of the calls after it."""
    calls: int = 3
    """How often the cell calls."""
    stand_in: Callable[[Callable[..., Any]], Launcher] | None = None
    """Called with the reference, gives what launches instead of the kernel."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """The context of the whole cell."""
    ready: Callable[[Trial], None] = _nothing
    """Brings the fresh gate into the state that the cell is about."""
    foreign: bool = True
    """Whether a gate that publishes neither path nor reason can go through it."""


def almost_right(reference: Callable[..., torch.Tensor]) -> Launcher:
    """A kernel that is one step off in one channel of 61, and only where its last operand is not zero.

    On data of zeros, and on anything that never touches those channels, it is right.
    """

    def launch(*args: Any) -> torch.Tensor:
        result = reference(*args)
        last = [argument for argument in args if isinstance(argument, torch.Tensor)][-1]
        off = (last != 0).expand_as(result) & result.isfinite()
        if result.dim():
            channels = torch.arange(result.shape[-1], device=result.device)
            off = off & (channels % 61 == 0)
        return torch.where(off, torch.nextafter(result, torch.full_like(result, float("inf"))), result)

    return launch


def _raising(error: Callable[[], Exception]) -> Callable[[Callable[..., Any]], Launcher]:
    def stand_in(_reference: Callable[..., Any]) -> Launcher:
        def launch(*_args: Any) -> torch.Tensor:
            raise error()

        return launch

    return stand_in


def _disabled() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"FUSIONGATE_DISABLE": "1"})


def _predicate_raises(trial: Trial) -> None:
    def declines(*_args: Any) -> str | None:
        raise ZeroDivisionError("a predicate with a fault of its own")

    assert trial.fusion is not None
    trial.fusion.declines = declines


def _full(trial: Trial) -> None:
    assert trial.fusion is not None
    trial.fusion.gate.policy = trial.fusion.policy


_REFERENCE = "reference"

LIFECYCLES: dict[str, Lifecycle] = {
    lifecycle.name: lifecycle
    for lifecycle in (
        Lifecycle("verified", (_REFERENCE, "first-sight"), ("fused", "verified")),
        Lifecycle("unseen", (_REFERENCE, "first-sight"), (_REFERENCE, "first-sight"), calls=1),
        Lifecycle("refused", (_REFERENCE, "first-sight"), (_REFERENCE, "refused"), stand_in=almost_right),
        Lifecycle(
            "launch-raises",
            (_REFERENCE, "first-sight"),
            (_REFERENCE, "refused"),
            stand_in=_raising(lambda: RuntimeError("the launch failed, as this stand-in has to")),
        ),
        Lifecycle(
            "build-fails",
            (_REFERENCE, "no-kernel"),
            (_REFERENCE, "no-kernel"),
            stand_in=_raising(lambda: BuildError("the build failed, as this stand-in has to")),
            foreign=False,
        ),
        Lifecycle(
            "out-of-memory",
            (_REFERENCE, "out-of-memory"),
            (_REFERENCE, "out-of-memory"),
            stand_in=_raising(lambda: torch.OutOfMemoryError("out of memory, as this stand-in has to be")),
            foreign=False,
        ),
        Lifecycle("disabled", (_REFERENCE, "disabled"), (_REFERENCE, "disabled"), around=_disabled, foreign=False),
        Lifecycle(
            "declines-raised",
            (_REFERENCE, "declines-raised"),
            (_REFERENCE, "declines-raised"),
            ready=_predicate_raises,
            foreign=False,
        ),
        Lifecycle("capacity", (_REFERENCE, "capacity"), (_REFERENCE, "capacity"), ready=_full, foreign=False),
    )
}
"""Every lifecycle by name. A build that aborts its process is tested where kernels are built."""
