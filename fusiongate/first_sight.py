"""First sight: everything that is asked of a kernel on a signature before its results may be used there.

The reference runs on the live inputs; the caller gets that result, whatever comes of the rest. Then the kernel runs, never on
the live tensors: on probes with fresh numbers, because live ones may prove nothing (zeros verify any kernel), and on copies
of the live inputs, because a probe may miss what is live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .contracts import Contract, Exact
from .guarded import PoisonedAllocations, storage_range
from .probes import Operands, live_copies, redrawn, taller
from .verdicts import Verdict, compare

__all__ = ["FirstSight", "Trial", "Witness"]

ELEMENTS = 1 << 16
"""Elements of probes that are compared before a kernel is believed: an all-fp32 chain passed 70 % of one-element probes."""
ROWS = 1 << 12
"""Elements of a witness likewise: a wrong order of summation agrees with the right one in most rows."""

Function: TypeAlias = Callable[..., Any]
Witness: TypeAlias = tuple[Function, Function]
"""The reference's and the kernel's intermediate, each a function of the arguments."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is on trial."""

    reference: Function
    """The eager chain."""
    launch: Function
    """The kernel."""
    declines: Function
    """Why it may not be launched on some arguments, or None."""
    contract: Contract
    """What "same" means."""
    witness: Witness | None
    """An intermediate to compare too."""
    probe: Function | None
    """Fresh operands, as ``probe(*args)``, where redrawn ones would not do."""
    names: Sequence[str]
    """The arguments' names."""


