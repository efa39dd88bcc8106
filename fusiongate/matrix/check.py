"""Prepared cells: a subject, its operands and what has to come of them; then the check itself."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusiongate.comparison.contracts import Contract, Exact
from fusiongate.comparison.verdicts import Verdict, unlike
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import FusiongateError
from fusiongate.gate.global_state import kept_settings
from fusiongate.gate.signatures import tensors_of
from fusiongate.io import counted
from fusiongate.subjects import Launcher, Subject, Trial

from .cells import Cell, CellFailure, CellResult, NotRun, Outcome, Path, described
from .inputs import HUGE_ELEMENTS
from .layouts import copied, on_copies
from .lifecycles import Forbidden, Lifecycle
from .modes import Mode
from .operands import Watched, metadata_of, results_of, shares_memory
from .steps import Step, calls_told, launches_told, steps_due
from .tracing import of_the_compiler

__all__ = ["PreparedCell"]

_FIRST_SIGHT = ("reference", "first-sight")


class PreparedCell:
    """One cell with the operands of its first call, and what has to come of them.

    Parameters
    ----------
    cell
        The cell.
    subject
        What runs: the host build on the host.
    mode, lifecycle
        How it is called, and what its gate goes through.
    device
        The device of the call.
    draw
        Gives the arguments of a call by its number: other data, the same signature.
    elsewhere
        Gives arguments of another signature.
    layout_forces
        The reason for which no gate may launch on the layout, whatever its predicate says.
    must_launch
        Whether the cell has to launch, whatever the predicate says.
    may_decline
        The reason for which the cell is documented to be declined.

    Raises
    ------
    NotRun
        The operands cannot be made on this machine.
    """

    def __init__(
        self,
        cell: Cell,
        subject: Subject,
        mode: Mode,
        lifecycle: Lifecycle,
        device: torch.device,
        *,
        draw: Callable[[int], tuple[Any, ...]],
        elsewhere: Callable[[], tuple[Any, ...]],
        layout_forces: str | None,
        must_launch: bool,
        may_decline: str | None,
    ) -> None:
        self.cell = cell
        """The cell as data."""
        self._subject = subject
        self._mode = mode
        self._lifecycle = lifecycle
        self._device = device
        self._drawn = draw
        self._elsewhere = elsewhere
        self._must_launch = must_launch
        self._may_decline = may_decline
        # What it writes is a copy: the operands of a call are the same for the reference and for the subject.
        self._plainly = on_copies(subject.reference, subject.written)
        self._reference = mode.called(subject.reference, subject.written, device) if mode.alike else self._plainly
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
            self._steps = steps_due(subject, mode, lifecycle, layout_forces, self.args, self._raised)
        self._last: Step = [step for steps in self._steps for step in steps][-1]

    def _check_traceable(self) -> None:
        try:
            self._mode.called(self._subject.reference, self._subject.written, self._device)(*self.args)
        except Exception as error:
            raise NotRun(f"{self._mode.name} does not trace the reference: {described(error)}") from error

    @property
    def path(self) -> Path:
        """The path that the last call has to take."""
        return self._last.path

    @property
    def reason(self) -> str:
        """The published reason for it; the exception's name where eager raises."""
        return self._last.reason

    @property
    def expected(self) -> Any:
        """What the reference makes of `args`, of several outputs a tuple; raises what eager raises."""
        if self._raised is not None:
            raise self._raised
        outputs = results_of(self._first)
        return outputs[0] if len(outputs) == 1 else outputs

    def check(self) -> CellResult:
        """Call the subject, and assert path, reason, launches, bits and strides of every call.

        Raises
        ------
        CellFailure
            One of them is another than it has to be.
        """
        __tracebackhide__ = True
        started = time.perf_counter()
        self._check_declared()
        calls = len(self._steps)
        with self._lifecycle.around(), self._trial() as trial:
            self._lifecycle.ready(trial, self._elsewhere)
            call = self._mode.called(trial.call, self._subject.written, self._device)
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
        if self._must_launch and self.path != "fused":
            happened = f"must fuse, but declined: {self.reason}"
            raise self._failure(None, happened, f"fused (verified): {self._how_to_mean(self.reason)}")
        if self._may_decline is not None and (self.path, self.reason) != ("reference", self._may_decline):
            raise self._failure(
                None,
                f"{self.path} ({self.reason})",
                f"reference ({self._may_decline}), as may_decline says: change it there if the kernel has changed",
            )

    def _how_to_mean(self, reason: str) -> str:
        """Say how the marker tells that this cell may be declined."""
        axis = next((name for name in ("dtype", "size", "layout") if name in self.cell.away), "layout")
        meant = f"may_decline={{{getattr(self.cell, axis)!r}: {reason!r}}}"
        return (
            f"the layout stands in must_fuse; where the kernel is not for this {axis}, the marker says so: {meant}, or "
            f"only=[…] with the dtypes, sizes and layouts that it is for"
        )

    # The calls --------------------------------------------------------------------------------------------------------

    def _draw(self, number: int) -> tuple[Any, ...]:
        mode = self._mode
        with self._around() if mode.made_inside else contextlib.nullcontext():
            drawn = self._drawn(number)
            kept = self._subject.written if mode.leaves_written else ()
            return tuple(drawn[place] if place in kept else one for place, one in enumerate(mode.convert(drawn)))

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        return self._mode.around(self._device)

    def _trial(self) -> contextlib.AbstractContextManager[Trial]:
        variant = self._lifecycle.variant
        if self._mode.launcher_fails:
            return self._subject.trial(lambda _launcher: Forbidden(), variant)
        return self._subject.trial(None if self._lifecycle.stand_in is None else self._stand_in, variant)

    def _stand_in(self, launcher: Launcher) -> Launcher:
        stand_in = self._lifecycle.stand_in
        assert stand_in is not None
        if hasattr(type(launcher), "__getitem__"):
            raise NotRun("nothing can stand in for a kernel that launches by kernel[grid]: its outputs are not known")
        return stand_in(launcher, self.args)

    def _check_call(self, trial: Trial, call: Callable[..., Any], number: int) -> None:
        args = self.args if number == 0 else self._draw(number)
        watched = (
            []
            if self._mode.metadata_only
            else [Watched(tensor, is_huge=tensor.numel() >= HUGE_ELEMENTS) for tensor in tensors_of(args)]
        )
        with self._around():
            expected, raised = self._expected_of(args, number)
            before = trial.launches, trial.counts
            try:
                with kept_settings() as left:
                    actual = call(*args)
            except Exception as error:
                self._check_raised(number, error, raised)
                self._check_path(trial, before, number)
                return
            self._check_returned(number, raised)
            self._check_path(trial, before, number)
        if left:
            raise self._failure(number, f"it left changed: the {', the '.join(left)}", "what is global stays as it was")
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
            if number > 0 and steps and self._lifecycle.stand_in is None and launched != bool(launches):
                raise self._failure(
                    number,
                    launches_told(launches),
                    f"{'a launch' if launched else 'no launch'} ({steps[-1].reason})",
                )
            return
        taken = Counter(trial.counts)
        taken.subtract(before[1])
        taken += Counter()
        forced = self._mode.forced
        counted = forced is None or forced.counted
        due = Counter((str(step.path), step.reason) for step in steps if counted)
        if taken != due:
            if _FIRST_SIGHT in due and set(taken) - set(due) == {("reference", "out-of-memory")}:
                raise NotRun("too little free memory on the device to compare a kernel at this size")
            raise self._failure(
                number,
                f"{calls_told(taken)}, {launches_told(launches)}",
                calls_told(due),
                self._story(trial) if any(reason == "refused" for _, reason in taken) else "",
            )
        self._check_launches(trial, number, launches, steps)

    def _check_not_launched(self, number: int, launches: int) -> None:
        if launches:
            raise self._failure(number, launches_told(launches), "no launch where eager raises")

    def _check_launches(self, trial: Trial, number: int, launches: int, steps: tuple[Step, ...]) -> None:
        fused = sum(step.path == "fused" for step in steps)
        if not any(step.reason == "first-sight" for step in steps):
            if launches != fused:
                reasons = ", ".join(sorted({step.reason for step in steps})) or "nothing reaches the gate"
                raise self._failure(number, launches_told(launches), f"{launches_told(fused)} ({reasons})")
        elif launches <= fused and not self._lifecycle.launch_raises:
            # What the kernel raised, or was about to do, says why.
            happened, expected = launches_told(launches), "first sight launches the kernel to compare it"
            story = self._story(trial)
            if raised := re.search(r"the kernel raised (.*)", story):
                happened += f": the kernel raised {raised[1]}"
                reason = "alignment" if "offset-" in self.cell.layout else "a reason"
                expected += f"; where it is not for such arguments, add {reason!r} to what declines gives"
            raise self._failure(number, happened, expected, story)

    def _story(self, trial: Trial) -> str:
        """What differs when the kernel runs on the cell's own arguments: says more than that it was refused."""
        fusion = trial.fusion
        if fusion is None:
            return ""
        lines = [str(event) for event in fusion.gate.events]
        with self._around(), kept_settings():
            try:
                actual = results_of(on_copies(fusion.fused, self._subject.written)(*self.args))
                expected = results_of(self._plainly(*self.args))
                pairs = zip(range(len(expected)), actual, expected, strict=False)
                verdicts = [self._compared(*pair, self.args) for pair in pairs]
            except Exception as error:
                return "\n".join([*lines, f"on this cell's arguments the kernel raised {described(error)}"])
        verdict = next((verdict for verdict in verdicts if not verdict), verdicts[0])
        # What the gate has found already is not told twice.
        if not any(f"hint: {verdict.hint}" in line for line in lines):
            lines.append(f"on this cell's arguments: {verdict}")
        return "\n".join(lines)

    # The bits ---------------------------------------------------------------------------------------------------------

    def _check_bits(
        self,
        number: int,
        args: tuple[Any, ...],
        actual: tuple[torch.Tensor, ...],
        expected: tuple[torch.Tensor, ...],
    ) -> None:
        mode, outputs = self._mode, len(expected)
        if not mode.alike:
            # A mode that calls several times gives a result of each; a replay calls nothing.
            expected = expected * max(1, mode.gate_calls[number])
        self._check_number(number, actual, expected)
        for place, (got, wanted) in enumerate(zip(actual, expected, strict=False)):
            if mode.metadata_only:
                if metadata_of(got) != metadata_of(wanted):
                    raise self._failure(number, f"{metadata_of(got)}", f"{metadata_of(wanted)}")
                continue
            output = place % outputs
            verdict = self._compared(output, got, wanted, args)
            if not verdict.ok:
                happened = f"{self._which(output, outputs)} is not the reference's"
                raise self._failure(number, happened, str(self._contract(output)), str(verdict))
            if mode.alike and (difference := unlike(got, wanted)) is not None:
                raise self._failure(number, difference, "a result of the reference's kind")
            if shares_memory(got, args) and not shares_memory(wanted, args):
                raise self._failure(number, "the result shares memory with an input", "a new tensor")

    def _contract(self, output: int) -> Contract:
        return self._subject.contract_of(output) if self.path == "fused" else Exact()

    def _compared(self, output: int, actual: Any, expected: torch.Tensor, args: tuple[Any, ...]) -> Verdict:
        """An output against the reference's; the hint replays the chain that gives this one."""
        subject, plainly = self._subject, self._plainly

        # With its parameters, by which a hint calls the operands.
        @functools.wraps(subject.reference)
        def one_output(*given: Any) -> torch.Tensor:
            return results_of(plainly(*given))[output]

        alone = not subject.written and not isinstance(self._first, tuple)
        return compare(actual, expected, self._contract(output), subject.reference if alone else one_output, args)

    def _which(self, output: int, outputs: int) -> str:
        """Which of several outputs, in words."""
        fusion, returned = self._subject.fusion, outputs - len(self._subject.written)
        if fusion is None or self._mode.alike or outputs == 1 or output < returned == 1:
            return "the result"
        if output < returned:
            return f"result {output + 1} of {returned}"
        return f"`{fusion.spec.mutates_args[output - returned]}`, which is written,"

    def _check_number(self, number: int, actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        if len(actual) != len(expected):
            raise self._failure(number, counted(len(actual), "result"), counted(len(expected), "result"))

    def _check_witness(self) -> None:
        fusion = self._subject.fusion
        if fusion is None or fusion.witness is None or self.cell.away not in {(), ("layout",), ("dtype",), ("size",)}:
            return
        of_reference, of_fused = fusion.witness
        with self._around():
            given = [tuple(map(_own, self.args)) if self._subject.written else self.args for _ in range(2)]
            verdict = compare(of_fused(*given[0]), of_reference(*given[1]))
        if not verdict.ok:
            raise self._failure(None, "the witness differs from the reference's", "equal bits", str(verdict))

    def _failure(self, number: int | None, happened: str, expected: str, more: str = "") -> CellFailure:
        """A failure at a call; which replay it was is said too: what a replay gives is no launch's fault."""
        where = "" if number is None else f", call {number + 1} of {self._lifecycle.calls}"
        if number is not None and (replay := self._mode.replays[number]):
            where += f", on replay {replay}"
        return CellFailure.at(self.cell, where, happened, expected, more)


def _own(argument: Any) -> Any:
    return copied(argument) if isinstance(argument, torch.Tensor) else argument
