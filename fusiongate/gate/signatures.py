"""What a call is keyed by: who may not see a kernel at all, and which calls share one verdict.

Two keys are made of a call's arguments. The *call key* is cheap and fine: it is made on every call and only serves to
find the *signature*, which is made once a call key and is coarse: calls with one signature share one verdict. So junk
strides on dimensions of size 1, or a kernel that buckets its rows, cost a look-up and no new verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fusiongate.comparison.bits import normalised_strides

__all__ = [
    "AUTOGRAD",
    "TRACING",
    "UNSUPPORTED",
    "Signature",
    "alignment",
    "call_key",
    "extent",
    "is_plain_call",
    "not_plain",
    "overlapping",
    "share_memory",
    "signature_of",
    "tensors_of",
]

Signature: TypeAlias = tuple[Hashable, ...]
"""Hashable, and equal for the calls that share one verdict."""

TRACING = "tracing"
AUTOGRAD = "autograd"
UNSUPPORTED = "unsupported-argument"

ALIGNMENT = 64
"""Alignments are told apart up to this many bytes: no load asks for more, and torch aligns all memory at least so."""

_OFFSET = ALIGNMENT - 1
_SMALLEST = sys.float_info.min
_FLUSHING = "flushing subnormal numbers"
"""Torch can set that mode of a thread but not tell it; a halved smallest normal number shows it."""
_PLAIN = frozenset({bool, int, type(None), str, torch.dtype, torch.device, torch.memory_format})


def alignment(tensor: Tensor) -> int:
    """The largest power of two, at most ``ALIGNMENT``, that divides the address of the first element, in bytes."""
    address = tensor.data_ptr() | ALIGNMENT
    return address & -address


def tensors_of(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among a call's arguments."""
    return [arg for arg in args if isinstance(arg, Tensor)]


# Looked up once: attribute chains through torch._C cost more than the calls themselves.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._are_functorch_transforms_active
_jit_tracing = torch._C._is_tracing
_autocast_anywhere = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled


def _observed() -> bool:
    """Whether something that is not ours watches or rewrites torch's ops in this thread."""
    if _functorch() or _jit_tracing() or forward_ad._current_level >= 0:
        return True
    for index in range(_dispatch_modes()):
        if not getattr(torch._C._get_dispatch_stack_at(index), "fusiongate_transparent", False):
            return True
    for index in range(_function_modes()):
        # The mode behind torch.set_default_device only redirects factory functions.
        if type(torch._C._get_function_stack_at(index)).__name__ != "DeviceContext":
            return True
    return False


def call_key(args: Sequence[Any]) -> tuple[Hashable, ...] | str:
    """The call's key; or, as a string, why no kernel may be launched on such arguments.

    Returns
    -------
    ``TRACING``
        Another tracer or transform is at work, or an argument is a Tensor subclass (fake ones are) or no dense tensor.
    ``AUTOGRAD``
        Gradients are enabled and needed.
    ``UNSUPPORTED``
        An argument has a type that no signature can hold.
    """
    if (
        _dispatch_modes() or _function_modes() or _functorch() or _jit_tracing() or forward_ad._current_level >= 0
    ) and _observed():
        return TRACING
    grad = _grad_enabled()
    parts: list[Any] = []
    try:
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if grad and arg.requires_grad:
                    return AUTOGRAD
                if arg.is_neg():
                    return TRACING
                # One append for all: this is the hot path of every gated call.
                parts += arg.shape, arg.stride(), arg.dtype, arg.device, arg.data_ptr() & _OFFSET
            elif kind is float:
                # Zero has two signs and NaN equals nothing, so those two go by their spelling.
                parts += kind, arg if arg == arg and arg != 0.0 else repr(arg)
            elif isinstance(arg, Tensor):
                return TRACING
            elif kind in _PLAIN:
                # True == 1 == 1.0, but a kernel need not think so.
                parts += kind, arg
            else:
                return UNSUPPORTED
    except (RuntimeError, NotImplementedError):
        # A tensor without strides or without memory: sparse, nested, or of a library's own layout.
        return TRACING
    if _autocast_anywhere():
        parts.append(_autocast(args))
    if not _SMALLEST / 2:
        parts.append(_FLUSHING)
    return tuple(parts)


