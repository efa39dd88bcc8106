"""Generic saboteurs whose output is right: what they disturb around them, refuse or cost is wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.signatures import tensors_of

from .saboteurs import SEEN, SOON, Detector, Launcher, Saboteur, afterwards, corrupted, declared, generic, later

__all__ = ["CONDUCT"]

_SLEEP_CYCLES = 200_000_000
"""On a GPU's clock, some 100 ms: longer than a comparison takes to read the result, on a busy host too."""


def _draw_a_number(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.rand(1)


def _draw_a_number_on_the_device(args: tuple[Any, ...], _result: Tensor) -> None:
    torch.rand(1, device=tensors_of(args)[0].device)


def _draw_a_number_of_python(_args: tuple[Any, ...], _result: Tensor) -> None:
    random.random()


def _draw_a_number_of_numpy(_args: tuple[Any, ...], _result: Tensor) -> None:
    np.random.rand()  # the generator that all share


def _leave_gradients_on(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.set_grad_enabled(True)


def _leave_another_default_dtype(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.set_default_dtype(torch.float64)


def _leave_another_number_of_threads(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def _leave_deterministic_algorithms(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def _leave_subnormals_flushed(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.set_flush_denormal(True)


def _raising(_fusion: Fusion) -> Launcher:
    def launch(*_args: Any) -> Tensor:
        raise RuntimeError("too many resources requested for launch")

    return launch


def _declining(fusion: Fusion) -> Fusion:
    """Asks for one condition more than the kernel needs: that nothing is strided."""

    def declines(*args: Any) -> str | None:
        if not all(tensor.is_contiguous() for tensor in tensors_of(args)):
            return "stride"
        return fusion.declines(*args)

    return corrupted(fusion, fusion.fused, declines=declines)


def _declining_by_flag(fusion: Fusion) -> Fusion:
    """Answers as a predicate of the opposite sense would: whether there is a reason, and not which."""
    return corrupted(fusion, fusion.fused, declines=lambda *args: fusion.declines(*args) is not None)


def _on_another_stream(fusion: Fusion) -> Launcher:
    """Launches on a stream of its own, and returns before anything there has run."""

    def launch(*args: Any) -> Tensor:
        stream = torch.cuda.Stream(tensors_of(args)[0].device)
        buffer = torch.empty_like(tensors_of(args)[0])
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            buffer.copy_(fusion.fused(*args))
        for tensor in (buffer, *tensors_of(args)):
            # Or the allocator hands the memory on while that stream is still at work on it.
            tensor.record_stream(stream)
        return buffer

    return launch


def _leave_another_device(args: tuple[Any, ...], _result: Tensor) -> None:
    device = tensors_of(args)[0].device
    torch.cuda.set_device(((device.index or 0) + 1) % torch.cuda.device_count())


def _leave_another_stream(args: tuple[Any, ...], _result: Tensor) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(tensors_of(args)[0].device))


def _fail_on_the_device(args: tuple[Any, ...], _result: Tensor) -> None:
    device = tensors_of(args)[0].device
    torch.zeros(1, device=device)[torch.tensor([7], device=device)]


def _ten_times_over(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        for _ in range(9):
            fusion.fused(*args)
        result: Tensor = fusion.fused(*args)
        return result

    return launch


CONDUCT: tuple[Saboteur, ...] = (
    generic(
        "random-state-moved",
        "the launcher draws a random number",
        afterwards(_draw_a_number),
        declared("random state", *SEEN),
    ),
    generic(
        "device-random-state-moved",
        "the launcher draws a random number on the device",
        afterwards(_draw_a_number_on_the_device),
        declared("random state", *SEEN),
        gpus=1,
    ),
    generic(
        "python-random-state-moved",
        "the launcher draws one of Python's random numbers",
        afterwards(_draw_a_number_of_python),
        declared("random state of Python", *SEEN),
    ),
    generic(
        "numpy-random-state-moved",
        "the launcher draws one of NumPy's random numbers",
        afterwards(_draw_a_number_of_numpy),
        declared("random state of NumPy", *SEEN),
    ),
    generic(
        "gradient-mode-left-changed",
        "the launcher leaves gradients enabled",
        afterwards(_leave_gradients_on),
        declared("changed the gradient mode", *SEEN),
    ),
    generic(
        "flushing-left-changed",
        "the launcher leaves the thread flushing subnormal numbers",
        afterwards(_leave_subnormals_flushed),
        declared("changed the flushing of subnormal numbers", *SEEN),
    ),
    generic(
        "default-dtype-left-changed",
        "the launcher leaves another default dtype",
        afterwards(_leave_another_default_dtype),
        declared("changed the default dtype", *SEEN),
    ),
    generic(
        "threads-left-changed",
        "the launcher leaves another number of threads",
        afterwards(_leave_another_number_of_threads),
        declared("changed the number of threads", *SEEN),
    ),
    generic(
        "deterministic-algorithms-left-changed",
        "the launcher leaves the switch of deterministic algorithms the other way round",
        afterwards(_leave_deterministic_algorithms),
        declared("changed the deterministic algorithms", *SEEN),
    ),
    generic(
        "raises-at-launch",
        "the launch fails",
        _raising,
        declared("too many resources", Detector.FIRST_SIGHT, matrix="no launch", timing="launches"),
    ),
    generic(
        "raises-later",
        f"the launch fails from launch {SOON} after first sight on",
        later(SOON, _raising),
        declared("too many resources", Detector.RECHECK, matrix="reference (refused)", timing="launches"),
    ),
    Saboteur(
        "declines-too-much",
        "generic",
        "the predicate declines strided rows, which the kernel can take",
        _declining,
        declared("must fuse, but declined", Detector.MATRIX, timing="launches"),
        cell="strided-unbind-4d",
    ),
    Saboteur(
        "declines-by-flag",
        "generic",
        "the predicate answers True or False, in place of a reason or None",
        _declining_by_flag,
        declared("declines returned False", Detector.MATRIX),
        cell="zeros",
    ),
    generic(
        "ten-times-over",
        "the result is right, and computed ten times",
        _ten_times_over,
        declared("no faster", Detector.TIMING),
        gpus=1,
    ),
    generic(
        "eager-in-disguise",
        "the launcher runs the eager chain",
        lambda fusion: fusion.reference,
        declared("no faster", Detector.TIMING),
        gpus=1,
    ),
    generic(
        "another-stream",
        "the kernel runs on a stream of its own that nothing waits for",
        _on_another_stream,
        declared("unwritten", *SEEN),
        gpus=1,
    ),
    generic(
        "current-stream-left-changed",
        "another stream is current afterwards",
        afterwards(_leave_another_stream),
        declared("current stream", *SEEN),
        gpus=1,
    ),
    generic(
        "current-device-left-changed",
        "another device is current afterwards",
        afterwards(_leave_another_device),
        declared("current device", Detector.CONTAINMENT),
        gpus=2,
    ),
    generic(
        "raises-asynchronously",
        "the device fails after the launch, and takes its context along",
        afterwards(_fail_on_the_device),
        declared("device context is unusable", Detector.CONTAINMENT),
        gpus=1,
        in_own_process=True,
    ),
)
"""Every generic saboteur that does something else than it should."""
