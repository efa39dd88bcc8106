"""The gate: which path a signature takes, why, and what happened to it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, final

from .hidden_inputs import Held
from .policies import Policy, Recheck
from .signatures import Signature

__all__ = ["Decision", "Event", "Gate", "Path", "Reason", "Slot", "State", "free_after_fork"]

log = logging.getLogger("fusiongate")

Path = Literal["fused", "reference"]


class Reason(StrEnum):
    """Why a call took its path: these, and whatever a fusion's ``declines`` returns."""

    VERIFIED = "verified"
    """The kernel was compared on this signature and kept its contract."""
    FIRST_SIGHT = "first-sight"
    """The comparison itself: the caller gets the reference's result."""
    RECHECK = "recheck"
    """A verified kernel is being compared again: the caller gets the reference's result."""
    DISABLED = "disabled"
    """``FUSIONGATE_DISABLE=1``."""
    COMPILING = "compiling"
    """Inside ``torch.compile``."""
    TRACING = "tracing"
    """Another tracer or transform, a fake, meta, sparse or lazily negated tensor, or a Tensor subclass."""
    AUTOGRAD = "autograd"
    """Gradients are needed."""
    EMPTY = "empty"
    """A tensor without elements."""
    REFUSED = "refused"
    """The kernel broke its contract, or raised, on this signature."""
    CAPTURING = "capturing"
    """Never seen before, and the stream is being captured into a graph: nothing can be compared now."""
    NOT_COMPARABLE = "not-comparable"
    """The gate could not compare results of this kind; no fault of the kernel's."""
    NO_KERNEL = "no-kernel"
    """The kernel could not be built."""
    OUT_OF_MEMORY = "out-of-memory"
    """There was no memory for the comparison; it is tried again."""
    CAPACITY = "capacity"
    """The gate holds as many signatures as its policy allows."""
    OVERLAPPING = "overlapping"
    """An argument that is written shares memory with another one, or with itself."""
    DECLINES_RAISED = "declines-raised"
    """``declines`` or ``signature`` raised."""
    UNSUPPORTED_ARGUMENT = "unsupported-argument"
    """An argument has a type that no signature can hold."""


class State(StrEnum):
    """What is known about a signature."""

    UNSEEN = "unseen"
    """Nothing: the next call is a first sight."""
    VERIFIED = "verified"
    """The kernel kept its contract."""
    REFUSED = "refused"
    """The kernel may not be used."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The path that a call would take."""

    path: Path
    """``fused`` or ``reference``."""
    reason: str
    """A :class:`Reason`, or what ``declines`` returned."""
    signature: Signature | None
    """What the verdict is keyed by; None where the arguments do not get that far."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a gate."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """``verified``, ``refused``, ``recovering``, or the reason of a fall-back that is no verdict."""
    signature: Signature | None
    """Which signature it happened to."""
    message: str
    """In words."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@final
class Slot:
    """One signature's place in a gate. Read without a lock; written under the gate's."""

    __slots__ = ("held", "reason", "recheck", "refused_at", "signature", "since", "state")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.state = State.UNSEEN
        self.reason: str = Reason.FIRST_SIGHT
        self.recheck = Recheck()
        """The fused calls since it was verified."""
        self.held: Held = ()
        """The tensors that the reference holds; one that needs a gradient keeps the kernel from calls with grad."""
        self.refused_at = 0.0
        self.since = itertools.count(1)
        """Calls since it was refused."""


_locked: weakref.WeakSet[Any] = weakref.WeakSet()


def free_after_fork(owner: Any) -> None:
    """See to it that a child of this process finds ``owner.lock`` free, whichever thread held it at the fork."""
    _locked.add(owner)


def _free_locks() -> None:
    # A thread that held one is not in the child; the forking thread's own ``with`` gives back the lock that it took.
    for owner in list(_locked):
        owner.lock = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)


def _nothing() -> None:
    pass


