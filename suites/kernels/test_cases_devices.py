"""Faults that people have reported of kernels on streams, in graphs, on several devices and beside other memory.

What can be shown without a GPU is: on the host builds, or on a stand-in that is named.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.sabotage import Detector, Stage, looked_at

from ..framework.planted import chain, right
from .operands import HOSTS, arguments, keeps_contract, operands, refill, same_bits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs a second GPU")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
each_kernel = pytest.mark.parametrize("op", fg.kernels.FUSIONS, ids=lambda op: op.name)


def for_device(op: fg.Fusion, device: str) -> fg.Fusion:
    """The kernel as it is built for a device."""
    if device != "cpu":
        return op
    assert op.host is not None
    return op.host


# 10: a cold gate while a graph is captured ----------------------------------------------------------------------------


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the gate is told that a graph is being captured: a stand-in, on the CPU."""
    told = [False]
    monkeypatch.setattr("fusiongate.gate.fusion.capturing", lambda args: told[0])
    return told


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
def test_case_10_a_capture_stores_no_verdict_and_a_warm_gate_is_captured(
    op: fg.Fusion, capture: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(op, operands(2, 9, 128))
    with op.isolated() as fresh:
        capture[0] = True
        assert same_bits(fresh(*args), op.reference(*args))
        assert (0, fg.State.UNSEEN) == (fresh.launches, fresh.standing(*args))
        assert {("reference", "capturing"): 1} == fresh.counters
        assert "warm_up" in caplog.text

        capture[0] = False
        fg.warm_up(fresh, args)
        before = fresh.launches
        capture[0] = True
        assert keeps_contract(op, fresh(*args), args)
        assert (before + 1, fg.State.VERIFIED) == (fresh.launches, fresh.standing(*args))


def test_case_10_no_capture_waits_for_a_recheck(capture: list[bool]) -> None:
    """It would compare inside the graph: the call is fused, and a later one is looked at again."""
    op, args = (
        fg.Fusion("case", reference=chain, fused=right, policy=fg.Policy(recheck=fg.Every(1))),
        operands(2, 9, 128),
    )
    fg.warm_up(op, args)
    capture[0] = True
    op(*args)
    capture[0] = False
    op(*args)

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1, ("reference", "recheck"): 1} == op.counters


@needs_gpu
@each_kernel
def test_case_10_first_sight_between_two_captured_segments(op: fg.Fusion) -> None:
    """The first segment holds the reference, the second the kernel; both replay as eager on changed inputs."""
    args = arguments(op, operands(2, 33, 512, device="cuda"))
    op.reference(*args)
    with op.isolated() as fresh:
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            cold = fresh(*args)
        assert (0, fg.State.UNSEEN) == (fresh.launches, fresh.standing(*args))
        fg.warm_up(fresh, args)
        with torch.cuda.graph(second), fg.require_fused():
            warm = fresh(*args)
        for seed in (1, 2, 3):
            refill(args, arguments(op, operands(2, 33, 512, seed=seed, device="cuda")))
            first.replay()
            second.replay()
            assert same_bits(cold, op.reference(*args))
            assert keeps_contract(op, warm, args)

        taken = {("reference", "capturing"): 1, ("reference", "first-sight"): 1, ("fused", "verified"): 1}
        assert taken == fresh.counters


# 18: tensors on another device than the current one -------------------------------------------------------------------


@needs_two
@each_kernel
@pytest.mark.parametrize("current", [0, 1])
def test_case_18_one_gate_serves_two_devices_whichever_is_current(op: fg.Fusion, current: int) -> None:
    on = {device: arguments(op, operands(2, 33, 512, device=device)) for device in ("cuda:0", "cuda:1")}
    with op.isolated() as fresh, torch.cuda.device(current):
        for device in ("cuda:1", "cuda:0") * 3:
            result = fresh(*on[device])
            assert torch.device(device) == result.device
            assert current == torch.cuda.current_device()
            assert keeps_contract(op, result, on[device])

        assert {("reference", "first-sight"): 2, ("fused", "verified"): 4} == fresh.counters


