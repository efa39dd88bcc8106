"""A device whose context has gone: its process runs no further test, and the report says so to the recorder.

Nothing can be believed of such a device, not even an error; only another process has another context. The session is
stopped rather than the process killed, so that what the test observed still reaches the ledger. Under pytest-xdist the
other workers run what they have been given already, and their results count.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from fusiongate.errors import PoisonedDevice
from fusiongate.io import one_line

from .device import selected

if TYPE_CHECKING:
    import torch

__all__ = ["Poisoning", "poisoning"]

_ATTRIBUTE: Final = "fusiongate_poisoning"


@dataclass(frozen=True, slots=True)
class Poisoning:
    """The end of a process's run on its device."""

    test: str
    """The node id of the test that it came to light in."""

    device: str
    """The device, with the worker whose it was: each worker may have a ``cuda:0`` of its own."""

    error: str
    """The error that told of it, in one line."""

    def __str__(self) -> str:
        return f"{self.device} cannot be used any more after {self.test} ({self.error})"


def poisoning(report: pytest.TestReport) -> Poisoning | None:
    """Give what a report tells of a device that has gone; None from all other reports."""
    told = getattr(report, _ATTRIBUTE, None)
    return told and Poisoning(report.nodeid, *told)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at every exception, whatever becomes of the test: also an expected one leaves a device that has gone."""
    report = yield
    lost = call.excinfo and _lost(call.excinfo.value, item.config)
    if lost:
        worker = getattr(item.config, "workerinput", {}).get("workerid")
        device = f"{lost.device} in {worker}" if worker else lost.device
        first, *_ = str(lost.original).splitlines() or [""]
        # A list of texts, because what crosses to the controller must be of basic types.
        told = [device, one_line(f"{type(lost.original).__name__}: {first}")]
        vars(report)[_ATTRIBUTE] = told
        item.session.shouldstop = f"fusiongate: {Poisoning(item.nodeid, *told)}"
    return report


def _lost(error: BaseException, config: pytest.Config) -> PoisonedDevice | None:
    named = next((one for one in _chain(error) if isinstance(one, PoisonedDevice)), None)
    if named is not None:
        return named
    # An asynchronous fault comes to light anywhere, not only where a gate looks.
    device = selected(config)
    if device is None or device.kind == "host" or not _gone(device.torch_device):
        return None
    return PoisonedDevice(str(device.torch_device), error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of: a cell's failure is raised from what its subject raised."""
    seen: set[int] = set()
    open_ends = [error]
    while open_ends:
        one = open_ends.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            open_ends += [end for end in (one.__cause__, one.__context__) if end is not None]


def _gone(device: torch.device) -> bool:
    from fusiongate.gate.device_state import is_of_a_capture, is_out_of_memory

    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not (is_out_of_memory(error) or is_of_a_capture(error))
    return False
