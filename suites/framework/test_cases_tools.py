"""Faults that people have reported of builds, platforms and graphs; and that each report has a test by its number.

Those of the kernels and of the gate stand in suites/kernels, those of snapshots, timings and workers next to this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.jit import Source, Target, library
from fusiongate.matrix import CellFailure, Matrix, Selected
from fusiongate.matrix.modes import MODES
from fusiongate.platforms import environment, platform_of
from fusiongate.presets import location

from .planted import chain, rows, same_bits
from .tiny_sources import TINY, write_tiny

CASES = range(1, 33)
"""The numbers of the reports in the list that these tests go by."""


def test_every_report_has_a_test_by_its_number() -> None:
    suites = Path(__file__).parent.parent
    modules = [*suites.glob("kernels/test_cases*.py"), *suites.glob("framework/test_cases*.py")]
    named = {int(n) for path in modules for n in re.findall(r"^def test_case_(\d\d)_", path.read_text(), re.MULTILINE)}

    assert set(CASES) == named


# 8: a build that kills its process ------------------------------------------------------------------------------------


def dying_compiler(folder: Path, signal: str) -> Path:
    """A compiler that says its version, and dies of a signal as soon as it compiles."""
    script = folder / "compiler"
    real = shutil.which("c++")
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real} --version; fi\nkill -{signal} $$\n')
    script.chmod(0o755)
    return script


def loading(statement: str) -> str:
    """A source whose library does this when it is loaded."""
    return f"{TINY}\n#include <csignal>\n#include <cstdlib>\nstatic const int kDies = ({statement}, 0);\n"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "signal, code, tells",
    [
        ("ABRT", TINY, "did not compile"),
        ("SEGV", TINY, "did not compile"),
        (None, loading("std::abort()"), "by SIGABRT"),
        (None, loading("std::raise(SIGILL)"), "by SIGILL"),
        (None, loading("std::_Exit(3)"), "failed its probe"),
    ],
    ids=["compiler-aborts", "compiler-crashes", "library-aborts", "illegal-instruction", "library-exits"],
)
def test_case_08_a_build_that_dies_leaves_its_parent_on_the_reference(
    signal: str | None,
    code: str,
    tells: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is not begun again: one attempt, one warning, the reason `no-kernel`."""
    if signal is not None:
        monkeypatch.setenv("CXX", str(dying_compiler(tmp_path, signal)))
    source: Source = write_tiny(tmp_path, code=code)
    op = Fusion(
        "case", reference=chain, fused=lambda x, *rest: chain(x + library(source, Target.host()).add(-2), *rest)
    )
    caplog.set_level(logging.INFO, logger="fusiongate")
    for batch in (1, 2, 1):
        assert same_bits(op(*rows(batch)), chain(*rows(batch)))

    assert {("reference", "no-kernel"): 3} == op.counters
    assert 0 == op.launches
    assert 1 == sum("compiling" in message for message in caplog.messages)
    (warning, *_) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "no kernel: tiny for host-" in warning
    assert tells in warning


# 13: a GPU of another maker whose capability reads like a known one ---------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5), (10, 0)], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_case_13_an_amd_gpu_is_no_hopper_whatever_its_capability(
    arch: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its platform, nor its build, nor where its snapshots lie comes from the two numbers."""
    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor, gcnArchName=f"{arch}:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked"))
    amd = dataclasses.replace(environment("cpu"), platform=platform_of("cuda:0"), device_name="one")
    hopper = dataclasses.replace(amd, platform="cuda-sm_90")

    assert f"rocm-{arch}" == amd.platform
    assert Target("hip", arch) == Target.of(torch.device("cuda", 0))
    assert location(Path(), amd, "test_it", "p", "tiny") != location(Path(), hopper, "test_it", "p", "tiny")


# 25: a replay that is wrong while eager is right ----------------------------------------------------------------------


class SimulatedGraph:
    """A graph on the CPU: it holds what was launched while it was captured, and replays that."""

    capturing: SimulatedGraph | None = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], Any]] = []
        self.replays = 0

    @classmethod
    @contextlib.contextmanager
    def capture(cls, graph: SimulatedGraph) -> Iterator[None]:
        cls.capturing = graph
        yield
        cls.capturing = None

    def replay(self) -> None:
        self.replays += 1
        for launch in self.launches:
            launch()


class StaleGraph(SimulatedGraph):
    """One whose second replay still gives what the first one gave."""

    def replay(self) -> None:
        if self.replays < 1:
            super().replay()


def captured_in_graphs(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = torch.empty_like(x)

    def launch() -> Tensor:
        return torch.add(x * (1 + scale), shift, out=out)

    if SimulatedGraph.capturing is not None:
        SimulatedGraph.capturing.launches.append(launch)
    return launch()


def failure_of(op: Fusion, cell: str, selected: Selected) -> str:
    """What a cell says when it is red; nothing when it is green."""
    matrix = Matrix(op, sizes=[{"B": 2, "S": 33, "D": 512}])
    try:
        matrix.prepare({one.id: one for one in matrix.cells()}[cell], selected).check()
    except CellFailure as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("graph", [SimulatedGraph, StaleGraph], ids=["right", "stale"])
def test_case_25_a_wrong_replay_is_told_from_a_wrong_kernel(
    graph: type[SimulatedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated graphs: the replay is red, by its mode and its call; the kernel stays verified, and is green."""
    monkeypatch.setitem(MODES, "capture-warm", dataclasses.replace(MODES["capture-warm"], needs_gpu=False))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", SimulatedGraph.capture)
    op = Fusion("case", reference=chain, fused=captured_in_graphs)

    replayed = failure_of(op, "capture-warm", Selected("host"))

    assert "" == failure_of(op, "base", Selected("host"))
    assert (graph is StaleGraph) is (
        "case[capture-warm], call 3 of 3, on replay 2\n  happened: the result is not" in replayed
    )
    assert "refused" not in replayed
