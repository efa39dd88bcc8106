"""Faults that people have reported of kernels in another process, and of timings."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.timing.measuring import Timer, measure
from fusiongate.timing.pairing import Settings
from fusiongate.timing.stopwatches import Arm

from ..timings import calibration
from ..timings.spinning import spin_ns

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs a GPU")


# 26: another configuration in another process -------------------------------------------------------------------------


def digests(device: str, seed: int) -> list[tuple[str, int, int, str]]:
    """What each kernel gives for a few sizes, met in an order of the seed's."""
    sizes = ((1, 1, 512), (2, 5, 512), (1, 700, 512), (2, 40, 4096))
    runs = [(op, size) for op in fg.kernels.FUSIONS for size in sizes]
    random.Random(seed).shuffle(runs)
    found = []
    for op, (batch, tokens, columns) in runs:
        generator = torch.Generator().manual_seed(7)
        shapes = (batch, tokens, columns), (batch, 1, columns), (batch, 1, columns)
        args = [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
        kernel = op.host if device == "cpu" else op
        assert kernel is not None
        found.append((op.name, tokens, columns, fg.md5(kernel.fused(*args, *([1e-6] if "norm" in op.name else [])))))
    return sorted(found)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_case_26_the_shipped_kernels_have_one_configuration_in_every_process(device: str) -> None:
    """Another process, which meets the sizes in another order, as a server would, gives the same bits."""
    module = "fusiongate.suites.kernels.test_cases_processes"
    program = f"from {module} import digests; print(digests({device!r}, 2))"
    there = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout

    here = digests(device, 1)

    assert f"{here}\n" == there
    assert 4 * len(fg.kernels.FUSIONS) == len(here)


def mean_square(x: Tensor, columns: int) -> Tensor:
    """In parts of so many columns, one after another: the order of the sum depends on it."""
    total = torch.zeros(x.shape[:-1])
    for part in x.float().square().split(columns, -1):
        total = total + part.sum(-1)
    return total / x.shape[-1]


def test_case_26_a_configuration_among_the_arguments_is_in_the_signature() -> None:
    x = torch.randn(40, 50, 256)
    op = fg.Fusion("case", reference=lambda x, columns: mean_square(x, 64), fused=mean_square)
    op(x, 64)
    op(x, 16)

    assert ("verified", "refused") == (op.explain(x, 64).reason, op.explain(x, 16).reason)


def test_case_26_a_configuration_that_nobody_names_is_found_by_a_recheck() -> None:
    """A tuner that changes its mind in the middle of a run."""
    chosen = 64
    x = torch.randn(40, 50, 256)
    op = fg.Fusion(
        "case",
        reference=lambda x: mean_square(x, 64),
        fused=lambda x: mean_square(x, chosen),
        policy=fg.Policy(recheck=fg.Every(2)),
    )
    op(x)
    op(x)
    chosen = 16
    op(x)

    assert "refused" == op.explain(x).reason


# 29: timings of kernels whose length is known -------------------------------------------------------------------------


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize("timer, ns", [("graph", 500_000), ("events", 2_000_000)])
def test_case_29_a_kernel_of_known_length_reads_as_long_as_it_is(timer: Timer, ns: int) -> None:
    x = torch.zeros(1, dtype=torch.int64, device="cuda")
    known_s = min(int(spin_ns(x, ns)) for _ in range(9)) * 1e-9
    settings = Settings(seconds=0.3, margin=0.05, precision=None, retries=0)

    taken = measure([Arm("spin", spin_ns), Arm("again", spin_ns)], (x, ns), settings=settings, timer=timer, hot=True)

    assert timer == taken.timer
    assert known_s == pytest.approx(taken.arms["spin"].median.value, rel=0.02)


@needs_gpu
@pytest.mark.alone
def test_case_29_what_naive_loops_read_is_something_else() -> None:
    """Without a wait, how fast launches are queued; with one after each, the wait too."""
    x = torch.zeros(1, dtype=torch.int64, device="cuda")
    # Or the first loop would time the build.
    int(spin_ns(x, 1_000))

    # The quickest of a few: whatever else keeps the host busy makes a loop longer, and no loop shorter.
    assert min(calibration._naive(x, 2_000_000) for _ in range(5)) < 0.5 * 2e-3
    assert min(calibration._naive_waiting(x, 50_000) for _ in range(5)) > 1.02 * 50e-6
