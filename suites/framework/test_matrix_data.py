"""Each kind of data holds what its name says, and the same numbers on every machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusiongate.comparison.digests import md5
from fusiongate.matrix import data
from fusiongate.matrix.cells import NotRun
from fusiongate.matrix.data import DATA, Draw, generator_for
from fusiongate.matrix.inputs import Inputs, Size
from fusiongate.subjects import ADALN

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
Tensors = dict[str, torch.Tensor]


SIZE = Size.of({"B": 2, "S": 9, "D": 64})


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


def draw(
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    call: int = 0,
    spec: dict[str, str] | None = None,
    reference: Callable[..., torch.Tensor] = modulate,
) -> Tensors:
    inputs = Inputs.of(spec or ADALN)
    shapes = {operand.name: operand.shape(SIZE) for operand in inputs.operands}
    dtypes = dict.fromkeys(shapes, dtype)
    return DATA[kind].draw(Draw(inputs, shapes, dtypes, SIZE, reference, call, generator_for("base", call)))


def test_the_same_cell_and_call_give_the_same_numbers_on_every_machine() -> None:
    assert "4bcc471534a0330ad7ef3e128bdf4e64" == md5(draw("normal")["x"])


def test_another_call_gives_other_numbers() -> None:
    assert not torch.equal(draw("normal", call=1)["x"], draw("normal", call=2)["x"])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", DATA)
def test_every_kind_has_the_shapes_and_dtypes_it_was_asked_for(kind: str, dtype: torch.dtype) -> None:
    values = draw(kind, dtype)
    assert [(2, 9, 64), (2, 1, 64), (2, 1, 64)] == [tuple(tensor.shape) for tensor in values.values()]
    assert {dtype} == {tensor.dtype for tensor in values.values()}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_data_stay_finite_and_small_data_stay_normal(dtype: torch.dtype) -> None:
    assert draw("large", dtype)["x"].isfinite().all()
    assert draw("small", dtype)["x"].any()


def test_zeros_are_adaln_zero_and_leave_the_activations() -> None:
    values = draw("zeros")
    assert (True, False, False) == (
        bool(values["x"].all()),
        bool(values["scale"].any()),
        bool(values["shift"].any()),
    )


def test_a_dummy_warm_up_is_followed_by_live_data() -> None:
    assert [False, True] == [bool(draw("zeros-first", call=call)["scale"].any()) for call in (0, 1)]
    assert [1, 0] == [int(draw("nan-first", call=call)["x"].isnan().sum()) for call in (0, 1)]


def test_nan_and_both_infinities_stand_in_every_operand() -> None:
    for tensor in draw("nan-inf").values():
        assert tensor.isnan().any()
        assert (tensor == float("inf")).any()
        assert (tensor == float("-inf")).any()


def test_one_nan_is_one() -> None:
    assert {"x": 1, "scale": 0, "shift": 0} == {
        name: int(tensor.isnan().sum()) for name, tensor in draw("one-nan").items()
    }


def test_zeros_of_both_signs_meet() -> None:
    """Only x=-0.0 with shift=-0.0 and a scale of zero gives -0.0, which a kernel that adds +0.0 loses."""
    x, scale, shift = draw("signed-zeros").values()
    result = modulate(x, scale, shift)
    meeting = (x == 0) & x.signbit() & (scale == 0) & (shift == 0) & shift.signbit()
    assert meeting.any()
    assert result[meeting].signbit().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_are_below_the_smallest_normal_and_not_zero(dtype: torch.dtype) -> None:
    x = draw("subnormals", dtype)["x"]
    below = (x != 0) & (x.abs() < torch.finfo(dtype).tiny)
    assert below.double().mean() > 0.8


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overflow_is_finite_and_its_results_are_not(dtype: torch.dtype) -> None:
    values = draw("overflow", dtype)
    assert all(tensor.isfinite().all() for tensor in values.values())
    assert not modulate(*values.values()).isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cancellation_leaves_exactly_zero_and_a_contraction_does_not(dtype: torch.dtype) -> None:
    x, scale, shift = draw("cancellation", dtype).values()
    assert shift.abs().max() > 0.1
    assert not modulate(x, scale, shift).any()
    if dtype != torch.float64:
        exact = x.double() * (1 + scale).double() + shift.double()
        assert exact.any()


def test_another_operand_cancels_where_the_last_cannot() -> None:
    spec = {"residual": "B S D", "update": "B S D", "gate": "B 1 D"}

    def reference(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return residual + update * gate

    values = draw("cancellation", spec=spec, reference=reference)
    assert values["update"].any()
    assert not reference(*values.values()).any()


def test_an_op_without_a_sum_has_no_cancellation() -> None:
    with pytest.raises(NotRun, match="no operand can cancel the result"):
        draw("cancellation", spec={"x": "B S D", "y": "B S D"}, reference=lambda x, y: torch.relu(x) * y)


def test_a_reference_that_needs_a_gpu_is_told() -> None:
    def reference(*_: torch.Tensor) -> torch.Tensor:
        raise ValueError("pointer argument cannot be accessed from Triton")

    with pytest.raises(NotRun, match="a reference that runs on the CPU, and it raised ValueError"):
        draw("cancellation", reference=reference)


def test_a_huge_operand_repeats_a_tile_that_holds_what_a_small_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw billions of numbers one by one would take longer than all the rest of the cell."""
    monkeypatch.setattr(data, "HUGE_ELEMENTS", 1000)
    monkeypatch.setattr(data, "_TILE", 512)
    x = draw("normal")["x"].flatten()
    assert 2 * 9 * 64 == x.numel()
    assert torch.equal(x[:512], x[512:1024])
    assert torch.equal(x[:128], x[1024:])
    assert 0.9 < x[:512].float().std() < 1.1


def test_operands_without_elements_have_no_place_for_a_nan() -> None:
    inputs = Inputs.of(ADALN)
    shapes = {operand.name: (0, 1, 64) for operand in inputs.operands}
    dtypes = dict.fromkeys(shapes, torch.bfloat16)
    drawn = DATA["one-nan"].draw(Draw(inputs, shapes, dtypes, SIZE, modulate, 0, generator_for("base", 0)))
    assert {(0, 1, 64)} == {tuple(tensor.shape) for tensor in drawn.values()}
