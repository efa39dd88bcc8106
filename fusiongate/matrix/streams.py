"""How the modes of streams, graphs and threads call a subject."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from fusiongate.gate.signatures import tensors_of

from .operands import results_of

__all__ = [
    "REPEATS",
    "THREADS",
    "captured_beside",
    "captured_cold",
    "captured_in_segments",
    "captured_warm",
    "in_threads",
    "on_side_stream",
]

Function = Callable[..., Any]
Arguments = tuple[Any, ...]

THREADS = 4
"""How many call at once."""
REPEATS = 8
"""How often a busy stream is called on, once there is a verdict."""

# Clock cycles: about a millisecond, far longer than a launch takes.
_SLEEP_CYCLES = 2_000_000


def _capture(
    graph: torch.cuda.CUDAGraph, device: torch.device, **options: Any
) -> contextlib.AbstractContextManager[Any]:  # only on a GPU: a CPU captures nothing
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Torch's own stream for captures is on whichever device was current at the first one.
        options["stream"] = torch.cuda.Stream(device)
    return torch.cuda.graph(graph, **options)


def _kept(result: Any) -> tuple[torch.Tensor, ...]:  # only on a GPU: a CPU captures nothing
    """What a graph gave, before its next replay gives it again."""
    return tuple(one.clone() for one in results_of(result))


def captured_cold(function: Function, device: torch.device) -> Function:  # only on a GPU: a CPU captures nothing
    """Each call is captured and replayed; nothing has been called before."""

    def called(*arguments: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        with _capture(graph, device):
            result = function(*arguments)
        graph.replay()
        return _kept(result)

    return called


def captured_warm(function: Function, device: torch.device) -> Function:  # only on a GPU: a CPU captures nothing
    """Called plainly, then captured and replayed, then replayed on changed inputs."""
    static: list[Arguments] = []
    graph = torch.cuda.CUDAGraph()
    recorded: list[Any] = []
    calls = iter(range(3))

    def called(*arguments: Any) -> Any:
        number = next(calls)
        if number == 0:
            return function(*arguments)
        if number == 1:
            static.append(arguments)
            with _capture(graph, device):
                recorded.append(function(*arguments))
        else:
            for old, new in zip(tensors_of(static[0]), tensors_of(arguments), strict=True):
                old.copy_(new)
        graph.replay()
        return _kept(recorded[0])

    return called


def captured_in_segments(function: Function, device: torch.device) -> Function:  # only on a GPU: a CPU captures nothing
    """Captured in two segments, and called plainly in the break between them, as breakable graphs do."""

    def called(*arguments: Any) -> tuple[Any, ...]:
        before, after = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _capture(before, device):
            first = function(*arguments)
        between = function(*arguments)
        with _capture(after, device):
            second = function(*arguments)
        before.replay()
        after.replay()
        return _kept(first), between, _kept(second)

    return called


def captured_beside(function: Function, device: torch.device) -> Function:  # only on a GPU: a CPU captures nothing
    """Captured, with a plain call in another thread in the midst of it.

    The capture's error mode is its own thread's: in the global one, whatever waits for a device breaks it.
    """

    def called(*arguments: Any) -> tuple[Any, ...]:
        graph = torch.cuda.CUDAGraph()
        with _capture(graph, device, capture_error_mode="thread_local"):
            first = function(*arguments)
            (beside,) = _at_once(function, arguments, threads=1)
            second = function(*arguments)
        graph.replay()
        return _kept(first), beside, _kept(second)

    return called


def on_side_stream(function: Function, device: torch.device) -> Function:  # only on a GPU: a CPU has no streams
    """On a stream of its own, behind a sleep and a late write of the first operand: nothing but stream order helps."""
    stream = torch.cuda.Stream(device)
    calls = iter(range(3))

    def called(*arguments: Any) -> tuple[Any, ...]:
        first = tensors_of(arguments)[0]
        values = first.clone()
        results = []
        for _ in range(1 if next(calls) == 0 else REPEATS):
            first.fill_(float("nan"))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_SLEEP_CYCLES)
                first.copy_(values)
                results.append(function(*arguments))
            torch.cuda.current_stream(device).wait_stream(stream)
        return tuple(results)

    return called


def in_threads(cold: bool) -> Callable[[Function, torch.device], Function]:
    """From several threads at once; on first sight too if ``cold``."""

    def wrap(function: Function, _device: torch.device) -> Function:
        calls = iter(range(3))

        def called(*arguments: Any) -> tuple[Any, ...]:
            if next(calls) == 0 and not cold:
                return (function(*arguments),)
            return _at_once(function, arguments)

        return called

    return wrap


def _at_once(function: Function, arguments: Arguments, threads: int = THREADS) -> tuple[Any, ...]:
    results: list[Any] = []
    errors: list[Exception] = []
    barrier = threading.Barrier(threads)

    def call() -> None:
        barrier.wait()
        try:
            results.append(function(*arguments))
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if errors:
        raise errors[0]
    return tuple(results)
