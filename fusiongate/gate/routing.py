"""From a call's arguments to the slot of their signature, or to the reason why they have none; kept by call key."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

from fusiongate.errors import UsageError

from .signatures import Signature, not_plain, signature_of, tensors_of
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
    reference
        Tells the names of the arguments.
    signature
        Gives what stands for the shapes of its arguments in the signature; None: the shapes.
    """

    def __init__(self, gate: Gate, reference: Callable[..., Tensor], signature: Callable[..., Hashable] | None) -> None:
        self._gate = gate
        self._signature = signature
        self._parameters = _parameters(reference)
        self._disabled = os.environ.get("FUSIONGATE_DISABLE", "") not in ("", "0")
        self.names = () if self._parameters is None else tuple(self._parameters.parameters)
        """The arguments' names."""
        self.known: dict[Hashable, Slot | str] = {}
        """What was found, by call key."""

    def given(self) -> Iterator[str]:
        """The reasons that are kept, among them those that ``declines`` gave to calls which nobody counted."""
        return (str(route) for route in list(self.known.values()) if isinstance(route, str))

    def positional(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as a kernel takes them; defaults after the last one given stay away, as in a positional call.

        Raises
        ------
        TypeError
            If they do not fit the reference's parameters.
        UsageError
            If the reference tells no parameters.
        """
        if not named:
            return args
        if self._parameters is None:
            raise UsageError(f"{self._gate.name}: its reference tells no parameters; pass all arguments by position")
        bound = self._parameters.bind(*args, **named)
        last = max(self.names.index(name) for name in bound.arguments)
        bound.apply_defaults()
        return bound.args[: last + 1]

    def find(self, key: Hashable, args: tuple[Any, ...], declines: Callable[..., str | None]) -> Slot | str:
        """The slot of a call key's signature, or the reason why it has none."""
        signature, reason = self.classify(args, declines)
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

    def classify(
        self, args: tuple[Any, ...], declines: Callable[..., str | None]
    ) -> tuple[Signature | None, str | None]:
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
            reason = declines(*args)
            signature = signature_of(args, self._signature) if reason is None else None
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


def _parameters(reference: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(reference)
    except (TypeError, ValueError):
        return None
