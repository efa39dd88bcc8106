"""What is asked of a kernel on one set of operands: what it returns, writes, leaves alone and leaves behind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import Verdict, compared, unlike
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError
from fusiongate.io import counted

from .global_state import CallersAutocast, GlobalState
from .guarded import LaunchGuard, aliasing, is_dense
from .hidden_inputs import DrawsRandomNumbers
from .probes import Operands, live_copies
from .spec import FusionSpec

__all__ = ["GATE", "RING_BYTES", "LaunchChecks", "Outputs", "bytes_of", "comparable"]

GATE = "the gate"
"""Whose code runs, where it is neither the kernel's nor the reference's."""
RING_BYTES = 1 << 25
"""What results that are kept may take together, two at least."""

Outputs: TypeAlias = tuple[Any, ...]


class LaunchChecks:
    """The launches of one first sight, and what they have in common.

    Parameters
    ----------
    spec
        What is on trial.
    launch
        The kernel, its launches counted.
    args
        The live arguments, as they were before the reference ran.
    """

    def __init__(self, spec: FusionSpec[..., Any], launch: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._spec = spec
        self._launch = launch
        self._args = args
        self._elements = 0
        self._rows = 0
        self._rows_of_the_last = 0
        self._results: list[Outputs] = []
        self._handed_back: set[tuple[int, int]] = set()
        self._autocast = CallersAutocast()
        self.running = GATE
        """Whose code runs, in words, for the story of an exception."""

    def _begin(self, expected: Outputs) -> None:
        """Take note of the live outputs of the reference."""
        self._outputs = len(expected)
        self._largest = max(range(len(expected)), key=lambda output: expected[output].numel())
        self._global = GlobalState(expected[0].device)

    def _run(self, whose: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call somebody else's code, and remember whose it was should it raise."""
        self.running = whose
        with self._autocast.on():
            result = function(*args)
        self.running = GATE
        return result

    def _run_reference(self, operands: Operands) -> Outputs:
        self.running = "the reference, on fresh operands,"
        expected = self._expected_of(operands.args)
        self.running = GATE
        return expected

    def _expected_of(self, args: tuple[Any, ...]) -> Outputs:
        """The reference's outputs; what it writes is a copy."""
        args = self._apart(args)
        versions = [(name, tensor, tensor._version) for name, tensor in self._unwritten(args)]
        with self._autocast.on():
            result = self._spec.reference(*args)
        for name, tensor, version in versions:
            if tensor._version != version:
                raise UsageError(
                    f"the reference writes its argument `{name}`: expected mutates_args= to name it, or a reference "
                    f"that leaves it alone"
                )
        outputs = self._spec.outputs(result, args)
        # A reference that gives back what it was given allows its kernel to.
        self._handed_back = {
            (output, place) for output, one in enumerate(outputs) for place, arg in enumerate(args) if one is arg
        }
        return outputs

    def _unwritten(self, args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
        for position, arg in enumerate(args):
            # A tensor that was made in inference mode counts no writes.
            if isinstance(arg, Tensor) and position not in self._spec.written and not arg.is_inference():
                yield self._name(position), arg

    def _outputs_of(self, operands: Operands) -> Outputs:
        """The kernel's outputs on operands; None is one that it forgot, unless it is to write only."""
        result = self._run("the kernel", self._launch, operands.args)
        if result is None and not self._spec.written:
            return (None,)
        return self._spec.outputs(result, operands.args)

    def _try(self, operands: Operands, expected: Outputs) -> Iterator[Verdict]:
        guard = LaunchGuard(expected)
        self._global.note()
        actual: Outputs = ()
        with guard, contextlib.suppress(DrawsRandomNumbers):
            actual = self._outputs_of(operands)
        # What is current first: on another stream, canaries would be read before the kernel's work is done.
        fault = self._global.fault(self._again(operands)) or operands.fault(self._name, self._spec.written)
        if fault is None and guard.drew:
            fault = "random-state", "the kernel draws random numbers, which would move the random state that all share"
        if fault is not None:
            yield self._fault(*fault, expected[0].numel())
        if len(actual) != len(expected):
            story = (
                f"the kernel gives {counted(len(actual), 'output')}, the reference {counted(len(expected), 'output')}"
            )
            yield self._fault("outputs", story, expected[0].numel())
        if (fault := self._aliasing(actual, expected, operands)) is not None:
            yield self._fault(*fault, expected[0].numel())
        for output, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            verdict = self._compared(output, got, wanted, operands, guard)
            if not verdict:
                if verdict.reason == "bits":
                    # A wrong statistic explains wrong outputs, and a few of those can look like anything.
                    yield from self._try_witness(operands)
                yield verdict
            if (difference := unlike(got, wanted)) is not None:
                yield replace(self._fault("metadata", difference, wanted.numel()), output=self._which(output))
        # After the values: what another stream has yet to do would be told as this.
        if guard.overrun():
            story = "the kernel wrote outside of its output, or of other memory that it allocated"
            yield self._fault("overrun", story, expected[0].numel())
        self._elements += expected[self._largest].numel()
        self._keep(actual)

    def _again(self, operands: Operands) -> Callable[[], object]:
        return lambda: self._launch(*live_copies(operands.args).args)

    def _keep(self, outputs: Outputs) -> None:
        """Hold on to results, so that nobody else gets their memory; the oldest go where that would be too much."""
        self._results.append(outputs)
        while len(self._results) > 2 and sum(map(bytes_of, self._results)) > RING_BYTES:
            del self._results[0]

    def _compared(
        self, output: int, actual: Any, expected: Tensor, operands: Operands, guard: LaunchGuard | None = None
    ) -> Verdict:
        contract = self._spec.contract_of(output)
        verdict, _ = compared(actual, expected, contract, operands.args)
        if verdict:
            return verdict
        poison = None if guard is None else guard.poison(actual, expected)
        verdict = compare(actual, expected, contract, self._reference_of(output), operands.args, poison=poison)
        return replace(verdict, output=self._which(output))

    def _reference_of(self, output: int) -> Callable[..., Any]:
        """The chain that gives one output, for a hint."""
        if self._outputs == 1 and not self._spec.written:
            return self._spec.reference
        return lambda *args: self._expected_of(args)[output]

    def _which(self, output: int) -> str:
        """Which of several outputs, in words."""
        returned = self._outputs - len(self._spec.written)
        if output >= returned:
            return f"`{self._spec.mutates_args[output - returned]}`, which is written"
        return "" if self._outputs == 1 else f"output {output + 1} of {self._outputs}"

    def _try_witness(self, operands: Operands) -> Iterator[Verdict]:
        if self._spec.witness is None:
            return
        of_reference, _ = self._spec.witness
        actual, expected, guard = self._witnesses(operands)
        verdict, _ = compared(actual, expected, Exact())
        if not verdict:
            poison = guard.poison(actual, expected)
            verdict = compare(actual, expected, Exact(), of_reference, operands.args, poison=poison)
        yield from self._witnessed(verdict, expected)

    def _witnesses(self, operands: Operands) -> tuple[Any, Tensor, LaunchGuard]:
        """The kernel's statistic and the reference's."""
        assert self._spec.witness is not None
        of_reference, of_kernel = self._spec.witness
        expected = self._run("the reference's witness", of_reference, self._apart(operands.args))
        # The statistic is an output too: memory that the reference's has just left must not pass for the kernel's.
        guard = LaunchGuard((expected,))
        with guard:
            actual = self._run("the kernel's witness", of_kernel, self._apart(operands.args))
        return actual, expected, guard

    def _apart(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, or copies where they are going to be written."""
        return live_copies(args).args if self._spec.written else args

    def _witnessed(self, verdict: Verdict, expected: Tensor) -> Iterator[Verdict]:
        if not verdict:
            story = (
                f"the witness differs ({verdict.mismatched:,} of {verdict.total:,} elements): where outputs agree, "
                f"they do so by luck, the reduction does not"
            )
            yield self._fault("witness", story, verdict.total, verdict.hint)
        # A statistic has one element a row; an intermediate has a row of elements.
        self._rows_of_the_last = expected.numel() if expected.dim() < 2 else expected[..., 0].numel()
        self._rows += self._rows_of_the_last

    def _aliasing(self, actual: Outputs, expected: Outputs, operands: Operands) -> tuple[str, str] | None:
        """Whether an output shares memory with anything that was there before the launch, or with another output."""
        handed_back = {output for output, place in self._handed_back if actual[output] is operands.args[place]}
        returned = range(self._outputs - len(self._spec.written))
        others = {
            "an input": (*operands.args, *self._args),
            "the reference's result": expected,
            "an earlier call's result": tuple(itertools.chain.from_iterable(self._results)),
        }
        return aliasing([(actual[one], expected[one]) for one in returned if one not in handed_back], others)

    def _fault(self, reason: str, story: str, total: int, hint: str | None = None) -> Verdict:
        return Verdict(False, reason, self._spec.contract_of(0), total, actual=story, hint=hint)

    def _name(self, position: int) -> str:
        return self._spec.names[position] if position < len(self._spec.names) else f"argument {position}"


def comparable(expected: object) -> bool:
    """Whether an output of the reference is one that a kernel's can be held against."""
    return is_dense(expected) and expected.numel() > 0


def bytes_of(outputs: Outputs) -> int:
    """What outputs take, in bytes, at least one."""
    return 1 + sum(one.numel() * one.element_size() for one in outputs if isinstance(one, Tensor))
