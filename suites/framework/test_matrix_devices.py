"""Where a cell's operands stand, and how long a huge one waits for memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusiongate.matrix.cells import NotRun, Selected
from fusiongate.matrix.devices import DEVICES, check_memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("placement", "selected", "expected"),
    [
        ("current", Selected("host"), "cpu"),
        ("current", Selected("cuda", 1), "cuda:1"),
        ("cpu", Selected("cuda", 1), "cpu"),
        ("other", Selected("cuda", 0), "cuda:1"),
        ("other", Selected("cuda", 1), "cuda:0"),
        ("split", Selected("cuda", 1), "cuda:1"),
    ],
)
def test_each_placement_is_relative_to_the_selected_device(
    placement: str, selected: Selected, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert torch.device(expected) == DEVICES[placement].device(selected)


@pytest.mark.parametrize(
    ("placement", "selected", "expected"),
    [
        ("other", Selected("host"), "needs a second GPU"),
        ("other", Selected("cuda", 0), "needs a second GPU"),
        ("split", Selected("host"), "needs a GPU"),
    ],
)
def test_a_placement_for_which_there_are_too_few_gpus_is_not_run(
    placement: str, selected: Selected, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotRun, match=f"^{expected}$"):
        DEVICES[placement].device(selected)


def test_only_the_first_tensor_is_split_off() -> None:
    """To the CPU, from a device that every machine has."""
    ready = torch.ones(2)
    away = torch.ones(2, device="meta")
    split, kept = DEVICES["split"].placed, DEVICES["current"].placed
    assert (1.0, ready, away) == split((1.0, ready, away))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        split((1.0, away, ready))
    assert (1.0, away, ready) == kept((1.0, away, ready))


class Memory:
    """A GPU's memory as other processes give it back: what is free at each look, in GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: float) -> None:
        self.free = list(free)
        self.looks = 0
        self.seconds = 0.0
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.look)
        monkeypatch.setattr("fusiongate.matrix.devices.time", SimpleNamespace(monotonic=self.now, sleep=self.sleep))

    def look(self, _: torch.device) -> tuple[int, int]:
        free = self.free[min(self.looks, len(self.free) - 1)]
        self.looks += 1
        return int(free * 2**30), 100 * 2**30

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


# Half of 24 copies, of two bytes an element: 24 GiB.
GIBI = 2**30


def test_a_huge_cell_begins_at_once_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, 24)
    check_memory(GPU, GIBI, 2)
    assert (1, 0.0) == (memory.looks, memory.seconds)


def test_a_huge_cell_waits_for_those_of_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, 2, 2, 30)
    check_memory(GPU, GIBI, 2)
    assert 3 == memory.looks


def test_a_huge_cell_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, 2)
    with pytest.raises(NotRun, match=r"^needs 24 GiB of GPU memory, and 2 are free$"):
        check_memory(GPU, GIBI, 2, patience_s=10)
    assert 10 <= memory.seconds < 11


def test_a_cell_that_never_fits_does_not_wait_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, 99)
    with pytest.raises(NotRun, match=r"^needs 120 GiB of GPU memory, and 99 are free$"):
        check_memory(GPU, 5 * GIBI, 2)
    assert 0.0 == memory.seconds
