"""First sight: everything that is asked of a kernel on a signature before its results may be used there.

The reference runs on the live inputs; the caller gets that result, whatever comes of the rest. Then the kernel runs,
never on the live tensors: on probes with fresh numbers, because live ones may prove nothing (zeros verify any kernel),
and on copies of the live inputs, because a probe may miss what is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import Verdict
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError

from .device_state import Surroundings, is_out_of_memory
from .guarded import PoisonedAllocations, storage_range
from .probes import Operands, live_copies, redrawn, taller
from .signatures import tensors_of
from .spec import FusionSpec

__all__ = ["FirstSight"]

ELEMENTS = 1 << 16
"""Elements of probes that are compared first: an all-fp32 chain passed 70 % of probes with a single element."""
ROWS = 1 << 12
"""Elements of a witness likewise: a wrong order of summation agrees with the right one in most rows."""
BATCH = 256
"""Small probes whose results are compared together."""


class FirstSight:
    """One first sight.

    Parameters
    ----------
    spec
        What is on trial.
    launch
        The kernel, its launches counted.
    args
        The live arguments.
    """

    def __init__(self, spec: FusionSpec[..., Any], launch: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._spec = spec
        self._launch = launch
        self._args = args
        self._elements = 0
        self._rows = 0
        self._earlier: Tensor | None = None
        self.running = "the gate"
        """Whose code runs, in words, for the story of an exception."""

    def verdict(self, expected: Tensor) -> Verdict:
        """Put the kernel through everything; the first fault is the verdict.

        Parameters
        ----------
        expected
            The reference's result on the live arguments.
        """
        if not _comparable(expected):
            story = "the reference does not return one dense tensor with elements; there is nothing to compare with"
            return self._fault("reference", story, 0)
        surroundings = Surroundings(expected.device)
        generator = torch.Generator(expected.device)
        generator.manual_seed(0x5EED)
        try:
            for fault in self._faults(expected, generator, surroundings):
                return fault
        finally:
            surroundings.restore()
        reason = "equal" if isinstance(self._spec.contract_of(0), Exact) else "within"
        return Verdict(True, reason, self._spec.contract_of(0), self._elements)

    def _faults(self, expected: Tensor, generator: torch.Generator, surroundings: Surroundings) -> Iterator[Verdict]:
        """What is wrong with the kernel; whoever asks for one fault stops the rest of the trial."""
        for operands in self._probes(expected, generator):
            reference = self._run("the reference, on fresh operands,", self._spec.reference, operands.args)
            if not _has_elements(reference):
                yield self._fault("probe", "the probe's operands give a result without elements", expected.numel())
            yield from self._try(operands, reference, surroundings)
            yield from self._try_witness(operands)
        if not self._enough():
            yield from self._try_many(expected, generator)
        yield from self._try(live_copies(self._args), expected, surroundings)

    def _enough(self) -> bool:
        return self._elements >= ELEMENTS and (self._spec.witness is None or self._rows >= ROWS)

    def _probes_missing(self, expected: Tensor) -> int:
        """How many probes of the live height would be enough; two at least have been counted."""
        missing = -(-(ELEMENTS - self._elements) // expected.numel())
        if self._spec.witness is not None and self._rows:
            missing = max(missing, -(-2 * (ROWS - self._rows) // self._rows))
        return missing

    # -- what the kernel is tried on -----------------------------------------------------------------------------------

    def _probes(self, expected: Tensor, generator: torch.Generator) -> Iterator[Operands]:
        """Probes until enough has been compared, or until no more can be made of this height."""
        if self._spec.probe is not None:
            while not self._enough():
                yield self._run("probe=", self._of_the_user, (self._spec.probe,))
            return
        yield redrawn(self._args, generator, special=False)
        yield redrawn(self._args, generator, special=True)
        while not self._enough():
            higher = self._taller(expected, generator)
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

    def _taller(self, expected: Tensor, generator: torch.Generator) -> Operands | None:
        grows = self._spec.grows
        if grows is False:
            return None
        factor = self._probes_missing(expected)
        operands = taller(self._args, expected, factor, generator)
        if operands is None or self._spec.declines(*operands.args) is not None:
            return None
        if callable(grows) and not grows(self._args, operands.args):
            return None
        try:
            result = self._spec.reference(*operands.args)
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            # The reference has no batch in that direction after all.
            return None
        return operands if result.shape == (operands.batch(expected.dim()), *expected.shape[1:]) else None

    def _try_many(self, expected: Tensor, generator: torch.Generator) -> Iterator[Verdict]:
        """Probes of the live height until enough has been compared, many at once: each may be a single element."""
        spec = self._spec
        operands = redrawn(self._args, generator, special=False)
        of_reference, of_kernel = spec.witness or (spec.reference, self._launch)
        while not self._enough():
            refills = operands.refills(min(self._probes_missing(expected), BATCH), generator)
            outputs: list[tuple[Tensor, Tensor]] = []
            witnesses: list[tuple[Tensor, Tensor]] = []
            for _ in refills:
                reference = self._run("the reference, on fresh operands,", spec.reference, operands.args)
                outputs.append((self._run("the kernel", self._launch, operands.args), reference))
                if spec.witness is not None:
                    statistic = self._run("the reference's witness", of_reference, operands.args)
                    witnesses.append((self._run("the kernel's witness", of_kernel, operands.args), statistic))
            if (fault := operands.fault(self._name)) is not None:
                yield self._fault(*fault, expected.numel())
            if not _all_equal(outputs):
                for _, (actual, reference) in zip(refills, outputs, strict=True):
                    verdict = compare(actual, reference, spec.contract_of(0), spec.reference, operands.args)
                    if not verdict:
                        yield verdict
            self._elements += sum(reference.numel() for _, reference in outputs)
            if witnesses:
                actual, statistic = (torch.cat([w.reshape(-1) for w in side]) for side in zip(*witnesses, strict=True))
                yield from self._witnessed(compare(actual, statistic), statistic)

    # -- one trial -----------------------------------------------------------------------------------------------------

    def _run(self, whose: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call somebody else's code, and remember whose it was should it raise."""
        self.running = whose
        result = function(*args)
        self.running = "the gate"
        return result

    def _try(self, operands: Operands, expected: Tensor, surroundings: Surroundings) -> Iterator[Verdict]:
        surroundings.restore()
        poison = PoisonedAllocations(expected)
        with poison:
            actual = self._run("the kernel", self._launch, operands.args)
        # What is current first: on another stream, canaries would be read before the kernel's work is done.
        fault = surroundings.disturbance() or operands.fault(self._name) or self._aliasing(actual, expected, operands)
        if fault is not None:
            yield self._fault(*fault, expected.numel())
        verdict = compare(
            actual,
            expected,
            self._spec.contract_of(0),
            self._spec.reference,
            operands.args,
            poison=poison.poison(actual),
        )
        if not verdict:
            if verdict.reason == "bits":
                # A wrong statistic explains wrong outputs, and a few of those can look like anything.
                yield from self._try_witness(operands)
            yield verdict
        self._elements += expected.numel()
        self._earlier = actual

    def _try_witness(self, operands: Operands) -> Iterator[Verdict]:
        if self._spec.witness is None:
            return
        of_reference, of_kernel = self._spec.witness
        expected = self._run("the reference's witness", of_reference, operands.args)
        # The statistic is an output too: memory that the reference's has just left must not pass for the kernel's.
        poison = PoisonedAllocations(expected)
        with poison:
            actual = self._run("the kernel's witness", of_kernel, operands.args)
        verdict = compare(actual, expected, Exact(), of_reference, operands.args, poison=poison.poison(actual))
        yield from self._witnessed(verdict, expected)

    def _witnessed(self, verdict: Verdict, expected: Tensor) -> Iterator[Verdict]:
        if not verdict:
            story = (
                f"the witness differs ({verdict.mismatched:,} of {verdict.total:,} elements): where outputs agree, "
                f"they do so by luck, the reduction does not"
            )
            yield self._fault("witness", story, verdict.total, verdict.hint)
        # A statistic has one element a row; an intermediate has a row of elements.
        self._rows += expected.numel() if expected.dim() < 2 else expected[..., 0].numel()

    def _aliasing(self, actual: Any, expected: Tensor, operands: Operands) -> tuple[str, str] | None:
        """Whether the output shares memory with anything that was there before the launch."""
        if not isinstance(actual, Tensor) or actual.device != expected.device or actual.layout is not torch.strided:
            return None  # compare() says what is wrong with it
        begin, end = storage_range(actual)
        others = {
            "an input": [*operands.tensors(), *tensors_of(self._args)],
            "the reference's result": [expected],
            "an earlier call's result": [] if self._earlier is None else [self._earlier],
        }
        for what, tensors in others.items():
            for other_begin, other_end in map(storage_range, tensors):
                if begin < other_end and other_begin < end:
                    return "aliasing", f"the kernel's output shares memory with {what}"
        return None

    def _fault(self, reason: str, story: str, total: int, hint: str | None = None) -> Verdict:
        return Verdict(False, reason, self._spec.contract_of(0), total, actual=story, hint=hint)

    def _name(self, position: int) -> str:
        return self._spec.names[position] if position < len(self._spec.names) else f"argument {position}"


def _comparable(expected: object) -> bool:
    """Whether the reference's result is one that a kernel's can be held against."""
    return isinstance(expected, Tensor) and expected.layout is torch.strided and expected.numel() > 0


def _has_elements(result: Tensor) -> bool:
    return result.numel() > 0


def _all_equal(pairs: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether all pairs are equal in bits, by one comparison; False also where that cannot be told at once."""
    if not all(isinstance(actual, Tensor) and actual.shape == expected.shape for actual, expected in pairs):
        return False
    return bool(compare(torch.stack([actual for actual, _ in pairs]), torch.stack([expected for _, expected in pairs])))
