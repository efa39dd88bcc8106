"""`check()` is green where path and bits are right, and tells what happened where they are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusiongate.comparison.bits import integer_view
from fusiongate.comparison.contracts import Ulp
from fusiongate.gate.fusion import Fusion
from fusiongate.matrix import Cell, CellFailure, CellResult, Matrix, NotRun, Selected
from fusiongate.subjects import ADALN, Subject

from .planted import strict

pytestmark = pytest.mark.usefixtures("quiet_gates")

HOST = Selected("host")


def reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


def launch(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Right, and by other means than the reference: it fills memory that it allocates."""
    out = torch.empty_like(x)
    torch.mul(x, 1 + scale, out=out)
    return out.add_(shift)


def unrounded(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def one_step_off(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    result = reference(x, scale, shift)
    return torch.where(result.isfinite(), (integer_view(result) ^ 1).view(result.dtype), result)


def declines(x: Any, scale: Any, shift: Any) -> str | None:
    operands = (x, scale, shift)
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return "scalar"
    if x.dtype == torch.float64 or not x.dtype == scale.dtype == shift.dtype:
        return "dtype"
    if x.dim() != 3 or not scale.shape == shift.shape == (x.shape[0], 1, x.shape[2]):
        return "rows"
    if not x.is_contiguous() or torch.is_autocast_enabled("cpu"):
        return "stride"
    return None


def fusion(**changes: Any) -> Fusion:
    return Fusion("modulate", **{"reference": reference, "fused": launch, "declines": declines, **changes})


def cell(matrix: Matrix, cell_id: str) -> Cell:
    return next(cell for cell in matrix.cells() if cell.id == cell_id)


def check(cell_id: str, subject: Fusion | Subject | None = None, **options: Any) -> CellResult:
    matrix = Matrix(subject or fusion(), **options)
    return matrix.prepare(cell(matrix, cell_id), HOST).check()


SMALL = [cell for cell in Matrix(fusion()).cells() if cell.mode != "compile" and cell.size in ("B2S33D512", "B2S1D512")]


@pytest.mark.parametrize("small", SMALL, ids=lambda cell: cell.id)
def test_a_right_fusion_is_green_in_every_cell(small: Cell) -> None:
    matrix = Matrix(fusion())
    if small.mode in ("capture-cold", "capture-warm", "side-stream") or small.device in ("other", "split"):
        with pytest.raises(NotRun, match=r"needs a GPU|needs a second GPU"):
            matrix.prepare(small, HOST)
    else:
        assert small is matrix.prepare(small, HOST).check().cell


def test_the_compiled_cell_is_green_without_a_launch() -> None:
    result = check("compile")
    assert ("reference", "compiling", 0, 3) == (result.outcome, result.reason, result.launches, result.checks)


def test_a_verified_cell_launches_on_first_sight_and_twice_more() -> None:
    result = check("base")
    assert ("fused", "verified", 3) == (result.outcome, result.reason, result.checks)
    assert result.launches > 3


def test_a_prepared_cell_shows_what_it_will_do() -> None:
    matrix = Matrix(fusion())
    prepared = matrix.prepare(cell(matrix, "permuted"), HOST)
    assert ("reference", "stride", "permuted") == (prepared.path, prepared.reason, prepared.cell.id)
    assert torch.equal(prepared.expected, reference(*prepared.args))


def test_the_three_calls_see_different_data_at_one_alignment() -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def recording(*args: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(arg.clone() for arg in args))
        assert all(arg.data_ptr() % 128 == 0 for arg in args)
        return reference(*args)

    check("fp64", fusion(reference=recording))
    first, second, third = (next(arg for arg in args) for args in (seen[-5], seen[-3], seen[-1]))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_where_eager_raises_the_cell_raises_alike() -> None:
    result = check("scalar", fusion(reference=strict))
    assert ("raises", "AttributeError", 1) == (result.outcome, result.reason, result.checks)


# Red ---------------------------------------------------------------------------------------------------------------


def red(cell_id: str, subject: Fusion | Subject | None = None, **options: Any) -> str:
    with pytest.raises(CellFailure) as caught:
        check(cell_id, subject, **options)
    return str(caught.value)


@pytest.mark.parametrize("cell_id", ["base", "strided-unbind-4d", "fp16", "fp32", "B2S1D512", "strided-unbind-3d-fp16"])
def test_a_predicate_that_is_too_strict_is_red_where_the_layout_must_fuse(cell_id: str) -> None:
    too_strict = lambda *args: declines(*args) or "never on Mondays"
    message = red(cell_id, fusion(declines=too_strict))
    assert f"modulate[{cell_id}]\n  happened: must fuse, but declined: never on Mondays\n" in message
    assert "expected: fused (verified): the layout stands in must_fuse" in message


def test_a_documented_decline_is_green_and_its_end_is_red() -> None:
    odd = lambda x, *rest: declines(x, *rest) or ("tail" if x.shape[1] == 1 else None)
    assert "tail" == check("B2S1D512", fusion(declines=odd), may_decline={"B2S1D512": "tail"}).reason
    message = red("B2S1D512", may_decline={"B2S1D512": "tail"})
    assert "happened: fused (verified)" in message
    assert "expected: reference (tail), as may_decline says" in message


def test_a_wrong_kernel_is_red_with_its_story() -> None:
    message = red("base", fusion(fused=unrounded))
    assert "call 2 of 3\n  happened: 1 × reference (refused), no launch\n  expected: 1 × fused (verified)\n" in message
    assert "refused: " in message
    assert 1 == message.count("hint: ")


def test_a_failure_says_how_to_run_its_cell_again(request: pytest.FixtureRequest) -> None:
    assert f'\n  run: pytest "{request.node.nodeid}"' in red("base", fusion(fused=unrounded))


def test_disabled_kernels_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONGATE_DISABLE", "1")
    assert "happened: 1 × reference (disabled), no launch" in red("base")


def test_a_witness_that_differs_is_red_although_the_results_agree() -> None:
    """Seen by the check itself: the gate compares the witness on first sight only, where this one is still right."""
    drift = [0.0]

    def mean(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x.float().mean(-1)

    subject = fusion(witness=(mean, lambda *args: mean(*args) + drift[0]))
    # First sight compares thousands of rows, of whatever length.
    short = [{"B": 2, "S": 5, "D": 16}]
    assert "fused" == check("base", subject, sizes=short).outcome

    def launch_and_drift(*args: torch.Tensor) -> torch.Tensor:
        launched.append(1)
        drift[0] = 1.0 if len(launched) > in_first_sight else 0.0
        return launch(*args)

    launched: list[int] = []
    drift[0], in_first_sight = 0.0, 10**6
    subject = Fusion.of(dataclasses.replace(subject.spec, fused=launch_and_drift))
    check("unseen", subject, sizes=short)
    in_first_sight = len(launched)
    launched.clear()
    assert "the witness differs from the reference's\n  expected: equal bits" in red("base", subject, sizes=short)


def test_the_contract_holds_on_the_fused_path_only() -> None:
    """A reference path owes the reference's bits, whatever the contract forgives the kernel."""
    lax = Ulp(2)
    assert "fused" == check("base", fusion(fused=one_step_off, contract=lax)).outcome
    subject = Subject(
        "lax",
        call=one_step_off,
        reference=reference,
        fused=f"{__name__}:launch",
        declines=lambda *args: "always",
        contract=lax,
    )
    assert "expected: bit for bit" in red("base", subject, may_decline={"row-broadcast": "always"})


# Foreign functions -------------------------------------------------------------------------------------------------


def ungated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return launch(x, scale, shift)


def foreign(call: Callable[..., torch.Tensor]) -> Subject:
    return Subject("foreign", call=call, reference=reference, fused=launch)


def test_a_foreign_function_that_launches_is_green() -> None:
    result = check("base", foreign(ungated))
    assert ("fused", "verified", 3) == (result.outcome, result.reason, result.launches)


def test_a_foreign_function_that_does_not_launch_is_red() -> None:
    message = red("base", foreign(reference))
    assert "call 2 of 3\n  happened: no launch\n  expected: a launch (verified)\n" in message


def test_a_foreign_function_that_launches_where_none_may_is_red() -> None:
    assert "happened: 1 launch\n  expected: no launch (empty)\n" in red("empty-batch", foreign(ungated))


def test_a_launch_while_compiling_is_red() -> None:
    assert "the launcher was reached where no kernel may be launched" in red("compiling-patched", foreign(ungated))


def test_an_input_that_changed_is_red() -> None:
    def in_place(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        launch(x, scale, shift)
        result = reference(x, scale, shift)
        x.zero_()
        return result

    assert "happened: it changed an input\n  expected: inputs are left as they were\n" in red("base", foreign(in_place))


def test_a_result_in_an_inputs_memory_is_red() -> None:
    """The input's values are back, but the next write to it would change the result."""

    def shared(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        launch(x, scale, shift)
        memory = torch.empty(2 * x.numel(), dtype=x.dtype)
        result = memory[x.numel() :].view(x.shape).copy_(reference(x, scale, shift))
        x.set_(memory.untyped_storage(), 0, x.shape, x.stride())
        x.copy_(drawn[0])
        return result

    matrix = Matrix(foreign(shared))
    prepared = matrix.prepare(cell(matrix, "base"), HOST)
    drawn = [prepared.args[0].clone()]
    with pytest.raises(CellFailure, match="the result shares memory with an input"):
        prepared.check()


@pytest.mark.parametrize("number, told", [(0, "0 results"), (2, "2 results")])
def test_another_number_of_results_is_red(number: int, told: str) -> None:
    several: Any = lambda *args: (launch(*args),) * number
    assert f"happened: {told}\n  expected: 1 result\n" in red("base", foreign(several))


def test_a_function_with_several_results_is_held_against_all_of_them() -> None:
    pair = lambda *args: (reference(*args), args[0] + 1)
    swapped = lambda *args: (launch(*args), args[0])
    both = lambda *args: (launch(*args), args[0] + 1)
    assert "fused" == check("base", Subject("pair", call=both, reference=pair, fused=launch)).outcome
    message = red("base", Subject("pair", call=swapped, reference=pair, fused=launch))
    assert "happened: the result is not the reference's\n" in message


def test_a_return_where_eager_raises_is_red() -> None:
    message = red("scalar", Subject("foreign", call=ungated, reference=strict, fused=launch))
    assert "happened: it returned\n  expected: it raises AttributeError: " in message


def test_a_launch_where_eager_raises_is_red() -> None:
    def launched_first(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        launch(x, scale, shift)
        return strict(x, scale, shift)

    message = red("scalar", Subject("foreign", call=launched_first, reference=strict, fused=launch))
    assert "happened: 1 launch\n  expected: no launch where eager raises\n" in message


def test_another_dtype_with_equal_values_is_red() -> None:
    widened = lambda x, scale, shift: launch(x, scale, shift).float()
    assert "dtype differs: got float32, expected bfloat16" in red("base", foreign(widened))


def test_an_exception_of_another_type_is_red() -> None:
    def raising(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        raise KeyError("not what eager raises")

    message = red("base", foreign(raising))
    assert "happened: it raised KeyError: 'not what eager raises'\n  expected: it returns, as eager does" in message


# Other inputs ------------------------------------------------------------------------------------------------------


def test_another_op_with_live_values_runs() -> None:
    def scaled(x: torch.Tensor, eps: float, gate: torch.Tensor, weight: None) -> torch.Tensor:
        assert (1e-6, None) == (eps, weight)
        return x * gate

    subject = Fusion("scaled", reference=scaled, fused=lambda x, eps, gate, weight: torch.mul(x, gate))
    inputs = {"x": "B S D", "eps": 1e-6, "gate": "B 1 D", "weight": None}
    assert "fused" == check("strided-unbind-4d", subject, inputs=inputs, sizes=[{"B": 2, "S": 3, "D": 8}]).outcome


def test_an_op_that_cannot_cancel_has_no_such_cells() -> None:
    subject = Fusion("gated", reference=lambda x, y: torch.relu(x) * y, fused=lambda x, y: torch.relu(x) * y)
    cells = Matrix(subject, {"x": "N D", "y": "N D"}, [{"N": 2, "D": 8}]).cells()
    assert "cancellation" not in {cell.data for cell in cells}
    assert "cancellation" in {cell.data for cell in Matrix(fusion()).cells()}


def test_a_factory_makes_the_arguments() -> None:
    def factory(
        size: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> tuple[Any, ...]:
        return (torch.randn(size["N"], 4, generator=generator).to(device, dtype), 2)

    subject = Fusion("power", reference=lambda x, n: x**n, fused=torch.pow)
    assert "fused" == check("base", subject, inputs=factory, sizes=[{"N": 32}]).outcome


# Not run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell_id, missing",
    [
        ("capture-warm", "needs a GPU"),
        ("other", "needs a second GPU"),
        ("split", "needs a GPU"),
        ("B1S524289D4096", "needs a GPU: 2,147,487,744 elements"),
    ],
)
def test_what_needs_a_gpu_is_not_run_by_name(cell_id: str, missing: str) -> None:
    with pytest.raises(NotRun) as caught:
        check(cell_id)
    assert missing == str(caught.value)


def test_a_reference_that_no_tracer_takes_is_not_run_under_it() -> None:
    """That is no fault of the gate, which gives the tracer the reference."""

    def counting(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() < float("inf")
        return reference(x, scale, shift)

    with pytest.raises(NotRun, match="make-fx does not trace the reference: "):
        check("make-fx", fusion(reference=counting))


def on_gpus_only(x: Any, *rest: Any) -> str | None:
    return "cpu" if x.device.type == "cpu" else declines(x, *rest)


def test_a_kernel_for_gpus_without_a_host_build_is_not_run_on_the_host() -> None:
    with pytest.raises(NotRun, match="modulate declines cpu and has no host build"):
        check("base", fusion(declines=on_gpus_only))


def test_what_a_kernel_for_gpus_does_on_cpu_tensors_always_runs() -> None:
    subject = fusion(declines=on_gpus_only, host=fusion())
    on_cpu = check("cpu", subject)
    assert ("reference", "cpu") == (on_cpu.outcome, on_cpu.reason)
    assert "fused" == check("base", subject).outcome


class GridKernel:
    """Launches by index, as Triton's kernels do."""

    def __getitem__(self, grid: int) -> Callable[..., torch.Tensor]:
        return launch


grid_kernel = GridKernel()


def call_by_grid(*args: torch.Tensor) -> torch.Tensor:
    return reference(*args) if torch.compiler.is_compiling() else grid_kernel[1](*args)


def test_a_kernel_with_a_grid_runs_and_has_no_stand_in() -> None:
    subject = Subject("grid", call=call_by_grid, reference=reference, fused=grid_kernel)
    assert "fused" == check("base", subject).outcome
    with pytest.raises(NotRun, match="nothing can stand in for a kernel that launches by"):
        check("refused", subject)


def test_adaln_is_the_default() -> None:
    assert list(ADALN) == [operand.name for operand in Matrix(fusion()).inputs.operands]
