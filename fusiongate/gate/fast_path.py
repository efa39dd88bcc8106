"""What a launcher may offer to make verified calls cheap: to recognise them itself, in the call that launches."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Admission", "OffersAdmission"]


class Admission(Protocol):
    """The calls that one gate has let through, as a launcher keeps them.

    It may forget a call at any time, and it must not take one call for another that could have another verdict: it keys
    by everything that is in :func:`fusiongate.gate.signatures.call_key`.
    """

    def __call__(self, args: tuple[Any, ...]) -> Tensor | None:
        """The kernel's result if this call was admitted and launched; None if it has to go to the gate."""

    def admit(self, args: tuple[Any, ...]) -> None:
        """Recognise calls like this one from now on."""

    def forget(self) -> None:
        """Recognise none any more."""


@runtime_checkable
class OffersAdmission(Protocol):
    """A launcher that can recognise verified calls."""

    def admission(self) -> Admission:
        """A new, empty one, for one gate."""
