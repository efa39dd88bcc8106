"""fg.rewired on models that are drawn: no difference from eager, whatever stands around a chain."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fusiongate as fg

from .scanned_programs import ALL, NORMS, Program, happen, programs, smallest
from .test_scan_adversaries import EAGER, fused, outcome

EXAMPLES = int(os.environ.get("FUSIONGATE_SCANNED_PROGRAMS", "100"))
"""How many models are drawn; `nox -s rewired` draws 2,000."""

MOUNTED: Counter[str] = Counter()


def failing(*_args: Any) -> Any:
    raise RuntimeError("this kernel does not launch")


def refused() -> list[Any]:
    """Kernels whose gates refuse them at once."""
    return [fg.Fusion(name, reference=function, fused=failing) for name, function in EAGER.items()]


def trace(program: Program, arm: Callable[[], list[Any]] | None) -> list[Any]:
    """What a program's calls give, in eager or rewired."""
    model: Any = program.kind()(NORMS[program.norm]()).eval()
    found = [outcome(model, 0)]
    with fg.rewired(model, [] if arm is None else arm()) as report:
        found += [outcome(model, seed) for seed in (1, 2)]
        called = model
        for event in program.events:
            autocast = event == "autocast"
            called = happen(event, called)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                found += [outcome(called, seed) for seed in (1, 2)]
    found += [outcome(called, 3), outcome(model, 3)]
    if arm is not None:
        MOUNTED["models"] += 1
        MOUNTED["mounted"] += any(site.fusion is not None for site in report.sites)
        MOUNTED["fused"] += any(path == "fused" for path, _ in report.counters)
        MOUNTED["obstacles"] += any(site.reason is not None for site in report.sites)
    return found


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def differs(program: Program) -> bool:
    """Whether a program's calls give anything else when it is rewired."""
    expected = trace(program, None)
    return any(expected != trace(program, arm) for arm in (fused, refused))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(ALL))
def test_drawn_models_give_eagers_bits(program: Program) -> None:
    if differs(program):
        pytest.fail(f"it computes something else rewired: {smallest(program, differs)!r}")


def test_the_models_that_are_drawn_have_sites_and_obstacles() -> None:
    """A generator of nothing would find no difference either."""
    if not MOUNTED["models"]:
        test_drawn_models_give_eagers_bits()
    assert MOUNTED["mounted"] > 0.3 * MOUNTED["models"]
    assert MOUNTED["fused"] > 0.1 * MOUNTED["models"]
    assert MOUNTED["obstacles"] > 0.2 * MOUNTED["models"]
