"""Causes: failures of one diagnosis told as one. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Cause", "cause_of", "causes"]

_FIELD = re.compile(r"^\s+(?P<name>hint|happened|expected): (?P<text>.*)$", re.MULTILINE)
_REFUSED = re.compile(r"\(reason: (?P<reason>[\w-]+)\)")
_NUMBER = re.compile(r"\d[\d,.]*")


@dataclass(frozen=True, slots=True)
class Cause:
    """Observations that failed for one reason."""

    diagnosis: str
    """The reason, in a sentence: the hint where there is one, else what happened and what was expected."""
    first: Mapping[str, Any]
    """The payload of the first of them, whose message stands for all."""
    others: tuple[Mapping[str, Any], ...]
    """The payloads of the rest."""

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 + len(self.others)


def cause_of(message: str) -> str:
    """The diagnosis in a failure's message.

    The hint names the fault itself. Without one, the gate's reason for refusing says more than what it led to, and that
    more than nothing; numbers differ from cell to cell and are left out of what is compared, see `causes`.
    """
    told: dict[str, str] = {}
    for found in _FIELD.finditer(message):
        told.setdefault(found["name"], found["text"])
    if "hint" in told:
        return told["hint"]
    if "happened" not in told:
        return message.strip().partition("\n")[0]
    refused = _REFUSED.search(message)
    why = f", for {refused['reason']}" if refused else ""
    return f"{told['happened']}{why}; expected {told.get('expected', '')}"


def causes(failed: Iterable[Mapping[str, Any]], message: str = "message") -> list[Cause]:
    """The causes of failed observations, the one with the most of them first.

    Parameters
    ----------
    failed
        Payloads of red rows, in the order of the run.
    message
        Which field tells of the failure; ``reason`` stands in where it is empty.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    diagnoses: dict[str, str] = {}
    for payload in failed:
        diagnosis = cause_of(payload.get(message) or payload.get("reason") or "red")
        key = _NUMBER.sub("#", diagnosis)
        diagnoses.setdefault(key, diagnosis)
        groups.setdefault(key, []).append(payload)
    found = [Cause(diagnoses[key], first, tuple(others)) for key, (first, *others) in groups.items()]
    return sorted(found, key=lambda cause: -cause.count)
