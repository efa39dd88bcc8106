"""What only a GPU shows of gate and kernels: captures, streams, devices, random states, and one launch a call."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg

from .operands import DTYPES, EPS, arguments, keeps_contract, operands, refill, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs a GPU")

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs a second GPU")

SHAPE = (2, 33, 512)


@pytest.fixture(params=fg.kernels.FUSIONS, ids=lambda op: op.name)
def kernel(request: pytest.FixtureRequest) -> Iterator[fg.Fusion]:
    """Each kernel with a fresh gate."""
    with request.param.isolated() as fresh:
        yield fresh


def on_gpu(op: fg.Fusion, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> tuple[Any, ...]:
    return arguments(op, operands(*SHAPE, dtype, seed=seed, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_call_is_verified_and_fused(kernel: fg.Fusion, dtype: torch.dtype) -> None:
    for seed in range(3):
        args = on_gpu(kernel, seed, dtype)
        if kernel.declines(*args) is not None:
            assert ("rms_norm_modulate_high", torch.float32) == (kernel.name, dtype)
            return
        assert keeps_contract(kernel, kernel(*args), args)

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 2} == kernel.counters, kernel.gate.events


def profiled() -> torch.profiler.profile:
    """A profile of what the device runs; every event is kept, or the profiler warns that some may be dropped."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Whatever waits for the device raises."""
    with warnings.catch_warnings():
        # Torch warns that it does not see every wait yet.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_fused_call_is_one_device_kernel(kernel: fg.Fusion) -> None:
    args = on_gpu(kernel)
    fg.warm_up(kernel, args, args)
    torch.cuda.synchronize()
    with profiled() as profile:
        kernel(*args)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]

    assert 1 == len(names)
    assert "fusiongate_kernel" in names[0]


@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_the_statistic_is_aten_s_over_thousands_of_rows(name: str) -> None:
    op = getattr(fg.kernels, name)
    of_reference, of_kernel = op.witness
    for tokens, columns in ((8000, 512), (3000, 2240), (2000, 4096), (3, 4096), (1, 1024), (40, 8192)):
        args = (*operands(2, tokens, columns, device="cuda"), EPS)
        verdict = fg.compare(of_kernel(*args), of_reference(*args))
        assert verdict, f"{tokens} x {columns}: {verdict}"


def test_a_cold_gate_in_a_capture_records_the_reference(kernel: fg.Fusion, caplog: pytest.LogCaptureFixture) -> None:
    """And stores nothing: later the same signature gets its first sight."""
    args = on_gpu(kernel)
    kernel.reference(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*args)
        kernel(*args)
    refill(args, on_gpu(kernel, 1))
    graph.replay()

    assert same_bits(out, kernel.reference(*args))
    assert {("reference", "capturing"): 2} == kernel.counters
    assert 0 == kernel.launches
    assert fg.State.UNSEEN == kernel.standing(*args)
    (message,) = caplog.messages
    assert "recorded the reference" in message
    assert "warm_up" in message
    kernel(*args)
    assert fg.State.VERIFIED == kernel.standing(*args)


def test_a_warm_gate_in_a_capture_records_the_kernel(kernel: fg.Fusion) -> None:
    args = on_gpu(kernel)
    fg.warm_up(kernel, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), fg.require_fused():
        out = kernel(*args)
    for seed in (1, 2):
        refill(args, on_gpu(kernel, seed))
        graph.replay()
        assert keeps_contract(kernel, out, args)

    assert 1 == kernel.counters["fused", "verified"]


def test_explain_sees_a_capture() -> None:
    with fg.kernels.modulate.isolated() as op:
        args = on_gpu(op)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
            reason = op.explain(*args).reason
            with pytest.raises(Exception, match=r"nothing to verify on these arguments: .* \(capturing\)"):
                op.verify(*args)

        assert "capturing" == reason


