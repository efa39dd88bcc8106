"""Modes: how a cell calls its subject, and which path that forces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusiongate.gate.signatures import tensors_of
from fusiongate.subjects import Subject

from . import streams, tracing
from .cells import NotRun
from .layouts import on_copies
from .operands import floating, results_of

__all__ = ["MODES", "Forced", "Mode"]

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Forced:
    """The path that a mode forces, whatever the layout."""

    reason: str
    """The published reason; the path is the reference."""
    rung: Literal["before declines", "after declines"] = "before declines"
    """Where on the gate's ladder it stands: what comes earlier gives its own reason."""
    counted: bool = True
    """Whether the gate counts the call: nothing of it is touched while compiling."""


def _unchanged(arguments: Arguments) -> Arguments:
    return arguments


def _no_context(_device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _plainly(function: Function, _device: torch.device) -> Function:
    return function


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of calling a subject."""

    name: str
    """The mode as it stands in a cell's id."""
    forced: Forced | None = None
    """What the mode forces; None leaves the path to the layout."""
    convert: Callable[[Arguments], Arguments] = _unchanged
    """Turns the drawn arguments into those that the mode calls with."""
    around: Callable[[torch.device], contextlib.AbstractContextManager[Any]] = _no_context
    """The context of every call, the reference's too."""
    wrap: Callable[[Function, torch.device], Function] = _plainly
    """Turns the subject into what is called, once a cell; its result is a tensor, or a tuple of them."""
    alike: bool = False
    """Whether the reference is wrapped alike. Otherwise it is called plainly, and each result is held against it."""
    gate_calls: tuple[int, int, int] = (1, 1, 1)
    """How often each of the cell's three calls reaches the gate: a replay does not."""
    captures: tuple[tuple[int, ...], ...] = ((), (), ())
    """Which of those, counted from 0, are captured into a graph."""
    replays: tuple[int, int, int] = (0, 0, 0)
    """Which replay of its graph each of the three calls gives the result of, counted from 1; 0 where none."""
    made_inside: bool = False
    """Whether the arguments have to be made inside the context."""
    launcher_fails: bool = False
    """Whether a stand-in that fails replaces the launcher."""
    metadata_only: bool = False
    """Whether the results hold no values."""
    needs_gpu: bool = False
    """Whether the mode exists on GPUs only."""
    expands: bool = True
    """Whether a matrix has cells of it; one of the others takes a `Cell` that names it."""
    traces: bool = False
    """Whether what is called is traced or differentiated, so that an argument to be written is copied outside."""
    differentiates: bool = False
    """Whether it asks for a gradient, which nothing but a floating tensor has."""
    leaves_written: bool = False
    """Whether arguments that are to be written are not turned: nobody writes a parameter that requires a gradient."""

    def called(self, function: Function, written: Sequence[int], device: torch.device) -> Function:
        """What a cell calls for a subject's function that writes some of its arguments, or none."""
        if self.traces or self.differentiates:
            return on_copies(self.wrap(function, device), written)
        return self.wrap(on_copies(function, written), device)

    @property
    def traces_once(self) -> bool:
        """Whether the first call is traced, and the others run its graph."""
        return self.forced == _TRACING and self.gate_calls[1:] == (0, 0)

    def seen_by(self, subject: Subject) -> Mode:
        """The mode as it is for a subject: a fusion that a compiler calls as an op is gated then too."""
        if subject.fusion is None or subject.fusion.compile == "expression" or self.forced != _COMPILING:
            return self
        return dataclasses.replace(self, forced=None, alike=False, launcher_fails=False)


# Autograd -----------------------------------------------------------------------------------------------------------


def _floating(arguments: Arguments) -> list[torch.Tensor]:
    found = floating(arguments)
    if not found:
        # A factory's arguments are known only once they are made.
        raise NotRun("no argument can have a gradient")
    return found


def _first_requires_grad(arguments: Arguments) -> Arguments:
    _floating(arguments)[0].requires_grad_()
    return arguments


def _last_requires_grad(arguments: Arguments) -> Arguments:
    _floating(arguments)[-1].requires_grad_()
    return arguments


def _parameters(arguments: Arguments) -> Arguments:
    """Every floating tensor but the first becomes a Parameter, as tables and projections give them."""
    others = floating(arguments)[1:]
    return tuple(torch.nn.Parameter(one) if any(one is other for other in others) else one for one in arguments)


def _with_gradient(function: Function, _device: torch.device) -> Function:
    def called(*arguments: Any) -> tuple[torch.Tensor, ...]:
        results = results_of(function(*arguments))
        leaves = [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]
        # One that has lost its gradient raises here, and says so.
        total = sum(result.sum() for result in floating(results))
        gradients = torch.autograd.grad(total, leaves) if isinstance(total, torch.Tensor) else ()
        return (*(result.detach() for result in results), *gradients)

    return called


# Contexts -----------------------------------------------------------------------------------------------------------


class _PassThrough(TorchDispatchMode):
    """A dispatch mode that changes nothing: any could be recording what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _deterministic(_device: torch.device) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _compiling(_device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return mock.patch("torch.compiler.is_compiling", return_value=True)


_COMPILING = Forced("compiling", counted=False)
_TRACING = Forced("tracing")
_AUTOGRAD = Forced("autograd")

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("eager"),
        Mode("inference", around=lambda _: torch.inference_mode(), made_inside=True),
        Mode("grad", _AUTOGRAD, convert=_first_requires_grad, wrap=_with_gradient, alike=True, differentiates=True),
        Mode(
            "grad-rows",
            _AUTOGRAD,
            convert=_last_requires_grad,
            wrap=_with_gradient,
            alike=True,
            differentiates=True,
        ),
        Mode("no-grad-parameters", convert=_parameters, around=lambda _: torch.no_grad(), leaves_written=True),
        Mode("autocast", around=lambda device: torch.autocast(device.type, torch.bfloat16)),
        Mode("deterministic", around=_deterministic),
        Mode("default-device", around=lambda device: device),
        Mode("compiling-patched", _COMPILING, around=_compiling, launcher_fails=True),
        Mode("compile", _COMPILING, wrap=tracing.compiled, alike=True, launcher_fails=True, traces=True),
        Mode("make-fx", _TRACING, wrap=tracing.by_make_fx, gate_calls=(1, 0, 0), traces=True),
        Mode("jit-trace", _TRACING, wrap=tracing.by_jit, gate_calls=(1, 0, 0), traces=True),
        Mode("vmap", _TRACING, wrap=tracing.by_vmap, alike=True, traces=True),
        Mode("functorch-grad", _TRACING, wrap=tracing.by_functorch_grad, alike=True, differentiates=True),
        Mode("dispatch-mode", _TRACING, around=lambda _: _PassThrough()),
        Mode("meta", _TRACING, convert=tracing.to_meta, metadata_only=True),
        Mode("fake-tensor", _TRACING, convert=tracing.to_fake, metadata_only=True),
        Mode("threads", wrap=streams.in_threads(cold=False), gate_calls=(1, streams.THREADS, streams.THREADS)),
        Mode("threads-cold", wrap=streams.in_threads(cold=True), gate_calls=(streams.THREADS,) * 3),
        Mode(
            "capture-cold",
            Forced("capturing", "after declines"),
            wrap=streams.captured_cold,
            captures=((0,),) * 3,
            replays=(1, 1, 1),
            needs_gpu=True,
        ),
        Mode(
            "capture-warm",
            wrap=streams.captured_warm,
            gate_calls=(1, 1, 0),
            captures=((), (0,), ()),
            replays=(0, 1, 2),
            needs_gpu=True,
        ),
        Mode(
            "capture-segments",
            wrap=streams.captured_in_segments,
            gate_calls=(3, 3, 3),
            captures=((0, 2),) * 3,
            needs_gpu=True,
            expands=False,
        ),
        Mode(
            "capture-beside",
            wrap=streams.captured_beside,
            gate_calls=(3, 3, 3),
            captures=((0, 2),) * 3,
            needs_gpu=True,
            expands=False,
        ),
        Mode(
            "side-stream", wrap=streams.on_side_stream, gate_calls=(1, streams.REPEATS, streams.REPEATS), needs_gpu=True
        ),
    )
}
"""Every mode by name."""
