"""What is around a launch: a device, a capture under way, and errors that are not its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "capturing",
    "device_of",
    "excuse",
    "is_of_a_capture",
    "is_out_of_memory",
    "is_poisoned",
    "wait_for",
]

_CAPTURE_ERRORS = range(900, 909)
"""CUDA's and HIP's codes: cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread."""


def device_of(args: Sequence[Any]) -> torch.device | None:
    """The device of the first tensor among a call's arguments."""
    return next((arg.device for arg in args if isinstance(arg, Tensor)), None)


def wait_for(device: torch.device) -> None:
    """Return once a device has done all that it was given so far."""
    if device.type == "cuda":  # only on a GPU: a CPU has finished when it returns
        torch.cuda.synchronize(device)


def capturing(args: Sequence[Any]) -> bool:
    """Whether the current stream of the arguments' device is being captured into a graph."""
    device = device_of(args)
    if device is None or device.type != "cuda":
        return False
    with torch.cuda.device(device):  # only on a GPU: a CPU captures nothing
        return torch.cuda.is_current_stream_capturing()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory, on the device or on the host."""
    # Torch has no class of its own for the host's allocator.
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_of_a_capture(error: BaseException) -> bool:
    """Whether the runtime forbade something because of a graph capture, this stream's or another one's.

    Told by its code, never by words: a kernel's own error may hold any.
    """
    return isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) in _CAPTURE_ERRORS


def excuse(error: BaseException, args: Sequence[Any]) -> str | None:
    """Why an error in a launch on arguments says nothing about the kernel, as a gate's reason; None if it does."""
    if is_out_of_memory(error):
        return "out-of-memory"
    return "capturing" if is_of_a_capture(error) or _forbidden_by_a_capture(args) else None


def _forbidden_by_a_capture(args: Sequence[Any]) -> bool:
    """Whether the arguments' stream may not be worked on as usual: it is captured, or so is one elsewhere.

    A launcher that is not torch's own raises errors of its own class; then the stream tells. A capture that is open in
    the global error mode in another thread, or was broken there, forbids to wait for any stream.
    """
    device = device_of(args)
    if device is None or device.type != "cuda":
        return False
    try:  # only on a GPU: a CPU captures nothing
        if capturing(args):
            return True
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        return is_of_a_capture(error)
    return False


def is_poisoned(args: Sequence[Any]) -> bool:
    """Whether the device's context has gone for good, rather than one launch failed."""
    device = device_of(args)
    if device is None or device.type != "cuda":
        return False
    try:
        # Each of these raises on a device that has gone, the first one too.
        if capturing(args):
            return False  # A capture forbids to ask: waiting for the device would break it.
        # Its own stream only: to wait for all of the device would break a capture that another thread has open.
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
        torch.empty(1, device=device).zero_()
        stream.synchronize()
    except RuntimeError as error:
        return not (is_out_of_memory(error) or is_of_a_capture(error))
    return False
