"""Rows on their way from a test to the ledger: they ride on its reports, which reach the controller of any worker."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from fusiongate import ledger
from fusiongate.platforms import Environment, environment

from .device import select

__all__ = ["Observation", "observations", "record"]

_ATTRIBUTE: Final = "fusiongate_rows"
_ROWS: Final = pytest.StashKey[list[str]]()
_ENVIRONMENT: Final = pytest.StashKey[Environment]()
_SENT: Final = pytest.StashKey[set[str]]()


@dataclass(frozen=True, slots=True)
class Observation:
    """A ledger row that does not know its run yet: only the controller does."""

    kind: str
    """One of ``ledger.KINDS``."""

    subject: str
    """What was observed."""

    environment: str
    """The key of the environment it was observed in."""

    payload: Mapping[str, Any]
    """The observation itself, of JSON's own types."""


def record(
    item: pytest.Item, kind: str, subject: str, payload: Mapping[str, Any], environment: Environment | None = None
) -> None:
    """Put an observation on the next report of ``item``; each process sends an environment along once.

    Parameters
    ----------
    item
        The test that made the observation.
    kind
        ``cell``, ``digest`` or ``timing``.
    subject
        The name of a fusion, a foreign function or a preset.
    payload
        JSON's own types, finite numbers only.
    environment
        Where the observation was made; by default on the selected device, as it was at the first observation.
    """
    rows = item.stash.setdefault(_ROWS, [])
    seen = (environment or _environment(item.config)).to_json()
    key = ledger.environment_key(seen)
    sent = item.config.stash.setdefault(_SENT, set())
    if key not in sent:
        sent.add(key)
        rows.append(_pack(Observation("run", "environment", key, seen)))
    rows.append(_pack(Observation(kind, subject, key, payload)))


def observations(report: pytest.TestReport) -> list[Observation]:
    """Give the observations that ride on a report, in the order in which they were made."""
    return [Observation(**json.loads(row)) for row in getattr(report, _ATTRIBUTE, ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Load what was observed since the last report on this one."""
    report = yield
    rows = item.stash.get(_ROWS, None)
    if rows:
        # Text, because what crosses to the controller must be of basic types.
        vars(report)[_ATTRIBUTE] = rows
        item.stash[_ROWS] = []
    return report


def _pack(observation: Observation) -> str:
    fields = {name: getattr(observation, name) for name in Observation.__slots__}
    return json.dumps(fields, allow_nan=False)


def _environment(config: pytest.Config) -> Environment:
    if _ENVIRONMENT not in config.stash:
        config.stash[_ENVIRONMENT] = environment(select(config).torch_device)
    return config.stash[_ENVIRONMENT]
