"""The roundings that a kernel may get wrong, each as a way to replay its reference and a sentence that names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fusiongate.comparison.bits import dtype_name

from .expressions import shortened
from .op_trace import Program, wider
from .replay import Rounding

__all__ = ["Variant", "nameable", "rounding_variants"]

_HALVES = (torch.bfloat16, torch.float16)
# Pairs of roundings grow with the square of the chain's length, and a long chain is seldom wrong in just two places.
_PAIRS_UP_TO = 6


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which the chain may have been computed."""

    roundings: Mapping[int, Rounding]
    """What the replay does at which steps."""
    sentence: str
    """What that means."""
    single: bool
    """Whether a single step differs: several of these may explain the same bits, and all of them are then named."""


def nameable(program: Program) -> list[int]:
    """The steps whose rounding can be told from the output's bits.

    The roundings of a sum's operands, of the sum and of the row statistic made from it are left out where they are
    float32's: they move last bits just as another order of summation does, so that naming one would be a guess.
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
        is_statistic = from_sum and program.values[step.outputs[0]].numel() < size
        feeds_sum = bool(before & set(step.outputs))
        if step.dtype in _HALVES or not (is_statistic or feeds_sum or step.sums):
            found.append(position)
    return found


def rounding_variants(program: Program) -> Iterator[Variant]:
    """Every variant that is worth a replay, likelier ones first."""
    steps = nameable(program)
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
