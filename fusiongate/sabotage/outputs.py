"""Generic saboteurs whose numbers are right, and whose output or operands are not what they have to be."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.digests import md5
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.signatures import tensors_of

from .saboteurs import (
    LATE,
    SEEN,
    SOON,
    Detector,
    Launcher,
    Saboteur,
    afterwards,
    corrupted,
    declared,
    generic,
    later,
    on_result,
)

__all__ = ["OUTPUTS"]

_SAME_WIDTH = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.int32}


def _into_first_operand(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        first: Tensor = tensors_of(args)[0]
        return first.copy_(fusion.fused(*args))

    return launch


def _first_operand_where_equal(fusion: Fusion) -> Launcher:
    """Hands its first operand back where the others leave it as it is."""

    def launch(*args: Any) -> Tensor:
        first: Tensor = tensors_of(args)[0]
        result: Tensor = fusion.fused(*args)
        return first if torch.equal(first, result) else result

    return launch


def _static_buffer(fusion: Fusion) -> Launcher:
    """Writes every result of a shape into one buffer, so that a call overwrites what the last one returned."""
    buffers: dict[torch.Size, Tensor] = {}

    def launch(*args: Any) -> Tensor:
        result: Tensor = fusion.fused(*args)
        return buffers.setdefault(result.shape, torch.empty_like(result)).copy_(result)

    return launch


_RING = 3


def _ring_of_buffers(fusion: Fusion) -> Launcher:
    """Writes its results into a few buffers in turn, so that a later call overwrites what an earlier one returned."""
    rings: dict[torch.Size, list[Tensor]] = {}

    def launch(*args: Any) -> Tensor:
        result: Tensor = fusion.fused(*args)
        ring = rings.setdefault(result.shape, [])
        buffer = torch.empty_like(result) if len(ring) < _RING else ring.pop(0)
        ring.append(buffer)
        return buffer.copy_(result)

    return launch


def _past_its_output(fusion: Fusion) -> Launcher:
    """Writes one element more than its output has."""

    def launch(*args: Any) -> Tensor:
        result: Tensor = fusion.fused(*args)
        output = torch.empty_like(result)
        end = output.storage_offset() + output.numel()
        if (end + 1) * output.element_size() <= output.untyped_storage().nbytes():
            output.as_strided((1,), (1,), end).fill_(1.0)
        return output.copy_(result)

    return launch


class _Labelled(Tensor):
    """A tensor of a class of its own."""


def _made_in_inference_mode(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        with torch.inference_mode():
            result: Tensor = fusion.fused(*args)
            return result.clone()

    return launch


def _past_the_end(args: tuple[Any, ...], _result: Tensor) -> None:
    """Writes one element after an operand, where the memory there belongs to the same allocation."""
    tensor = tensors_of(args)[0]
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    after = tensor.storage_offset() + reach + 1
    if (after + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes():
        tensor.as_strided((1,), (1,), after).fill_(1.0)


def _change_first(args: tuple[Any, ...], _result: Tensor) -> None:
    tensors_of(args)[0].add_(1)


def _change_last(args: tuple[Any, ...], _result: Tensor) -> None:
    tensors_of(args)[-1].add_(1)


def _elsewhere(result: Tensor) -> Tensor:
    return result.cpu() if result.is_cuda else result.to("meta")


def _sharing_a_cache(fusion: Fusion) -> Fusion:
    """Launches nothing where the reference has seen the operands: its result lies in a cache that both have."""
    cache: dict[tuple[str, ...], Tensor] = {}

    @functools.wraps(fusion.reference)
    def reference(*args: Any) -> Tensor:
        result: Tensor = fusion.reference(*args)
        cache[tuple(map(md5, tensors_of(args)))] = result
        return result

    def launch(*args: Any) -> Tensor:
        known = cache.get(tuple(map(md5, tensors_of(args))))
        return fusion.fused(*args) if known is None else known

    return corrupted(fusion, launch, reference=reference)


OUTPUTS: tuple[Saboteur, ...] = (
    generic(
        "nothing-returned",
        "the launcher forgets to return its output",
        on_result(lambda _: None),
        declared("returns nothing", *SEEN),
    ),
    generic(
        "another-dtype",
        "the result is fp32 whatever the operands are",
        on_result(lambda result: result.float()),
        declared("dtype differs", *SEEN),
    ),
    generic(
        "dtype-mislabelled",
        "the result has the right bits under another dtype of the same width",
        on_result(lambda result: result.view(_SAME_WIDTH[result.dtype])),
        declared("dtype differs", *SEEN),
    ),
    generic(
        "dtype-mislabelled-later",
        f"the result has the right bits under another dtype of the same width, from launch {LATE} after first sight on",
        later(LATE, on_result(lambda result: result.view(_SAME_WIDTH[result.dtype]))),
        declared("a recheck found", Detector.RECHECK, timing="dtype differs"),
    ),
    generic(
        "another-shape",
        "the result has a dimension more",
        on_result(lambda result: result.unsqueeze(0)),
        declared("shape differs", *SEEN),
    ),
    generic(
        "other-strides",
        "the result lies in memory with its last two dimensions exchanged",
        on_result(lambda result: result.mT.contiguous().mT),
        declared("strides", *SEEN),
    ),
    generic(
        "another-layout",
        "the result is sparse",
        on_result(lambda result: result.to_sparse()),
        declared("layout differs", *SEEN),
    ),
    generic(
        "another-device",
        "the result lies on another device than the operands",
        on_result(_elsewhere),
        declared("device differs", *SEEN),
    ),
    generic(
        "output-in-its-input",
        "the result is written over the first operand",
        _into_first_operand,
        declared("changed its input", *SEEN),
    ),
    generic(
        "first-operand-handed-back",
        "where nothing changes, the first operand itself is returned",
        _first_operand_where_equal,
        declared("shares memory with an input", *SEEN),
        cell="zeros",
    ),
    generic(
        "first-operand-changed",
        "the first operand holds other values afterwards",
        afterwards(_change_first),
        declared("changed its input", *SEEN),
    ),
    generic(
        "rows-changed",
        "the last operand holds other values afterwards",
        afterwards(_change_last),
        declared("changed its input", *SEEN),
    ),
    generic(
        "rows-changed-later",
        f"the last operand holds other values afterwards, from launch {SOON} after first sight on",
        later(SOON, afterwards(_change_last)),
        declared("changed an input", Detector.MATRIX),
    ),
    generic(
        "output-in-its-input-later",
        f"the result lies in the first operand's memory, from launch {SOON} after first sight on",
        later(SOON, _first_operand_where_equal),
        declared("shares memory with an input", Detector.MATRIX),
        cell="zeros",
    ),
    generic(
        "operand-overrun",
        "one element after the first operand is written",
        afterwards(_past_the_end),
        declared("wrote outside of", *SEEN),
    ),
    generic(
        "static-output-buffer",
        "all results of a shape lie in one buffer",
        _static_buffer,
        declared("an earlier call's result", *SEEN),
    ),
    generic(
        "ring-of-output-buffers",
        f"the results of a shape take turns in {_RING} buffers",
        _ring_of_buffers,
        declared("an earlier call's result", *SEEN),
    ),
    generic(
        "output-overrun",
        "one element after the output is written",
        _past_its_output,
        declared("wrote outside of its output", *SEEN),
    ),
    generic(
        "output-of-inference-mode",
        "the result is made in inference mode, so that nobody may write it later",
        _made_in_inference_mode,
        declared("made in inference mode", *SEEN),
    ),
    generic(
        "output-of-a-subclass",
        "the result is of a class of its own",
        on_result(lambda result: result.as_subclass(_Labelled)),
        declared("the result is a _Labelled", *SEEN),
    ),
    generic(
        "output-that-requires-a-gradient",
        "the result asks for a gradient that nothing gives it",
        on_result(lambda result: result.requires_grad_()),
        declared("requires a gradient", *SEEN),
    ),
    Saboteur(
        "references-result-handed-on",
        "generic",
        "nothing is launched: what the reference has computed is returned",
        _sharing_a_cache,
        declared("the reference's result", *SEEN),
    ),
)
"""Every generic saboteur that gives back, or leaves behind, other memory than it should."""
