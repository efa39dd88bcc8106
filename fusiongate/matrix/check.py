"""Prepared cells: a subject, its operands and what has to come of them; then the check itself."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusiongate.bits import normalised_strides
from fusiongate.contracts import Exact
from fusiongate.errors import FusiongateError
from fusiongate.matrix.cells import Cell, CellFailure, CellResult, Outcome, Path
from fusiongate.matrix.lifecycles import Lifecycle
from fusiongate.matrix.modes import Mode, tensors_of
from fusiongate.matrix.sizes import HUGE_ELEMENTS
from fusiongate.subjects import Subject, Trial
from fusiongate.verdicts import bits_differ, compare

__all__ = ["PreparedCell", "Recipe"]

FORBIDDEN = "the launcher was reached where no kernel may be launched"


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


class PreparedCell:
    """One cell with the operands of its first call, and what has to come of them.

    Raises
    ------
    NotRun
        The operands cannot be made on this machine.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        mode = recipe.mode
        self._reference = mode.wrap(recipe.subject.reference, recipe.device) if mode.alike else recipe.subject.reference
        self.args: tuple[Any, ...] = self._draw(0)
        """The arguments of the first call."""
        self._first: Any = None
        self._raised: Exception | None = None
        with self._around():
            try:
                self._first = self._reference(*self.args)
            except FusiongateError:
                raise
            except Exception as error:
                self._raised = error
            self._path, self._reason = self._expected_path()

    @property
    def cell(self) -> Cell:
        """The cell as data."""
        return self._recipe.cell

    @property
    def id(self) -> str:
        """The cell's id."""
        return self.cell.id

    @property
    def path(self) -> Path:
        """The path that the last call has to take."""
        return self._path

    @property
    def reason(self) -> str:
        """The published reason for it; the exception's name where eager raises."""
        return self._reason

    @property
    def expected(self) -> torch.Tensor:
        """What the reference makes of `args`; raises what eager raises."""
        if self._raised is not None:
            raise self._raised
        return _results(self._first)[0]

    def check(self) -> CellResult:
        """Call the subject, and assert path, reason, launches, bits and strides of every call.

        Raises
        ------
        CellFailure
            One of them is another than it has to be.
        """
        __tracebackhide__ = True
        started = time.perf_counter()
        recipe = self._recipe
        self._check_declared()
        calls = recipe.lifecycle.calls if self._raised is None else 1
        with recipe.lifecycle.around(), self._trial() as trial:
            recipe.lifecycle.ready(trial, recipe.elsewhere)
            call = recipe.mode.wrap(trial.call, recipe.device)
            before = trial.launches
            for number in range(calls):
                self._check_call(trial, call, number)
            launches = trial.launches - before
        if self._path == "fused":
            self._check_witness()
        return CellResult(self.cell, self._outcome(), self._reason, launches, calls, time.perf_counter() - started)

    # What has to come of it ------------------------------------------------------------------------------------------

    def _expected_path(self) -> tuple[Path, str]:
        recipe = self._recipe
        forced = recipe.mode.forced
        if self._raised is not None:
            return "raises", type(self._raised).__name__
        if forced is not None and forced.rung == "before declines":
            return "reference", forced.reason
        if recipe.layout_forces is not None:
            return "reference", recipe.layout_forces
        if any(tensor.numel() == 0 for tensor in tensors_of(self.args)):
            return "reference", "empty"
        try:
            declined = recipe.subject.declined(*self.args)
        except Exception:
            return "reference", "declines-raised"
        if declined is not None:
            return "reference", declined
        if forced is not None:
            return "reference", forced.reason
        path, reason = recipe.lifecycle.later
        return ("fused" if path == "fused" else "reference"), reason

    def _steps(self, number: int) -> tuple[str, str]:
        lifecycle = self._recipe.lifecycle
        if (self._path, self._reason) == lifecycle.later and number == 0:
            return lifecycle.first
        return self._path, self._reason

    def _check_declared(self) -> None:
        recipe = self._recipe
        if recipe.must_launch and self._path != "fused":
            if os.environ.get("FUSIONGATE_DISABLE"):
                return
            raise self._failure(
                "", f"must fuse, but declined: {self._reason}", "fused (verified): the layout stands in must_fuse"
            )
        if recipe.may_decline is not None and self._path == "fused":
            raise self._failure(
                "",
                "declines gives no reason, and the cell would launch",
                f"{recipe.may_decline!r}, which may_decline declares: take it out there if the kernel has learnt it",
            )

    # The calls --------------------------------------------------------------------------------------------------------

    def _draw(self, number: int) -> tuple[Any, ...]:
        mode = self._recipe.mode
        with self._around() if mode.made_inside else contextlib.nullcontext():
            return mode.convert(self._recipe.draw(number))

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        return self._recipe.mode.around(self._recipe.device)

    def _trial(self) -> contextlib.AbstractContextManager[Trial]:
        recipe = self._recipe
        if recipe.mode.launcher_fails:
            return recipe.subject.trial(lambda _launcher: _forbidden)
        stand_in = recipe.lifecycle.stand_in
        return recipe.subject.trial(None if stand_in is None else lambda launcher: stand_in(launcher, self.args))

    def _check_call(self, trial: Trial, call: Callable[..., Any], number: int) -> None:
        args = self.args if number == 0 else self._draw(number)
        watched = [] if self._recipe.mode.metadata_only else [_Watched.of(tensor) for tensor in tensors_of(args)]
        with self._around():
            expected, raised = self._expected_of(args, number)
            before = trial.launches, trial.counts
            try:
                actual = call(*args)
            except Exception as error:
                self._check_raised(number, error, raised)
                self._check_path(trial, before, number)
                return
            if raised is not None:
                raise self._failure(number, "it returned", f"it raises {_described(raised)}, as eager does")
            self._check_path(trial, before, number)
        # Before the bits: a reference that ran on what the kernel left behind differs for that reason.
        if any(one.changed() for one in watched):
            raise self._failure(number, "it changed an input", "inputs are left as they were")
        with self._around():
            self._check_bits(number, args, _results(actual), _results(expected))

    def _expected_of(self, args: tuple[Any, ...], number: int) -> tuple[Any, Exception | None]:
        if number == 0:
            return self._first, self._raised
        try:
            return self._reference(*args), None
        except Exception as error:
            return None, error

    def _check_raised(self, number: int, error: Exception, expected: Exception | None) -> None:
        if expected is None:
            raise self._failure(number, f"it raised {_described(error)}", "it returns, as eager does") from error
        if type(error) is not type(expected):
            raise self._failure(
                number, f"it raised {_described(error)}", f"it raises {_described(expected)}, as eager does"
            ) from error

    def _check_path(self, trial: Trial, before: tuple[int, Mapping[tuple[str, str], int] | None], number: int) -> None:
        launches = trial.launches - before[0]
        mode = self._recipe.mode
        path, reason = self._steps(number)
        reached = mode.gate_calls[number]
        if trial.counts is None or before[1] is None:
            # A foreign gate decides for itself what its first call does.
            launched = path == "fused"
            if number > 0 and reached and self._recipe.lifecycle.stand_in is None and launched != bool(launches):
                raise self._failure(
                    number, _launched(launches), f"{'a launch' if launched else 'no launch'} ({reason})"
                )
            return
        taken = Counter(trial.counts)
        taken.subtract(before[1])
        taken += Counter()
        if mode.races and number == 0 and self._path == "fused":
            if sum(taken.values()) != reached:
                raise self._failure(number, f"{taken.total()} calls were counted", f"{reached} calls")
            return
        if path == "raises":
            if launches:
                raise self._failure(number, _launched(launches), "no launch where eager raises")
            return
        counted = not (mode.forced is not None and not mode.forced.counted)
        due = Counter({(path, reason): reached} if counted and reached else {})
        if taken != due:
            raise self._failure(
                number,
                f"{_paths(taken)}, {_launched(launches)}",
                f"{_paths(due)}",
                self._story(trial) if any(reason == "refused" for _, reason in taken) else None,
            )
        self._check_launches(number, launches, path, reason, reached)

    def _check_launches(self, number: int, launches: int, path: str, reason: str, reached: int) -> None:
        lifecycle = self._recipe.lifecycle
        if path == "fused" and launches != reached:
            raise self._failure(number, _launched(launches), f"{reached} launches ({reason})")
        if path == "reference" and reason == "first-sight" and not launches and lifecycle.name != "launch-raises":
            raise self._failure(number, "no launch", "first sight launches the kernel to compare it")
        if path == "reference" and reason != "first-sight" and launches:
            raise self._failure(number, _launched(launches), f"no launch ({reason})")

    # The bits ---------------------------------------------------------------------------------------------------------

    def _check_bits(
        self,
        number: int,
        args: tuple[Any, ...],
        actual: tuple[torch.Tensor, ...],
        expected: tuple[torch.Tensor, ...],
    ) -> None:
        mode, subject = self._recipe.mode, self._recipe.subject
        if not mode.alike:
            expected = expected * len(actual)
        if len(actual) != len(expected):
            raise self._failure(number, f"{len(actual)} results", f"{len(expected)} results")
        for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            if mode.metadata_only:
                if _metadata(got) != _metadata(wanted):
                    raise self._failure(number, f"{_metadata(got)}", f"{_metadata(wanted)}")
                continue
            contract = subject.contract if self._path == "fused" and position == 0 else Exact()
            verdict = compare(got, wanted, contract, subject.reference, args)
            if not verdict.ok:
                raise self._failure(number, "the result is not the reference's", str(contract), str(verdict))
            if _shares(got, args) and not _shares(wanted, args):
                raise self._failure(number, "the result shares memory with an input", "a new tensor")

    def _check_witness(self) -> None:
        fusion = self._recipe.subject.fusion
        if fusion is None or fusion.witness is None or self.cell.away not in {(), ("layout",), ("dtype",), ("size",)}:
            return
        of_reference, of_fused = fusion.witness
        with self._around():
            verdict = compare(of_fused(*self.args), of_reference(*self.args))
        if not verdict.ok:
            raise self._failure("", "the witness differs from the reference's", "equal bits", str(verdict))

    # Telling it -------------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        return "refused" if self._reason == "refused" else self._path

    def _story(self, trial: Trial) -> str:
        """What differs when the kernel runs on this cell's own arguments: says more than that it was refused."""
        fusion = self._recipe.subject.fusion
        assert fusion is not None
        assert trial.fusion is not None
        lines = [f"event: {event}" for event in trial.fusion.gate.events]
        try:
            with self._around():
                actual = fusion.fused(*self.args)
                verdict = compare(actual, self.expected, fusion.contract, fusion.reference, self.args)
            lines.append(f"on this cell's arguments: {verdict}")
        except Exception as error:
            lines.append(f"on this cell's arguments the kernel raised {_described(error)}")
        return "\n".join(lines)

    def _failure(self, number: int | str, happened: str, expected: str, story: str | None = None) -> CellFailure:
        call = f", call {number + 1} of {self._recipe.lifecycle.calls}" if isinstance(number, int) else ""
        lines = [
            f"{self.cell.subject}[{self.id}]{call}",
            f"  happened: {happened}",
            f"  expected: {expected}",
            *(f"  {line}" for line in (story or "").splitlines()),
            f"  run: {_command(self.id)}",
        ]
        return CellFailure("\n".join(lines))


@dataclass(frozen=True, slots=True)
class _Watched:
    """An input and what it held."""

    tensor: torch.Tensor
    before: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Watched:
        # A copy of a huge operand could be what no longer fits.
        return cls(tensor, tensor.detach().clone() if tensor.numel() < HUGE_ELEMENTS else None)

    def changed(self) -> bool:
        if self.before is None:
            return False
        now = self.tensor.detach().clone()
        return bool(bits_differ(now, self.before))


def _forbidden(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    raise CellFailure(FORBIDDEN)


def _results(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = normalised_strides(tensor.shape, tensor.stride())
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), strides, tensor.device.type


def _shares(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    memory = result.untyped_storage().data_ptr()
    return bool(result.numel()) and any(memory == tensor.untyped_storage().data_ptr() for tensor in tensors_of(args))


def _described(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _launched(launches: int) -> str:
    return f"{launches or 'no'} {'launch' if launches in (0, 1) else 'launches'}"


def _paths(counts: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{count} × {path} ({reason})" for (path, reason), count in sorted(counts.items())) or "nothing"


def _command(cell_id: str) -> str:
    test, _, _phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
    return f'pytest "{test}"' if test else f'pytest -k "{cell_id}"'