# 19: work on side streams ---------------------------------------------------------------------------------------------


@needs_gpu
@each_kernel
def test_case_19_one_verified_gate_follows_whichever_stream_is_current(op: fg.Fusion) -> None:
    """Fifty calls by turns on five streams, each behind a sleep and a late write of its operands, and no wait."""
    streams = [torch.cuda.Stream() for _ in range(5)]
    live = [arguments(op, operands(2, 33, 512, device="cuda")) for _ in streams]
    drawn = [arguments(op, operands(2, 33, 512, seed=seed, device="cuda")) for seed in range(50)]
    results = []
    with op.isolated() as fresh:
        # A call before the streams begin for each set of operands: a first sight would wait for the device.
        fg.warm_up(fresh, *live)
        taken = fresh.counters
        torch.cuda.synchronize()
        for number, others in enumerate(drawn):
            with torch.cuda.stream(streams[number % 5]):
                torch.cuda._sleep(1_000_000)
                refill(live[number % 5], others)
                results.append(fresh(*live[number % 5]))
        torch.cuda.synchronize()

        assert {("fused", "verified"): 50} == fresh.counters - taken
    assert all(keeps_contract(op, result, args) for result, args in zip(results, drawn, strict=True))


# 20: memory beside the operands and beside the result -----------------------------------------------------------------

CANARY, GAP = -7.5, 256
"""A gap is a whole number of cache lines, in elements of 16 bits."""


def carved(sources: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of tensors out of one slab, each at a whole cache line, and the gaps before, between and after them."""
    sizes = [tensor.numel() for tensor in sources]
    slab = torch.full(
        (sum(sizes) + GAP * (2 * len(sizes) + 1),), CANARY, dtype=sources[0].dtype, device=sources[0].device
    )
    start, pieces, gaps = GAP, [], [slab[:GAP]]
    for tensor in sources:
        end = start + tensor.numel()
        pieces.append(slab[start:end].view(tensor.shape).copy_(tensor))
        start = -(-end // GAP) * GAP + GAP
        gaps.append(slab[end:start])
    return pieces, gaps


@on_each_device
@each_kernel
@pytest.mark.parametrize("columns", [130, 2240, 4100])
@pytest.mark.parametrize("tokens", [1, 127, 129])
def test_case_20_nothing_beside_the_operands_and_the_result_is_written(
    op: fg.Fusion, tokens: int, columns: int, device: str
) -> None:
    op = for_device(op, device)
    x, scale, shift = operands(2, tokens, columns, device=device)
    unwritten = torch.full_like(x, float("nan"))
    (out, *pieces), gaps = carved([unwritten, x, scale, shift])
    args = arguments(op, (pieces[0], pieces[1], pieces[2]))
    if op.declines(*args) is not None:
        assert "norm" in op.name
        assert columns % 4
        return

    launcher: Any = op.fused
    launcher.entry.on(x.device)(out, *launcher.operands(*args))

    assert all(bool((gap == CANARY).all()) for gap in gaps)
    assert all(map(torch.equal, pieces, (x, scale, shift)))
    assert keeps_contract(op, out, args)


# 25: a replay that is wrong while eager is right ----------------------------------------------------------------------


@needs_gpu
def test_case_25_a_replay_that_does_nothing_is_told_from_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its mode and its call: called plainly, the kernel is green."""

    def red(cell: str) -> tuple[bool, str]:
        return looked_at(Stage(None, "modulate", cell, torch.device("cuda", 0)), Detector.MATRIX)

    assert not red("capture-warm")[0]
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)

    told, story = red("capture-warm")
    assert told
    assert "modulate[capture-warm], call 2 of 3, on replay 1\n  happened: the result is not" in story
    assert "refused" not in story
    assert not red("base")[0]
