"""A fusion: reference, kernel, predicate, contract and gate as one callable."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from .contracts import Contract, Exact
from .errors import BuildError, FallbackError, PoisonedDevice, UsageError
from .first_sight import FirstSight, Trial, Witness
from .gates import Decision, Gate, Policy, Reason, Slot, State, Tallies
from .platforms import environment
from .rechecks import Recheck
from .registered import RegisteredOp
from .signatures import AUTOGRAD, TRACING, UNSUPPORTED, Signature, call_key, not_plain, signature_of, tensors_of
from .verdicts import Verdict

__all__ = ["Fusion", "require_fused", "warm_up"]

log = logging.getLogger("fusiongate")

_fused_required: contextvars.ContextVar[bool] = contextvars.ContextVar("fusiongate_fused_required", default=False)

_VERIFIED = State.VERIFIED
_FUSED = ("fused", str(Reason.VERIFIED))
_LAUNCH = ("launch", "")
_CALL_KEYS_A_SIGNATURE = 16
"""Call keys that are kept for each signature of the gate's capacity, on average; beyond that they are made anew."""


def _never_declines(*args: Any) -> str | None:
    return None


@final
class Fusion:
    """A fused kernel behind a gate, called like the eager chain that it replaces.

    Parameters
    ----------
    name
        For messages, reports and snapshots.
    reference
        The eager chain; right by definition. Its parameters are the fusion's.
    fused
        The kernel's launcher: the same arguments, passed positionally; returns a new tensor.
    declines
        The static predicate, with the same arguments: None (may launch) or a reason. A function of the signature alone, so that
        its answer is kept; it runs before anything is built. One that raises is reason ``declines-raised``.
    signature
        A callable that gives what stands for the shapes of its arguments in the signature; None: the shapes.
    contract
        What "same" means.
    policy
        How the gate behaves.
    probe
        Fresh operands for the probe, as ``probe(*args) -> args``; None: floating tensors are redrawn, all else is live.
    witness
        A pair (reference's intermediate, kernel's intermediate), each a function of the arguments that returns a tensor.
    compile
        What ``torch.compile`` sees: ``"expression"``, the reference itself, or ``"op"``, a custom op with a fake kernel (the reference needs
        annotated parameters then).
    host
        The same kernel built for the host, a fusion of its own.

    Raises
    ------
    UsageError
        If an argument is not what is asked for.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., Tensor],
        fused: Callable[..., Tensor],
        declines: Callable[..., str | None] = _never_declines,
        signature: Callable[..., Hashable] | None = None,
        contract: Contract = Exact(),  # noqa: B008  # frozen
        policy: Policy = Policy(),  # noqa: B008  # frozen
        probe: Callable[..., Sequence[Any]] | None = None,
        witness: Witness | None = None,
        compile: Literal["expression", "op"] = "expression",  # noqa: A002  # the public name
        host: Fusion | None = None,
    ) -> None:
        for label, value in (("reference", reference), ("fused", fused), ("declines", declines)):
            if not callable(value):
                raise UsageError(f"Fusion({name!r}): {label}= is {value!r}; expected a callable")
        if compile not in ("expression", "op"):
            raise UsageError(f"Fusion({name!r}): compile={compile!r}; expected 'expression' or 'op'")
        self.name = name
        self.reference = reference
        self.fused = fused
        self.declines = declines
        self.contract = contract
        self.policy = policy
        self.witness = witness
        self.compile = compile
        self.host = host
        self.gate = Gate(name, policy)
        self._signature = signature
        self._probe = probe
        self._names = _parameters(reference)
        self._routes: dict[Hashable, Slot | str] = {}
        self._tallies = Tallies()
        self._launched = Tallies()
        self._disabled = os.environ.get("FUSIONGATE_DISABLE", "") not in ("", "0")
        self._recheck = policy.recheck
        self._several_devices = torch.cuda.device_count() > 1
        self._registered = RegisteredOp(name, reference, self._call) if compile == "op" else None

    def __repr__(self) -> str:
        return f"Fusion({self.name!r})"

    def __call__(self, *args: Any) -> Tensor:
        """The result of the eager chain on these arguments, by the path that the gate allows."""
        # Looked up on the module each time: that is where a test, or a tracer, puts another one.
        if torch.compiler.is_compiling():
            return self.reference(*args) if self._registered is None else self._registered.traced(*args)
        return self._call(*args)

    def _call(self, *args: Any) -> Tensor:
        key = call_key(args)
        if type(key) is str:
            return self._refer(args, key)
        route = self._routes.get(key)
        if route is None:
            route = self._route(key, args)
        if type(route) is not Slot:
            return self._refer(args, route)
        if route.state is not _VERIFIED:
            return self._unverified(route, args)
        if self._recheck is not None:
            return self._rechecked(route, args)
        return self._fuse(route, args)

    # -- which way ---------------------------------------------------------------------------------------------------

    def _route(self, key: Hashable, args: tuple[Any, ...]) -> Slot | str:
        """The slot of a call key's signature, or the reason why it has none."""
        signature, reason = self._classify(args)
        route: Slot | str | None = reason
        if signature is not None:
            route = self.gate.slot(signature)
            if route is None:
                # Not kept: the table of a full gate would grow with every new shape.
                return Reason.CAPACITY
        assert route is not None
        if any(tensor.is_complex() for tensor in tensors_of(args)):
            # Whether it is lazily conjugated is not in the call key.
            return route
        if len(self._routes) >= _CALL_KEYS_A_SIGNATURE * self.policy.capacity:
            self._routes = {}
        self._routes[key] = route
        return route

    def _classify(self, args: tuple[Any, ...]) -> tuple[Signature | None, str | None]:
        """The signature of arguments that a kernel may be launched on, or why none may."""
        if not_plain(args):
            return None, Reason.TRACING
        if self._disabled:
            return None, Reason.DISABLED
        if any(tensor.numel() == 0 for tensor in tensors_of(args)):
            return None, Reason.EMPTY
        try:
            reason = self.declines(*args)
            signature = signature_of(args, self._signature) if reason is None else None
        except Exception as error:
            log.warning("%s: declines or signature raised %s: %s; the reference runs", self.name, type(error).__name__, error)
            return None, Reason.DECLINES_RAISED
        if isinstance(reason, bool) or not isinstance(reason, str | None):
            raise TypeError(f"{self.name}: declines returned {reason!r}; expected None (may launch) or a reason in a word")
        return signature, reason

    def explain(self, *args: Any) -> Decision:
        """The path that a call with these arguments would take now, and why; runs nothing."""
        if torch.compiler.is_compiling():
            return Decision("reference", Reason.COMPILING, None)
        key = call_key(args)
        if isinstance(key, str):
            return Decision("reference", key, None)
        signature, reason = self._classify(args)
        if signature is None:
            return Decision("reference", str(reason), None)
        slot = self.gate.peek(signature)
        state = self.gate.state(signature)
        if state is State.VERIFIED:
            return Decision("fused", Reason.VERIFIED, signature)
        if state is State.REFUSED:
            return Decision("reference", Reason.REFUSED if slot is None else slot.reason, signature)
        if slot is None and len(self.gate.signatures) >= self.policy.capacity:
            return Decision("reference", Reason.CAPACITY, signature)
        return Decision("reference", Reason.CAPTURING if _capturing(args) else Reason.FIRST_SIGHT, signature)

    # -- the paths ---------------------------------------------------------------------------------------------------

    def _refer(self, args: tuple[Any, ...], reason: str) -> Tensor:
        """The reference, counted."""
        if reason != Reason.FIRST_SIGHT and _fused_required.get():
            raise FallbackError(self.name, "reference", reason)
        self._tallies.add(("reference", str(reason)))
        return self.reference(*args)

    def _launch(self, *args: Any) -> Tensor:
        """The kernel, on the device of its operands, counted once it is launched."""
        if self._several_devices and (device := _device_of(args)) is not None and device.type == "cuda":
            with torch.cuda.device(device):
                result = self.fused(*args)
        else:
            result = self.fused(*args)
        self._launched.add(_LAUNCH)
        return result

    def _fuse(self, slot: Slot, args: tuple[Any, ...]) -> Tensor:
        try:
            result = self._launch(*args)
        except torch.OutOfMemoryError:
            return self._refer(args, Reason.OUT_OF_MEMORY)
        except Exception as error:
            self._fail(slot, args, error)
            return self._refer(args, slot.reason)
        self._tallies.add(_FUSED)
        return result

    def _unverified(self, slot: Slot, args: tuple[Any, ...]) -> Tensor:
        if slot.state is State.REFUSED and not self.gate.recovers(slot):
            return self._refer(args, slot.reason)
        if _capturing(args):
            self.gate.say_capturing(slot.signature)
            return self._refer(args, Reason.CAPTURING)
        with self.gate.lock:
            if slot.state is State.UNSEEN:
                return self._first_sight(slot, args)[0]
        return self._call(*args)

    def _trial(self) -> Trial:
        return Trial(
            self.reference, self._launch, self.declines, self.contract, self.witness, self._probe, self._names
        )

    def _first_sight(
        self, slot: Slot, args: tuple[Any, ...], *, quiet: bool = False
    ) -> tuple[Tensor, Verdict | None]:
        """The reference's result, and what came of comparing the kernel with it; None where that could not be found out."""
        expected = self.reference(*args)
        verdict: Verdict | None = None
        outcome: str = Reason.FIRST_SIGHT
        try:
            with torch.no_grad():
                verdict = FirstSight(self._trial(), args).verdict(expected)
        except torch.OutOfMemoryError:
            outcome = Reason.OUT_OF_MEMORY
            self.gate.record("out-of-memory", slot.signature, "no memory for the comparison; it is tried again")
            if expected.is_cuda:
                torch.cuda.empty_cache()
        except Exception as error:
            verdict = self._fail(slot, args, error)
        else:
            if verdict:
                self.gate.verify(slot, str(verdict))
            else:
                self.gate.refuse(slot, Reason.REFUSED, self._story(str(verdict), args), quiet=quiet)
        if verdict is not None and not verdict and _fused_required.get():
            raise FallbackError(self.name, "reference", slot.reason)
        self._tallies.add(("reference", str(outcome)))
        return expected, verdict

    def _fail(self, slot: Slot, args: tuple[Any, ...], error: Exception) -> Verdict:
        """Refuse a signature on which the kernel raised."""
        device = _device_of(args)
        if isinstance(error, BuildError):
            self.gate.refuse(slot, Reason.NO_KERNEL, f"no kernel: {error}; the reference runs")
            return Verdict(False, "no-kernel", self.contract, 0, actual=str(error))
        if device is not None and device.type == "cuda" and _is_poisoned(device):
            raise PoisonedDevice(str(device), error) from error
        story = f"the kernel raised {type(error).__name__}: {error}"
        self.gate.refuse(slot, Reason.REFUSED, self._story(story, args))
        return Verdict(False, "raised", self.contract, 0, actual=story)

    def _rechecked(self, slot: Slot, args: tuple[Any, ...]) -> Tensor:
        """A verified call under a policy that looks again."""
        assert self._recheck is not None
        recheck = slot.pending
        call = next(slot.calls)
        if isinstance(recheck, Recheck) and self._found_wrong(slot, recheck, args):
            return self._refer(args, slot.reason)
        if not self._recheck.due(call) or _capturing(args):
            return self._fuse(slot, args)
        expected = self.reference(*args)
        try:
            actual = self._launch(*args)
            if not isinstance(recheck, Recheck):
                slot.pending = recheck = Recheck(expected.device)
            with torch.no_grad():
                recheck.compare(actual, expected, self.contract, args, call)
        except torch.OutOfMemoryError:
            self._tallies.add(("reference", str(Reason.OUT_OF_MEMORY)))
            return expected
        except Exception as error:
            self._fail(slot, args, error)
        else:
            if expected.device.type != "cuda":
                self._found_wrong(slot, recheck, args)
        self._tallies.add(("reference", str(Reason.RECHECK)))
        return expected

    def _found_wrong(self, slot: Slot, recheck: Recheck, args: tuple[Any, ...]) -> bool:
        wrong = recheck.first_wrong()
        if not wrong:
            if recheck.latest and _device_of(args) is not None and not _is_asynchronous(args):
                slot.checked = recheck.latest
            return False
        since = "first sight" if slot.checked == 0 else f"call {slot.checked}"
        self.gate.refuse(
            slot,
            Reason.REFUSED,
            self._story(
                f"a recheck found call {wrong} of this signature wrong; the last one known to be right is {since}: "
                f"results of the fused calls in between may be wrong",
                args,
            ),
        )
        return True

    def _story(self, what: str, args: tuple[Any, ...]) -> str:
        """What happened, where, and what to do, for the one warning."""
        operands = ", ".join(
            f"{name}={_described(arg)}" for name, arg in zip([*self._names, *[""] * len(args)], args, strict=False)
        )
        try:
            where = environment(_device_of(args)).summary()
        except Exception as error:  # the warning matters more than its last line
            where = f"(no description of the platform: {error})"
        return (
            f"{what}\n  called with {operands}\n  on {where}\n  The reference's result was returned, and this signature takes the "
            f"reference from now on. Report it with these lines; FUSIONGATE_DISABLE=1 switches all kernels off."
        )

    # -- for users -----------------------------------------------------------------------------------------------

    def standing(self, *args: Any) -> State | None:
        """What is known about the signature of these arguments; None if no kernel may be launched on them. As cheap as a call."""
        key = call_key(args)
        if isinstance(key, str):
            return None
        route = self._routes.get(key) or self._route(key, args)
        return route.state if isinstance(route, Slot) else None

    def verify(self, *args: Any, quiet: bool = False) -> Verdict:
        """First sight now, before a capture, say; the verdict.

        A signature that has a verdict already is compared again, and may change its state.

        Parameters
        ----------
        args
            The arguments of a call.
        quiet
            Whether a refusal is no news, as when several kernels are tried on a site: it is logged at level DEBUG then.

        Raises
        ------
        UsageError
            If no kernel may be launched on these arguments, or they cannot be compared now: the message gives the reason.
        """
        key = call_key(args)
        reason: str | None = key if isinstance(key, str) else None
        if reason is None:
            route = self._route(key, args)
            reason = route if isinstance(route, str) else (Reason.CAPTURING if _capturing(args) else None)
        if reason is not None:
            raise UsageError(f"{self.name}: nothing to verify on these arguments: reference, {reason}")
        assert isinstance(route, Slot)
        with self.gate.lock:
            route.state = State.UNSEEN
            verdict = self._first_sight(route, args, quiet=quiet)[1]
        if verdict is None:
            raise UsageError(f"{self.name}: no memory for the comparison on these arguments; free some and call again")
        return verdict

    @property
    def launches(self) -> int:
        """Kernel launches that completed, counted where they are launched; those of first sight included."""
        return self._launched.total().total()

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """Calls by (path, reason); calls under ``torch.compile`` are not counted."""
        return self._tallies.total()

    def _copy(self, name: str, reference: Callable[..., Tensor]) -> Fusion:
        return Fusion(
            name,
            reference=reference,
            fused=self.fused,
            declines=self.declines,
            signature=self._signature,
            contract=self.contract,
            policy=self.policy,
            probe=self._probe,
            witness=self.witness,
            compile=self.compile,
            host=self.host,
        )

    @contextlib.contextmanager
    def isolated(self) -> Iterator[Fusion]:
        """The same fusion with a fresh gate and fresh counts; this one does not notice."""
        yield self._copy(self.name, self.reference)

    def with_reference(
        self, reference: Callable[..., Tensor], *, name: str | None = None, witness: Witness | None = None
    ) -> Fusion:
        """The same kernel at a site with another reference, behind a gate of its own.

        Parameters
        ----------
        reference
            The site's eager chain.
        name
            The site's; None: the fusion's.
        witness
            Takes the place of this fusion's, whose reference's half belongs to the other reference.
        """
        fusion = self._copy(name or self.name, reference)
        fusion.witness = witness
        fusion.host = None if self.host is None else self.host.with_reference(reference, name=name, witness=witness)
        return fusion


