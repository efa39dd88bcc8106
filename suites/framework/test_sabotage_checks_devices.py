"""Each check of what is around a launch on a GPU is needed; shown on a CPU that passes for two GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusiongate.comparison.verdicts import Verdict
from fusiongate.gate import launch_checks
from fusiongate.gate.global_state import GlobalState
from fusiongate.sabotage import saboteur

from .removals import LARGE, normal, nothing, right, unwatched, unwatched_device


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs in what torch.cuda says: all work is done on the CPU. As in CUDA, each has a current stream."""
    gpus = SimpleNamespace(device=0, streams=[object(), object()])

    def set_stream(stream: object) -> None:
        gpus.streams[gpus.device] = stream

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(gpus, "device", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpus.streams[gpus.device])
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(launch_checks, "GlobalState", lambda device: GlobalState(torch.device("cuda", 0)))
    return gpus


def verified(name: str) -> Verdict:
    return saboteur(name).apply(right()).verify(*normal(*LARGE))


@pytest.mark.usefixtures("simulated")
def test_without_the_stream_a_kernel_may_leave_another_one_current(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stream" == verified("current-stream-left-changed").reason
    unwatched("current stream")(monkeypatch)
    assert verified("current-stream-left-changed").ok


@pytest.mark.usefixtures("simulated")
def test_without_the_device_a_kernel_may_leave_another_one_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device has another current stream: that is what is told instead, and without it nothing is."""
    assert "device" == verified("current-device-left-changed").reason
    unwatched_device(monkeypatch)
    assert "stream" == verified("current-device-left-changed").reason
    unwatched("current stream")(monkeypatch)
    assert verified("current-device-left-changed").ok


@pytest.mark.parametrize("name", ["current-stream-left-changed", "current-device-left-changed"])
def test_without_its_end_a_first_sight_leaves_behind_what_a_kernel_changed(
    name: str, simulated: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current() -> tuple[int, object]:
        return simulated.device, simulated.streams[simulated.device]

    before = current()
    verified(name)
    assert before == current()
    nothing(GlobalState, "_make_current_again")(monkeypatch)
    verified(name)
    assert before != current()
