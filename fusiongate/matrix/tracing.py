"""How the tracing modes call a subject: compilers, tracers, transforms and tensors without values.

A tracer runs once and its graph serves the later calls, so that a value which it baked in as a constant shows. Tracers
are imported where they are used: they cost seconds, and every worker of a parallel run collects all cells.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .layouts import copied
from .operands import floating, results_of

__all__ = ["by_functorch_grad", "by_jit", "by_make_fx", "by_vmap", "compiled", "of_the_compiler", "to_fake", "to_meta"]

Function = Callable[..., Any]


def compiled(function: Function, _device: torch.device) -> Function:
    """``torch.compile(fullgraph=True)``: a graph break is an error."""
    # Dynamo keeps its caches by code object, which every cell's call shares.
    torch.compiler.reset()

    def called(*arguments: Any) -> Any:
        return function(*arguments)

    graph: Function = torch.compile(called, fullgraph=True)

    def quietly(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            # Inductor's own; a project that turns warnings into errors would see no compiled cell.
            warnings.simplefilter("ignore")
            return graph(*arguments)

    return quietly


def of_the_compiler(error: Exception) -> bool:
    """Whether an exception is the compiler's own, such as that there is no C++ compiler."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def by_make_fx(function: Function, _device: torch.device) -> Function:
    """Traced by ``make_fx`` on the first call."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return _traced_once(function, lambda of_tensors, tensors: make_fx(of_tensors)(*tensors))


def by_jit(function: Function, _device: torch.device) -> Function:
    """Traced by ``torch.jit.trace`` on the first call, and run unoptimized: TorchScript's fuser contracts."""

    def trace(of_tensors: Function, tensors: list[torch.Tensor]) -> Function:
        with warnings.catch_warnings():
            # It is deprecated, and models that are served by it are still traced.
            warnings.simplefilter("ignore")
            traced: Function = torch.jit.trace(of_tensors, tuple(tensors), check_trace=False)

        def run(*arguments: Any) -> Any:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                return traced(*arguments)

        return run

    return _traced_once(function, trace)


def _traced_once(function: Function, trace: Callable[[Function, list[torch.Tensor]], Function]) -> Function:
    graphs: list[Function] = []

    def called(*arguments: Any) -> Any:
        tensors, of_tensors = _of_tensors(function, arguments)
        if not graphs:
            # A tracer runs what it traces, and the graph runs it again: what the first run writes is a copy's.
            graphs.append(trace(of_tensors, [copied(tensor) for tensor in tensors]))
        return graphs[0](*tensors)

    return called


def _of_tensors(function: Function, arguments: tuple[Any, ...]) -> tuple[list[torch.Tensor], Function]:
    """The tensors among the arguments, and the function of them alone: tracers take no numbers."""
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return function(*filled)

    return [arguments[place] for place in places], of_tensors


def by_vmap(function: Function, _device: torch.device) -> Function:
    """Under ``torch.func.vmap`` over a new first dimension of every tensor."""

    def called(*arguments: Any) -> Any:
        tensors, of_tensors = _of_tensors(function, arguments)
        mapped = torch.func.vmap(of_tensors)(*(tensor.unsqueeze(0) for tensor in tensors))
        return tuple(one.squeeze(0) for one in mapped) if isinstance(mapped, tuple) else mapped.squeeze(0)

    return called


def by_functorch_grad(function: Function, _device: torch.device) -> Function:
    """The gradient of the results' sum with respect to the first floating tensor, by ``torch.func.grad``."""

    def called(*arguments: Any) -> torch.Tensor:
        tensors, of_tensors = _of_tensors(function, arguments)
        place = next(place for place, tensor in enumerate(tensors) if tensor.is_floating_point())

        def total(*inner: torch.Tensor) -> torch.Tensor:
            return torch.stack([one.sum() for one in floating(results_of(of_tensors(*inner)))]).sum()

        gradient: torch.Tensor = torch.func.grad(total, argnums=place)(*tensors)
        return gradient

    return called


def to_meta(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Meta tensors of the same shapes, strides and dtypes."""
    return tuple(
        torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    )


def to_fake(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fake tensors of one mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return tuple(
        mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments
    )
