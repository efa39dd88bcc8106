"""The operands that a kernel may read wrongly, each as other arguments for its reference and a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import dtype_name

__all__ = ["operand_variants"]

_HALVES = (torch.bfloat16, torch.float16)
_USUAL_EPSILONS = (0.0, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)


def operand_variants(
    names: Sequence[str], args: Sequence[Any], output: Tensor, whole: Sequence[bool]
) -> Iterator[tuple[str, list[Any]]]:
    """Sentences, each with the arguments under which the reference would give what it describes.

    Parameters
    ----------
    names, args
        The reference's parameters and arguments.
    output
        Its result.
    whole
        Which arguments are as they were given, not slices of that: only their memory says what a kernel that ignores
        strides would have read.
    """
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    uncut = [i for i in tensors if whole[i]]
    changes = (
        _rows(names, args, [i for i in tensors if args[i].dim() > 1 and args[i].numel() < output.numel()]),
        _read_as_packed(names, args, uncut),
        _confused(names, args, tensors),
        _narrowed(names, args, tensors, output.dtype),
        _other_floats(names, args),
    )
    for sentence, changed in itertools.chain(*changes):
        yield sentence, [changed.get(i, a) for i, a in enumerate(args)]


_Changes = Iterator[tuple[str, dict[int, Any]]]
"""Sentences, each with the arguments that change, by position."""


def _read_as_packed(names: Sequence[str], args: Sequence[Any], uncut: Sequence[int]) -> _Changes:
    packed = {i: p for i in uncut if (p := _read_as_contiguous(args[i])) is not None}
    for changed in _alone_and_together(packed):
        read = "it is read as if it were" if len(changed) == 1 else "they are read as if they were"
        yield f"the strides of {_listed(names, changed)} are ignored: {read} contiguous", changed


def _confused(names: Sequence[str], args: Sequence[Any], tensors: Sequence[int]) -> _Changes:
    for i in tensors:
        yield f"`{names[i]}` is ignored: the result is as if it were zero", {i: torch.zeros_like(args[i])}
    for i, j in itertools.combinations(tensors, 2):
        if args[i].shape == args[j].shape and args[i].dtype == args[j].dtype:
            yield f"`{names[i]}` and `{names[j]}` are exchanged", {i: args[j], j: args[i]}


def _narrowed(names: Sequence[str], args: Sequence[Any], tensors: Sequence[int], dtype: torch.dtype) -> _Changes:
    present = {args[i].dtype for i in tensors} | {dtype}
    wide = [i for i in tensors if args[i].dtype in (torch.float32, torch.float64)]
    for half in [d for d in _HALVES if d in present] or _HALVES:
        for changed in _alone_and_together({i: args[i].to(half).to(args[i].dtype) for i in wide}):
            used = "is rounded to {} before it is" if len(changed) == 1 else "are rounded to {} before they are"
            yield f"{_listed(names, changed)} {used.format(dtype_name(half))} used", changed


def _other_floats(names: Sequence[str], args: Sequence[Any]) -> _Changes:
    for i, value in enumerate(args):
        if isinstance(value, float):
            for other in {*_USUAL_EPSILONS, value * 10, value / 10} - {value}:
                yield f"`{names[i]}` is taken as {other:g}, not {value:g}", {i: other}


def _listed(names: Sequence[str], positions: Iterable[int]) -> str:
    return " and ".join(f"`{names[i]}`" for i in positions)


def _alone_and_together(changes: dict[int, Any]) -> Iterator[dict[int, Any]]:
    """Each change alone, then all: a kernel that reads one operand wrongly often reads its like in the same way."""
    for position, change in changes.items():
        yield {position: change}
    if len(changes) > 1:
        yield changes


def _rows(names: Sequence[str], args: Sequence[Any], rows: list[int]) -> _Changes:
    """Rows that are broadcast over the activations, taken from another place along one of their dimensions."""
    groups = [[i] for i in rows] + ([rows] if len(rows) > 1 else [])
    depth = max((args[i].dim() for i in rows), default=1) - 1
    for group, dimension in itertools.product(groups, range(depth)):
        if not all(args[i].dim() > dimension + 1 and args[i].shape[dimension] > 1 for i in group):
            continue
        listed = _listed(names, group)
        where = "batch row" if dimension == 0 else f"place along dimension {dimension}"
        first = {i: args[i].narrow(dimension, 0, 1).expand_as(args[i]) for i in group}
        yield f"the first {where} of {listed} is used for all", first
        for changed in (
            {i: args[i].roll(1, dimension) for i in group},
            {i: args[i].roll(-1, dimension) for i in group},
            {i: args[i].flip(dimension) for i in group},
        ):
            yield f"{listed} is read from another {where}", changed


def _read_as_contiguous(tensor: Tensor) -> Tensor | None:
    """What a kernel sees that knows address and shape only; None where that is the same, or not all there."""
    if tensor.is_contiguous():
        return None
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes():
        return None
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
