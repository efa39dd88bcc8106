"""A fusion: reference, kernel, predicate, contract and gate as one callable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Contract, Exact
from fusiongate.comparison.verdicts import Verdict
from fusiongate.errors import BuildError, UsageError

from .counters import Counts, Tallies
from .custom_op import RegisteredOp
from .device_state import capturing, device_of, excuse
from .hidden_inputs import need_gradients
from .judging import Judge, fell_back
from .policies import Policy
from .probes import live_copies
from .routing import Router
from .signatures import is_plain_call
from .spec import Admission, FusionSpec, P, R, Specified, Witness, never_declines
from .states import Decision, Gate, Reason, Slot, State

__all__ = ["Fusion"]

_VERIFIED = State.VERIFIED
_FUSED = ("fused", str(Reason.VERIFIED))
_LAUNCH = ("launch", "")


@final
class Fusion(Specified[P, R]):
    """A fused kernel behind a gate, called like the eager chain that it replaces.

    Parameters
    ----------
    name
        For messages, reports and snapshots.
    reference
        The eager chain; right by definition. Its parameters are the fusion's.
    fused
        The kernel's launcher: the same arguments, passed positionally; returns a new tensor, or a tuple of them as the
        reference does, or nothing where that only writes arguments.
    declines
        The static predicate, with the same arguments: None (may launch) or a reason. A function of the signature alone,
        so that its answer is kept; it runs before anything is built. One that raises is reason ``declines-raised``.
    signature
        A callable that gives what stands for the shapes of its arguments in the signature; None: the shapes.
    contract
        What "same" means: for all outputs, or a tuple with one for each: those returned, then the written arguments.
    policy
        How the gate behaves.
    probe
        Fresh operands for the probe, as ``probe(*args) -> args``; None: floating tensors are redrawn, all else is live.
    witness
        A pair (reference's intermediate, kernel's intermediate), each a function of the arguments that gives a tensor.
    grows
        Whether a probe may have a larger batch than a small live call, so that few launches prove much; False, or a
        function of the live and the probe's arguments, where the arithmetic depends on the batch, as the order of many
        reductions does: then there are many small probes.
    mutates_args
        The names of the parameters whose tensors the op writes, in place or as ``out=``; each is compared as an output.
    compile
        What ``torch.compile`` sees: ``"expression"``, the reference itself, or ``"op"``, a custom op with a fake
        kernel (the reference needs annotated parameters then).
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
        reference: Callable[P, R],
        fused: Callable[..., R],
        declines: Callable[..., str | None] = never_declines,
        signature: Callable[..., Hashable] | None = None,
        contract: Contract | tuple[Contract, ...] = Exact(),  # noqa: B008  # frozen
        policy: Policy = Policy(),  # noqa: B008  # frozen
        probe: Callable[..., Sequence[Any]] | None = None,
        witness: Witness | None = None,
        grows: bool | Callable[[Sequence[Any], Sequence[Any]], bool] = True,
        mutates_args: tuple[str, ...] = (),
        compile: Literal["expression", "op"] = "expression",  # noqa: A002  # the public name
        host: Fusion[..., Any] | None = None,
    ) -> None:
        self._open(
            FusionSpec(
                name=name,
                reference=reference,
                fused=fused,
                declines=declines,
                signature=signature,
                contract=contract,
                policy=policy,
                probe=probe,
                witness=witness,
                grows=grows,
                mutates_args=mutates_args,
                compile=compile,
                host=host,
            )
        )

    @classmethod
    def of(cls, spec: FusionSpec[P, R]) -> Fusion[P, R]:
        """The fusion that a spec describes, behind a new gate.

        Raises
        ------
        UsageError
            If the spec's ``host`` is no fusion, or its ``compile`` asks for more than the reference tells.
        """
        fusion = cls.__new__(cls)
        fusion._open(spec)
        return fusion

    def _open(self, spec: FusionSpec[P, R]) -> None:
        if not (spec.host is None or isinstance(spec.host, Fusion)):
            raise UsageError(f"Fusion({spec.name!r}): host= is {spec.host!r}; expected a Fusion or None")
        self.spec = spec
        self.gate = Gate(spec.name, spec.policy)
        self._reference: Callable[..., R] = spec.reference
        self._fused = spec.fused
        self._recheck = spec.policy.recheck
        self._router = Router(self.gate, spec)
        self._routes = self._router.known
        self._tallies = Tallies()
        self._launched = Tallies()
        self._direct = Tallies()
        self._judge = Judge(spec, self.gate, self._router, self._tallies, self._launch)
        self._careful = self._recheck is not None or bool(spec.written)
        self._several_devices = torch.cuda.device_count() > 1
        self._admitted: Admission | None = None
        # Asked of the class: a spy before a launcher passes everything on, and has to see each launch. And a kernel
        # that is looked at again has to come by the gate each time.
        if self._recheck is None and hasattr(type(spec.fused), "admission"):
            launcher: Any = spec.fused
            admitted: Admission = launcher.admission()
            self._admitted, self.gate.on_withdrawal = admitted, admitted.forget
        self._registered = RegisteredOp(spec, lambda *args: self._call(args)) if spec.compile == "op" else None

    def __repr__(self) -> str:
        return f"Fusion({self.name!r})"

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """The result of the eager chain on these arguments, by the path that the gate allows."""
        # Looked up on the module each time: that is where a test, or a tracer, puts another one.
        if torch.compiler.is_compiling():
            if self._registered is None or self._registered.loses_gradients(args, named):
                return self._reference(*args, **named)
            return cast("R", self._registered.traced(*args, **named))
        if self._admitted is not None and not named:
            result: Any = self._admitted(args)
            if result is not None:
                self._direct.add(_FUSED)
                return result  # type: ignore[no-any-return]  # a cast is a call
        return self._call(self.spec.positional(args, named) if named else args)

    def _call(self, args: tuple[Any, ...]) -> R:
        key = self._router.key(args)
        if type(key) is str:
            return self._refer(args, key)
        route = self._routes.get(key)
        if route is None:
            route = self._router.find(key, args)
        if type(route) is not Slot:
            return self._refer(args, route)
        if route.state is not _VERIFIED:
            return self._unverified(route, args)
        if route.held or self._careful:
            return self._carefully(route, args)
        return self._fuse(route, args)

    def explain(self, *args: P.args, **named: P.kwargs) -> Decision:
        """The path that a call with these arguments would take now, and why; runs nothing."""
        if torch.compiler.is_compiling():
            return Decision("reference", Reason.COMPILING, None)
        call = self.spec.positional(args, named)
        key = self._router.key(call)
        if isinstance(key, str):
            return Decision("reference", key, None)
        signature, reason = self._router.classify(call)
        if signature is None:
            return Decision("reference", str(reason), None)
        slot = self.gate.peek(signature)
        state = self.gate.state(signature)
        if state is State.VERIFIED:
            if slot is not None and torch.is_grad_enabled() and need_gradients(slot.held):
                return Decision("reference", Reason.AUTOGRAD, signature)
            return Decision("fused", Reason.VERIFIED, signature)
        if state is State.REFUSED:
            return Decision("reference", Reason.REFUSED if slot is None else slot.reason, signature)
        if slot is None and len(self.gate.signatures) >= self.gate.policy.capacity:
            return Decision("reference", Reason.CAPACITY, signature)
        return Decision("reference", Reason.CAPTURING if capturing(call) else Reason.FIRST_SIGHT, signature)

    # -- the paths -----------------------------------------------------------------------------------------------------

    def _refer(self, args: tuple[Any, ...], reason: str) -> R:
        """The reference, counted."""
        fell_back(self.name, reason)
        self._tallies.add(("reference", str(reason)))
        return self._reference(*args)

    def _launch(self, *args: Any) -> R:
        """The kernel, on the device of its operands, counted once it is launched."""
        if self._several_devices and (device := device_of(args)) is not None and device.type == "cuda":
            with torch.cuda.device(device):  # only on a GPU: a CPU is one device
                result = self._fused(*args)
        else:
            result = self._fused(*args)
        self._launched.add(_LAUNCH)
        return result

    def _fuse(self, slot: Slot, args: tuple[Any, ...]) -> R:
        try:
            result = self._launch(*args)
        except Exception as error:
            reason = excuse(error, args)
            if reason is None:
                self._judge.fail(slot, args, error)
            if self.spec.written and not isinstance(error, BuildError):
                error.add_note(
                    f"{self.name}: the kernel may have written a part of {', '.join(self.spec.mutates_args)} before it "
                    f"raised, so that the reference could not run on what was there"
                )
                raise
            return self._refer(args, slot.reason if reason is None else reason)
        self._tallies.add(_FUSED)
        if self._admitted is not None and not self._router.switched and not slot.held and is_plain_call(args):
            with self.gate.lock:
                # Under the lock that a refusal takes, so that nothing is admitted after it.
                if slot.state is State.VERIFIED:
                    self._admitted.admit(args)
        return result

    def _unverified(self, slot: Slot, args: tuple[Any, ...]) -> R:
        if slot.state is State.REFUSED and not self.gate.recovers(slot):
            return self._refer(args, slot.reason)
        if capturing(args):  # only on a GPU: a CPU captures nothing
            what = (
                "a graph capture met a signature that was never seen, and recorded the reference, which the graph will "
                "replay for as long as it lives; call fusiongate.warm_up(…) before capturing"
            )
            self.gate.say_once("capturing", slot.signature, what)
            return self._refer(args, Reason.CAPTURING)
        with self.gate.lock:
            # Another thread's look may have found out that the reference heeds switches, which begins all slots anew.
            if slot.state is State.UNSEEN and self.gate.peek(slot.signature) is slot:
                return cast("R", self._judge.first_sight(slot, args)[0])
        return self._call(args)

    def _carefully(self, slot: Slot, args: tuple[Any, ...]) -> R:
        """A verified call of a fusion that writes, is looked at again, or has a reference that holds tensors."""
        if slot.held and torch.is_grad_enabled() and need_gradients(slot.held):
            return self._refer(args, Reason.AUTOGRAD)
        result = self._fuse(slot, args) if self._recheck is None else self._rechecked(slot, args)
        written = [args[position] for position in self.spec.written if position < len(args)]
        # As an op of torch's does it, or autograd would take what it saved before for what is there now.
        torch.autograd.graph.increment_version([arg for arg in written if isinstance(arg, Tensor)])
        return result

    def _rechecked(self, slot: Slot, args: tuple[Any, ...]) -> R:
        """A verified call under a policy that looks again."""
        assert self._recheck is not None
        call = slot.recheck.count()
        if self._judge.found_wrong(slot, args):
            return self._refer(args, slot.reason)
        if not self._recheck.due(call) or capturing(args):
            return self._fuse(slot, args)
        return cast("R", self._judge.look_again(slot, args, call))

    # -- for users -----------------------------------------------------------------------------------------------------

    def standing(self, *args: P.args, **named: P.kwargs) -> State | None:
        """What is known about these arguments' signature, as cheaply as in a call; None if they allow no kernel."""
        call = self.spec.positional(args, named)
        key = self._router.key(call)
        if isinstance(key, str):
            return None
        route = self._routes.get(key) or self._router.find(key, call)
        return route.state if isinstance(route, Slot) else None

    def verify(self, *args: Any, quiet: bool = False, **named: Any) -> Verdict:
        """First sight now, before a capture, say; the verdict.

        A signature that has a verdict already is compared again, and may change its state.

        Parameters
        ----------
        args, named
            The arguments of a call.
        quiet
            Whether a refusal is no news, as when several kernels are tried on a site: it is logged at level DEBUG then.

        Raises
        ------
        UsageError
            If no kernel may be launched on these arguments, or they cannot be compared now; the message says why.
        """
        call = self.spec.positional(args, named)
        if self.spec.written:
            call = live_copies(call).args
        key = self._router.key(call)
        route = key if isinstance(key, str) else self._router.find(key, call)
        if isinstance(route, Slot) and capturing(call):
            route = Reason.CAPTURING  # only on a GPU: a CPU captures nothing
        if isinstance(route, str):
            raise UsageError(f"{self.name}: nothing to verify on these arguments: they take the reference ({route})")
        with self.gate.lock:
            self.gate.withdraw(route)
            verdict = self._judge.first_sight(route, call, quiet=quiet)[1]
        if isinstance(verdict, str):
            raise UsageError(f"{self.name}: these arguments cannot be compared now ({verdict})")
        return verdict

    @property
    def launches(self) -> int:
        """Kernel launches that completed, counted where they are launched; those of first sight included."""
        return self._launched.total().total() + self._direct.total().total()

    @property
    def counters(self) -> Counts:
        """Calls by (path, reason), a Counter; calls under ``torch.compile`` are not counted.

        A path that there is not, or a misspelt reason, is a ``KeyError`` that says which there are; a reason that only
        ``declines`` could still give counts 0.
        """
        total = self._tallies.total() + self._direct.total()
        return Counts(total, name=self.name, given=self._router.given, declines=self.declines is not never_declines)

    @contextlib.contextmanager
    def isolated(self) -> Iterator[Fusion[P, R]]:
        """The same fusion with a fresh gate and fresh counts; this one does not notice."""
        yield Fusion.of(self.spec)

    def with_reference(
        self, reference: Callable[..., R], *, name: str | None = None, witness: Witness | None = None
    ) -> Fusion[..., R]:
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
        host = None if self.host is None else self.host.with_reference(reference, name=name, witness=witness)
        spec: FusionSpec[..., R] = self.spec
        return Fusion.of(replace(spec, name=name or self.name, reference=reference, witness=witness, host=host))
