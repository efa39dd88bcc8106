"""What a launch has to leave as it was, and what other threads may do meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.global_state import CallersAutocast, GlobalState
from fusiongate.gate.states import State

from .planted import fusion, state_of

CPU = torch.device("cpu")


@pytest.fixture
def beside() -> Iterator[None]:
    """Another thread, which does nothing."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


def watched(launch: Callable[[], object]) -> tuple[str, str] | None:
    """What is told of one launch."""
    state = GlobalState(CPU)
    state.note()
    launch()
    return state.fault(launch)


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "gradient mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "default device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "number of threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True),
    ),
    "flushing of subnormal numbers": (
        lambda: bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0 == 0),
        lambda: torch.set_flush_denormal(True),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "switch of mkldnn": (torch._C._get_mkldnn_enabled, lambda: torch._C._set_mkldnn_enabled(False)),
    "precision of fp32 matrix products on mkldnn": (
        lambda: torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
        lambda: torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16"),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("threads", ["alone", "beside"])
def test_a_setting_that_a_kernel_changes_is_told_and_put_back(
    name: str, threads: str, request: pytest.FixtureRequest
) -> None:
    if threads == "beside":
        request.getfixturevalue("beside")
    read, change = SETTINGS[name]
    before = read()

    reason, story = watched(change) or ("", "")

    assert ("global-state", before) == (reason, read())
    assert 0 == torch._C._len_torch_function_stack()
    assert f"the kernel changed the {name} from" in story


def test_a_setting_that_another_thread_changes_is_that_thread_s() -> None:
    """It changes once, and is left as that thread has set it."""
    times = iter([torch.float64])
    before = torch.get_default_dtype()

    def beside() -> None:
        for dtype in times:
            thread = threading.Thread(target=torch.set_default_dtype, args=(dtype,))
            thread.start()
            thread.join()

    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        assert watched(beside) is None
        assert torch.float64 == torch.get_default_dtype()
    finally:
        torch.set_default_dtype(before)
        over.set()
        waiting.join()


DRAWS: dict[str, Callable[[], object]] = {
    "of Python": random.random,
    "of NumPy": np.random.rand,
    "of the CPU": lambda: torch.default_generator.manual_seed(int(torch.randint(1 << 30, ()))),
}


@pytest.mark.parametrize("whose", DRAWS)
def test_a_generator_that_a_kernel_moves_is_told(whose: str) -> None:
    """Beside whatever threads a run of tests may have."""
    state = GlobalState(CPU)
    DRAWS[whose]()

    told = state.moved_generator(DRAWS[whose], lambda: None)

    assert ("random-state", f"the kernel moved the random state {whose}") == told


def test_a_generator_that_moves_between_launches_too_is_another_thread_s() -> None:
    state = GlobalState(CPU)
    random.random()

    assert state.moved_generator(random.random, random.random) is None


def test_a_generator_that_only_some_launches_move_is_another_thread_s() -> None:
    state = GlobalState(CPU)
    random.random()
    left = [random.random, random.random]

    def launch() -> None:
        if left:
            left.pop()()

    assert state.moved_generator(launch, lambda: None) is None


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "in-place"])
def test_a_thread_that_draws_keeps_its_draws_and_refuses_nobody(kind: str) -> None:
    """As many first sights go by as it takes for the other thread to meet some of them."""
    draw: Callable[[], float] = {
        "torch": lambda: torch.rand((), dtype=torch.float64).item(),
        "python": random.random,
        "numpy": lambda: float(np.random.rand()),
        "in-place": lambda: torch.empty((), dtype=torch.float64).uniform_().item(),
    }[kind]
    drawn: list[float] = []
    over = threading.Event()

    def drawing() -> None:
        while not over.is_set():
            drawn.append(draw())
            # Or this thread keeps the interpreter's lock to itself.
            time.sleep(1e-3)

    thread = threading.Thread(target=drawing)
    thread.start()
    try:
        for size in range(2, 22):
            op, x = fusion(lambda x: x * 2, reference=lambda x: x * 2), torch.ones(size, 8)
            op(x)
            assert State.VERIFIED == state_of(op, x), op.gate.events[-1]
    finally:
        over.set()
        thread.join()

    assert len(drawn) > 10
    assert len(drawn) == len(set(drawn))


def test_the_reference_and_the_kernel_run_under_the_caller_s_autocast_and_the_gate_does_not() -> None:
    """Stacking what it compares would fail there: autocast cannot promote fp16 beside bf16."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        return x @ y

    op = Fusion("product", reference=product, fused=product)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.bfloat16 == op(x, x).dtype
        assert op.verify(x, x).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cast_to", [torch.bfloat16, torch.float16], ids=str)
def test_small_calls_are_compared_under_any_autocast(dtype: torch.dtype, cast_to: torch.dtype) -> None:
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2)
    with torch.autocast("cpu", dtype=cast_to):
        assert op.verify(torch.randn(100).to(dtype)).ok


def test_without_autocast_none_is_set() -> None:
    with CallersAutocast().on():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_is_the_caller_s(device: str) -> None:
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2)
    with torch.device(device):
        assert op.verify(torch.randn(4, 4, device="cpu")).ok


def test_another_default_dtype_is_the_caller_s() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert fusion(lambda x: x * 2, reference=lambda x: x * 2).verify(torch.randn(1, 4).bfloat16()).ok
    finally:
        torch.set_default_dtype(before)
