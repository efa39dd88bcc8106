"""The dtypes of a cell: one for all operands, or two of them mixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .inputs import Inputs

__all__ = ["DTYPES", "DtypePlan", "dtypes_for"]


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Which operand gets which dtype."""

    name: str
    """The plan as it stands in a cell's id."""
    main: torch.dtype
    """The dtype of every operand that has no other."""
    rows: torch.dtype | None = None
    """The dtype of all row operands, where it is another."""
    last: torch.dtype | None = None
    """The dtype of the last operand alone, where it is another."""

    @property
    def mixed(self) -> bool:
        """Whether the operands' dtypes differ."""
        return self.rows is not None or self.last is not None

    def assign(self, inputs: Inputs) -> dict[str, torch.dtype]:
        """The dtype of each operand."""
        dtypes = {operand.name: self.main for operand in inputs.operands}
        if self.rows is not None:
            dtypes.update({operand.name: self.rows for operand in inputs.having("row")})
        if self.last is not None:
            dtypes[inputs.operands[-1].name] = self.last
        return dtypes


DTYPES: dict[str, DtypePlan] = {
    plan.name: plan
    for plan in (
        DtypePlan("bf16", torch.bfloat16),
        DtypePlan("fp16", torch.float16),
        DtypePlan("fp32", torch.float32),
        DtypePlan("fp64", torch.float64),
        DtypePlan("mixed", torch.bfloat16, rows=torch.float32),
        DtypePlan("mixed-last", torch.bfloat16, last=torch.float32),
    )
}
"""Every plan by name. ``mixed`` is bf16 under fp32 rows; in ``mixed-last`` the last operand alone is fp32."""


def dtypes_for(inputs: Inputs) -> tuple[DtypePlan, ...]:
    """The plans that differ from one another on these inputs."""
    plans: dict[tuple[torch.dtype, ...], DtypePlan] = {}
    for plan in DTYPES.values():
        if plan.mixed and inputs.factory is not None:
            continue
        key = tuple(plan.assign(inputs).values()) or (plan.main,)
        plans.setdefault(key, plan)
    return tuple(plans.values())