class Gate:
    """The state machine that turns verdicts into the path of the next call.

    Parameters
    ----------
    name
        The fusion's, for messages.
    policy
        How it behaves.
    clock
        Seconds, monotonic; replaced in tests.
    """

    def __init__(self, name: str, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.policy = policy
        self.lock = threading.RLock()
        """Held while a signature is looked at: a second caller waits for the verdict and makes none of its own."""
        free_after_fork(self)
        self.on_withdrawal: Callable[[], None] = _nothing
        """Called under the lock when a verdict stops being one, before anybody is told."""
        self._clock = clock
        self._slots: dict[Signature, Slot] = {}
        self._events: deque[Event] = deque(maxlen=1000)
        self._all_refused: str | None = None
        self._said: set[str] = set()

    @property
    def events(self) -> list[Event]:
        """What happened, oldest first; the last thousand."""
        return list(self._events)

    @property
    def signatures(self) -> list[Signature]:
        """The signatures that the gate holds."""
        return list(self._slots)

    def state(self, signature: Signature) -> State:
        """What is known about a signature."""
        slot = self._slots.get(signature)
        if slot is not None:
            return slot.state
        return State.UNSEEN if self._all_refused is None else State.REFUSED

    def slot(self, signature: Signature) -> Slot | None:
        """The signature's place; None when the gate is full."""
        with self.lock:
            slot = self._slots.get(signature)
            if slot is None:
                if len(self._slots) >= self.policy.capacity:
                    self.say_once(
                        "capacity",
                        signature,
                        f"holds {self.policy.capacity} signatures and takes no more: further ones take the reference; "
                        f"raise Policy(capacity=…), or bucket the shapes with signature=",
                    )
                    return None
                slot = self._slots[signature] = Slot(signature)
                if self._all_refused is not None:
                    self._mark_refused(slot, self._all_refused)
            return slot

    def peek(self, signature: Signature) -> Slot | None:
        """The signature's place, if it has one."""
        return self._slots.get(signature)

    def verify(self, slot: Slot, story: str) -> None:
        """The kernel kept its contract on this signature."""
        with self.lock:
            slot.state, slot.reason = State.VERIFIED, Reason.VERIFIED
            slot.recheck = Recheck()
            self.record("verified", slot.signature, story)

    def refuse(self, slot: Slot, reason: str, story: str, *, quiet: bool = False) -> None:
        """The kernel must not be used on this signature any more; says so, once, unless that is no news."""
        with self.lock:
            if slot.state is State.REFUSED:
                return
            # A kernel that cannot be built is missing for every signature: saying it once is enough.
            quiet = quiet or reason in self._said
            if reason == Reason.NO_KERNEL:
                self._said.add(reason)
            self._mark_refused(slot, reason)
            if self.policy.scope == "process":
                self._all_refused = reason
                for other in self._slots.values():
                    self._mark_refused(other, reason)
            self.record("refused", slot.signature, story)
        log.log(logging.DEBUG if quiet else logging.WARNING, "%s: %s", self.name, story)

    def withdraw(self, slot: Slot) -> None:
        """A verdict is about to be found anew: no call may go by the old one."""
        with self.lock:
            slot.state = State.UNSEEN
            self.on_withdrawal()

    def clear(self) -> None:
        """Forget every signature; no call may go by a verdict that there was."""
        with self.lock:
            for slot in self._slots.values():
                self.withdraw(slot)
            self._slots.clear()

    def _mark_refused(self, slot: Slot, reason: str) -> None:
        self.on_withdrawal()
        slot.state, slot.reason = State.REFUSED, reason
        slot.refused_at, slot.since = self._clock(), itertools.count(1)

    def recovers(self, slot: Slot) -> bool:
        """Whether a refused signature is due for another first sight; called once for each call that it refuses."""
        recover = self.policy.recover
        if recover is None or not recover.due(self._clock() - slot.refused_at, next(slot.since)):
            return False
        with self.lock:
            if slot.state is State.REFUSED:
                self._all_refused = None
                slot.state, slot.reason = State.UNSEEN, Reason.FIRST_SIGHT
                self.record("recovering", slot.signature, "a refused signature gets another first sight")
        return True

    def record(self, kind: str, signature: Signature | None, message: str) -> None:
        """Add an event."""
        self._events.append(Event(time.time(), kind, signature, message))

    def say_once(self, kind: str, signature: Signature | None, message: str) -> None:
        """Add an event of a kind that concerns the whole gate, and log it, the first time that it happens."""
        if kind not in self._said:
            self._said.add(kind)
            self.record(kind, signature, message)
            log.warning("%s: %s", self.name, message)
