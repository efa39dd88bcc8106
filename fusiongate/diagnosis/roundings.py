"""The roundings that a kernel may get wrong: each a way to replay its reference, and a sentence that names it.

Eager operators compute in a wider type and round each result to its dtype. A fused kernel that leaves one of these
roundings out, or does it otherwise, is told from others by replaying the chain in the same way and looking at the bits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fusiongate.comparison.bits import dtype_name, step_from_zero, step_toward_zero

from .expressions import shortened
from .op_trace import Program, Slot, Step, wider

__all__ = ["Rounding", "Variant", "nameable", "replay", "rounding_variants"]

_HALVES = (torch.bfloat16, torch.float16)
# Pairs of roundings grow with the square of the chain's length, and a long chain is seldom wrong in just two places.
_PAIRS_UP_TO = 6


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


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which the chain may have been computed."""

    roundings: Mapping[int, Rounding]
    """What the replay does at which steps."""
    sentence: str
    """What that means."""
    single: bool
    """Whether a single step differs: several of these may explain the same bits, and all of them are then named."""


def nameable(program: Program, *, witnessed: bool = False) -> list[int]:
    """The steps whose rounding can be told from the output's bits.

    Left out, where they are float32's, are the roundings of a sum's operands, of the sum, and of all that is made from
    it: they move last bits just as another order of summation does, or another reciprocal square root, so that naming
    one would be a guess.

    Parameters
    ----------
    program
        The reference.
    witnessed
        Whether the row statistic is known to be right: what is made from it has roundings of its own then.
    """
    before: set[int] = set()
    for step in reversed(program.steps):
        if step.sums or before & set(step.outputs):
            before |= set(step.inputs)
    after: set[int] = set()
    found = []
    size = program.values[program.output].numel()
    for position, step in enumerate(program.steps):
        from_sum = step.sums or bool(after & set(step.inputs))
        if from_sum:
            after |= set(step.outputs)
        if not step.rounds:
            continue
        is_statistic = program.values[step.outputs[0]].numel() < size
        moved_by_order = from_sum and (is_statistic or not witnessed)
        feeds_sum = bool(before & set(step.outputs))
        if step.dtype in _HALVES or not (moved_by_order or feeds_sum or step.sums):
            found.append(position)
    return found


def rounding_variants(program: Program, *, witnessed: bool = False) -> Iterator[Variant]:
    """Every variant that is worth a replay, likelier ones first; parameters as for :func:`nameable`."""
    steps = nameable(program, witnessed=witnessed)
    if not steps:
        return
    final = next((p for p in reversed(range(len(program.steps))) if program.steps[p].rounds), None)
    inner = [p for p in steps if p != final]
    for position in inner:
        yield Variant({position: Rounding.KEPT}, _kept(program, position), True)
    for position in steps:
        yield Variant(
            {position: Rounding.TRUNCATED},
            f"{_named(program, position)} is truncated toward zero, not rounded to nearest even",
            True,
        )
    yield from _several(program, inner, steps)
    for position in steps:
        yield Variant(
            {position: Rounding.TIES_AWAY},
            f"{_named(program, position)} is rounded with ties away from zero, not to even",
            True,
        )
    yield Variant(
        dict.fromkeys(steps, Rounding.FLUSHED), "subnormal results are flushed to zero before they are used", False
    )
    yield from _narrowed(program, steps)


def _several(program: Program, inner: list[int], steps: list[int]) -> Iterator[Variant]:
    halves = [p for p in inner if program.steps[p].dtype in _HALVES]
    wide = [p for p in inner if p not in halves]
    contracted = [p for p in wide if _is_contracted(program, p)]
    for together in (halves, wide):
        if len(together) < 2:
            continue
        dtype = program.steps[together[0]].dtype
        yield Variant(
            dict.fromkeys(together, Rounding.KEPT),
            f"no intermediate is rounded to {dtype_name(dtype)}: the whole chain runs in {dtype_name(wider(dtype))}",
            False,
        )
    if len(contracted) > 1:
        yield Variant(
            dict.fromkeys(contracted, Rounding.KEPT),
            "every product is contracted into the add that follows it (fused multiply-add)",
            False,
        )
    if 2 < len(halves) <= _PAIRS_UP_TO:
        for first, second in itertools.combinations(halves, 2):
            name = dtype_name(program.steps[first].dtype)
            yield Variant(
                dict.fromkeys((first, second), Rounding.KEPT),
                f"neither {_named(program, first)} nor {_named(program, second)} is rounded to {name}",
                False,
            )
    if len(steps) > 1:
        yield Variant(
            dict.fromkeys(steps, Rounding.TRUNCATED),
            "every result is truncated toward zero, not rounded to nearest even",
            False,
        )


def _narrowed(program: Program, steps: list[int]) -> Iterator[Variant]:
    wide = [p for p in steps if program.steps[p].dtype == torch.float32]
    present = {value.dtype for value in program.values}
    for dtype in [d for d in _HALVES if d in present] or list(_HALVES):
        rounding = Rounding.TO_BFLOAT16 if dtype == torch.bfloat16 else Rounding.TO_FLOAT16
        for position in wide:
            yield Variant(
                {position: rounding},
                f"{_named(program, position)} is rounded to {dtype_name(dtype)}, where the reference keeps float32",
                True,
            )
        if len(wide) > 1:
            yield Variant(
                dict.fromkeys(wide, rounding),
                f"every intermediate is rounded to {dtype_name(dtype)}, where the reference keeps float32",
                False,
            )


def _named(program: Program, position: int) -> str:
    return f"`{shortened(program.steps[position].expression)}`"


def _is_contracted(program: Program, position: int) -> bool:
    added = {"add", "sub", "rsub", "addcmul"}
    return program.steps[position].name in {"mul", "square"} and any(
        step.name in added for step in program.consumers(position)
    )


def _kept(program: Program, position: int) -> str:
    dtype = dtype_name(program.steps[position].dtype)
    named = _named(program, position)
    if not _is_contracted(program, position):
        return f"{named} is not rounded to {dtype} before it is used"
    if program.steps[position].dtype in _HALVES:
        return f"{named} is not rounded to {dtype} (or is contracted into the following add)"
    return f"{named} is not rounded to {dtype}: it is contracted into the following add (fused multiply-add)"
