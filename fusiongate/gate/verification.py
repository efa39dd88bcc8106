"""First sight: everything that is asked of a kernel on a signature before its results may be used there.

The reference runs on the live inputs; the caller gets that result, whatever comes of the rest. Then the kernel runs,
never on the live tensors: on probes with fresh numbers, because live ones may prove nothing (zeros verify any kernel),
and on copies of the live inputs, because a probe may miss what is live. All of it observes and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import Verdict, compared, unlike
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError
from fusiongate.io import counted

from .device_state import is_out_of_memory
from .global_state import CallersAutocast, GlobalState
from .guarded import LaunchGuard, aliasing, is_dense
from .hidden_inputs import DrawsRandomNumbers
from .probes import Operands, live_copies, redrawn, sharing, taller
from .signatures import tensors_of
from .spec import FusionSpec

__all__ = ["GATE", "FirstSight", "first_sight_under_way"]

GATE = "the gate"
"""Whose code runs, where it is neither the kernel's nor the reference's."""

ELEMENTS = 1 << 16
"""Elements of probes that are compared first: an all-fp32 chain passed 70 % of probes with a single element."""
ROWS = 1 << 12
"""Elements of a witness likewise: a wrong order of summation agrees with the right one in most rows."""
BATCH = 256
"""Small probes whose results are compared together."""
RESULTS = 5
"""Results of live operands that are kept beside each other: a ring of fewer buffers comes round."""
RING_BYTES = 1 << 25
"""What they may take together, two at least."""
STACKED = 1 << 16
"""Elements of a result up to which several are compared at once."""

Outputs: TypeAlias = tuple[Any, ...]

_under_way: contextvars.ContextVar[bool] = contextvars.ContextVar("fusiongate_first_sight_under_way", default=False)


def first_sight_under_way() -> bool:
    """Whether this thread is in a first sight; a kernel that is wrong on purpose may ask."""
    return _under_way.get()


class FirstSight:
    """One first sight.

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
        self._rng = Random(0x5EED)
        self._elements = 0
        self._rows = 0
        self._rows_of_the_last = 0
        self._results: list[Outputs] = []
        self._handed_back: set[tuple[int, int]] = set()
        self._autocast = CallersAutocast()
        self.running = GATE
        """Whose code runs, in words, for the story of an exception."""

    def verdict(self, expected: Outputs) -> Verdict:
        """Put the kernel through everything; the first fault is the verdict.

        Parameters
        ----------
        expected
            The outputs of the reference on the live arguments.
        """
        if not expected or not all(map(_comparable, expected)):
            story = "the reference does not return dense tensors with elements; there is nothing to compare with"
            return self._fault("reference", story, 0)
        self._outputs = len(expected)
        self._largest = max(range(len(expected)), key=lambda output: expected[output].numel())
        device = expected[0].device
        self._global = GlobalState(device)
        token = _under_way.set(True)
        try:
            with self._autocast.off():
                for fault in self._faults(expected):
                    return fault
        finally:
            _under_way.reset(token)
        reason = (
            "equal" if all(isinstance(self._spec.contract_of(i), Exact) for i in range(len(expected))) else "within"
        )
        return Verdict(True, reason, self._spec.contract_of(0), self._elements)

    def _faults(self, expected: Outputs) -> Iterator[Verdict]:
        """What is wrong with the kernel; whoever asks for one fault stops the rest of the trial."""
        live: Tensor = expected[self._largest]
        for operands in self._probes(live):
            yield from self._try_probe(operands)
        if not self._enough():
            yield from self._try_many(live)
        operands = live_copies(self._args)
        yield from self._try(operands, expected)
        yield from self._try_ring(operands, expected)
        fault = self._global.moved_generator(self._again(operands), lambda: self._expected_of(operands.args))
        if fault is not None:
            yield self._fault(*fault, live.numel())

    def _enough(self) -> bool:
        return self._elements >= ELEMENTS and (self._spec.witness is None or self._rows >= ROWS)

    def _probes_missing(self, live: Tensor) -> int:
        """How many probes of the live height would be enough."""
        missing = -(-(ELEMENTS - self._elements) // live.numel())
        if self._spec.witness is not None and self._rows_of_the_last:
            missing = max(missing, -(-(ROWS - self._rows) // self._rows_of_the_last))
        return missing

    # -- what the kernel is tried on -----------------------------------------------------------------------------------

    def _probes(self, live: Tensor) -> Iterator[Operands]:
        """Probes until enough has been compared, or until no more can be made of this height."""
        if self._spec.probe is not None:
            while not self._enough():
                yield self._run("probe=", self._of_the_user, (self._spec.probe,))
            return
        layouts = [] if self._spec.signature is None else sharing(self._spec.signature, self._args, live)
        members = [redrawn(self._args, self._rng, layout) for layout in layouts]
        members = [one for one in members if self._spec.declines(*one.args) is None]
        operands = members.pop(0) if members else redrawn(self._args, self._rng)
        yield operands
        # Into the same memory: what a kernel keeps by address would be stale now.
        for refilled in (operands, *members):
            refilled.refill(self._rng)
            yield refilled
        while not self._enough():
            higher = self._taller(live)
            if higher is None:
                return
            yield higher

    def _of_the_user(self, probe: Callable[..., Any]) -> Operands:
        args = tuple(probe(*self._args))
        fault = self._unfit(args)
        if fault is not None:
            raise UsageError(fault)
        return live_copies(args)

    def _unfit(self, args: Sequence[Any]) -> str | None:
        """Why operands of the user's are no probe."""
        if not all(tensor.numel() for tensor in tensors_of(args)):
            return "an operand has no elements"
        reason = self._spec.declines(*args)
        return None if reason is None else f"declines refuses the operands: {reason}"

    def _taller(self, live: Tensor) -> Operands | None:
        grows = self._spec.grows
        if grows is False:
            return None
        factor = self._probes_missing(live)
        operands = taller(self._args, live, factor, self._rng)
        if operands is None or self._spec.declines(*operands.args) is not None:
            return None
        if callable(grows) and not grows(self._args, operands.args):
            return None
        try:
            result = self._expected_of(operands.args)[self._largest]
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            # The reference has no batch in that direction after all.
            return None
        return operands if result.shape == (operands.batch(live.dim()), *live.shape[1:]) else None

    def _try_probe(self, operands: Operands) -> Iterator[Verdict]:
        expected = self._run_reference(operands)
        if not all(map(_comparable, expected)):
            yield self._fault("probe", "the probe's operands give a result without elements", 0)
        yield from self._try(operands, expected)
        yield from self._try_witness(operands)

    def _try_many(self, live: Tensor) -> Iterator[Verdict]:
        """Probes of the live height until enough has been compared, many at once: each may be a single element."""
        operands = redrawn(self._args, self._rng)
        first = 0
        while not self._enough():
            numbers = range(first, first + min(self._probes_missing(live), BATCH))
            first = numbers.stop
            outputs: list[tuple[Outputs, Outputs]] = []
            witnesses: list[tuple[Tensor, Tensor]] = []
            for number in numbers:
                _refill_for(number, operands)
                expected = self._run_reference(operands)
                if self._spec.witness is not None:
                    witnesses.append(self._witnesses(operands)[:2])
                found = self._outputs_of(operands)
                returned = len(found) - len(self._spec.written)
                # What was written lies in the operands, which the next probe fills again.
                outputs.append(((*found[:returned], *map(_kept, found[returned:])), expected))
            if (fault := operands.fault(self._name, self._spec.written)) is not None:
                yield self._fault(*fault, live.numel())
            for output in range(self._outputs):
                pairs = [(actual[output], expected[output]) for actual, expected in outputs]
                if _all_equal(pairs):
                    continue
                for number, (actual, expected) in zip(numbers, pairs, strict=True):
                    _refill_for(number, operands)
                    verdict = self._compared(output, actual, expected, operands)
                    if not verdict:
                        yield verdict
            self._elements += sum(expected[self._largest].numel() for _, expected in outputs)
            if witnesses:
                actual, statistic = (torch.cat([w.reshape(-1) for w in side]) for side in zip(*witnesses, strict=True))
                yield from self._witnessed(compare(actual, statistic), statistic)

    # -- one trial -----------------------------------------------------------------------------------------------------

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

    def _try_ring(self, operands: Operands, expected: Outputs) -> Iterator[Verdict]:
        """Launch a few times more on live operands and keep all results: no two may share memory, none may differ."""
        if self._spec.written:
            # Each launch would begin with what the last one wrote.
            return
        outputs: list[Outputs] = []
        for _ in range(max(2, min(RESULTS, RING_BYTES // _bytes_of(expected))) - 1):
            actual = self._outputs_of(operands)
            if len(actual) == len(expected) and (fault := self._aliasing(actual, expected, operands)) is not None:
                yield self._fault(*fault, expected[0].numel())
            self._keep(actual)
            outputs.append(actual)
        for output, wanted in enumerate(expected):
            results = [actual[output] for actual in outputs if len(actual) == len(expected)]
            if len(results) == len(outputs) and _all_equal([(got, wanted) for got in results]):
                continue
            for got in results:
                verdict = self._compared(output, got, wanted, operands)
                if not verdict:
                    yield verdict

    def _keep(self, outputs: Outputs) -> None:
        """Hold on to results, so that nobody else gets their memory; the oldest go where that would be too much."""
        self._results.append(outputs)
        while len(self._results) > 2 and sum(map(_bytes_of, self._results)) > RING_BYTES:
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


def _refill_for(number: int, operands: Operands) -> None:
    """Put the numbers of one small probe into the operands; the same ones each time."""
    operands.refill(Random(number), special=number % 2 == 1)


def _comparable(expected: object) -> bool:
    """Whether an output of the reference is one that a kernel's can be held against."""
    return is_dense(expected) and expected.numel() > 0


def _bytes_of(outputs: Outputs) -> int:
    return 1 + sum(one.numel() * one.element_size() for one in outputs if isinstance(one, Tensor))


def _kept(written: Any) -> Any:
    return written.clone() if isinstance(written, Tensor) else written


def _all_equal(pairs: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether all pairs are equal in bits, by one comparison; False also where that cannot be told at once."""
    if not all(isinstance(actual, Tensor) and actual.shape == expected.shape for actual, expected in pairs):
        return False
    if pairs[0][1].numel() > STACKED:
        return all(bool(compare(actual, expected)) for actual, expected in pairs)
    return bool(compare(torch.stack([actual for actual, _ in pairs]), torch.stack([expected for _, expected in pairs])))