def in_another_thread(call: Any) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_warm_gate_is_safe_beside_a_capture_in_another_thread(kernel: fg.Fusion, mode: str) -> None:
    args, others = on_gpu(kernel), on_gpu(kernel, 1)
    fg.warm_up(kernel, args, args)
    results: list[Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        captured = kernel(*args)
        errors = in_another_thread(lambda: results.append(kernel(*others)))
    graph.replay()

    assert [] == errors
    assert keeps_contract(kernel, captured, args)
    assert keeps_contract(kernel, results[0], others)


def test_a_first_sight_is_safe_beside_a_capture_of_another_thread_s_own_mode() -> None:
    with fg.kernels.modulate.isolated() as op, fg.kernels.modulate_fp32.isolated() as cold:
        args, others = on_gpu(op), on_gpu(cold, 1)
        fg.warm_up(op, args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = op(*args)
            errors = in_another_thread(lambda: cold(*others))
        graph.replay()

        assert [] == errors
        assert same_bits(captured, op.reference(*args))
        assert fg.State.VERIFIED == cold.standing(*others)


def test_a_first_sight_beside_a_global_capture_blames_no_kernel() -> None:
    program = Path(__file__).with_name("captured_beside.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr


def test_launches_are_ordered_on_the_current_stream(kernel: fg.Fusion) -> None:
    """A side stream that is busy when the call comes: fifty times."""
    args = on_gpu(kernel)
    fg.warm_up(kernel, args, args)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for seed in range(50):
        others = on_gpu(kernel, seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            refill(args, others)
            result = kernel(*args)
        stream.synchronize()
        assert keeps_contract(kernel, result, others)

    assert kernel.counters["fused", "verified"] >= 50


def test_a_first_sight_on_a_side_stream_is_ordered_too(kernel: fg.Fusion) -> None:
    args, others = on_gpu(kernel), on_gpu(kernel, 1)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        refill(args, others)
        result = kernel(*args)
    stream.synchronize()

    assert same_bits(result, kernel.reference(*others))
    assert fg.State.VERIFIED == kernel.standing(*others)


@needs_two
def test_a_launch_goes_to_the_tensors_device(kernel: fg.Fusion) -> None:
    args = on_gpu(kernel, device="cuda:1")
    with torch.cuda.device(0):
        results = [kernel(*args) for _ in range(3)]
        assert 0 == torch.cuda.current_device()

    assert all(keeps_contract(kernel, result, args) for result in results)
    assert {torch.device("cuda:1")} == {result.device for result in results}
    assert 2 == kernel.counters["fused", "verified"]


@needs_two
def test_each_device_has_verdicts_of_its_own(kernel: fg.Fusion) -> None:
    signatures = {kernel.explain(*on_gpu(kernel, device=device)).signature for device in ("cuda:0", "cuda:1")}

    assert 2 == len(signatures)


@needs_two
def test_operands_on_two_devices_raise_as_eager_does() -> None:
    x, scale, shift = operands(*SHAPE, device="cuda:0")
    with pytest.raises(RuntimeError) as eager:
        x * (1 + scale.to("cuda:1")) + shift
    with fg.kernels.modulate.isolated() as op, pytest.raises(RuntimeError) as gated:
        op(x, scale.to("cuda:1"), shift)

    assert str(eager.value) == str(gated.value)


def planted(fused: Any) -> fg.Fusion:
    return fg.Fusion("planted", reference=fg.kernels.modulate.reference, fused=fused)


def right(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.add(x * (1 + scale), shift, out=torch.empty_like(x))


def draws(*args: Tensor) -> Tensor:
    torch.rand(1, device="cuda")
    return right(*args)


def moves_the_stream(*args: Tensor) -> Tensor:
    result = right(*args)
    torch.cuda.set_stream(torch.cuda.Stream())
    return result


def stores_nothing(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    right(x, scale, shift)
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "fused, tells",
    [
        (draws, "the kernel draws random numbers"),
        (moves_the_stream, "the kernel changed the current stream"),
        (stores_nothing, "unwritten output"),
    ],
    ids=["draws", "moves-the-stream", "stores-nothing"],
)
def test_a_kernel_that_disturbs_the_device_is_refused(fused: Any, tells: str) -> None:
    op, args = planted(fused), operands(*SHAPE, device="cuda")
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()

    result = op(*args)

    assert same_bits(result, op.reference(*args))
    assert tells in op.gate.events[-1].message
    assert fg.environment("cuda").platform in op.gate.events[-1].message
    assert stream == torch.cuda.current_stream()
    assert torch.equal(state, torch.cuda.get_rng_state())


@needs_two
def test_a_kernel_that_moves_the_device_is_refused() -> None:
    def moves(*args: Tensor) -> Tensor:
        result = right(*args)
        torch.cuda.set_device(1)
        return result

    op, args = planted(moves), operands(*SHAPE, device="cuda:0")
    with torch.cuda.device(0):
        op(*args)
        assert 0 == torch.cuda.current_device()


def test_a_recheck_never_waits_and_finds_a_kernel_that_turns_wrong(caplog: pytest.LogCaptureFixture) -> None:
    wrong = False

    def turning(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return right(x, scale, shift) + 1 if wrong else right(x, scale, shift)

    op = fg.Fusion("turning", reference=right, fused=turning, policy=fg.Policy(recheck=fg.Every(2)))
    args = operands(*SHAPE, device="cuda")
    for _ in range(5):
        op(*args)
    torch.cuda.synchronize()
    wrong = True
    with waiting_forbidden():
        # Half a second: whatever keeps the host busy, the calls are made before the device has come to them.
        torch.cuda._sleep(1_000_000_000)
        slept = torch.cuda.Event()
        slept.record()
        for _ in range(4):
            op(*args)
        waited = slept.query()
    torch.cuda.synchronize()
    op(*args)

    assert not waited
    assert fg.State.REFUSED == op.standing(*args)
    (message,) = caplog.messages
    assert "a recheck found call 6 of this signature wrong, and the last one known to be right is call 4" in message


def test_a_verified_call_never_waits(kernel: fg.Fusion) -> None:
    args = on_gpu(kernel)
    fg.warm_up(kernel, args, args)
    with waiting_forbidden():
        for _ in range(3):
            kernel(*args)

    assert kernel.counters["fused", "verified"] >= 4


def test_out_of_memory_in_a_first_sight_is_no_verdict() -> None:
    """Simulated: a real one needs a full GPU."""
    short = [torch.OutOfMemoryError("CUDA out of memory")]

    def fused(*args: Tensor) -> Tensor:
        if short:
            raise short.pop()
        return right(*args)

    op, args = planted(fused), operands(*SHAPE, device="cuda")
    assert same_bits(op(*args), op.reference(*args))
    assert fg.State.UNSEEN == op.standing(*args)
    op(*args)
    assert fg.State.VERIFIED == op.standing(*args)


def test_a_compiled_call_is_one_fused_kernel_and_leaves_the_gate_alone() -> None:
    torch._dynamo.reset()
    with fg.kernels.modulate.isolated() as op:
        args = operands(*SHAPE, device="cuda")
        compiled = torch.compile(lambda *args: op(*args), fullgraph=True)  # noqa: PLW0108
        compiled(*args)
        torch.cuda.synchronize()
        with profiled() as profile:
            compiled(*args)
            torch.cuda.synchronize()

        names = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
        assert 1 == len(names)
        assert {} == op.counters