def _parameters(reference: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(reference).parameters)
    except (TypeError, ValueError):
        return ()


def _device_of(args: Sequence[Any]) -> torch.device | None:
    return next((arg.device for arg in args if isinstance(arg, Tensor)), None)


def _is_asynchronous(args: Sequence[Any]) -> bool:
    return any(tensor.is_cuda for tensor in tensors_of(args))


def _capturing(args: Sequence[Any]) -> bool:
    """Whether the current stream of the operands' device is being captured into a graph."""
    device = _device_of(args)
    if device is None or device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _is_poisoned(device: torch.device) -> bool:
    """Whether the device's context has gone for good, rather than one launch failed."""
    try:
        torch.cuda.synchronize(device)
        torch.empty(1, device=device).zero_()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def _described(arg: Any) -> str:
    if not isinstance(arg, Tensor):
        return repr(arg)
    dtype = str(arg.dtype).removeprefix("torch.")
    strides = "" if arg.is_contiguous() else f" strides {tuple(arg.stride())}"
    return f"{dtype}{list(arg.shape)}{strides}"


@contextlib.contextmanager
def require_fused() -> Iterator[None]:
    """Inside, any call of a fusion that falls back raises, naming the reason; a first sight that verifies is none.

    Raises
    ------
    FallbackError
        From the call that falls back.
    """
    token = _fused_required.set(True)
    try:
        yield
    finally:
        _fused_required.reset(token)


def warm_up(op_or_model: Fusion | nn.Module, *calls: Sequence[Any] | Mapping[str, Any]) -> None:
    """First sight for all signatures that a run will need.

    A first sight compares and therefore waits for the device, and it can break a capture that another thread has open in the
    global error mode: warm up before capturing.

    Parameters
    ----------
    op_or_model
        A fusion, or a module whose sites are to be warmed up by running it.
    calls
        One for each signature: the positional arguments, or for a module a mapping of keyword arguments.
    """
    with torch.no_grad():
        for call in calls:
            if isinstance(call, Mapping):
                op_or_model(**call)
            else:
                op_or_model(*call)
