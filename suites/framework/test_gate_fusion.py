"""The ladder: which path a call takes and why, what is counted, and what users may ask of a fusion."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.errors import FallbackError, UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.judging import require_fused, warm_up
from fusiongate.gate.policies import Policy
from fusiongate.gate.states import Decision, State

from .planted import FAULTS, chain, fresh_rows, fusion, right, rows, same_bits, state_of

WRONG = FAULTS[3].fused


class Switched:
    """A kernel that the test makes go wrong."""

    def __init__(self) -> None:
        self.broken: Callable[..., Tensor] | None = None

    def __call__(self, *args: Any) -> Tensor:
        return (self.broken or right)(*args)


def raising(*args: Any) -> Tensor:
    raise RuntimeError("misaligned address")


def test_a_call_is_first_looked_at_and_then_fused() -> None:
    op = fusion()
    results = [op(*args) for args in fresh_rows(4)]

    assert all(same_bits(result, chain(*args)) for result, args in zip(results, fresh_rows(4), strict=True))
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 3} == op.counters
    assert ["verified"] == [event.kind for event in op.gate.events]


def test_launches_are_counted_where_they_are_launched() -> None:
    kernel_ran: list[int] = []

    def counted(*args: Tensor) -> Tensor:
        kernel_ran.append(1)
        return right(*args)

    op = fusion(counted)
    op(*rows())
    at_first_sight = op.launches
    op(*rows())
    op.fused(*rows())

    assert [len(kernel_ran) - 1, at_first_sight + 1] == [op.launches] * 2
    assert at_first_sight > 1


def test_a_launch_that_raises_is_none() -> None:
    op = fusion(raising)
    op(*rows())

    assert 0 == op.launches


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda x, a, b: (x[:, :0], a, b), "empty"),
        (lambda x, a, b: (x.requires_grad_(), a, b), "autograd"),
        (lambda x, a, b: (x.to("meta"), a.to("meta"), b.to("meta")), "tracing"),
        (lambda x, a, b: (x.double(), a, b), "mixed-dtype"),
        (lambda x, a, b: (x, a.float().numpy().tolist()[0][0][0], b), "rank"),
    ],
    ids=["empty", "autograd", "meta", "declined", "a-number"],
)
def test_a_call_that_no_kernel_may_see_takes_the_reference(change: Any, reason: str) -> None:
    def declines(x: Tensor, scale: Any, shift: Any) -> str | None:
        if not isinstance(scale, Tensor):
            return "rank"
        return None if x.dtype == scale.dtype else "mixed-dtype"

    op, args = fusion(declines=declines), change(*rows())

    assert Decision("reference", reason, None) == op.explain(*args)
    for _ in range(2):
        result = op(*args)
        expected = chain(*args)
        assert (expected.dtype, expected.shape, expected.device) == (result.dtype, result.shape, result.device)
        if not result.is_meta:
            assert same_bits(result.detach(), expected.detach())

    assert {("reference", reason): 2} == op.counters
    assert 0 == op.launches
    assert [] == op.gate.signatures


def test_an_argument_that_no_signature_can_hold_takes_the_reference() -> None:
    op = fusion(lambda x, sizes: x.reshape(sizes), reference=lambda x, sizes: x.reshape(sizes))

    assert (4, 2) == op(torch.zeros(8), (4, 2)).shape
    assert {("reference", "unsupported-argument"): 1} == op.counters


def test_gradients_keep_flowing() -> None:
    op = fusion()
    for args in fresh_rows(2):
        op(*args)
    x, scale, shift = rows(dtype=torch.float32)
    scale.requires_grad_()

    result = op(x, scale, shift)

    assert result.grad_fn is not None
    result.sum().backward()
    assert torch.allclose(scale.grad, x.sum(1, keepdim=True))  # type: ignore[arg-type]


def test_without_gradients_a_parameter_is_fused() -> None:
    op = fusion()
    x, scale, shift = rows()
    parameter = torch.nn.Parameter(scale)
    with torch.no_grad():
        op(x, parameter, shift)
        op(x, parameter, shift)
    with torch.inference_mode():
        op(x, parameter, shift)

    assert 2 == op.counters["fused", "verified"]


def test_a_reference_that_holds_a_parameter_keeps_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    op = fusion(lambda x: x * weight.detach(), reference=lambda x: x * weight)
    x = torch.randn(4, 64)

    assert op(x).grad_fn is not None
    assert {("reference", "autograd"): 1} == op.counters
    assert State.UNSEEN == state_of(op, x)


def test_the_switch_turns_all_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONGATE_DISABLE", "1")
    op, args = fusion(), rows()

    assert Decision("reference", "disabled", None) == op.explain(*args)
    assert same_bits(op(*args), chain(*args))
    assert ({("reference", "disabled"): 1}, 0) == (op.counters, op.launches)


@pytest.mark.parametrize("value", ["", "0"])
def test_the_switch_may_be_set_to_no(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FUSIONGATE_DISABLE", value)

    assert "first-sight" == fusion().explain(*rows()).reason


def test_declines_is_asked_once_for_calls_of_one_kind() -> None:
    asked: list[int] = []

    def declines(*args: Tensor) -> str | None:
        asked.append(1)
        return "rank"

    op = fusion(declines=declines)
    kept = fresh_rows(50)
    for args in kept:
        op(*args)

    assert 50 == op.counters["reference", "rank"]
    assert 1 == len(asked)


@pytest.mark.parametrize("answer", [True, False, 3, "", ["rank"]], ids=repr)
def test_declines_has_to_answer_none_or_a_word(answer: Any) -> None:
    op = fusion(declines=lambda *args: answer)

    for call in (op, op.explain):
        with pytest.raises(TypeError, match=r"planted: declines returned .*; expected None \(may launch\) or a reason"):
            call(*rows())


def test_declines_that_raises_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def declines(x: Tensor, *args: Tensor) -> str | None:
        raise ZeroDivisionError("division by zero")

    op = fusion(declines=declines)
    for batch in range(1, 5):
        assert same_bits(op(*rows(batch)), chain(*rows(batch)))

    assert {("reference", "declines-raised"): 4} == op.counters
    (message,) = caplog.messages
    assert "planted: declines or signature raised ZeroDivisionError: division by zero; the reference runs" in message


def test_a_signature_that_cannot_be_hashed_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    op = fusion(signature=lambda *args: [1])

    assert same_bits(op(*rows()), chain(*rows()))
    assert {("reference", "declines-raised"): 1} == op.counters
    assert "TypeError" in caplog.text


def test_explain_runs_nothing() -> None:
    def never(*args: Any) -> Any:
        pytest.fail("ran")

    op = fusion(never, reference=never, witness=(never, never), probe=never)
    decision = op.explain(*rows())

    assert ("reference", "first-sight") == (decision.path, decision.reason)
    assert [] == op.gate.signatures
    assert {} == op.counters


def test_explain_tells_what_the_next_call_would_do() -> None:
    good, bad, full = fusion(), fusion(WRONG), fusion(policy=Policy(capacity=1))
    for op in (good, bad, full):
        op(*rows())

    told = [good.explain(*rows()), bad.explain(*rows()), full.explain(*rows(3))]
    assert [("fused", "verified"), ("reference", "refused"), ("reference", "capacity")] == [
        (decision.path, decision.reason) for decision in told
    ]


def test_standing_tells_what_is_known() -> None:
    good, bad, declining = fusion(), fusion(WRONG), fusion(declines=lambda *args: "rank")
    before = good.standing(*rows())
    for op in (good, bad):
        op(*rows())

    assert [State.UNSEEN, State.VERIFIED] == [before, good.standing(*rows())]
    assert [State.REFUSED, None] == [bad.standing(*rows()), declining.standing(*rows())]
    assert good.standing(rows()[0].requires_grad_(), *rows()[1:]) is None


def test_verify_gives_the_verdict() -> None:
    good, bad = fusion(), fusion(WRONG)

    right_verdict, wrong_verdict = good.verify(*rows()), bad.verify(*rows())

    assert (True, "equal") == (right_verdict.ok, right_verdict.reason)
    assert (False, "bits") == (wrong_verdict.ok, wrong_verdict.reason)
    assert "unwritten output" in str(wrong_verdict)
    good(*rows())
    assert 1 == good.counters["fused", "verified"]


def test_verify_looks_again_at_what_has_a_verdict() -> None:
    kernel = Switched()
    op = fusion(kernel)
    op(*rows())

    kernel.broken = WRONG
    assert not op.verify(*rows())
    assert State.REFUSED == state_of(op, *rows())
    kernel.broken = None
    assert op.verify(*rows())
    assert State.VERIFIED == state_of(op, *rows())


def test_verify_lifts_a_refusal_of_everything_for_one_signature() -> None:
    kernel = Switched()
    kernel.broken = WRONG
    op = fusion(kernel, policy=Policy(scope="process"))
    op(*rows())
    kernel.broken = None
    op.verify(*rows())

    assert [State.VERIFIED, State.REFUSED] == [state_of(op, *rows()), state_of(op, *rows(3))]


def test_a_quiet_verification_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not fusion(WRONG).verify(*rows(), quiet=True)
    assert [] == caplog.records


@pytest.mark.parametrize(
    "options, change, reason",
    [
        ({"declines": lambda *args: "rank"}, lambda x: x, "rank"),
        ({}, lambda x: x.requires_grad_(), "autograd"),
        ({"policy": Policy(capacity=1)}, lambda x: x.repeat(2, 1, 1), "capacity"),
    ],
    ids=["declined", "autograd", "capacity"],
)
def test_there_may_be_nothing_to_verify(options: Any, change: Any, reason: str) -> None:
    op = fusion(**options)
    op(*rows())
    x, scale, shift = rows()

    with pytest.raises(UsageError) as raised:
        op.verify(change(x), scale[:1], shift[:1])
    assert f"planted: nothing to verify on these arguments: they take the reference ({reason})" == str(raised.value)


def test_verify_without_memory_says_so() -> None:
    def short(*args: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(UsageError, match=r"planted: these arguments cannot be compared now \(out-of-memory\)"):
        fusion(short).verify(*rows())


def test_names_of_arguments_are_the_reference_s() -> None:
    def reference(x: Tensor, eps: float, weight: Tensor | None = None, bias: float = 0.0) -> Tensor:
        out = x + eps + bias
        return out if weight is None else out * weight

    kernel_saw: list[int] = []

    def kernel(*args: Any) -> Tensor:
        kernel_saw.append(len(args))
        return reference(*args)

    op = fusion(kernel, reference=reference)
    x = torch.randn(4, 64)
    for _ in range(2):
        assert torch.equal(x + 1e-3, op(x, eps=1e-3))
    by_name, by_position = op.explain(x=x, eps=1e-3), op.explain(x, 1e-3)
    assert torch.equal(x + 1e-3 + 2.0, op(x, bias=2.0, eps=1e-3))

    assert by_name == by_position
    assert {2, 4} == set(kernel_saw)
    assert op.verify(eps=1e-3, x=x)
    with pytest.raises(TypeError, match="epsilon"):
        op(x, 1e-3, epsilon=1e-3)


def test_a_reference_without_parameters_takes_positions_only() -> None:
    op = fusion(torch.mul, reference=torch.mul)
    x = torch.randn(4, 64)

    op(x, x)
    assert torch.equal(x * x, op(x, x))
    with pytest.raises(UsageError, match="planted: its reference tells no parameters; pass all arguments by position"):
        op(x, other=x)


def test_isolated_gives_a_fresh_gate() -> None:
    op = fusion(WRONG)
    op(*rows())

    with op.isolated() as fresh:
        assert State.UNSEEN == state_of(fresh, *rows())
        assert {} == fresh.counters
        fresh(*rows(3))

    assert State.UNSEEN == state_of(op, *rows(3))
    assert {("reference", "first-sight"): 1} == op.counters
    assert op.contract is fresh.contract


def test_another_reference_has_a_gate_of_its_own() -> None:
    op = fusion(name_of := right, witness=(chain, chain), host=fusion())
    other = op.with_reference(lambda x, scale, shift: chain(x, scale, shift) + 1, name="elsewhere")

    op(*rows())
    result = other(*rows())

    assert same_bits(result, chain(*rows()) + 1)
    assert [State.VERIFIED, State.REFUSED] == [state_of(op, *rows()), state_of(other, *rows())]
    assert ("elsewhere", None, name_of) == (other.name, other.witness, other.fused)
    assert other.host is not None
    assert "elsewhere" == other.host.name
    assert op.host is not other.host


def test_a_copy_of_a_model_goes_through_the_same_gate() -> None:
    op = fusion()

    assert op is copy.deepcopy({"op": op})["op"]


def test_require_fused_names_the_reason() -> None:
    op = fusion(declines=lambda *args: "per-token")

    with require_fused(), pytest.raises(FallbackError) as raised:
        op(*rows())

    assert ("planted", "reference", "per-token") == (raised.value.op, raised.value.path, raised.value.reason)
    assert {} == op.counters
    op(*rows())


def test_require_fused_lets_a_first_sight_that_verifies_pass() -> None:
    op = fusion()
    with require_fused():
        op(*rows())
        op(*rows())

    assert 1 == op.counters["fused", "verified"]


@pytest.mark.parametrize("fused, reason", [(WRONG, "refused"), (raising, "refused")], ids=["wrong", "raises"])
def test_require_fused_lets_no_refusal_pass(fused: Any, reason: str) -> None:
    op = fusion(fused)

    for _ in range(2):
        with require_fused(), pytest.raises(FallbackError, match=f"reason: {reason}"):
            op(*rows())


def test_require_fused_ends_with_its_block_and_holds_for_its_thread_only() -> None:
    op = fusion(declines=lambda *args: "rank")
    with require_fused(), ThreadPoolExecutor(1) as pool:
        assert same_bits(pool.submit(op, *rows()).result(), chain(*rows()))
    op(*rows())

    assert {("reference", "rank"): 2} == op.counters


def test_warm_up_is_first_sight_for_every_call() -> None:
    op = fusion()
    warm_up(op, rows(1), rows(2), rows(3))
    with require_fused():
        for batch in (1, 2, 3):
            op(*rows(batch))

    assert {("reference", "first-sight"): 3, ("fused", "verified"): 3} == op.counters


def test_warm_up_runs_a_model() -> None:
    op = fusion()

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return op(x, scale, shift)

    x, scale, shift = rows()
    warm_up(Block(), {"x": torch.nn.Parameter(x), "scale": scale, "shift": shift})

    assert {("reference", "first-sight"): 1} == op.counters


def test_warm_up_takes_calls_and_no_tensors() -> None:
    with pytest.raises(UsageError, match="a call is a tuple of arguments, not a tensor"):
        warm_up(fusion(), *rows())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reference": 3}, "reference= is 3; expected a callable"),
        ({"fused": None}, "fused= is None; expected a callable"),
        ({"declines": "rank"}, "declines= is 'rank'; expected a callable"),
        ({"signature": 3}, "signature= is 3; expected a callable or None"),
        ({"probe": 3}, "probe= is 3; expected a callable or None"),
        ({"witness": chain}, "expected a pair of callables or None"),
        ({"contract": "exact"}, "contract= is 'exact'; expected Exact() or Ulp(n)"),
        ({"policy": None}, "policy= is None; expected a Policy"),
        ({"host": chain}, "expected a Fusion or None"),
        ({"compile": "graph"}, "compile= is 'graph'; expected 'expression' or 'op'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_argument_is_told_with_what_is_expected(options: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Fusion("planted", **({"reference": chain, "fused": right} | options))

    assert message in str(raised.value)
    assert "Fusion('planted'): " in str(raised.value)


def test_a_kernel_that_raises_when_it_is_verified_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Switched()
    op = fusion(kernel)
    op(*rows())
    kernel.broken = raising

    assert same_bits(op(*rows()), chain(*rows()))
    assert same_bits(op(*rows()), chain(*rows()))

    assert {("reference", "first-sight"): 1, ("reference", "refused"): 2} == op.counters
    (message,) = caplog.messages
    assert "the kernel raised RuntimeError: misaligned address" in message


def test_a_verified_kernel_without_memory_is_not_refused() -> None:
    def short(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no")

    kernel = Switched()
    op = fusion(kernel)
    op(*rows())
    kernel.broken = short
    assert same_bits(op(*rows()), chain(*rows()))
    kernel.broken = None
    op(*rows())

    counted = {("reference", "first-sight"): 1, ("reference", "out-of-memory"): 1, ("fused", "verified"): 1}
    assert counted == op.counters


def test_what_the_reference_raises_is_raised() -> None:
    op = fusion()
    x, scale, shift = rows()

    with pytest.raises(RuntimeError) as eager:
        chain(x, scale[..., :7], shift)
    for _ in range(2):
        with pytest.raises(RuntimeError) as gated:
            op(x, scale[..., :7], shift)
        assert str(eager.value) == str(gated.value)

    assert [] == op.gate.events


def test_many_signatures_stay_bounded() -> None:
    """And every one beyond the capacity is answered by the reference."""
    plus_one: Callable[[Tensor], Tensor] = lambda x: x + 1
    op = fusion(lambda x: 1 + x, reference=plus_one, policy=Policy(capacity=4), probe=lambda x: (x.new_zeros(1 << 16),))
    for number in range(10_000):
        assert number + 1 == len(op(torch.zeros(number + 1)))

    assert 4 == len(op.gate.signatures)
    assert {("reference", "first-sight"): 4, ("reference", "capacity"): 9996} == op.counters
    assert len(op._routes) <= 64


def test_many_declined_kinds_of_call_stay_bounded() -> None:
    op = fusion(reference=lambda x: x, declines=lambda *args: "rank", policy=Policy(capacity=4))
    for number in range(2000):
        op(torch.zeros(number + 1))

    assert {("reference", "rank"): 2000} == op.counters
    assert len(op._routes) <= 64


def test_tokens_and_junk_strides_give_few_signatures() -> None:
    """S = 1..200, and strides on dimensions of size 1 that mean nothing."""

    def bucket(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return x.shape[1].bit_length(), x.shape[2]

    op = fusion(signature=bucket)
    for tokens in range(1, 201):
        x, scale, shift = rows(1, tokens, 64)
        for junk in (1, 64, 12345):
            assert same_bits(op(x, scale.as_strided(scale.shape, (junk, junk, 1)), shift), chain(x, scale, shift))

    assert 8 == len(op.gate.signatures)
    assert 600 - 8 == op.counters["fused", "verified"]


def test_threads_share_one_first_sight() -> None:
    """A second caller waits for the verdict; nothing is lost of what is counted."""
    kernel_ran = threading.Semaphore(0)

    def counted(*args: Tensor) -> Tensor:
        kernel_ran.release()
        return right(*args)

    shared, own = fusion(counted), [fusion() for _ in range(32)]
    ready = threading.Barrier(32)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def run(number: int) -> bool:
        ready.wait()
        same = True
        for turn in range(20):
            args = rows(1 + turn % 2, seed=number)
            same &= all(same_bits(op(*args), chain(*args)) for op in (shared, own[number]))
        return same

    try:
        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(run, range(32)))
    finally:
        sys.setswitchinterval(interval)

    assert {("reference", "first-sight"): 2, ("fused", "verified"): 32 * 20 - 2} == shared.counters
    assert ["verified", "verified"] == [event.kind for event in shared.gate.events]
    assert all({("reference", "first-sight"): 2, ("fused", "verified"): 18} == op.counters for op in own)
    launches = 0
    while kernel_ran.acquire(blocking=False):
        launches += 1
    assert launches == shared.launches


def test_threads_that_meet_a_failing_kernel_refuse_it_once(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Switched()
    op = fusion(kernel)
    op(*rows())
    kernel.broken = raising

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda number: op(*rows()), range(64)))

    assert all(same_bits(result, chain(*rows())) for result in results)
    assert 1 == len(caplog.messages)
    assert 64 == op.counters["reference", "refused"]
