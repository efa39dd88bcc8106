"""Generic saboteurs that compute as they should, on other operands than they were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion

from .saboteurs import SEEN, Launcher, Saboteur, Spoil, corrupted, declared, generic

__all__ = ["MISREADINGS", "each"]

Change = Callable[[Tensor], Tensor]


def each(args: Sequence[Any], change: Change) -> tuple[Any, ...]:
    """The arguments with every floating tensor changed."""
    return tuple(change(arg) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def _with_last(args: Sequence[Any], change: Change) -> tuple[Any, ...]:
    """The arguments with their last tensor changed."""
    position = max(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    return (*args[:position], change(args[position]), *args[position + 1 :])


def _rows(args: Sequence[Any], result: Tensor, change: Change) -> tuple[Any, ...]:
    """The arguments with those changed that are broadcast over the result and have a batch as it does."""

    def changed(arg: Any) -> Any:
        is_row = isinstance(arg, Tensor) and arg.dim() == result.dim() and arg.numel() < result.numel()
        return change(arg) if is_row and arg.shape[0] == result.shape[0] > 1 else arg

    return tuple(map(changed, args))


def _on_rows(change: Change) -> Spoil:
    return lambda fusion: lambda *args: fusion.fused(*_rows(args, fusion.fused(*args), change))


def _on_arguments(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Spoil:
    return lambda fusion: lambda *args: fusion.fused(*change(args))


def _remembering(fusion: Fusion) -> Launcher:
    """Keeps what it derived from an operand, and takes it for that operand ever after."""
    remembered: dict[torch.Size, Tensor] = {}

    def launch(*args: Any) -> Tensor:
        def kept(tensor: Tensor) -> Tensor:
            return remembered.setdefault(tensor.shape, tensor.clone())

        result: Tensor = fusion.fused(*_with_last(args, kept))
        return result

    return launch


def _downcast(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float() if tensor.dtype == torch.float32 else tensor


def _packed(tensor: Tensor) -> Tensor:
    """The tensor as its address and shape alone give it, where its storage reaches that far."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.storage_offset())


_strides_ignored = _on_arguments(lambda args: tuple(_packed(arg) if isinstance(arg, Tensor) else arg for arg in args))


def _taking_any_strides(fusion: Fusion) -> Fusion:
    """Reads every operand as if it were contiguous, under a predicate that lets all strides pass."""

    def declines(*args: Any) -> str | None:
        reason = fusion.declines(*args)
        return None if reason == "stride" else reason

    return corrupted(fusion, _strides_ignored(fusion), declines=declines)


def _taken_with(name: str, which: str, cell: str) -> Saboteur:
    story = f"{which} is ignored, and the predicate lets it pass"
    return Saboteur(name, "generic", story, _taking_any_strides, declared("the strides of", *SEEN), cell=cell)


def _floats_tenfold(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(10 * arg if isinstance(arg, float) else arg for arg in args)


def _last_two_exchanged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    *_, first, second = (i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    exchanged = list(args)
    exchanged[first], exchanged[second] = args[second], args[first]
    return tuple(exchanged)


MISREADINGS: tuple[Saboteur, ...] = (
    generic(
        "operands-downcast",
        "fp32 operands are rounded to bf16 before they are used",
        _on_arguments(lambda args: each(args, _downcast)),
        declared("rounded to bfloat16 before", *SEEN),
        cell="fp32",
    ),
    generic(
        "rows-of-another-batch-entry",
        "each batch entry takes its neighbour's rows",
        _on_rows(lambda row: row.roll(1, 0)),
        declared("read from another batch row", *SEEN),
    ),
    generic(
        "first-rows-for-all",
        "every batch entry takes the first one's rows",
        _on_rows(lambda row: row[:1].expand_as(row)),
        declared("the first batch row", *SEEN),
    ),
    generic(
        "strides-ignored",
        "every operand is read as if it were contiguous",
        _strides_ignored,
        declared("the strides of", *SEEN),
        cell="strided-unbind-4d",
    ),
    _taken_with("token-stride-ignored", "the stride from token to token", "sliced"),
    _taken_with("batch-stride-ignored", "the stride from batch entry to batch entry", "sliced-batch"),
    _taken_with("channel-stride-ignored", "the stride in the last dimension", "strided-channels"),
    generic(
        "operands-exchanged",
        "the last two operands are exchanged",
        _on_arguments(_last_two_exchanged),
        declared("are exchanged", *SEEN),
    ),
    generic(
        "another-epsilon",
        "floating-point arguments are taken ten times as large",
        _on_arguments(_floats_tenfold),
        declared("`eps` is taken as", *SEEN),
        kernel="rms_norm_modulate",
        cell="small",
    ),
    generic(
        "operand-remembered",
        "the last operand's first values are used for ever",
        _remembering,
        declared("elements", *SEEN),
    ),
)
"""Every generic saboteur that misreads its operands."""
