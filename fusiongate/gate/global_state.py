"""What a launch has to leave as it was: settings of its thread and of the process, and the default random generators.

Nothing here writes a random generator: other threads draw from them.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["CallersAutocast", "GlobalState", "kept_settings"]

_SMALLEST = sys.float_info.min
_LAUNCHES = 16
"""Launches that tell a kernel's draws from those of other threads, which agree with a few by chance at times."""


def _fp32_precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return (
        lambda: torch._C._get_fp32_precision_getter(backend, op),
        lambda value: torch._C._set_fp32_precision_setter(backend, op, value),
    )


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _default_device() -> torch.device | None:
    """What was set, None if nothing: to set what torch then tells would leave a mode in the place of none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _put_back_autocast(state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    for kind, enabled, dtype in state:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


_OF_THE_THREAD: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gradient mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast": (_autocast, _put_back_autocast),
    "flushing of subnormal numbers": (lambda: not _SMALLEST / 2, torch.set_flush_denormal),
    "default device": (_default_device, torch.set_default_device),
}
"""What only this thread can have changed: how it is read, and put back."""

_OF_THE_PROCESS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "precision of fp32 matrix products on CUDA": _fp32_precision("cuda", "matmul"),
    "precision of fp32 matrix products on mkldnn": _fp32_precision("mkldnn", "matmul"),
    "switch of mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "switch of cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "benchmark switch of cudnn": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "deterministic switch of cudnn": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "bf16 reductions of matrix products": _attribute(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    ),
    "fp16 reductions of matrix products": _attribute(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
    ),
}
"""What another thread may have changed as well."""

_SETTINGS = {**_OF_THE_THREAD, **_OF_THE_PROCESS}


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


class CallersAutocast:
    """The autocast that a call came under: for the code that it is to run, and not for the gate's own."""

    def __init__(self) -> None:
        self._dtypes = {kind: dtype for kind, enabled, dtype in _autocast() if enabled}

    def on(self) -> contextlib.AbstractContextManager[None]:
        """As it was."""
        return self._set(enabled=True) if self._dtypes else contextlib.nullcontext()

    def off(self) -> contextlib.AbstractContextManager[None]:
        """None."""
        return self._set(enabled=False) if self._dtypes else contextlib.nullcontext()

    @contextlib.contextmanager
    def _set(self, *, enabled: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextlib.contextmanager
def kept_settings() -> Iterator[list[str]]:
    """Put back what is changed inside; gives a list that holds, afterwards, what was changed and was not put back."""
    left: list[str] = []
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    try:
        yield left
    finally:
        left += _put_back(before)


def _put_back(before: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings back; those that were others, with what they were."""
    changed = {}
    for name, (read, put_back) in _SETTINGS.items():
        if (now := read()) != before[name]:
            put_back(before[name])
            changed[name] = now
    return changed


class GlobalState:
    """Compares what is global before and after each launch of a trial.

    Parameters
    ----------
    device
        The launches'.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._process = os.getpid()
        self._states = self._generator_states()
        self._before: dict[str, Any] = {}

    def note(self) -> None:
        """Remember how the settings are, right before a launch."""
        self._before = {name: read() for name, (read, _) in _SETTINGS.items()}
        if self._cuda:  # only on a GPU: a CPU has none of these
            self._current = torch.cuda.current_device()
            self._stream = torch.cuda.current_stream()

    def fault(self, launch_again: Callable[[], object]) -> tuple[str, str] | None:
        """What is not as it was, right after the launch: a word for it and a sentence; settings are put back.

        Parameters
        ----------
        launch_again
            Launches once more on other memory: a setting of the process that changes again is not another thread's
            doing.
        """
        return self._current_device() or self._changed_settings(launch_again)

    def moved_generator(self, launch_again: Callable[[], object], wait: Callable[[], object]) -> tuple[str, str] | None:
        """What a whole trial did to a default random generator: a word for it and a sentence.

        Another thread may draw meanwhile: the kernel's is what each of a few launches moves, and no wait before one.

        Parameters
        ----------
        launch_again
            Launches once more on other memory.
        wait
            Takes about as long, and moves none.
        """
        if os.getpid() != self._process:
            # Python seeds its generator anew in the child of a fork, which nobody moved then.
            return None
        moved = set(self._moved_by(lambda: None))
        for _ in range(_LAUNCHES):
            if not moved:
                return None
            self._states = self._generator_states()
            moved -= set(self._moved_by(wait))
            moved &= set(self._moved_by(launch_again))
        return next((("random-state", f"the kernel moved the random state {name}") for name in sorted(moved)), None)

    def _moved_by(self, what: Callable[[], object]) -> list[str]:
        what()
        before, self._states = self._states, self._generator_states()
        return [name for name, state in self._states.items() if before.get(name) != state]

    def _current_device(self) -> tuple[str, str] | None:
        if not self._cuda:
            return None
        # Only on a GPU: a CPU is never changed, and has no streams.
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        self._make_current_again()
        if device != self._current:
            return "device", "the kernel changed the current device and did not change it back"
        if stream != self._stream:
            return "stream", "the kernel changed the current stream and did not change it back"
        return None

    def _make_current_again(self) -> None:
        torch.cuda.set_device(self._current)  # only on a GPU: a CPU is never changed
        torch.cuda.set_stream(self._stream)  # only on a GPU: a CPU has no streams

    def _changed_settings(self, launch_again: Callable[[], object]) -> tuple[str, str] | None:
        changed = _put_back(self._before)
        if changed and threading.active_count() > 1 and not changed.keys() & _OF_THE_THREAD.keys():
            launch_again()
            again = _put_back(self._before)
            for name in changed.keys() - again.keys():
                _SETTINGS[name][1](changed.pop(name))
        for name, now in changed.items():
            before = self._before[name]
            return "global-state", f"the kernel changed the {name} from {before} to {now} and left it so"
        return None

    def _generator_states(self) -> dict[str, Any]:
        states = {
            "of the CPU": torch.get_rng_state().numpy().tobytes(),
            "of Python": random.getstate(),
            "of NumPy": _numpy_state(),
        }
        if self._cuda:  # only on a GPU: its own
            states[f"of {self._device}"] = torch.cuda.get_rng_state(self._device).numpy().tobytes()
        return states
