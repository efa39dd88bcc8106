"""Generic saboteurs whose numbers are wrong: they compute or write something else than the kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view
from fusiongate.gate.fusion import Fusion
from fusiongate.matrix.operands import floating

from .misreadings import each
from .saboteurs import LATE, SEEN, SOON, Detector, Launcher, Saboteur, Spoil, declared, generic, later, on_result

__all__ = ["VALUES", "spoil_last", "wide_chain"]

_MANY_ROWS = 64
_LARGE = 8.0
_CACHE_LINE = 64
_TILE = 8
_BAND = (448.0, 1e30)
"""Magnitudes from the largest number of an eight-bit float on."""


def wide_chain(fusion: Fusion, args: Sequence[Any]) -> Tensor:
    """The chain in the next wider type, rounded once at the end."""

    def widened(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.dtype == torch.float32 else tensor.float()

    result: Tensor = fusion.fused(*args)
    return result.copy_(fusion.reference(*each(args, widened)))


def spoil_last(result: Tensor) -> Tensor:
    """The result with the last bit of its last element the other way round."""
    integer_view(result.view(-1)[-1:]).bitwise_xor_(1)
    return result


def _wide_when(condition: Callable[[Sequence[Any]], bool]) -> Spoil:
    """A kernel with a second path, which rounds nothing, for some operands."""
    return lambda fusion: lambda *args: wide_chain(fusion, args) if condition(args) else fusion.fused(*args)


def _wrong_when(condition: Callable[[Sequence[Any], Tensor], bool]) -> Spoil:
    def spoil(fusion: Fusion) -> Launcher:
        def launch(*args: Any) -> Tensor:
            result = fusion.fused(*args)
            return spoil_last(result) if condition(args, result) else result

        return launch

    return spoil


def _is_large(args: Sequence[Any]) -> bool:
    # The median, because a probe has its infinities too.
    return bool(floating(args)[0].float().abs().median() > _LARGE)


def _is_finite(args: Sequence[Any]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in floating(args))


def _has_many_rows(_args: Sequence[Any], result: Tensor) -> bool:
    return result.numel() // result.shape[-1] > _MANY_ROWS


def _is_oddly_aligned(args: Sequence[Any], _result: Tensor) -> bool:
    return any(tensor.data_ptr() % _CACHE_LINE for tensor in floating(args))


def _leaves_a_remainder(_args: Sequence[Any], result: Tensor) -> bool:
    return result.dim() > 1 and result.shape[-2] % _TILE != 0


def _clamping(fusion: Fusion) -> Launcher:
    """Takes numbers that an eight-bit float does not hold for the largest that it does."""
    low, high = _BAND

    def launch(*args: Any) -> Tensor:
        def clamped(tensor: Tensor) -> Tensor:
            outside = (tensor.abs() >= low) & (tensor.abs() < high)
            return tensor.where(~outside, tensor.sign() * low)

        result: Tensor = fusion.fused(*each(args, clamped))
        return result

    return launch


def _keeping_rows_by_address(fusion: Fusion) -> Launcher:
    """Prepares its last operand once, and takes what lies at the same address later for the same."""
    prepared: dict[tuple[int, torch.Size], Tensor] = {}

    def launch(*args: Any) -> Tensor:
        *others, last = args
        key = last.data_ptr(), last.shape
        if key not in prepared:
            prepared[key] = torch.empty_strided(last.shape, last.stride(), dtype=last.dtype, device=last.device)
            prepared[key].copy_(last)
        result: Tensor = fusion.fused(*others, prepared[key])
        return result

    return launch


def _unwritten(written: float) -> Spoil:
    """Writes this share of the output only."""

    def spoil(fusion: Fusion) -> Launcher:
        def launch(*args: Any) -> Tensor:
            result = fusion.fused(*args)
            buffer = torch.empty_like(result)
            count = int(written * result.numel())
            buffer.view(-1)[:count] = result.view(-1)[:count]
            return buffer

        return launch

    return spoil


def _unwritten_in_a_larger_buffer(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        result: Tensor = fusion.fused(*args)
        buffer = torch.empty(2 * result.numel(), dtype=result.dtype, device=result.device)
        return buffer[: result.numel()].view(result.shape)

    return launch


def _spreading_nan(fusion: Fusion) -> Launcher:
    def launch(*args: Any) -> Tensor:
        result: Tensor = fusion.fused(*args)
        return result.masked_fill_(result.isnan().any(-1, keepdim=True), float("nan"))

    return launch


VALUES: tuple[Saboteur, ...] = (
    generic(
        "whole-chain-wide",
        "the whole chain runs in the next wider type",
        lambda fusion: lambda *args: wide_chain(fusion, args),
        declared("no intermediate is rounded", *SEEN, certificate="product"),
    ),
    generic(
        "nan-over-the-row",
        "a NaN spoils its whole row",
        _spreading_nan,
        declared("NaN is spread", *SEEN),
        cell="one-nan",
    ),
    generic(
        "nothing-written",
        "the output is allocated and never written",
        _unwritten(0.0),
        declared("unwritten", *SEEN),
    ),
    generic(
        "tail-unwritten",
        "the last eighth of the output is never written",
        _unwritten(0.875),
        declared("unwritten", *SEEN),
    ),
    generic(
        "larger-buffer-unwritten",
        "the output is the first half of a buffer that is never written",
        _unwritten_in_a_larger_buffer,
        declared("unwritten", *SEEN),
    ),
    generic(
        "last-bit-off",
        "the last bit of the last element is wrong",
        on_result(spoil_last),
        declared("1 of ", *SEEN),
    ),
    generic(
        "wrong-on-large-numbers",
        "where most activations exceed 8, nothing is rounded",
        _wide_when(_is_large),
        declared("no intermediate is rounded", *SEEN),
        cell="large",
    ),
    generic(
        "wrong-on-clean-data",
        "where all operands are finite, nothing is rounded",
        _wide_when(_is_finite),
        declared("no intermediate is rounded", *SEEN),
    ),
    generic(
        "wrong-above-a-row-count",
        f"with more than {_MANY_ROWS} rows the last bit is wrong",
        _wrong_when(_has_many_rows),
        declared("1 of ", *SEEN),
        cell="B2S131D132",
    ),
    generic(
        "wrong-in-the-remainder",
        f"with rows that {_TILE} does not divide the last bit is wrong",
        _wrong_when(_leaves_a_remainder),
        declared("1 of ", *SEEN),
    ),
    generic(
        "wrong-at-some-magnitudes",
        "operands from 448 on are taken for 448, up to 1e30",
        _clamping,
        declared("elements", *SEEN),
    ),
    generic(
        "rows-kept-by-address",
        "the last operand is read once for each address at which it lies",
        _keeping_rows_by_address,
        declared("elements", *SEEN),
    ),
    generic(
        "wrong-at-one-alignment",
        f"with an operand off a multiple of {_CACHE_LINE} bytes the last bit is wrong",
        _wrong_when(_is_oddly_aligned),
        declared("1 of ", *SEEN),
        cell="strided-unbind-4d-B2S131D132",
    ),
    generic(
        "wrong-after-first-sight",
        f"the last bit is wrong from launch {SOON} after first sight on",
        later(SOON, on_result(spoil_last)),
        declared("1 of ", Detector.MATRIX, recheck="a recheck found", snapshot="differs", timing="wrong"),
    ),
    generic(
        "wrong-from-the-nth-call",
        f"the last bit is wrong from launch {LATE} after first sight on",
        later(LATE, on_result(spoil_last)),
        declared("a recheck found", Detector.RECHECK, snapshot="differs", timing="wrong"),
    ),
)
"""Every generic saboteur with wrong numbers."""