def is_plain_call(args: Sequence[Any]) -> bool:
    """Whether a call is nothing but memory and numbers, as far as that can be told without reading a tensor's metadata.

    A launcher that recognises verified calls asks this first; the rest of the call key it reads in its own way.
    """
    if (
        _dispatch_modes()
        or _function_modes()
        or _functorch()
        or _jit_tracing()
        or forward_ad._current_level >= 0
        or _autocast_anywhere()
        or not _SMALLEST / 2
    ):
        return False
    grad = _grad_enabled()
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.is_neg() or (grad and arg.requires_grad):
                return False
        elif kind is not float and arg is not None:
            return False
    return True


def not_plain(args: Sequence[Any]) -> bool:
    """Whether a tensor is no block of memory that a kernel may read: meta, quantized, sparse, lazily conjugated.

    All but the last follow from what is in the call key.
    """
    return any(
        tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_conj()
        for tensor in tensors_of(args)
    )


def overlapping(args: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether an argument that is written shares memory with another one, or with itself.

    Parameters
    ----------
    args
        The call's arguments.
    written
        The positions of those that are written; numbers and None may stand there too.
    """
    for position in written:
        target = args[position] if position < len(args) else None
        if not isinstance(target, Tensor):
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
            return True
        others = (arg for place, arg in enumerate(args) if place != position and isinstance(arg, Tensor))
        if any(share_memory(target, other) for other in others):
            return True
    return False


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common, or lie between each other in a way that is not looked through."""
    apart = other.data_ptr() - one.data_ptr()
    if apart >= extent(one) or -apart >= extent(other):
        return False
    if one.element_size() != other.element_size() or one.dim() != other.dim() or apart % one.element_size():
        return True
    steps: list[tuple[int, int, int]] = []
    for size, stride, other_size, other_stride in zip(
        one.shape, one.stride(), other.shape, other.stride(), strict=True
    ):
        if size > 1 and other_size > 1 and stride != other_stride:
            return True
        steps.append((stride if size > 1 else other_stride, 1 - other_size, size - 1))
    # Equal strides, as of two slices of one tensor: do some whole steps lead from one's beginning to the other's?
    return _reachable(apart // one.element_size(), sorted(steps, reverse=True))


def extent(tensor: Tensor) -> int:
    """Bytes from the first element's beginning to the last one's end."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def _reachable(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a sum of steps is a distance, each a stride with the fewest and the most times that it may be taken."""
    if not steps:
        return distance == 0
    (stride, fewest, most), *rest = steps
    if stride == 0:
        return _reachable(distance, rest)
    low = sum(step * times for step, times, _ in rest)
    high = sum(step * times for step, _, times in rest)
    first, last = max(fewest, -((high - distance) // stride)), min(most, (distance - low) // stride)
    return any(_reachable(distance - stride * times, rest) for times in range(first, last + 1))


def _autocast(args: Sequence[Any]) -> Hashable:
    kinds = sorted({tensor.device.type for tensor in tensors_of(args)})
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _layout(tensor: Tensor) -> Hashable:
    """The strides as far as they mean something: "C" for C order, whatever the shape, else the normalised strides."""
    strides = normalised_strides(tensor.shape, tensor.stride())
    dense = normalised_strides(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
    return "C" if strides == dense else strides


def signature_of(args: Sequence[Any], bucket: Callable[..., Hashable] | None) -> Signature:
    """The signature of a call that :func:`call_key` gave a key for.

    Parameters
    ----------
    args
        The call's arguments.
    bucket
        Called with the arguments, gives what stands for all their shapes; None: the shapes themselves.
    """
    shapes: Hashable = tuple(tuple(t.shape) for t in tensors_of(args)) if bucket is None else bucket(*args)
    parts: list[Hashable] = []
    for arg in args:
        if isinstance(arg, Tensor):
            parts.append((arg.dtype, _layout(arg), alignment(arg), str(arg.device)))
        else:
            parts.append((type(arg).__name__, repr(arg)))
    flushing = (_FLUSHING,) if not _SMALLEST / 2 else ()
    return (shapes, *parts, _autocast(args), *flushing)
