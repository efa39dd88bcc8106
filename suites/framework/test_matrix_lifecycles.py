"""What has to come of a lifecycle in a mode is what the gate does, in captures too: those are simulated here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate import kernels
from fusiongate.gate import fusion as fusions
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Slot
from fusiongate.matrix import CellFailure, CellResult, Matrix, NotRun, Selected, modes
from fusiongate.matrix.expansion import axis_values
from fusiongate.matrix.lifecycles import LIFECYCLES
from fusiongate.matrix.modes import MODES
from fusiongate.matrix.streams import THREADS

pytestmark = pytest.mark.usefixtures("quiet_gates")

CAPTURES = [name for name, mode in MODES.items() if any(mode.captures)]


class SimulatedGraph:
    """A graph on the CPU: it holds what this thread did while it was captured, and replays that."""

    capturing = threading.local()

    def __init__(self) -> None:
        self.recorded: list[Callable[[], Any]] = []

    @classmethod
    @contextlib.contextmanager
    def capture(cls, graph: SimulatedGraph, **options: Any) -> Iterator[None]:
        cls.capturing.graph = graph
        yield
        cls.capturing.graph = None

    @classmethod
    def current(cls) -> SimulatedGraph | None:
        """The graph that this thread captures."""
        graph: SimulatedGraph | None = getattr(cls.capturing, "graph", None)
        return graph

    def replay(self) -> None:
        for again in self.recorded:
            again()


def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, as a capture records it."""

    @functools.wraps(function)
    def called(*args: Any) -> Tensor:
        out = function(*args)
        graph = SimulatedGraph.current()
        if graph is not None:
            graph.recorded.append(lambda: out.copy_(function(*args)))
        return out

    return called


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", SimulatedGraph.capture)
    monkeypatch.setattr(fusions, "capturing", lambda args: SimulatedGraph.current() is not None)
    for name in CAPTURES:
        monkeypatch.setitem(modes.MODES, name, dataclasses.replace(MODES[name], needs_gpu=False))


def checked(op: Fusion, mode: str, lifecycle: str) -> CellResult:
    matrix = Matrix(op, sizes=[{"B": 2, "S": 33, "D": 512}])
    base = matrix.cells()[0]
    return matrix.prepare(dataclasses.replace(base, mode=mode, lifecycle=lifecycle), Selected("host")).check()


def modulate(lifecycle: str = "verified") -> Fusion:
    """The host's kernel; what replays it has to be told what it did."""
    op = kernels.modulate.host
    assert op is not None
    # A kernel that cannot be loaded is in no graph, and another one cannot be built with a fault.
    fused = op.fused if lifecycle == "build-aborts" else recorded(op.fused)
    return Fusion("case", reference=recorded(op.reference), fused=fused, declines=op.declines)


REFERENCE, FUSED = "reference", "fused"

LAST = {
    "verified": ("capturing", "verified", "verified", "verified"),
    "unseen": ("capturing", "first-sight", "verified", "verified"),
    "refused": ("capturing", "refused", "refused", "refused"),
    "verified-elsewhere": ("capturing", "refused", "refused", "refused"),
    "mutates-input": ("capturing", "refused", "refused", "refused"),
    "launch-raises": ("capturing", "refused", "refused", "refused"),
    "build-fails": ("capturing", "no-kernel", "no-kernel", "no-kernel"),
    "build-aborts": ("capturing", "no-kernel", "no-kernel", "no-kernel"),
    "out-of-memory": ("capturing", "capturing", "capturing", "capturing"),
    "disabled": ("disabled", "disabled", "disabled", "disabled"),
    "declines-raised": ("declines-raised", "declines-raised", "declines-raised", "declines-raised"),
    "capacity": ("capacity", "capacity", "capacity", "capacity"),
    "recovers": ("capturing", "capturing", "verified", "verified"),
}
"""The reason of the last call that reaches the gate: captured cold, warm, in segments, beside another thread."""


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("lifecycle, number", [(name, number) for name in LAST for number in range(4)])
def test_a_capture_goes_through_each_lifecycle(lifecycle: str, number: int) -> None:
    mode = ("capture-cold", "capture-warm", "capture-segments", "capture-beside")[number]

    assert LAST[lifecycle][number] == checked(modulate(lifecycle), mode, lifecycle).reason


def test_every_lifecycle_and_every_capture_is_among_them() -> None:
    assert list(LAST) == sorted(LIFECYCLES, key=list(LAST).index)
    assert ["capture-cold", "capture-warm", "capture-segments", "capture-beside"] == CAPTURES


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("mode", CAPTURES)
def test_a_gate_that_looks_at_a_kernel_in_a_capture_is_red(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "capturing", lambda args: False)
    if mode == "capture-warm":
        assert "verified" == checked(modulate(), mode, "verified").reason
        mode, lifecycle = "capture-warm", "out-of-memory"
    else:
        lifecycle = "verified"
    with pytest.raises(CellFailure, match=r"expected: .*1 × reference \(capturing\)"):
        checked(modulate(), mode, lifecycle)


def test_a_second_first_sight_among_threads_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gate's lock each thread would look for itself, where all get there before one has a verdict."""
    everyone = threading.Barrier(THREADS)

    def without_lock(op: Fusion, slot: Slot, args: tuple[Any, ...]) -> Tensor:
        everyone.wait(timeout=60)
        result: Tensor = op._judge.first_sight(slot, args)[0]
        return result

    monkeypatch.setattr(Fusion, "_unverified", without_lock)
    with pytest.raises(CellFailure, match=r"expected: 3 × fused \(verified\), 1 × reference \(first-sight\)"):
        checked(modulate(), "threads-cold", "verified")


def test_a_kernel_of_somebody_else_is_not_built_with_a_fault() -> None:
    with pytest.raises(NotRun, match="needs a kernel that is built from fusiongate's sources"):
        checked(modulate(), "eager", "build-aborts")


def test_some_lifecycles_and_modes_stand_in_no_matrix() -> None:
    axes = axis_values()

    assert {"build-aborts", "recovers"} == set(LIFECYCLES) - set(axes["lifecycle"])
    assert {"capture-segments", "capture-beside"} == set(MODES) - set(axes["mode"])
