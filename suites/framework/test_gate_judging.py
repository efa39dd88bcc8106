"""Looking again at verified kernels, and giving refused ones another chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.errors import FallbackError, PoisonedDevice
from fusiongate.gate import policies
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.judging import require_fused
from fusiongate.gate.policies import After, Every, Policy, Sampled
from fusiongate.gate.states import Gate, State

from .planted import FAULTS, chain, fresh_rows, fusion, right, rows, same_bits, state_of, wrong_at_two

WRONG = next(fault.fused for fault in FAULTS if fault.name == "one-element")


class Turning:
    """A kernel that is right until the test turns it."""

    def __init__(self) -> None:
        self.kernel: Callable[..., Tensor] = right

    def __call__(self, *args: Tensor) -> Tensor:
        return self.kernel(*args)


def verified(policy: Policy) -> tuple[Fusion, Turning]:
    kernel = Turning()
    op = fusion(kernel, policy=policy)
    op(*rows())
    assert State.VERIFIED == state_of(op)
    return op, kernel


def test_every_nth_call_is_compared_again() -> None:
    op, _ = verified(Policy(recheck=Every(5)))
    for args in fresh_rows(12):
        assert same_bits(op(*args), chain(*args))

    assert {("reference", "first-sight"): 1, ("reference", "recheck"): 2, ("fused", "verified"): 10} == op.counters


@pytest.mark.parametrize("turns_after", range(8))
def test_a_kernel_that_turns_wrong_is_found_within_n_calls(turns_after: int, caplog: pytest.LogCaptureFixture) -> None:
    op, kernel = verified(Policy(recheck=Every(4)))
    wrong = 0
    for call, args in enumerate(fresh_rows(16)):
        if call == turns_after:
            kernel.kernel = WRONG
        wrong += not same_bits(op(*args), chain(*args))

    assert wrong < 4
    assert State.REFUSED == state_of(op)
    (message,) = caplog.messages
    found = turns_after // 4 * 4 + 4
    right_last = f"call {found - 4}" if found > 4 else "first sight"
    assert (
        f"a recheck found call {found} of this signature wrong, and the last one known to be right is {right_last}: "
        in message
    )
    assert "results of the fused calls in between may be wrong" in message
    assert f"torch {torch.__version__}" in message


def test_the_call_that_is_looked_at_gives_the_reference() -> None:
    op, kernel = verified(Policy(recheck=Every(1)))
    kernel.kernel = WRONG

    assert all(same_bits(op(*args), chain(*args)) for args in fresh_rows(3))
    assert {("reference", "first-sight"): 1, ("reference", "recheck"): 1, ("reference", "refused"): 2} == op.counters


def test_a_sample_finds_it_too() -> None:
    op, kernel = verified(Policy(recheck=Sampled(0.2)))
    kernel.kernel = WRONG
    for args in fresh_rows(60):
        op(*args)

    assert State.REFUSED == state_of(op)


def test_looking_again_moves_no_random_state() -> None:
    op, _ = verified(Policy(recheck=Sampled(0.5)))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for args in fresh_rows(1):
        for _ in range(20):
            op(*args)

    generator = torch.Generator().manual_seed(0)
    assert torch.equal(expected, torch.rand(1, generator=generator))
    assert torch.equal(expected, torch.rand(1))


def test_a_recheck_that_raises_refuses(caplog: pytest.LogCaptureFixture) -> None:
    def raising(*args: Any) -> Tensor:
        raise RuntimeError("misaligned address")

    op, kernel = verified(Policy(recheck=Every(2)))
    op(*rows())
    kernel.kernel = raising

    assert same_bits(op(*rows()), chain(*rows()))
    assert State.REFUSED == state_of(op)
    assert "the kernel raised RuntimeError: misaligned address" in caplog.text


def test_a_recheck_without_memory_is_no_verdict() -> None:
    def short(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no")

    op, kernel = verified(Policy(recheck=Every(1)))
    kernel.kernel = short

    assert same_bits(op(*rows()), chain(*rows()))
    assert State.VERIFIED == state_of(op)
    assert 1 == op.counters["reference", "out-of-memory"]


def test_a_recheck_is_no_fall_back_unless_it_refuses() -> None:
    op, kernel = verified(Policy(recheck=Every(1)))
    with require_fused():
        op(*rows())
        kernel.kernel = WRONG
        with pytest.raises(FallbackError, match="reason: refused"):
            op(*rows())


def test_a_device_that_is_behind_is_never_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated: outcomes turn up when the test says so. The call that learns of a wrong one gives the reference."""
    under_way: list[tuple[Tensor, Tensor]] = []

    def reported(differs: Tensor) -> Tensor:
        flag = torch.full((), -1, dtype=torch.int8)
        under_way.append((flag, differs))
        return flag

    monkeypatch.setattr(policies, "_reported", reported)
    op, kernel = verified(Policy(recheck=Every(2)))
    op(*rows())
    op(*rows())
    kernel.kernel = WRONG
    for _ in range(4):
        op(*rows())
    assert State.VERIFIED == state_of(op)

    for flag, differs in under_way:
        flag.copy_(differs)
    result = op(*rows())

    assert same_bits(result, chain(*rows()))
    assert State.REFUSED == state_of(op)
    (message,) = caplog.messages
    assert "a recheck found call 4 of this signature wrong, and the last one known to be right is call 2" in message


