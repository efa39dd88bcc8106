"""Beside the verified path: first sight, looking again, and what is said when a kernel fails or may not run."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusiongate.comparison.verdicts import Verdict
from fusiongate.errors import BuildError, FallbackError, PoisonedDevice, UsageError
from fusiongate.platforms import environment

from .counters import Tallies
from .device_state import device_of, excuse, is_poisoned
from .hidden_inputs import UNKNOWN, DrawsRandomNumbers, HiddenInputs, watched
from .launch_checks import GATE
from .probes import live_copies
from .routing import Router
from .spec import FusionSpec
from .states import Gate, Reason, Slot, State
from .verification import FirstSight

if TYPE_CHECKING:
    from .fusion import Fusion

__all__ = ["Judge", "fell_back", "require_fused", "warm_up"]

_required: contextvars.ContextVar[bool] = contextvars.ContextVar("fusiongate_fused_required", default=False)


@contextlib.contextmanager
def require_fused() -> Iterator[None]:
    """Inside, any call of a fusion that falls back raises, naming the reason; a first sight that verifies is none.

    Raises
    ------
    FallbackError
        From the call that falls back.
    """
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)


def fell_back(name: str, reason: str) -> None:
    """Say that a fusion takes its reference.

    Raises
    ------
    FallbackError
        Inside :func:`require_fused`.
    """
    if _required.get():
        raise FallbackError(name, "reference", str(reason))


def warm_up(op_or_model: Fusion[..., Any] | nn.Module, *calls: Sequence[Any] | Mapping[str, Any]) -> None:
    """First sight for all signatures that a run will need.

    A first sight compares and therefore waits for the device, and it can break a capture that another thread has open
    in the global error mode: warm up before capturing.

    Parameters
    ----------
    op_or_model
        A fusion, or a module whose sites are to be warmed up by running it.
    calls
        One for each signature: the positional arguments, or for a module a mapping of keyword arguments.
    """
    with torch.no_grad():
        for call in calls:
            if isinstance(call, Tensor):
                raise UsageError(
                    "warm_up(op, *calls): a call is a tuple of arguments, not a tensor: warm_up(op, (x, …))"
                )
            if isinstance(call, Mapping):
                op_or_model(**call)
            else:
                op_or_model(*call)


class Judge:
    """Looks at a kernel, tells its gate what came of it, and gives the caller the reference's result.

    Parameters
    ----------
    spec
        What is on trial.
    gate
        Takes the verdicts.
    router
        Learns what was seen of the reference.
    tallies
        Counts the calls by path and reason.
    launch
        The kernel, its launches counted.
    """

    def __init__(
        self, spec: FusionSpec[..., Any], gate: Gate, router: Router, tallies: Tallies, launch: Callable[..., Any]
    ) -> None:
        self._spec = spec
        self._gate = gate
        self._router = router
        self._tallies = tallies
        self._launch = launch

    def first_sight(self, slot: Slot, args: tuple[Any, ...], *, quiet: bool = False) -> tuple[Any, Verdict | str]:
        """The reference's result, and the verdict on the kernel; or the reason why there is none.

        Parameters
        ----------
        slot
            The signature's, unseen; the gate's lock is held.
        args
            The live arguments.
        quiet
            Whether a refusal is no news.

        Raises
        ------
        FallbackError
            If the kernel is refused where kernels are required.
        PoisonedDevice
            If the kernel took the device with it.
        """
        spec = self._spec
        try:
            before = self._apart(args)
        except Exception as error:
            reason = excuse(error, args)
            if reason is None:
                raise
            return self._postpone(slot, reason, args, spec.reference(*args)), reason
        expected = spec.reference(*args)
        if torch.is_grad_enabled() and any(map(_requires_grad, spec.outputs(expected, args))):
            # No argument needs a gradient, but something that the reference holds does.
            return self._refer(expected, Reason.AUTOGRAD), Reason.AUTOGRAD
        sight, started = FirstSight(spec, self._launch, before), time.perf_counter()
        try:
            known = self._router.learn(self._hidden_inputs(before), slot, args)
            if known is None:
                return self._refer(expected, Reason.CAPACITY), Reason.CAPACITY
            slot = known
            with torch.no_grad():
                verdict = sight.verdict(spec.outputs(expected, args))
        except DrawsRandomNumbers:
            story = (
                "the reference draws random numbers: no two of its calls are alike, and nothing can be held against it"
            )
            verdict = Verdict(False, "random-state", spec.contract_of(0), 0, actual=story)
            self._gate.refuse(slot, Reason.REFUSED, self._story(story, args), quiet=quiet)
        except Exception as error:
            reason = excuse(error, args)
            if reason is not None:
                return self._postpone(slot, reason, args, expected), reason
            verdict = self.fail(slot, args, error, culprit=sight.running)
        else:
            if verdict:
                took = f"first sight took {1e3 * (time.perf_counter() - started):.1f} ms"
                self._gate.verify(slot, f"{verdict}; {took}")
            else:
                self._gate.refuse(slot, Reason.REFUSED, self._story(str(verdict), args), quiet=quiet)
        if not verdict:
            fell_back(self._gate.name, slot.reason)
        missing = slot.reason == Reason.NO_KERNEL
        self._tallies.add(("reference", str(Reason.NO_KERNEL if missing else Reason.FIRST_SIGHT)))
        return expected, verdict

    def look_again(self, slot: Slot, args: tuple[Any, ...], call: int) -> Any:
        """The reference's result, compared with the kernel's; on an asynchronous device a later call learns of it.

        Parameters
        ----------
        args
            As for :meth:`first_sight`.
        slot
            The signature's, verified.
        call
            The number of the fused call.
        """
        spec = self._spec
        try:
            before = self._apart(args)
        except Exception as error:
            reason = excuse(error, args)
            if reason is None:
                raise
            return self._refer(spec.reference(*args), reason)
        expected = spec.reference(*args)
        try:
            actual = self._launch(*before)
            with torch.no_grad():
                self._compare_later(slot, spec.outputs(actual, before), spec.outputs(expected, args), args, call)
        except Exception as error:
            reason = excuse(error, args)
            if reason is not None:
                return self._refer(expected, reason)
            self.fail(slot, args, error)
        else:
            self.found_wrong(slot, args)
        if slot.state is State.REFUSED:
            fell_back(self._gate.name, slot.reason)
        self._tallies.add(("reference", str(Reason.RECHECK)))
        return expected

    def _compare_later(
        self, slot: Slot, actual: Sequence[Any], expected: Sequence[Any], args: tuple[Any, ...], call: int
    ) -> None:
        if len(actual) != len(expected):
            story = f"a recheck found {len(actual)} outputs and expected {len(expected)}"
            self._gate.refuse(slot, Reason.REFUSED, self._story(story, args))
            return
        for output, pair in enumerate(zip(actual, expected, strict=True)):
            slot.recheck.compare(*pair, self._spec.contract_of(output), args, call)

    def _apart(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as they are now, also after the reference has written to them."""
        return live_copies(args).args if self._spec.written else args

    def _hidden_inputs(self, args: tuple[Any, ...]) -> HiddenInputs:
        try:
            return watched(self._spec.reference, self._apart(args))
        except Exception as error:
            if isinstance(error, DrawsRandomNumbers) or excuse(error, args) is not None:
                raise
            return UNKNOWN

    def found_wrong(self, slot: Slot, args: tuple[Any, ...]) -> bool:
        """Whether a recheck has reported a wrong call, for which the signature is refused then."""
        wrong = slot.recheck.first_wrong()
        if not wrong:
            return False
        right = slot.recheck.last_right
        since = f"call {right}" if right else "first sight"
        story = (
            f"a recheck found call {wrong} of this signature wrong, and the last one known to be right is {since}: "
            f"results of the fused calls in between may be wrong"
        )
        self._gate.refuse(slot, Reason.REFUSED, self._story(story, args))
        return True

    def fail(self, slot: Slot, args: tuple[Any, ...], error: Exception, *, culprit: str = "the kernel") -> Verdict:
        """Refuse a signature on which the kernel, or what else is named as the culprit, raised.

        Raises
        ------
        PoisonedDevice
            If the error took the device with it: the reference cannot run either.
        """
        if isinstance(error, BuildError):
            self._gate.refuse(slot, Reason.NO_KERNEL, f"no kernel: {error}; the reference runs instead")
            return Verdict(False, "no-kernel", self._spec.contract_of(0), 0, actual=str(error))
        if is_poisoned(args):
            raise PoisonedDevice(str(device_of(args)), error) from error
        if culprit == GATE and not isinstance(error, UsageError):
            story = (
                f"the gate cannot compare results of this kind, which is no fault of the kernel's: it raised "
                f"{type(error).__name__}: {error}"
            )
            self._gate.refuse(slot, Reason.NOT_COMPARABLE, self._story(story, args))
            return Verdict(False, Reason.NOT_COMPARABLE, self._spec.contract_of(0), 0, actual=story)
        story = f"{culprit} raised {type(error).__name__}: {error}"
        self._gate.refuse(slot, Reason.REFUSED, self._story(story, args))
        return Verdict(False, "raised", self._spec.contract_of(0), 0, actual=story)

    def _refer(self, expected: Any, reason: str) -> Any:
        fell_back(self._gate.name, reason)
        self._tallies.add(("reference", str(reason)))
        return expected

    def _postpone(self, slot: Slot, reason: str, args: tuple[Any, ...], expected: Any) -> Any:
        self._gate.record(
            reason, slot.signature, f"the comparison was not possible ({reason}); the next call tries again"
        )
        device = device_of(args)
        if reason == Reason.OUT_OF_MEMORY and device is not None and device.type == "cuda":
            torch.cuda.empty_cache()  # only on a GPU: a CPU has no such cache
        return self._refer(expected, reason)

    def _story(self, what: str, args: tuple[Any, ...]) -> str:
        """What happened, where, and what to do, for the one warning."""
        names = [*self._spec.names, *("" for _ in args)]
        operands = ", ".join(f"{name}={_described(arg)}" for name, arg in zip(names, args, strict=False))
        try:
            where = environment(device_of(args)).summary()
        except Exception as error:  # the warning matters more than its last line
            where = f"(no description of the platform: {error})"
        refused = "this signature takes" if self._gate.policy.scope == "signature" else "all signatures take"
        return (
            f"{what}\n  called with {operands}\n  on {where}\n  The reference's result was returned, and {refused} the "
            f"reference from now on. Report it with these lines; FUSIONGATE_DISABLE=1 switches all kernels off."
        )


def _requires_grad(output: object) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def _described(arg: Any) -> str:
    if not isinstance(arg, Tensor):
        return repr(arg)
    dtype = str(arg.dtype).removeprefix("torch.")
    strides = "" if arg.is_contiguous() else f" strides {tuple(arg.stride())}"
    return f"{dtype}{list(arg.shape)}{strides}"
