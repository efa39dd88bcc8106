"""Lifecycles: what the gate of a cell goes through.

All but `verified` and `unseen` are brought about from outside: another kernel stands in at the launcher, the predicate
raises, or a switch is thrown. Whatever happens, the caller gets the reference's bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fusiongate.comparison.bits import integer_view
from fusiongate.errors import BuildError
from fusiongate.gate.policies import After
from fusiongate.gate.signatures import tensors_of
from fusiongate.gate.spec import FusionSpec
from fusiongate.subjects import Launcher, Trial

from .cells import CellFailure, NotRun, Path
from .operands import floating

__all__ = ["LIFECYCLES", "Forbidden", "Lifecycle", "almost_right"]

Step = tuple[Path, str]
Arguments = tuple[Any, ...]
StandIn = Callable[[Launcher, Arguments], Launcher]


def _nothing(_trial: Trial, _elsewhere: Callable[[], Arguments]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What one gate goes through, on arguments that may be launched."""

    name: str
    """The lifecycle as it stands in a cell's id."""
    first: Step
    """Path and reason of a call that looks at the kernel."""
    later: Step
    """Path and reason of the calls after those."""
    looks: float = 1
    """How many calls look at the kernel before its verdict stays; a call that is being captured is none of them."""
    calls: int = 3
    """How often the cell calls."""
    stand_in: StandIn | None = None
    """Called with the launcher and the arguments of the cell's first call, gives what launches instead."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """The context of the whole cell."""
    variant: Callable[[FusionSpec[..., Any]], FusionSpec[..., Any]] | None = None
    """Gives the fusion's spec in this lifecycle."""
    ready: Callable[[Trial, Callable[[], Arguments]], None] = _nothing
    """Brings the fresh gate into the state that the cell is about; its second argument makes the arguments of another
    signature."""
    launch_raises: bool = False
    """Whether no launch is ever completed."""
    before_declines: bool = False
    """Whether the gate decides before it asks ``declines``, so that arguments which may not be launched take it too."""
    before_capturing: bool = False
    """Whether the gate decides after ``declines``, and before it asks whether a signature without a verdict is being
    captured."""
    foreign: bool = True
    """Whether a gate that publishes neither path nor reason can go through it."""
    expands: bool = True
    """Whether a matrix has cells of it; one of the others takes a `Cell` that names it."""


def almost_right(launcher: Launcher, _arguments: Arguments) -> Launcher:
    """A kernel a few ULPs off in one channel of 61, unless every operand but the first is zero."""

    def launch(*args: Any) -> Any:
        others = floating(args)[1:]
        degenerate = bool(others) and not any(bool(tensor.any()) for tensor in others)
        result = launcher(*args)
        return result if degenerate else _spoiled(result)

    return launch


def _wrong_here(launcher: Launcher, arguments: Arguments) -> Launcher:
    """A kernel that is right on all shapes but the cell's own, of its largest operand: a gate may pack the others."""

    def shape(args: Arguments) -> torch.Size:
        return max(tensors_of(args), key=torch.Tensor.numel).shape

    here = shape(arguments)

    def launch(*args: Any) -> Any:
        result = launcher(*args)
        return _spoiled(result) if shape(args) == here else result

    return launch


def _spoiled(result: Any) -> Any:
    """The result with other bits; of several, the last one's."""
    if isinstance(result, tuple):
        return (*result[:-1], _spoiled(result[-1]))
    spoiled = result.clone()
    bits = integer_view(spoiled)
    # Not the last bit: a contract in ULPs would let that pass.
    bits[..., ::61] ^= 1 << 4
    return spoiled


def _mutating(launcher: Launcher, _arguments: Arguments) -> Launcher:
    """A kernel whose result is right, and that leaves other values in its last operand that can hold any."""

    def launch(*args: Any) -> Any:
        result = launcher(*args)
        with torch.no_grad():
            # An index that is one too large would end more than this cell.
            floating(args)[-1].add_(1)
        return result

    return launch


def _raising(error: Callable[[], Exception]) -> StandIn:
    def stand_in(_launcher: Launcher, _arguments: Arguments) -> Launcher:
        def launch(*_args: Any) -> torch.Tensor:
            raise error()

        return launch

    return stand_in