def test_a_refused_kernel_gets_another_chance_after_some_calls() -> None:
    kernel = Turning()
    kernel.kernel = WRONG
    op = fusion(kernel, policy=Policy(recover=After(calls=3)))
    op(*rows())
    kernel.kernel = right

    paths = []
    for _ in range(5):
        before = op.counters
        assert same_bits(op(*rows()), chain(*rows()))
        paths += list((op.counters - before).elements())

    assert [
        *[("reference", "refused")] * 2,
        ("reference", "first-sight"),
        *[("fused", "verified")] * 2,
    ] == paths
    assert ["refused", "recovering", "verified"] == [event.kind for event in op.gate.events]


def test_a_refused_kernel_gets_another_chance_after_some_time() -> None:
    now = [0.0]
    kernel = Turning()
    kernel.kernel = WRONG
    policy = Policy(recover=After(seconds=60))
    op = fusion(kernel, policy=policy)
    op.gate._clock = lambda: now[0]
    op(*rows())
    kernel.kernel = right

    states = []
    for second in (10, 59, 60, 61):
        now[0] = second
        op(*rows())
        states.append(state_of(op))

    assert [State.REFUSED, State.REFUSED, State.VERIFIED, State.VERIFIED] == states
    assert isinstance(op.gate, Gate)


def test_scope_process_refuses_every_signature(caplog: pytest.LogCaptureFixture) -> None:
    """As a hand-written gate does that switches itself off for good."""
    op = fusion(wrong_at_two, policy=Policy(scope="process"))
    for batch in (1, 1, 2, 1, 3):
        assert same_bits(op(*rows(batch)), chain(*rows(batch)))

    assert {("reference", "first-sight"): 2, ("fused", "verified"): 1, ("reference", "refused"): 2} == op.counters
    (message,) = caplog.messages
    assert "all signatures take the reference from now on" in message


def test_a_device_that_has_gone_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference cannot run there either."""

    def raising(*args: Any) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("fusiongate.gate.judging.is_poisoned", lambda args: True)
    op, kernel = verified(Policy())
    kernel.kernel = raising

    with pytest.raises(
        PoisonedDevice, match="cpu: the device context is unusable after RuntimeError: an illegal memory"
    ):
        op(*rows())
    assert State.VERIFIED == state_of(op)


def test_a_warning_survives_an_unknown_platform(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(device: Any) -> Any:
        raise RuntimeError("no driver answers")

    monkeypatch.setattr("fusiongate.gate.judging.environment", unknown)
    fusion(WRONG)(*rows())

    assert "(no description of the platform: no driver answers)" in caplog.text
    assert "1 of 640 elements" in caplog.text


@pytest.mark.parametrize(
    "words",
    [
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
        "could not capture the user's attention",
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["from-the-start", "after-its-verdict"])
def test_a_kernel_that_always_raises_is_refused_whatever_it_says(words: str, later: bool) -> None:
    """That a stream is being captured is asked of the stream, and read from no message."""
    raising = [not later]

    def kernel(*args: Tensor) -> Tensor:
        if raising[0]:
            raise RuntimeError(words)
        return right(*args)

    op = fusion(kernel)
    for _ in range(3):
        assert same_bits(op(*rows()), chain(*rows()))
        raising[0] = True
    launched = op.launches
    for _ in range(3):
        assert same_bits(op(*rows()), chain(*rows()))

    assert State.REFUSED is state_of(op)
    assert launched == op.launches
    assert 0 == op.counters["reference", "capturing"]
