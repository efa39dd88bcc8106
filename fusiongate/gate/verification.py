"""First sight: everything that is asked of a kernel on a signature before its results may be used there.

The reference runs on the live inputs; the caller gets that result, whatever comes of the rest. Then the kernel runs,
never on the live tensors: on probes with fresh numbers, because live ones may prove nothing (zeros verify any kernel),
and on copies of the live inputs, because a probe may miss what is live. All of it observes and disturbs nobody.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import Verdict
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError

from .device_state import is_out_of_memory
from .launch_checks import RING_BYTES, LaunchChecks, Outputs, bytes_of, comparable
from .probes import Operands, live_copies, redrawn, sharing, taller
from .signatures import tensors_of
from .spec import FusionSpec

__all__ = ["FirstSight", "first_sight_under_way"]

ELEMENTS = 1 << 16
"""Elements of probes that are compared first: an all-fp32 chain passed 70 % of probes with a single element."""
ROWS = 1 << 12
"""Elements of a witness likewise: a wrong order of summation agrees with the right one in most rows."""
BATCH = 256
"""Small probes whose results are compared together."""
RESULTS = 5
"""Results of live operands that are kept beside each other: a ring of fewer buffers comes round."""
STACKED = 1 << 16
"""Elements of a result up to which several are compared at once."""

_under_way: contextvars.ContextVar[bool] = contextvars.ContextVar("fusiongate_first_sight_under_way", default=False)


def first_sight_under_way() -> bool:
    """Whether this thread is in a first sight; a kernel that is wrong on purpose may ask."""
    return _under_way.get()


class FirstSight(LaunchChecks):
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
        super().__init__(spec, launch, args)
        self._rng = Random(0x5EED)

    def verdict(self, expected: Outputs) -> Verdict:
        """Put the kernel through everything; the first fault is the verdict.

        Parameters
        ----------
        expected
            The outputs of the reference on the live arguments.
        """
        if not expected or not all(map(comparable, expected)):
            story = "the reference does not return dense tensors with elements; there is nothing to compare with"
            return self._fault("reference", story, 0)
        self._begin(expected)
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
        if not all(map(comparable, expected)):
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

    def _try_ring(self, operands: Operands, expected: Outputs) -> Iterator[Verdict]:
        """Launch a few times more on live operands and keep all results: no two may share memory, none may differ."""
        if self._spec.written:
            # Each launch would begin with what the last one wrote.
            return
        outputs: list[Outputs] = []
        for _ in range(max(2, min(RESULTS, RING_BYTES // bytes_of(expected))) - 1):
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


def _refill_for(number: int, operands: Operands) -> None:
    """Put the numbers of one small probe into the operands; the same ones each time."""
    operands.refill(Random(number), special=number % 2 == 1)


def _all_equal(pairs: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether all pairs are equal in bits, by one comparison; False also where that cannot be told at once."""
    if not all(isinstance(actual, Tensor) and actual.shape == expected.shape for actual, expected in pairs):
        return False
    if pairs[0][1].numel() > STACKED:
        return all(bool(compare(actual, expected)) for actual, expected in pairs)
    return bool(compare(torch.stack([actual for actual, _ in pairs]), torch.stack([expected for _, expected in pairs])))


def _kept(written: Any) -> Any:
    return written.clone() if isinstance(written, Tensor) else written