class _Surroundings:
    """What a launch has to leave as it was: the random state, the current device and its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_state = torch.get_rng_state()
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._device_state = torch.cuda.get_rng_state(device)
            self._current = torch.cuda.current_device()
            self._stream = torch.cuda.current_stream()

    def disturbance(self) -> tuple[str, str] | None:
        if self._cuda and torch.cuda.current_device() != self._current:
            return "device", "the kernel changed the current device and did not change it back"
        if self._cuda and torch.cuda.current_stream() != self._stream:
            return "stream", "the kernel changed the current stream and did not change it back"
        if not torch.equal(torch.get_rng_state(), self._cpu_state):
            return "random-state", "the kernel moved the random state of the CPU"
        if self._cuda and not torch.equal(torch.cuda.get_rng_state(self._device), self._device_state):
            return "random-state", f"the kernel moved the random state of {self._device}"
        return None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._cuda:
            torch.cuda.set_device(self._current)
            torch.cuda.set_stream(self._stream)
            torch.cuda.set_rng_state(self._device_state, self._device)


class FirstSight:
    """One first sight.

    Parameters
    ----------
    trial
        What is on trial.
    args
        The live arguments.
    """

    def __init__(self, trial: Trial, args: tuple[Any, ...]) -> None:
        self._trial = trial
        self._args = args
        self._elements = 0
        self._rows = 0
        self._outputs: list[Tensor] = []

    def verdict(self, expected: Tensor) -> Verdict:
        """Put the kernel through everything; the first fault is the verdict.

        Parameters
        ----------
        expected
            The reference's result on the live arguments.
        """
        device = expected.device
        surroundings = _Surroundings(device)
        generator = torch.Generator(device)
        generator.manual_seed(0x5EED)
        try:
            for operands in self._probes(expected, generator):
                verdict = self._try(operands, self._reference(operands), surroundings) or self._try_witness(operands)
                if verdict is not None:
                    return verdict
                self._outputs = self._outputs[-1:]
            verdict = self._try(live_copies(self._args), expected, surroundings)
            return verdict or Verdict(True, "equal" if isinstance(self._trial.contract, Exact) else "within",
                                      self._trial.contract, self._elements)
        finally:
            surroundings.restore()

    def _probes(self, expected: Tensor, generator: torch.Generator) -> Any:
        """Probes until enough has been compared; which come next depends on what was counted before."""
        if self._trial.probe is not None:
            while not self._enough():
                yield Operands(tuple(self._trial.probe(*self._args)), {})
            return
        yield redrawn(self._args, generator, special=False)
        yield redrawn(self._args, generator, special=True)
        while not self._enough():
            yield self._taller(expected, generator) or redrawn(self._args, generator, special=False)

    def _enough(self) -> bool:
        return self._elements >= ELEMENTS and (self._trial.witness is None or self._rows >= ROWS)

    def _taller(self, expected: Tensor, generator: torch.Generator) -> Operands | None:
        factor = -(-(ELEMENTS - self._elements) // expected.numel())
        if self._trial.witness is not None and self._rows:
            # Two probes of the live height have been counted.
            factor = max(factor, -(-2 * (ROWS - self._rows) // self._rows))
        operands = taller(self._args, expected, max(factor, 2), generator)
        if operands is None or self._trial.declines(*operands.args) is not None:
            return None
        try:
            result = self._trial.reference(*operands.args)
        except (RuntimeError, ValueError, IndexError):
            # The reference has no batch in that direction after all.
            return None
        return operands if result.shape == (operands_batch(expected, operands), *expected.shape[1:]) else None

    def _reference(self, operands: Operands) -> Tensor:
        result: Tensor = self._trial.reference(*operands.args)
        return result

    def _try(self, operands: Operands, expected: Tensor, surroundings: _Surroundings) -> Verdict | None:
        surroundings.restore()
        poison = PoisonedAllocations(expected)
        with poison:
            actual = self._trial.launch(*operands.args)
        if (fault := operands.fault(self._name) or surroundings.disturbance() or self._aliasing(actual, expected, operands)) is not None:
            return self._fault(*fault, expected)
        verdict = compare(
            actual, expected, self._trial.contract, self._trial.reference, operands.args, poison=poison.poison()
        )
        if not verdict:
            return verdict
        self._elements += expected.numel()
        self._outputs.append(actual)
        return None

    def _try_witness(self, operands: Operands) -> Verdict | None:
        if self._trial.witness is None:
            return None
        of_reference, of_kernel = self._trial.witness
        expected = of_reference(*operands.args)
        verdict = compare(of_kernel(*operands.args), expected)
        # A statistic has one element a row; an intermediate has a row of elements.
        self._rows += expected.numel() if expected.dim() < 2 else expected[..., 0].numel()
        if verdict:
            return None
        story = f"the witness differs ({verdict.mismatched} of {verdict.total} rows): the outputs agree by luck, the reduction does not"
        return self._fault("witness", story, expected, verdict.hint)

    def _aliasing(self, actual: Any, expected: Tensor, operands: Operands) -> tuple[str, str] | None:
        """Whether the output shares memory with anything that was there before the launch."""
        if not isinstance(actual, Tensor) or actual.device != expected.device or actual.layout is not torch.strided:
            return None  # compare() says what is wrong with it
        begin, end = storage_range(actual)
        others = {
            "an input": [*operands.tensors(), *(arg for arg in self._args if isinstance(arg, Tensor))],
            "the reference's result": [expected],
            "an earlier call's result": self._outputs,
        }
        for what, tensors in others.items():
            for other_begin, other_end in map(storage_range, tensors):
                if begin < other_end and other_begin < end:
                    return "aliasing", f"the kernel's output shares memory with {what}"
        return None

    def _fault(self, reason: str, story: str, expected: Tensor, hint: str | None = None) -> Verdict:
        return Verdict(False, reason, self._trial.contract, expected.numel(), actual=story, hint=hint)

    def _name(self, position: int) -> str:
        return self._trial.names[position] if position < len(self._trial.names) else f"argument {position}"


def operands_batch(expected: Tensor, operands: Operands) -> int:
    """The batch of the operands, of which at least one spans it."""
    sizes = [t.shape[0] for t in operands.tensors() if t.dim() == expected.dim()]
    return max(sizes, default=expected.shape[0])
