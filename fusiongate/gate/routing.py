"""From a call's arguments to the slot of their signature, or to the reason why they have none; kept by call key."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from typing import Any

from .signatures import Signature, not_plain, signature_of, tensors_of
from .spec import FusionSpec
from .states import Gate, Reason, Slot

__all__ = ["Router"]

_CALL_KEYS_A_SIGNATURE = 16
"""Call keys that are kept for each signature of the gate's capacity, on average; beyond that they are made anew."""


class Router:
    """Finds a call's way once, and keeps it.

    Parameters
    ----------
    gate
        Has the slots.
    spec
        Has the predicate and the shapes' bucket.
    """

    def __init__(self, gate: Gate, spec: FusionSpec) -> None:
        self._gate = gate
        self._spec = spec
        self._disabled = os.environ.get("FUSIONGATE_DISABLE", "") not in ("", "0")
        self.known: dict[Hashable, Slot | str] = {}
        """What was found, by call key."""

    def given(self) -> Iterator[str]:
        """The reasons that are kept, among them those that ``declines`` gave to calls which nobody counted."""
        return (str(route) for route in list(self.known.values()) if isinstance(route, str))

    def find(self, key: Hashable, args: tuple[Any, ...]) -> Slot | str:
        """The slot of a call key's signature, or the reason why it has none."""
        signature, reason = self.classify(args)
        route: Slot | str | None = reason
        if signature is not None:
            route = self._gate.slot(signature)
            if route is None:
                # Not kept: the table of a full gate would grow with every new shape.
                return Reason.CAPACITY
        assert route is not None
        if any(tensor.is_complex() for tensor in tensors_of(args)):
            # Whether it is lazily conjugated is not in the call key.
            return route
        if len(self.known) >= _CALL_KEYS_A_SIGNATURE * self._gate.policy.capacity:
            self.known.clear()
        self.known[key] = route
        return route

    def classify(self, args: tuple[Any, ...]) -> tuple[Signature | None, str | None]:
        """The signature of arguments that a kernel may be launched on, or why none may.

        Raises
        ------
        TypeError
            If ``declines`` answers with something else than None or a word.
        """
        if not_plain(args):
            return None, Reason.TRACING
        if self._disabled:
            return None, Reason.DISABLED
        if any(tensor.numel() == 0 for tensor in tensors_of(args)):
            return None, Reason.EMPTY
        try:
            reason = self._spec.declines(*args)
            signature = signature_of(args, self._spec.signature) if reason is None else None
            hash(signature)
        except Exception as error:
            what = f"declines or signature raised {type(error).__name__}: {error}; the reference runs on such arguments"
            self._gate.say_once("declines-raised", None, what)
            return None, Reason.DECLINES_RAISED
        if reason is not None and not (isinstance(reason, str) and reason):
            raise TypeError(
                f"{self._gate.name}: declines returned {reason!r}; expected None (may launch) or a reason in a word"
            )
        return signature, reason
