"""Causes: failures of one diagnosis told as one, the first of them whole and the rest by name. Imports no torch.

A rounding that a kernel leaves out fails a hundred cells or more. The terminal, its short summary, GitHub's annotations
and the report tell of it once; ``-v`` tells of every failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest

__all__ = ["FLAKY", "REPEATED", "Cause", "cause_of", "causes", "key_of"]

T = TypeVar("T")

_FIELD = re.compile(r"^\s+(?P<name>hint|happened|expected): (?P<text>.*)$", re.MULTILINE)
_REFUSED = re.compile(r"\(reason: (?P<reason>[\w-]+)\)")
# Dtypes are left out with the numbers: one missing rounding is the same in each of them.
_VARYING = re.compile(r"\bb?float\d+\b|\d[\d,.]*")

FLAKY = "flaky: green when it was tried again, and red at first: "
"""What the message of a test begins with that was red in an earlier attempt alone."""

REPEATED = "fusiongate_repeats_a_cause"
"""The attribute of a report whose cause an earlier one has told."""


@dataclass(frozen=True, slots=True)
class Cause(Generic[T]):
    """Failures for one reason."""

    diagnosis: str
    """The reason, in a sentence: the hint where there is one, else what happened and what was expected."""
    first: T
    """The first of them, whose message stands for all."""
    others: tuple[T, ...]
    """The rest."""

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 + len(self.others)

    def __str__(self) -> str:
        return self.diagnosis if not self.others else f"{self.count} × {self.diagnosis}"


def cause_of(message: str) -> str:
    """The diagnosis in a failure's message.

    The hint names the fault itself. Without one, the gate's reason for refusing says more than what it led to, and that
    more than nothing.
    """
    told: dict[str, str] = {}
    for found in _FIELD.finditer(message):
        told.setdefault(found["name"], found["text"])
    if message.startswith(FLAKY):
        return f"flaky: {cause_of(message.removeprefix(FLAKY))}"
    if "hint" in told:
        return told["hint"]
    if "happened" not in told:
        return message.strip().partition("\n")[0]
    refused = _REFUSED.search(message)
    why = f", for {refused['reason']}" if refused else ""
    return f"{told['happened']}{why}; expected {told.get('expected', '')}"


def key_of(message: str) -> str:
    """What failures of one cause have in common: the diagnosis without what differs from cell to cell."""
    return _VARYING.sub("#", cause_of(message))


def causes(failures: Iterable[T], message: Callable[[T], str]) -> list[Cause[T]]:
    """The causes of some failures, the one with the most of them first.

    Parameters
    ----------
    failures
        Failures of any kind, in the order of the run.
    message
        Gives a failure's message.
    """
    groups: dict[str, list[T]] = {}
    for failure in failures:
        groups.setdefault(key_of(message(failure)), []).append(failure)
    found = [Cause(cause_of(message(first)), first, tuple(others)) for first, *others in groups.values()]
    return sorted(found, key=lambda cause: -cause.count)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport, config: pytest.Config
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Count a failure whose cause has been told apart from those that the terminal shows whole."""
    if getattr(report, REPEATED, False) and config.get_verbosity() <= 0:
        return "same cause", "F", ("FAILED", {"red": True})
    return None
