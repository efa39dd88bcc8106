"""Replaying a recorded reference with single roundings changed.

Eager operators compute in a wider type and round each result to its dtype. A fused kernel that leaves one of these
roundings out, or does it otherwise, is told from others by replaying the chain in the same way and looking at the bits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fusiongate.comparison.bits import step_from_zero, step_toward_zero

from .op_trace import Program, Slot, Step, wider

__all__ = ["Rounding", "replay"]


class Rounding(enum.Enum):
    """What a replay does with one operator's result in place of rounding it to nearest even."""

    KEPT = "kept in the wider type"
    TRUNCATED = "truncated toward zero"
    TIES_AWAY = "rounded to nearest with ties away from zero"
    FLUSHED = "rounded to nearest, subnormal results then replaced by zero"
    TO_BFLOAT16 = "rounded to bfloat16 as well"
    TO_FLOAT16 = "rounded to float16 as well"


def replay(program: Program, roundings: Mapping[int, Rounding]) -> Tensor:
    """The program's output when the steps at the given positions round otherwise; all others round to nearest even."""
    changed: dict[int, Tensor] = {}
    for position, step in enumerate(program.steps):
        rounding = roundings.get(position)
        if rounding is None and not any(number in changed for number in step.inputs):
            continue
        for number, result in zip(step.outputs, _run(program, step, changed, rounding), strict=True):
            dtype = program.values[number].dtype
            changed[number] = _rounded(result, dtype, rounding) if step.rounds else result
    expected = program.values[program.output]
    return changed.get(program.output, expected).to(expected.dtype)


def _run(program: Program, step: Step, changed: Mapping[int, Tensor], rounding: Rounding | None) -> list[Tensor]:
    """The step's results before they are rounded."""
    sources = {number: changed.get(number, program.values[number]) for number in step.inputs}
    floating = [s.dtype for s in sources.values() if s.is_floating_point()]
    compute = step.dtype if step.dtype.is_floating_point else torch.bfloat16
    for dtype in floating:
        compute = torch.promote_types(compute, dtype)
    if rounding is not None:
        compute = torch.promote_types(compute, wider(step.dtype))

    def filled(value: Any) -> Any:
        if isinstance(value, Slot):
            source = sources[value.number]
            return source.to(compute) if source.is_floating_point() and floating else source
        return value

    args, kwargs = tree_map(filled, step.args), tree_map(filled, step.kwargs)
    named = kwargs.get("dtype")
    if isinstance(named, torch.dtype) and named.is_floating_point:
        kwargs["dtype"] = compute
    return [r for r in tree_flatten(step.op(*args, **kwargs))[0] if isinstance(r, Tensor)]


def _rounded(result: Tensor, dtype: torch.dtype, rounding: Rounding | None) -> Tensor:
    if not dtype.is_floating_point or rounding is Rounding.KEPT:
        return result
    nearest = result.to(dtype)
    match rounding:
        case Rounding.TRUNCATED:
            return torch.where(nearest.abs() > result.abs(), step_toward_zero(nearest), nearest)
        case Rounding.TIES_AWAY:
            beyond = step_from_zero(nearest)
            halfway = (result - nearest == beyond - result) & nearest.isfinite() & (nearest.abs() < result.abs())
            return torch.where(halfway, beyond, nearest)
        case Rounding.FLUSHED:
            subnormal = nearest.abs() < torch.finfo(dtype).smallest_normal
            return torch.where(subnormal, torch.zeros_like(nearest).copysign(nearest), nearest)
        case Rounding.TO_BFLOAT16:
            return nearest.to(torch.bfloat16).to(dtype)
        case Rounding.TO_FLOAT16:
            return nearest.to(torch.float16).to(dtype)
    return nearest
