"""What a launch has to leave alone, and which errors are no fault of a kernel's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusiongate.gate import device_state as surroundings
from fusiongate.gate.device_state import capturing, device_of, excuse, is_out_of_memory, is_poisoned


def test_the_host_s_allocator_runs_out_of_memory_too() -> None:
    """It has no exception of its own."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_out_of_memory(raised.value)


def of_the_runtime(code: int) -> Any:
    """As torch raises it, with the runtime's code."""
    error: Any = torch.AcceleratorError("CUDA error")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    "error, reason",
    [
        (torch.OutOfMemoryError("no"), "out-of-memory"),
        (of_the_runtime(900), "capturing"),
        (of_the_runtime(901), "capturing"),
        (of_the_runtime(906), "capturing"),
        (of_the_runtime(716), None),
        (torch.AcceleratorError("operation not permitted when stream is capturing"), None),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), None),
        (ValueError("capturing"), None),
    ],
    ids=["memory", "forbidden", "broken", "legacy", "a-fault", "no-code", "words", "another-class"],
)
def test_some_errors_say_nothing_about_the_kernel(error: Exception, reason: str | None) -> None:
    assert reason == excuse(error, (torch.zeros(1),))


@pytest.mark.parametrize(
    "captured, answer, reason",
    [
        (True, None, "capturing"),
        (False, of_the_runtime(900), "capturing"),
        (False, of_the_runtime(716), None),
        (False, RuntimeError("capturing"), None),
        (False, None, None),
    ],
    ids=["this-stream", "elsewhere", "a-fault", "words", "none"],
)
def test_a_launchers_own_error_is_excused_by_what_the_stream_says(
    monkeypatch: pytest.MonkeyPatch, captured: bool, answer: Exception | None, reason: str | None
) -> None:
    """Simulated: the device is a CPU's that says it is on a GPU."""

    def synchronize() -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(surroundings, "device_of", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr(surroundings, "capturing", lambda args: captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))

    assert reason == excuse(RuntimeError("a launcher's own words"), (torch.zeros(1),))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), MemoryError()], ids=["device", "python"])
def test_out_of_memory_is_known_by_its_class(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("DefaultCPUAllocator")], ids=["runtime", "value"])
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_cpu_is_neither_captured_nor_poisoned() -> None:
    args = (1, torch.zeros(2))

    assert torch.device("cpu") == device_of(args)
    assert device_of((1, None)) is None
    assert not capturing(args)
    assert not is_poisoned(args)


@pytest.mark.parametrize(
    "raises, poisoned",
    [
        (None, False),
        (RuntimeError("an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("no"), False),
        (of_the_runtime(900), False),
    ],
    ids=["works", "gone", "no-memory", "captured-elsewhere"],
)
def test_a_device_that_does_not_answer_is_poisoned(
    monkeypatch: pytest.MonkeyPatch, raises: Exception | None, poisoned: bool
) -> None:
    """Simulated: the device is a meta tensor that says it is on a GPU."""

    def synchronize() -> None:
        if raises is not None:
            raise raises

    monkeypatch.setattr("fusiongate.gate.device_state.device_of", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr("fusiongate.gate.device_state.capturing", lambda args: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))
    monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.zeros(1))

    assert poisoned == is_poisoned((torch.zeros(1),))


def test_a_capture_is_not_asked_for_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device would break it."""
    monkeypatch.setattr("fusiongate.gate.device_state.device_of", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr("fusiongate.gate.device_state.capturing", lambda args: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("asked"))

    assert not is_poisoned((torch.zeros(1),))


def test_a_device_that_cannot_even_be_asked_for_a_capture_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an assertion in a kernel every question raises, the first one too; the device stands in for a GPU's."""

    def gone(args: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(surroundings, "device_of", lambda args: torch.device("cuda", 0))
    monkeypatch.setattr(surroundings, "capturing", gone)

    assert is_poisoned((torch.zeros(2),))
