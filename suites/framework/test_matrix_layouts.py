"""Every layout lies in memory as its name says, and holds the values that were drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusiongate.matrix.inputs import Inputs, Size
from fusiongate.matrix.layouts import Layout, layouts_for
from fusiongate.subjects import ADALN

SIZE = Size.of({"B": 2, "S": 5, "D": 12})
INPUTS = Inputs.of(ADALN)
LAYOUTS = {layout.name: layout for layout in layouts_for(INPUTS)}


def drawn(layout: Layout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = layout.shapes(INPUTS, SIZE)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def placed(name: str) -> dict[str, Any]:
    layout = LAYOUTS[name]
    return dict(layout.place(INPUTS, drawn(layout)))


def test_names_are_stable() -> None:
    """Ids in committed tables are made of them: a new name goes at the end of its group, an old one stays."""
    assert [
        "row-broadcast",
        "strided-unbind-4d",
        "strided-unbind-3d",
        "padded-rows",
        "junk-strides",
        "strided-channels-rows",
        "per-token",
        "frame-rows",
        "batch-broadcast-rows",
        "expanded-rows",
        "expanded-channels",
        "zero-dim",
        "rank-2",
        "one-token",
        "expanded-full",
        "permuted",
        "sliced",
        "sliced-batch",
        "strided-channels",
        "negated",
        "empty-batch",
        "empty-tokens",
        "scalar",
        "offset-x",
        "offset-scale",
        "offset-shift",
    ] == list(LAYOUTS)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.keeps_shape and name != "scalar"])
def test_placing_changes_no_value(name: str) -> None:
    values = drawn(LAYOUTS[name])
    for operand, tensor in placed(name).items():
        torch.testing.assert_close(tensor, values[operand], rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_eager_takes_every_layout(name: str) -> None:
    x, scale, shift = INPUTS.positional(placed(name))
    assert isinstance(x * (1 + scale) + shift, torch.Tensor)


CLAIMS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "row-broadcast": lambda x, scale, shift: scale.stride() == (12, 12, 1) and x.is_contiguous(),
    "strided-unbind-4d": lambda x, scale, shift: (
        scale.stride() == (72, 72, 1) and shift.data_ptr() - scale.data_ptr() == 12 * 4 and scale._base is not None
    ),
    "strided-unbind-3d": lambda x, scale, shift: (
        scale.stride() == (72, 12, 1) and shift.data_ptr() - scale.data_ptr() == 12 * 4
    ),
    "padded-rows": lambda x, scale, shift: scale.stride(0) == 36 and shift.stride(0) == 36,
    "junk-strides": lambda x, scale, shift: scale.stride() == (12, 7, 1),
    "strided-channels-rows": lambda x, scale, shift: scale.stride(-1) == 2 and x.is_contiguous(),
    "per-token": lambda x, scale, shift: scale.shape == shift.shape == (2, 5, 12),
    "frame-rows": lambda x, scale, shift: x.shape == (2, 3, 5, 12) and scale.shape == shift.shape == (2, 3, 1, 12),
    "batch-broadcast-rows": lambda x, scale, shift: scale.shape == (1, 1, 12) and x.shape == (2, 5, 12),
    "expanded-rows": lambda x, scale, shift: scale.shape == (2, 1, 12) and scale.stride(0) == 0,
    "expanded-channels": lambda x, scale, shift: scale.shape == (2, 1, 12) and scale.stride(-1) == 0,
    "zero-dim": lambda x, scale, shift: scale.shape == shift.shape == (),
    "rank-2": lambda x, scale, shift: x.shape == (5, 12) and scale.shape == (1, 12),
    "one-token": lambda x, scale, shift: x.shape == (2, 1, 12),
    "expanded-full": lambda x, scale, shift: x.shape == (2, 5, 12) and x.stride(0) == 0,
    "permuted": lambda x, scale, shift: x.stride() == (60, 1, 5),
    "sliced": lambda x, scale, shift: x.stride() == (72, 12, 1) and x.data_ptr() % 256 == 48,
    "sliced-batch": lambda x, scale, shift: x.stride(0) == 120,
    "strided-channels": lambda x, scale, shift: x.stride(-1) == 2,
    "negated": lambda x, scale, shift: x.is_neg() and not scale.is_neg(),
    "empty-batch": lambda x, scale, shift: x.shape == (0, 5, 12) and scale.shape == (0, 1, 12),
    "empty-tokens": lambda x, scale, shift: x.shape == (2, 0, 12) and scale.shape == (2, 1, 12),
    "scalar": lambda x, scale, shift: type(scale) is type(shift) is float,
    "offset-x": lambda x, scale, shift: misaligned(x) and not misaligned(scale) and not misaligned(shift),
    "offset-scale": lambda x, scale, shift: not misaligned(x) and misaligned(scale) and not misaligned(shift),
    "offset-shift": lambda x, scale, shift: not misaligned(x) and not misaligned(scale) and misaligned(shift),
}


def misaligned(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == tensor.element_size()


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_what_its_name_says(name: str) -> None:
    assert CLAIMS[name](*INPUTS.positional(placed(name)))


@pytest.mark.parametrize(
    "spec, missing, present",
    [
        ({"x": "N D", "y": "N D"}, {"per-token", "rank-2", "scalar", "empty-tokens"}, {"contiguous", "offset-y"}),
        ({"x": "B S D", "row": "1 D"}, {"expanded-rows", "frame-rows", "rank-2"}, {"row-broadcast", "permuted"}),
        ({"x": "B S D", "weight": "D"}, {"per-token", "rank-2"}, {"permuted", "offset-weight"}),
    ],
)
def test_a_layout_that_no_operand_can_have_is_left_out(
    spec: dict[str, str], missing: set[str], present: set[str]
) -> None:
    names = {layout.name for layout in layouts_for(Inputs.of(spec))}
    assert set() == names & missing
    assert present <= names


@pytest.mark.parametrize("spec", [{"x": "N D", "y": "N D"}, {"x": "B S D", "row": "1 D"}, {"x": "B S D", "w": "D"}])
def test_every_layout_that_is_left_in_can_be_placed(spec: dict[str, str]) -> None:
    inputs = Inputs.of(spec)
    size = Size.of(dict(zip(inputs.symbols, (2, 5, 12), strict=False)))
    for layout in layouts_for(inputs):
        values = {name: torch.randn(shape) for name, shape in layout.shapes(inputs, size).items()}
        first, second = inputs.positional(layout.place(inputs, values))
        assert isinstance(first + second, torch.Tensor), layout.name


def test_a_factorys_arguments_lie_as_it_made_them() -> None:
    assert ["as-given"] == [layout.name for layout in layouts_for(Inputs.of(lambda *_: ()))]
