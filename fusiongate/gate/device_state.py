"""What is around a launch: a device, a capture under way, states to leave alone, and errors that are not its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Surroundings", "capturing", "device_of", "excuse", "is_out_of_memory", "is_poisoned", "wait_for"]


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


def excuse(error: BaseException) -> str | None:
    """Why an error in a launch says nothing about the kernel, as a gate's reason; None if it does."""
    if is_out_of_memory(error):
        return "out-of-memory"
    # A capture that is open elsewhere in the global error mode forbids what a comparison needs, and one that was broken
    # fails every launch after that. Torch has no class for either; the runtime's three messages share this word.
    return "capturing" if isinstance(error, RuntimeError) and "captur" in str(error) else None


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
        return excuse(error) is None
    return False


class Surroundings:
    """What a launch has to leave as it was: the random states, the current device and its stream.

    Parameters
    ----------
    device
        The launch's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_state = torch.get_rng_state()
        self._cuda = device.type == "cuda"
        if self._cuda:  # only on a GPU: a CPU has none of these
            self._device_state = torch.cuda.get_rng_state(device)
            self._current = torch.cuda.current_device()
            self._stream = torch.cuda.current_stream()

    def disturbance(self) -> tuple[str, str] | None:
        """What is not as it was: a word for it and a sentence; None if nothing."""
        if self._cuda and torch.cuda.current_device() != self._current:  # only on a GPU: a CPU is never changed
            return "device", "the kernel changed the current device and did not change it back"
        if self._cuda and torch.cuda.current_stream() != self._stream:  # only on a GPU: a CPU has no streams
            return "stream", "the kernel changed the current stream and did not change it back"
        if not torch.equal(torch.get_rng_state(), self._cpu_state):
            return "random-state", "the kernel moved the random state of the CPU"
        if self._cuda and not torch.equal(torch.cuda.get_rng_state(self._device), self._device_state):
            return "random-state", f"the kernel moved the random state of {self._device}"  # only on a GPU: its own
        return None

    def restore(self) -> None:
        """Put everything back."""
        torch.set_rng_state(self._cpu_state)
        if self._cuda:  # only on a GPU: a CPU has none of these
            torch.cuda.set_device(self._current)
            torch.cuda.set_stream(self._stream)
            torch.cuda.set_rng_state(self._device_state, self._device)
