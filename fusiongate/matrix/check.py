"""Prepared cells: a subject, its operands and what has to come of them; then the check itself."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusiongate._telling import counted
from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import compare
from fusiongate.errors import FusiongateError
from fusiongate.gate.signatures import tensors_of
from fusiongate.subjects import Launcher, Trial

from .cells import Cell, CellFailure, CellResult, NotRun, Outcome, Path
from .recipe import Recipe, Step
from .results import Watched, metadata_of, results_of, shares_memory
from .sizes import HUGE_ELEMENTS
from .telling import called_in_words, calls_in_words, described, failure, launches_in_words, story
from .tracing import of_the_compiler

__all__ = ["PreparedCell"]

_FIRST_SIGHT = ("reference", "first-sight")


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
                if of_the_compiler(error):
                    raise NotRun(f"torch.compile does not compile the reference here: {described(error)}") from error
                self._raised = error
            if self._raised is None and mode.traces_once:
                self._check_traceable()
            self._steps = recipe.steps(self.args, self._raised)

    def _check_traceable(self) -> None:
        recipe = self._recipe
        try:
            recipe.mode.wrap(recipe.subject.reference, recipe.device)(*self.args)
        except Exception as error:
            raise NotRun(f"{recipe.mode.name} does not trace the reference: {described(error)}") from error

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
        return self._last.path

    @property
    def _last(self) -> Step:
        return [step for steps in self._steps for step in steps][-1]

    @property
    def reason(self) -> str:
        """The published reason for it; the exception's name where eager raises."""
        return self._last.reason

    @property
    def expected(self) -> torch.Tensor:
        """What the reference makes of `args`; raises what eager raises."""
        if self._raised is not None:
            raise self._raised
        return results_of(self._first)[0]

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
        calls = len(self._steps)
        with recipe.lifecycle.around(), self._trial() as trial:
            recipe.lifecycle.ready(trial, recipe.elsewhere)
            call = recipe.mode.wrap(trial.call, recipe.device)
            before = trial.launches
            for number in range(calls):
                self._check_call(trial, call, number)
            launches = trial.launches - before
        if self.path == "fused":
            self._check_witness()
        outcome: Outcome = "refused" if self.reason == "refused" else self.path
        return CellResult(self.cell, outcome, self.reason, launches, calls, time.perf_counter() - started)

    def close(self) -> None:
        """Let go of the operands; after a huge cell, of the memory that they leave too: other workers wait for it."""
        huge = any(tensor.is_cuda and tensor.numel() >= HUGE_ELEMENTS for tensor in tensors_of(self.args))
        self.args, self._first = (), None
        if huge:
            torch.cuda.empty_cache()

    def _check_declared(self) -> None:
        recipe = self._recipe
        if recipe.must_launch and self.path != "fused":
            happened = f"must fuse, but declined: {self.reason}"
            raise self._failure(None, happened, "fused (verified): the layout stands in must_fuse")
        if recipe.may_decline is not None and (self.path, self.reason) != ("reference", recipe.may_decline):
            raise self._failure(
                None,
                f"{self.path} ({self.reason})",
                f"reference ({recipe.may_decline}), as may_decline says: change it there if the kernel has changed",
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
            return recipe.subject.trial(lambda _launcher: _Forbidden())
        if recipe.lifecycle.stand_in is not None:
            return recipe.subject.trial(self._stand_in)
        return recipe.subject.trial()

    def _stand_in(self, launcher: Launcher) -> Launcher:
        stand_in = self._recipe.lifecycle.stand_in
        assert stand_in is not None
        if hasattr(type(launcher), "__getitem__"):
            raise NotRun("nothing can stand in for a kernel that launches by kernel[grid]: its outputs are not known")
        return stand_in(launcher, self.args)

    def _check_call(self, trial: Trial, call: Callable[..., Any], number: int) -> None:
        args = self.args if number == 0 else self._draw(number)
        watched = [] if self._recipe.mode.metadata_only else [Watched.of(tensor) for tensor in tensors_of(args)]
        with self._around():
            expected, raised = self._expected_of(args, number)
            before = trial.launches, trial.counts
            try:
                actual = call(*args)
            except Exception as error:
                self._check_raised(number, error, raised)
                self._check_path(trial, before, number)
                return
            self._check_returned(number, raised)
            self._check_path(trial, before, number)
        # Before the bits: a reference that ran on what the kernel left behind differs for that reason.
        if any(one.changed() for one in watched):
            raise self._failure(number, "it changed an input", "inputs are left as they were")
        with self._around():
            self._check_bits(number, args, results_of(actual), results_of(expected))

    def _expected_of(self, args: tuple[Any, ...], number: int) -> tuple[Any, Exception | None]:
        if number == 0:
            return self._first, self._raised
        try:
            return self._reference(*args), None
        except Exception as error:
            return None, error

    def _check_raised(self, number: int, error: Exception, expected: Exception | None) -> None:
        if expected is None:
            raise self._failure(number, f"it raised {described(error)}", "it returns, as eager does") from error
        if type(error) is not type(expected):
            raise self._failure(
                number, f"it raised {described(error)}", f"it raises {described(expected)}, as eager does"
            ) from error

    def _check_returned(self, number: int, expected: Exception | None) -> None:
        if expected is not None:
            raise self._failure(number, "it returned", f"it raises {described(expected)}, as eager does")

    def _check_path(self, trial: Trial, before: tuple[int, Mapping[tuple[str, str], int] | None], number: int) -> None:
        launches = trial.launches - before[0]
        steps = self._steps[number]
        if self.path == "raises":
            self._check_not_launched(number, launches)
            return
        if trial.counts is None or before[1] is None:
            # A foreign gate decides for itself what its first call does.
            launched = any(step.path == "fused" for step in steps)
            if number > 0 and steps and self._recipe.lifecycle.stand_in is None and launched != bool(launches):
                raise self._failure(
                    number,
                    launches_in_words(launches),
                    f"{'a launch' if launched else 'no launch'} ({steps[-1].reason})",
                )
            return
        taken = Counter(trial.counts)
        taken.subtract(before[1])
        taken += Counter()
        forced = self._recipe.mode.forced
        counted = forced is None or forced.counted
        due = Counter((str(step.path), step.reason) for step in steps if counted)
        if taken != due:
            if _FIRST_SIGHT in due and set(taken) - set(due) == {("reference", "out-of-memory")}:
                raise NotRun("too little free memory on the device to compare a kernel at this size")
            raise self._failure(
                number,
                f"{calls_in_words(taken)}, {launches_in_words(launches)}",
                calls_in_words(due),
                self._story(trial) if any(reason == "refused" for _, reason in taken) else "",
            )
        self._check_launches(number, launches, steps)

    def _check_not_launched(self, number: int, launches: int) -> None:
        if launches:
            raise self._failure(number, launches_in_words(launches), "no launch where eager raises")

    def _check_launches(self, number: int, launches: int, steps: tuple[Step, ...]) -> None:
        fused = sum(step.path == "fused" for step in steps)
        if not any(step.reason == "first-sight" for step in steps):
            if launches != fused:
                reasons = ", ".join(sorted({step.reason for step in steps})) or "nothing reaches the gate"
                raise self._failure(number, launches_in_words(launches), f"{launches_in_words(fused)} ({reasons})")
        elif launches <= fused and not self._recipe.lifecycle.launch_raises:
            raise self._failure(number, launches_in_words(launches), "first sight launches the kernel to compare it")

    def _story(self, trial: Trial) -> str:
        with self._around():
            return story(trial, self.args)

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
            # A mode that calls several times gives a result of each; a replay calls nothing.
            expected = expected * max(1, mode.gate_calls[number])
        self._check_number(number, actual, expected)
        for got, wanted in zip(actual, expected, strict=False):
            if mode.metadata_only:
                if metadata_of(got) != metadata_of(wanted):
                    raise self._failure(number, f"{metadata_of(got)}", f"{metadata_of(wanted)}")
                continue
            contract = subject.contract if self.path == "fused" else Exact()
            verdict = compare(got, wanted, contract, subject.reference, args)
            if not verdict.ok:
                raise self._failure(number, "the result is not the reference's", str(contract), str(verdict))
            if shares_memory(got, args) and not shares_memory(wanted, args):
                raise self._failure(number, "the result shares memory with an input", "a new tensor")

    def _check_number(self, number: int, actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        if len(actual) != len(expected):
            raise self._failure(number, counted(len(actual), "result"), counted(len(expected), "result"))

    def _check_witness(self) -> None:
        fusion = self._recipe.subject.fusion
        if fusion is None or fusion.witness is None or self.cell.away not in {(), ("layout",), ("dtype",), ("size",)}:
            return
        of_reference, of_fused = fusion.witness
        with self._around():
            verdict = compare(of_fused(*self.args), of_reference(*self.args))
        if not verdict.ok:
            raise self._failure(None, "the witness differs from the reference's", "equal bits", str(verdict))

    def _failure(self, number: int | None, happened: str, expected: str, more: str = "") -> CellFailure:
        where = "" if number is None else called_in_words(number, self._recipe.lifecycle.calls, self._recipe.mode)
        return failure(self.cell, where, happened, expected, more)


class _Forbidden:
    """A launcher that must not be reached, by a call or by a grid."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise CellFailure("the launcher was reached where no kernel may be launched")

    def __getitem__(self, _grid: Any) -> Any:
        self()