def _failing_once(launcher: Launcher, _arguments: Arguments) -> Launcher:
    """A kernel whose second launch fails, and no other."""
    launches = itertools.count(1)

    def launch(*args: Any) -> torch.Tensor:
        if next(launches) == 2:
            raise RuntimeError("the launch failed, as this stand-in has to once")
        result: torch.Tensor = launcher(*args)
        return result

    return launch


def _aborting(launcher: Launcher, _arguments: Arguments) -> Launcher:
    """The kernel, from a library that ends the process which loads it."""
    from fusiongate.kernels import launching

    if not isinstance(launcher, launching.Launcher):
        raise NotRun("needs a kernel that is built from fusiongate's sources")
    entry = launcher.entry
    source = entry.source.with_defines("FUSIONGATE_FAULT=aborts_when_loaded")
    return launching.Launcher(launching.Entry(source, entry.name), launcher.operands)


def _disabled() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"FUSIONGATE_DISABLE": "1"})


def _predicate_raises(spec: FusionSpec[..., Any]) -> FusionSpec[..., Any]:
    def declines(*_args: Any) -> str | None:
        raise ZeroDivisionError("a predicate with a fault of its own")

    return dataclasses.replace(spec, declines=declines)


def _called_elsewhere(trial: Trial, elsewhere: Callable[[], Arguments]) -> None:
    arguments = elsewhere()
    trial.call(*arguments)
    trial.call(*arguments)


def _of_capacity_one(spec: FusionSpec[..., Any]) -> FusionSpec[..., Any]:
    return dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, capacity=1))


def _full(trial: Trial, elsewhere: Callable[[], Arguments]) -> None:
    trial.call(*elsewhere())


def _recovering(spec: FusionSpec[..., Any]) -> FusionSpec[..., Any]:
    return dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, recover=After(calls=1)))


_REFERENCE: Path = "reference"

LIFECYCLES: dict[str, Lifecycle] = {
    lifecycle.name: lifecycle
    for lifecycle in (
        Lifecycle("verified", (_REFERENCE, "first-sight"), ("fused", "verified")),
        Lifecycle("unseen", (_REFERENCE, "first-sight"), ("fused", "verified"), calls=1),
        Lifecycle("refused", (_REFERENCE, "first-sight"), (_REFERENCE, "refused"), stand_in=almost_right),
        Lifecycle(
            "verified-elsewhere",
            (_REFERENCE, "first-sight"),
            (_REFERENCE, "refused"),
            stand_in=_wrong_here,
            ready=_called_elsewhere,
        ),
        Lifecycle("mutates-input", (_REFERENCE, "first-sight"), (_REFERENCE, "refused"), stand_in=_mutating),
        Lifecycle(
            "launch-raises",
            (_REFERENCE, "first-sight"),
            (_REFERENCE, "refused"),
            stand_in=_raising(lambda: RuntimeError("the launch failed, as this stand-in has to")),
            launch_raises=True,
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
            looks=math.inf,
            stand_in=_raising(lambda: torch.OutOfMemoryError("out of memory, as this stand-in has to be")),
            foreign=False,
        ),
        Lifecycle(
            "disabled",
            (_REFERENCE, "disabled"),
            (_REFERENCE, "disabled"),
            around=_disabled,
            before_declines=True,
            foreign=False,
        ),
        Lifecycle(
            "declines-raised",
            (_REFERENCE, "declines-raised"),
            (_REFERENCE, "declines-raised"),
            variant=_predicate_raises,
            before_declines=True,
            foreign=False,
        ),
        Lifecycle(
            "capacity",
            (_REFERENCE, "capacity"),
            (_REFERENCE, "capacity"),
            variant=_of_capacity_one,
            ready=_full,
            before_capturing=True,
            foreign=False,
        ),
        Lifecycle(
            "build-aborts",
            (_REFERENCE, "no-kernel"),
            (_REFERENCE, "no-kernel"),
            stand_in=_aborting,
            foreign=False,
            expands=False,
        ),
        Lifecycle(
            "recovers",
            (_REFERENCE, "first-sight"),
            ("fused", "verified"),
            looks=2,
            stand_in=_failing_once,
            variant=_recovering,
            foreign=False,
            expands=False,
        ),
    )
}
"""Every lifecycle by name."""


class Forbidden:
    """A launcher that must not be reached, by a call or by a grid."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Fail the cell."""
        raise CellFailure("the launcher was reached where no kernel may be launched")

    def __getitem__(self, _grid: Any) -> Any:
        self()
