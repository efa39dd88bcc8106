"""Each check of first sight that takes a GPU is needed: without it a saboteur goes unseen there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.sabotage import saboteur

from ..framework.removals import (
    LARGE,
    Patch,
    memory_as_an_allocator_hands_it_out,
    modulate,
    no_metadata,
    no_ring,
    normal,
    right,
    undisturbed_generators,
    unwatched,
    unwatched_device,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs a GPU")


@pytest.fixture
def restored() -> Iterator[None]:
    """Whatever a test lets through is undone: what is current, and work on streams that nobody waits for."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    torch.cuda.set_device(device)
    torch.cuda.set_stream(stream)
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)


def waiting(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The chain, with the device idle before and after it: streams that nobody watches wait for nothing else."""
    torch.cuda.synchronize(x.device)
    result = modulate(x, scale, shift)
    torch.cuda.synchronize(x.device)
    return result


def on_gpu() -> tuple[Tensor, ...]:
    return tuple(tensor.to("cuda:0") for tensor in normal(*LARGE))


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "name, patch, fused",
    [
        ("current-stream-left-changed", unwatched("current stream"), waiting),
        ("device-random-state-moved", undisturbed_generators, modulate),
        ("another-stream", memory_as_an_allocator_hands_it_out, modulate),
    ],
    ids=["stream", "random-state", "poison"],
)
def test_without_one_check_first_sight_on_a_gpu_misses_a_saboteur(
    name: str, patch: Patch, fused: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, args = fg.Fusion("modulate", reference=modulate, fused=fused), on_gpu()
    assert not saboteur(name).apply(op).verify(*args).ok
    patch(monkeypatch)
    verdict = saboteur(name).apply(op).verify(*args)
    assert verdict.ok, verdict


def test_without_the_device_a_result_without_dimensions_may_lie_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes with such a number and a GPU's as if they lay together; many at once would give it away."""

    def mean(x: Tensor) -> Tensor:
        return x.float().mean()

    monkeypatch.setattr("fusiongate.gate.verification.ELEMENTS", 0)
    elsewhere, args = saboteur("another-device"), on_gpu()[:1]
    op = fg.Fusion("mean", reference=mean, fused=mean)
    assert op.verify(*args).ok
    assert "device" == elsewhere.apply(op).verify(*args).reason
    no_metadata("device")(monkeypatch)
    no_ring(monkeypatch)
    verdict = elsewhere.apply(op).verify(*args)
    assert verdict.ok, verdict


ENDS_THE_DEVICE = """
import sys
import torch
from fusiongate.gate import judging
from fusiongate.gate.fusion import Fusion
from fusiongate.sabotage import saboteur

def modulate(x, scale, shift):
    return x * (1 + scale) + shift

if "unasked" in sys.argv:
    judging.is_poisoned = lambda args: False
op = saboteur("raises-asynchronously").apply(Fusion("modulate", reference=modulate, fused=modulate))
op(*(torch.ones(2, 3, 8, device="cuda") for _ in range(3)))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("words", [(), ("unasked",)], ids=["asked", "unasked"])
def test_without_a_look_at_the_device_its_loss_has_no_name(words: tuple[str, ...]) -> None:
    """In a process of its own, in which nothing more can run afterwards."""
    child = subprocess.run(
        [sys.executable, "-c", ENDS_THE_DEVICE, *words], capture_output=True, text=True, timeout=180, check=False
    )
    assert 0 != child.returncode
    assert ("PoisonedDevice" in child.stderr) is (not words), child.stderr


def unguarded(self: fg.Fusion, *args: Any) -> Any:
    """A launch that does not put the current device back."""
    return self.fused(*args)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs a second GPU")
@pytest.mark.usefixtures("restored")
def test_a_changed_device_is_undone_after_each_launch_or_else_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks stand behind each other, and a third where the other device's stream is seen: all have to go."""
    torch.cuda.set_device(0)
    args = on_gpu()

    def device_after_calls() -> int:
        op = saboteur("current-device-left-changed").apply(right())
        for _ in range(3):
            op(*args)
        left = torch.cuda.current_device()
        torch.cuda.set_device(0)
        return left

    assert 0 == device_after_calls()
    monkeypatch.setattr(fg.Fusion, "_launch", unguarded)
    assert "device" == saboteur("current-device-left-changed").apply(right()).verify(*args).reason
    assert 0 == device_after_calls()
    unwatched_device(monkeypatch)
    assert "stream" == saboteur("current-device-left-changed").apply(right()).verify(*args).reason
    unwatched("current stream")(monkeypatch)
    assert 1 == device_after_calls()
