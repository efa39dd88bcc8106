"""From a source to a launcher: the library of the operands' target, built when it is first needed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusiongate.gate.signatures import is_plain_call
from fusiongate.jit import Source, Target, library

__all__ = ["AdmittedCalls", "Entry", "Launcher"]


class Entry:
    """One exported function of a kernel's library, on whatever device its operands are.

    Parameters
    ----------
    source
        The library's source.
    name
        The function.
    """

    __slots__ = ("_functions", "name", "source")

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name
        self._functions: dict[torch.device, Any] = {}

    def on(self, device: torch.device) -> Any:
        """The function for a device.

        Raises
        ------
        BuildError
            If there is no library for it and none can be built.
        """
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = getattr(library(self.source, Target.of(device)), self.name)
        return function


class Launcher:
    """A kernel as its fusion calls it: allocates the output, launches, returns it.

    Parameters
    ----------
    entry
        The native function; takes the output, then the operands.
    operands
        The native operands of a call, given its arguments; x comes first and the output is like it.
    """

    def __init__(self, entry: Entry, operands: Callable[..., tuple[Any, ...]]) -> None:
        self.entry = entry
        self.operands = operands

    def __call__(self, *args: Any) -> Tensor:
        """Launch on the current stream of x's device.

        Raises
        ------
        BuildError
            If there is no kernel for the device.
        RuntimeError
            If the operands are not what the kernel takes, or the launch fails.
        """
        x: Tensor = args[0]
        out = torch.empty_like(x)
        self.entry.on(x.device)(out, *self.operands(*args))
        return out

    def admission(self) -> AdmittedCalls:
        """For one gate: the calls that it has verified, as the library keeps them."""
        return AdmittedCalls(self)


_all_admitted: weakref.WeakSet[AdmittedCalls] = weakref.WeakSet()


class AdmittedCalls:
    """See :class:`fusiongate.gate.spec.Admission`; the first device's library keeps the calls."""

    __slots__ = ("__weakref__", "_admit", "_forget", "_handle", "_launch", "_launcher", "_operands", "_target")

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._operands = launcher.operands
        self._handle: int | None = None
        self._target: Target | None = None
        _all_admitted.add(self)

    def __call__(self, args: tuple[Any, ...]) -> Tensor | None:
        """The kernel's result, or None."""
        if self._handle is None or not is_plain_call(args):
            return None
        try:
            out = torch.empty_like(args[0])
            # Whatever goes wrong goes wrong again behind the gate, which knows what to do about it.
            launched = self._launch(self._handle, out, *self._operands(*args))
        except Exception:
            return None
        return out if launched else None

    def admit(self, args: tuple[Any, ...]) -> None:
        """Recognise calls like this one."""
        target = Target.of(args[0].device)
        if self._handle is None:
            module: Any = library(self._launcher.entry.source, target)
            name = self._launcher.entry.name
            self._launch = module[f"{name}_if_admitted"]
            self._admit = module[f"{name}_admit"]
            self._forget = module["forget_admitted_calls"]
            handle = int(module["new_admitted_calls"]())
            weakref.finalize(self, module["delete_admitted_calls"], handle)
            self._target, self._handle = target, handle
        if self._target == target:
            self._admit(self._handle, *self._operands(*args))

    def leave(self) -> None:
        """Leave what the library keeps to the process that this one was forked from: a thread of it may be at it."""
        self._handle = None

    def forget(self) -> None:
        """Recognise none."""
        if self._handle is not None:
            self._forget(self._handle)


def _leave_all() -> None:
    for calls in list(_all_admitted):
        calls.leave()


os.register_at_fork(after_in_child=_leave_all)
