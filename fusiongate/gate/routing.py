"""From a call's arguments to the slot of their signature, or to the reason why they have none; kept by call key."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

from .hidden_inputs import HiddenInputs, switch_state
from .signatures import Signature, call_key, extent, not_plain, overlapping, signature_of, tensors_of
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

    def __init__(self, gate: Gate, spec: FusionSpec[..., Any]) -> None:
        self._gate = gate
        self._spec = spec
        self._disabled = os.environ.get("FUSIONGATE_DISABLE", "") not in ("", "0")
        self.switched = False
        """Whether the reference was seen to heed torch's switches."""
        self._extents: dict[Hashable, tuple[int, ...]] = {}
        self._plain_key: Callable[[tuple[Any, ...]], Hashable] = self._key_of_a_writer if spec.written else call_key
        self.key = self._plain_key
        """Gives a call's key, or as a string why it takes the reference."""
        self.known: dict[Hashable, Slot | str] = {}
        """What was found, by call key."""

    def given(self) -> Iterator[str]:
        """The reasons that are kept, among them those that ``declines`` gave to calls which nobody counted."""
        return (str(route) for route in list(self.known.values()) if isinstance(route, str))

    def _key_of_a_writer(self, args: tuple[Any, ...]) -> Hashable:
        key = call_key(args)
        if type(key) is str:
            return key
        extents = self._extents.get(key)
        if extents is None:
            extents = self._extents[key] = tuple(extent(arg) if isinstance(arg, Tensor) else 0 for arg in args)
        near: list[Hashable] = []
        for position in self._spec.written:
            if position >= len(args) or not extents[position]:
                continue
            begin, reach = args[position].data_ptr(), extents[position]
            for place, arg in enumerate(args):
                if place != position and extents[place]:
                    apart = arg.data_ptr() - begin
                    if -extents[place] < apart < reach:
                        near += position, place, apart
        # Where they lie relative to each other decides, as far as their ranges meet.
        return (key, *near) if near else key

    def _key_with_switches(self, args: tuple[Any, ...]) -> Hashable:
        key = self._plain_key(args)
        return key if isinstance(key, str) else (key, switch_state(args))

    def learn(self, hidden: HiddenInputs, slot: Slot, args: tuple[Any, ...]) -> Slot | None:
        """The slot of a call whose reference was watched; it is another one if that heeds switches, as was not known.

        Parameters
        ----------
        hidden
            What was seen.
        slot
            The call's so far; the gate's lock is held.
        args
            The call's arguments.
        """
        if hidden.switched and not self.switched:
            self.switched, self.key = True, self._key_with_switches
            # The verdicts so far may hold for other settings than those of now.
            self._gate.clear()
            self.known.clear()
            found = self.find(self.key(args), args)
            if not isinstance(found, Slot):
                return None
            slot = found
        slot.held = hidden.held
        return slot

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
            self._extents.clear()
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
        if self._spec.written and overlapping(args, self._spec.written):
            # What is written may be read under another name: copies are apart, and a verdict is on copies.
            return None, Reason.OVERLAPPING
        try:
            reason = self._spec.declines(*args)
            signature = signature_of(args, self._spec.signature) if reason is None else None
            if signature is not None and self.switched:
                signature = (*signature, switch_state(args))
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
