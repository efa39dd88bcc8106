"""Generic saboteurs whose numbers are right: what they return, touch, leave behind or cost is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusiongate.digests import md5
from fusiongate.fusions import Fusion
from fusiongate.sabotage.saboteurs import Detector, Launcher, Saboteur, corrupted, declared
from fusiongate.sabotage.values import later

__all__ = ["CONDUCT"]

_SEEN = (Detector.FIRST_SIGHT, Detector.MATRIX)
_SOON = 5
_SLEEP_CYCLES = 20_000_000
"""On a GPU's clock, some 10 ms: longer than everything that a comparison does before it reads the result."""

_SAME_WIDTH = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.int32}

Change = Callable[[Tensor], Any]


def _on_result(change: Change) -> Callable[[Fusion], Launcher]:
    return lambda fusion: lambda *args: change(fusion.fused(*args))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def _afterwards(disturb: Callable[[tuple[Any, ...], Tensor], None]) -> Callable[[Fusion], Launcher]:
    """A right result, and something done on the way out."""

    def spoil(fusion: Fusion) -> Launcher:
        def launch(*args: Any) -> Tensor:
            result: Tensor = fusion.fused(*args)
            disturb(args, result)
            return result

        return launch

    return spoil


def _into_first_operand(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        first: Tensor = _tensors(args)[0]
        return first.copy_(fusion.fused(*args))

    return launch


def _first_operand_where_equal(fusion: Fusion) -> Launcher:
    """Hands its first operand back where the others leave it as it is."""

    def launch(*args: Any) -> Tensor:
        first: Tensor = _tensors(args)[0]
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


def _past_the_end(args: tuple[Any, ...], _result: Tensor) -> None:
    """Writes one element after an operand, where the memory there belongs to the same allocation."""
    tensor = _tensors(args)[0]
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    after = tensor.storage_offset() + reach + 1
    if (after + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes():
        tensor.as_strided((1,), (1,), after).fill_(1.0)


def _change_last(args: tuple[Any, ...], _result: Tensor) -> None:
    _tensors(args)[-1].add_(1)


def _draw_a_number(_args: tuple[Any, ...], _result: Tensor) -> None:
    torch.rand(1)


def _elsewhere(result: Tensor) -> Tensor:
    return result.cpu() if result.is_cuda else result.to("meta")


def _sharing_a_cache(fusion: Fusion) -> Fusion:
    """Launches nothing where the reference has seen the operands: its result lies in a cache that both have."""
    cache: dict[tuple[str, ...], Tensor] = {}

    @functools.wraps(fusion.reference)
    def reference(*args: Any) -> Tensor:
        cache[tuple(map(md5, _tensors(args)))] = result = fusion.reference(*args)
        return result

    def launch(*args: Any) -> Tensor:
        known = cache.get(tuple(map(md5, _tensors(args))))
        return fusion.fused(*args) if known is None else known

    return corrupted(fusion, launch, reference=reference)


def _raising(_fusion: Fusion) -> Launcher:
    def launch(*_args: Any) -> Tensor:
        raise RuntimeError("too many resources requested for launch")

    return launch


def _declining(fusion: Fusion) -> Fusion:
    """Asks for one condition more than the kernel needs: that nothing is strided."""
    spoilt = corrupted(fusion, fusion.fused)

    def declines(*args: Any) -> str | None:
        if not all(tensor.is_contiguous() for tensor in _tensors(args)):
            return "stride"
        return fusion.declines(*args)

    spoilt.declines = declines
    return spoilt


def _on_another_stream(fusion: Fusion) -> Launcher:
    """Launches on a stream of its own, and returns before anything there has run."""

    def launch(*args: Any) -> Tensor:
        stream = torch.cuda.Stream(_tensors(args)[0].device)
        buffer = torch.empty_like(_tensors(args)[0])
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            buffer.copy_(fusion.fused(*args))
        for tensor in (buffer, *_tensors(args)):
            # Or the allocator hands the memory on while that stream is still at work on it.
            tensor.record_stream(stream)
        return buffer

    return launch


def _leave_another_device(args: tuple[Any, ...], _result: Tensor) -> None:
    device = _tensors(args)[0].device
    torch.cuda.set_device((device.index + 1) % torch.cuda.device_count())


def _leave_another_stream(args: tuple[Any, ...], _result: Tensor) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(_tensors(args)[0].device))


def _fail_on_the_device(args: tuple[Any, ...], _result: Tensor) -> None:
    device = _tensors(args)[0].device
    torch.zeros(1, device=device)[torch.tensor([7], device=device)]


def _ten_times_over(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        for _ in range(9):
            fusion.fused(*args)
        return fusion.fused(*args)

    return launch


def _generic(
    name: str,
    story: str,
    spoil: Callable[[Fusion], Launcher],
    detectors: dict[Detector, str],
    *,
    cell: str = "base",
    gpus: int = 0,
    in_own_process: bool = False,
) -> Saboteur:
    return Saboteur(
        name,
        "generic",
        story,
        lambda fusion: corrupted(fusion, spoil(fusion)),
        detectors,
        cell=cell,
        gpus=gpus,
        in_own_process=in_own_process,
    )


CONDUCT: tuple[Saboteur, ...] = (
    _generic(
        "nothing-returned",
        "the launcher forgets to return its output",
        _on_result(lambda _: None),
        declared("returns nothing", *_SEEN),
    ),
    _generic(
        "another-dtype",
        "the result is fp32 whatever the operands are",
        _on_result(lambda result: result.float()),
        declared("dtype differs", *_SEEN),
    ),
    _generic(
        "dtype-mislabelled",
        "the result has the right bits under another dtype of the same width",
        _on_result(lambda result: result.view(_SAME_WIDTH[result.dtype])),
        declared("dtype differs", *_SEEN),
    ),
    _generic(
        "another-shape",
        "the result has a dimension more",
        _on_result(lambda result: result.unsqueeze(0)),
        declared("shape differs", *_SEEN),
    ),
    _generic(
        "other-strides",
        "the result lies in memory with its last two dimensions exchanged",
        _on_result(lambda result: result.mT.contiguous().mT),
        declared("strides", *_SEEN),
    ),
    _generic(
        "another-device",
        "the result lies on another device than the operands",
        _on_result(_elsewhere),
        declared("device differs", *_SEEN),
    ),
    _generic(
        "output-in-its-input",
        "the result is written over the first operand",
        _into_first_operand,
        declared("changed its input", *_SEEN),
    ),
    _generic(
        "first-operand-handed-back",
        "where nothing changes, the first operand itself is returned",
        _first_operand_where_equal,
        declared("shares memory with an input", *_SEEN),
        cell="zeros",
    ),
    _generic(
        "rows-changed",
        "the last operand holds other values afterwards",
        _afterwards(_change_last),
        declared("changed its input", *_SEEN),
    ),
    _generic(
        "rows-changed-later",
        f"the last operand holds other values afterwards, from launch {_SOON} on",
        later(_SOON, _afterwards(_change_last)),
        declared("changed an input", Detector.MATRIX),
    ),
    _generic(
        "output-in-its-input-later",
        f"the result lies in the first operand's memory, from launch {_SOON} on",
        later(_SOON, _first_operand_where_equal),
        declared("shares memory with an input", Detector.MATRIX),
        cell="zeros",
    ),
    _generic(
        "operand-overrun",
        "one element after the first operand is written",
        _afterwards(_past_the_end),
        declared("wrote outside of", *_SEEN),
    ),
    _generic(
        "static-output-buffer",
        "all results of a shape lie in one buffer",
        _static_buffer,
        declared("an earlier call's result", *_SEEN),
    ),
    Saboteur(
        "references-result-handed-on",
        "generic",
        "nothing is launched: what the reference has computed is returned",
        _sharing_a_cache,
        declared("the reference's result", *_SEEN),
    ),
    _generic(
        "random-state-moved",
        "the launcher draws a random number",
        _afterwards(_draw_a_number),
        declared("random state", *_SEEN),
    ),
    _generic(
        "raises-at-launch",
        "the launch fails",
        _raising,
        declared("too many resources", Detector.FIRST_SIGHT, matrix="no launch", timing="launches"),
    ),
    Saboteur(
        "declines-too-much",
        "generic",
        "the predicate declines strided rows, which the kernel can take",
        _declining,
        declared("must fuse, but declined", Detector.MATRIX, timing="launches"),
        cell="strided-unbind-4d",
    ),
    _generic(
        "ten-times-over",
        "the result is right, and computed ten times",
        _ten_times_over,
        declared("no faster", Detector.TIMING),
        gpus=1,
    ),
    _generic(
        "eager-in-disguise",
        "the launcher runs the eager chain",
        lambda fusion: fusion.reference,
        declared("no faster", Detector.TIMING),
        gpus=1,
    ),
    _generic(
        "another-stream",
        "the kernel runs on a stream of its own that nothing waits for",
        _on_another_stream,
        declared("unwritten", *_SEEN),
        gpus=1,
    ),
    _generic(
        "current-stream-left-changed",
        "another stream is current afterwards",
        _afterwards(_leave_another_stream),
        declared("current stream", *_SEEN),
        gpus=1,
    ),
    _generic(
        "current-device-left-changed",
        "another device is current afterwards",
        _afterwards(_leave_another_device),
        declared("current device", Detector.CONTAINMENT),
        gpus=2,
    ),
    _generic(
        "raises-asynchronously",
        "the device fails after the launch, and takes its context along",
        _afterwards(_fail_on_the_device),
        declared("device context is unusable", Detector.CONTAINMENT),
        gpus=1,
        in_own_process=True,
    ),
)
"""Every generic saboteur whose numbers are right."""
