"""Traces: the bits of each operator's results as one number, and where two runs part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusiongate.presets.op_bisect import OpRecord, fingerprint, parting

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        [X + 0.0, torch.ones(1)],
        [X.flip(0)],
        [torch.where(X == 5, torch.nextafter(X, X + 1), X)],
        [X, X],
    ],
    ids=["one more", "swapped rows", "one bit", "twice"],
)
def test_other_bits_have_another_fingerprint(other: list[Tensor]) -> None:
    assert fingerprint([X]) != fingerprint(other)


@pytest.mark.parametrize(
    "same",
    [
        [X.t().contiguous().t()],
        [X.clone().requires_grad_()],
        [torch.empty(0), X],
        [X, torch.empty(3, device="meta")],
        [X.to_sparse(), X],
    ],
    ids=["other strides", "a gradient", "no elements", "no memory", "sparse"],
)
def test_what_has_no_dense_bits_of_its_own_does_not_count(same: list[Tensor]) -> None:
    assert fingerprint([X]) == fingerprint(same)


def ran(op: str, bits: int = 0) -> OpRecord:
    return OpRecord("step 0", "block: Block", op, bits)


def test_two_runs_part_at_the_first_operator_that_differs() -> None:
    first = [ran("mul"), ran("sum", 1), ran("add", 1)]
    second = [ran("mul"), ran("sum", 2), ran("add", 2)]
    assert "step 'step 0', in block: Block, sum (operator 2 of 3)" == str(parting(first, second))
    assert parting(first, list(first)) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_that_goes_on_parts_where_the_other_ends(swapped: bool) -> None:
    runs = [[ran("mul"), ran("sum")], [ran("mul")]]
    found = parting(*(reversed(runs) if swapped else runs))
    assert "step 'step 0', in block: Block, sum (operator 2 of 2)" == str(found)
