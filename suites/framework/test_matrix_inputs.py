"""Symbolic inputs say shapes, roles and order; what cannot be read is told in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.matrix.inputs import ADALN_SIZES, Inputs, Size, dtypes_for, sizes_for
from fusiongate.subjects import ADALN

RESIDUAL_GATE = {"residual": "B S D", "update": "B S D", "gate": "B 1 D"}


def test_symbols_become_shapes() -> None:
    inputs = Inputs.of(ADALN)
    size = Size.of({"B": 2, "S": 517, "D": 4096})
    assert [(2, 517, 4096), (2, 1, 4096), (2, 1, 4096)] == [operand.shape(size) for operand in inputs.operands]


def test_a_literal_one_makes_a_row_and_all_symbols_a_full_operand() -> None:
    inputs = Inputs.of({"x": "B S D", "scale": "B 1 D", "weight": "D"})
    roles = {role: [operand.name for operand in inputs.having(role)] for role in ("full", "row", "part")}
    assert {"full": ["x"], "row": ["scale"], "part": ["weight"]} == roles


def test_other_values_are_passed_live_and_in_order() -> None:
    inputs = Inputs.of({"x": "B S D", "eps": 1e-6, "scale": "B 1 D", "weight": None})
    assert ("the x", 1e-6, "the scale", None) == inputs.positional({"scale": "the scale", "x": "the x"})


def test_a_callable_is_a_factory() -> None:
    factory = lambda size, dtype, device, generator: ()
    assert factory is Inputs.of(factory).factory


@pytest.mark.parametrize(
    "spec, told",
    [
        ({"x": "B S 2"}, "dimension '2'; a dimension is a symbol of letters, or 1"),
        ({"x": "B,S,D"}, "dimension 'B,S,D'"),
        ({"x": "1 1"}, "has no symbol"),
        ({"x": ""}, "has no symbol"),
        ({"x": "B D D"}, "repeats a symbol"),
        ({"eps": 1e-6}, "describe no tensor"),
        ({}, "describe no tensor"),
        ("B S D", "a mapping of names to shapes, or a callable"),
    ],
)
def test_inputs_that_cannot_be_read_are_told(spec: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Inputs.of(spec)
    assert told in str(caught.value)


def test_a_size_is_named_by_its_symbols() -> None:
    assert "B2S517D4096" == Size.of({"B": 2, "S": 517, "D": 4096}).name


@pytest.mark.parametrize("extent", [0, -1, 2.0, True, "2"])
def test_an_extent_is_a_positive_integer(extent: Any) -> None:
    with pytest.raises(UsageError, match="an integer of at least 1"):
        Size.of({"B": extent})


@pytest.mark.parametrize(
    "extents, told",
    [
        (None, "size None: expected a mapping of symbols to extents"),
        ({"B": 2**31, "S": 2**32}, "are more than a tensor has"),
    ],
)
def test_a_size_that_no_tensor_has_is_told(extents: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Size.of(extents)
    assert told in str(caught.value)


def test_adaln_has_sizes_of_its_own_and_a_small_one_first() -> None:
    sizes = sizes_for(Inputs.of(ADALN), None)
    assert len(ADALN_SIZES) == len(sizes)
    assert "B2S33D512" == sizes[0].name
    assert max(size.elements for size in sizes) > 2**31


def test_the_base_is_the_given_size_with_the_fewest_elements() -> None:
    sizes = sizes_for(Inputs.of(RESIDUAL_GATE), [{"B": 2, "S": 517, "D": 4096}, {"B": 1, "S": 2, "D": 64}])
    assert ["B1S2D64", "B2S517D4096"] == [size.name for size in sizes]


@pytest.mark.parametrize(
    "inputs, sizes, told",
    [
        ({"x": "N D"}, None, "the default sizes are for the symbols B, S and D"),
        (lambda *_: (), None, "the default sizes are for the symbols B, S and D"),
        ({"x": "N D"}, [], "at least one size"),
        ({"x": "N D"}, [{"N": 2}], "gives N, but the inputs have the symbols D, N"),
        ({"x": "N D"}, [{"N": 2, "D": 3, "K": 4}], "gives D, K, N, but"),
        ({"x": "N D"}, [{"N": 2, "D": 3}, {"N": 2, "D": 3}], "sizes repeat"),
    ],
)
def test_sizes_have_to_fit_the_inputs(inputs: Any, sizes: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        sizes_for(Inputs.of(inputs), sizes)
    assert told in str(caught.value)


def test_dtypes_mix_rows_or_the_last_operand() -> None:
    plans = {plan.name: list(plan.assign(Inputs.of(ADALN)).values()) for plan in dtypes_for(Inputs.of(ADALN))}
    assert ["bf16", "fp16", "fp32", "fp64", "mixed", "mixed-last"] == list(plans)
    assert [torch.bfloat16, torch.float32, torch.float32] == plans["mixed"]
    assert [torch.bfloat16, torch.bfloat16, torch.float32] == plans["mixed-last"]


def test_a_mixture_that_another_one_already_is_makes_no_cells() -> None:
    """With one row operand, and that the last, both mixtures are the same; without rows, only one is a mixture."""
    assert ["mixed"] == [plan.name for plan in dtypes_for(Inputs.of(RESIDUAL_GATE)) if plan.mixed]
    assert ["mixed-last"] == [plan.name for plan in dtypes_for(Inputs.of({"x": "N D", "y": "N D"})) if plan.mixed]
