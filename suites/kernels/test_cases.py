"""Faults that people have reported of their fused kernels, each as an input and what has to happen.

What needs a GPU is in test_gpu.py, and what concerns building, the matrix, snapshots or timings stands with those.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusiongate as fg

from .operands import EPS, HOSTS, arguments, operands, same_bits

BY_NAME = {op.name.removesuffix(".host"): op for op in HOSTS}


def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def right(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.add(x * (1 + scale), shift, out=torch.empty_like(x))


def all_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def gated(fused: Any, reference: Any = chain, **options: Any) -> fg.Fusion:
    return fg.Fusion("case", reference=reference, fused=fused, **options)


def reason_after(op: fg.Fusion, *args: Any) -> str:
    op(*args)
    return op.explain(*args).reason


def test_case_01_equal_values_of_another_dtype_are_not_equal() -> None:
    """Eager promotes to fp32, the kernel gives bf16, and the values are exact in both."""
    x = torch.ones(2, 3, 8, dtype=torch.bfloat16)
    rows = torch.tensor([0.0, 0.5]).repeat(4).reshape(1, 1, 8)
    eager = chain(x, rows, rows)
    verdict = fg.compare(eager.bfloat16(), eager)

    assert (False, "dtype") == (verdict.ok, verdict.reason)
    op = gated(lambda x, a, b: chain(x, a, b).to(x.dtype))
    assert "refused" == reason_after(op, x, rows, rows)
    assert torch.float32 == op(x, rows, rows).dtype


def test_case_02_rows_as_the_model_builds_them_launch_the_kernel() -> None:
    """Six chunks of one projection, B=2, S=97: a launch is counted where it happens, not where it was meant."""
    x = operands(2, 97, 128)[0]
    shift, scale, *_ = (row.unsqueeze(1) for row in torch.randn(2, 6 * 128).bfloat16().chunk(6, dim=-1))
    with BY_NAME["modulate"].isolated() as op:
        op(x, scale, shift)
        before = op.launches
        with fg.require_fused():
            op(x, scale, shift)

        assert before + 1 == op.launches


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
def test_case_03_alignment_is_part_of_the_signature(op: fg.Fusion) -> None:
    """At 16 bytes and at 8 a kernel may load in other ways; at 2 it is not launched at all."""
    x, scale, shift = operands(2, 5, 128)
    memory = torch.empty(x.numel() + 64, dtype=x.dtype)

    def at(elements: int) -> Tensor:
        return memory[elements : elements + x.numel()].view(x.shape).copy_(x)

    with op.isolated() as fresh:
        signatures = [fresh.explain(*arguments(op, (at(offset), scale, shift))).signature for offset in (0, 8, 4, 1)]
    assert 3 == len(set(signatures[:3]))
    assert signatures[3] is None


def test_case_04_degenerate_data_verify_no_wrong_kernel() -> None:
    """adaLN-zero begins with scale = shift = 0, and a dummy warm-up shows nothing else."""
    x, scale, shift = operands(2, 97, 128)
    op = gated(all_fp32)
    op(x, torch.zeros_like(scale), torch.zeros_like(shift))

    assert "refused" == reason_after(op, x, torch.zeros_like(scale), torch.zeros_like(shift))
    assert same_bits(op(x, scale, shift), chain(x, scale, shift))


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
def test_case_05_one_nan_refuses_no_right_kernel(op: fg.Fusion) -> None:
    rows = operands(2, 9, 128)
    rows[0][1, 3, 7] = float("nan")
    args = arguments(op, rows)
    with op.isolated() as fresh:
        assert "verified" == reason_after(fresh, *args), fresh.gate.events
        assert fg.compare(fresh(*args), op.reference(*args), op.contract, args=args)


def test_case_05_nan_on_one_side_is_a_mismatch() -> None:
    assert "refused" == reason_after(gated(lambda *args: right(*args).nan_to_num(0.0)), *operands(2, 9, 128))


@pytest.mark.parametrize("missing", [None, 64], ids=["everything", "the-last-tile"])
def test_case_06_memory_that_the_reference_has_just_left_is_no_result(missing: int | None) -> None:
    """The caching allocator hands the same block out again, with the right values in it."""

    def forgetful(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        result = right(x, scale, shift)
        out = torch.empty_like(x)
        if missing is not None:
            out.view(-1)[:-missing] = result.view(-1)[:-missing]
        return out

    op = gated(forgetful)
    assert "refused" == reason_after(op, *operands(2, 9, 128))
    assert "unwritten output" in op.gate.events[-1].message


@pytest.mark.parametrize("name", ["modulate", "modulate_fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_case_07_a_negative_zero_stays_negative(name: str, dtype: torch.dtype) -> None:
    x = torch.full((2, 3, 8), -0.0, dtype=dtype)
    scale, shift = torch.zeros(2, 1, 8, dtype=dtype), torch.full((2, 1, 8), -0.0, dtype=dtype)
    result = BY_NAME[name].fused(x, scale, shift)

    assert bool(torch.signbit(chain(x, scale, shift)).all())
    assert same_bits(result, BY_NAME[name].reference(x, scale, shift))
    verdict = fg.compare(result.abs(), result)
    assert not verdict
    assert "the sign of zero is lost" in str(verdict)


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
@pytest.mark.parametrize("operand", range(3), ids=["x", "scale", "shift"])
def test_case_09_a_misaligned_operand_is_declined_before_launch(op: fg.Fusion, operand: int) -> None:
    rows = list(operands(2, 9, 128))
    memory = torch.empty(rows[operand].numel() + 1, dtype=torch.bfloat16)
    rows[operand] = memory[1:].view(rows[operand].shape).copy_(rows[operand])
    args = arguments(op, (rows[0], rows[1], rows[2]))
    with op.isolated() as fresh:
        assert same_bits(fresh(*args), op.reference(*args))
        assert {("reference", "alignment"): 1} == fresh.counters
        assert 0 == fresh.launches


def test_case_11_many_lengths_and_junk_strides_give_few_signatures() -> None:
    with BY_NAME["modulate"].isolated() as op:
        for tokens in range(1, 201):
            x, scale, shift = operands(1, tokens, 64)
            junk = scale.as_strided(scale.shape, (tokens * 1000, 7, 1), scale.storage_offset())
            op(x, junk, shift)

        assert len(op.gate.signatures) <= 16
        assert 200 - len(op.gate.signatures) == op.counters["fused", "verified"]


@pytest.mark.parametrize(
    "unrounded",
    [
        lambda x, a, b: (x.float() * (1 + a).float() + b.float()).to(x.dtype),
        lambda x, a, b: (x.float() * (1 + a.float())).to(x.dtype) + b,
        all_fp32,
    ],
    ids=["product", "one-plus-scale", "all"],
)
def test_case_12_an_unrounded_intermediate_is_refused(unrounded: Any) -> None:
    op = gated(unrounded)

    assert "refused" == reason_after(op, *operands(2, 9, 128))
    assert "rounded to bfloat16" in op.gate.events[-1].message


def test_case_14_a_compiler_sees_the_expression_cold_and_warm() -> None:
    torch._dynamo.reset()
    with BY_NAME["modulate"].isolated() as op:
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=counter)  # noqa: PLW0108
        args = operands(2, 9, 128)
        cold = compiled(*args)
        assert {} == op.counters
        for _ in range(3):
            op(*args)
        warm = compiled(*args)

        assert same_bits(cold, warm)
        assert 1 == counter.frame_count
        assert not [node for node in counter.graphs[0].graph.nodes if "fusiongate" in str(node.target)]
        assert 3 == op.counters.total()


def test_case_15_a_library_that_sums_in_another_order_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Two processes, two versions: a verdict is of its process, and the warning names the versions."""
    torch_is_new = False

    def one_by_one(columns: Any) -> Tensor:
        total = torch.zeros(())
        for column in columns:
            total = total + column.square()
        return total

    def reference(x: Tensor) -> Tensor:
        columns = x.unbind(-1)
        return one_by_one(reversed(columns) if torch_is_new else columns)

    def kernel(x: Tensor) -> Tensor:
        return one_by_one(x.unbind(-1))

    x = torch.randn(40, 5, 32)
    op = gated(kernel, reference)
    assert "verified" == reason_after(op, x)
    torch_is_new = True
    with op.isolated() as in_the_new_process:
        assert same_bits(in_the_new_process(x), reference(x))
        assert "refused" == in_the_new_process.explain(x).reason
    (record,) = caplog.records
    assert logging.WARNING == record.levelno
    assert f"torch {torch.__version__}" in record.getMessage()
    assert fg.environment("cpu").platform in record.getMessage()


def test_case_16_rows_off_the_bf16_grid_promote_as_in_eager() -> None:
    x, scale, shift = operands(2, 9, 128)
    scale, shift = scale.float() + 1e-4, shift.float() + 1e-4
    with BY_NAME["modulate"].isolated() as op:
        result = op(x, scale, shift)

        assert torch.float32 == result.dtype
        assert same_bits(result, chain(x, scale, shift))
        assert {("reference", "mixed-dtype"): 1} == op.counters


@pytest.mark.parametrize("op", [op for op in HOSTS if "norm" in op.name], ids=lambda op: op.name)
def test_case_17_eps_is_explicit_and_in_the_signature(op: fg.Fusion) -> None:
    rows = operands(2, 9, 128)
    with op.isolated() as fresh:
        signatures = {fresh.explain(*rows, eps).signature for eps in (1e-6, 1e-5, 1)}
        without = fresh.explain(*rows, None)

    assert 3 == len(signatures)
    assert ("reference", "eps") == (without.path, without.reason)


def test_case_18_mixed_devices_raise_as_eager_does() -> None:
    x, scale, shift = operands(2, 9, 128)
    shift = shift.to("meta")
    with pytest.raises(RuntimeError) as eager:
        chain(x, scale, shift)
    with fg.kernels.modulate.isolated() as op, pytest.raises(RuntimeError) as fused:
        op(x, scale, shift)

    assert str(eager.value) == str(fused.value)


def test_case_21_another_batch_brings_its_own_rows() -> None:
    """Verified at B=1, where any row is the right one."""
    with BY_NAME["modulate"].isolated() as op:
        for _ in range(2):
            op(*operands(1, 9, 128))
        for seed in range(3):
            args = operands(2, 9, 128, seed=seed)
            assert same_bits(op(*args), chain(*args))

        assert {("reference", "first-sight"): 2, ("fused", "verified"): 3} == op.counters


def test_case_21_frame_rows_take_the_reference() -> None:
    """(B, F, 1, D) rows broadcast over a (B, F, S, D) activation."""
    x, row = torch.randn(2, 3, 5, 128).bfloat16(), torch.randn(2, 3, 1, 128).bfloat16()
    with BY_NAME["modulate"].isolated() as op:
        assert same_bits(op(x, row, row), chain(x, row, row))
        assert {("reference", "rank"): 1} == op.counters


def test_case_22_a_transposed_x_is_declined() -> None:
    x, scale, shift = operands(2, 128, 128)
    with BY_NAME["modulate"].isolated() as op:
        result = op(x.transpose(1, 2), scale, shift)

        assert same_bits(result, chain(x.transpose(1, 2), scale, shift))
        assert {("reference", "stride"): 1} == op.counters


@pytest.mark.parametrize("name", ["modulate", "modulate_fp32"])
def test_case_23_subnormal_numbers_stay(name: str) -> None:
    x = torch.full((1, 3, 8), 1e-39)
    scale, shift = torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)

    result = BY_NAME[name].fused(x, scale, shift)

    assert same_bits(result, x)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_case_23_rows_of_zeros_and_of_tiny_numbers_are_normalised_as_in_eager(name: str, eps: float) -> None:
    x, scale, shift = operands(1, 4, 128, torch.float32)
    x[0, 0], x[0, 1], x[0, 2] = 0.0, 1e-22, 1e-39
    op = BY_NAME[name]

    assert same_bits(op.fused(x, scale, shift, eps), op.reference(x, scale, shift, eps))


def test_case_24_every_bf16_number_against_a_few_scales() -> None:
    """All 65,536 of them, against eager bit for bit; a kernel that truncates its product is refused, by ULPs."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 512, 128)
    for scale in (0.003, -1.0, 0.5, 1.25, -2.5, 300.0):
        rows = torch.full((1, 1, 128), scale).bfloat16(), torch.full((1, 1, 128), -0.0).bfloat16()
        verdict = fg.compare(BY_NAME["modulate"].fused(x, *rows), chain(x, *rows))
        assert verdict, verdict

    def truncating(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        product = x.float() * (1 + scale).float()
        bits = product.view(torch.int32) & ~0xFFFF
        return torch.where(product.isfinite(), bits.view(torch.float32), product).to(x.dtype) + shift

    op = gated(truncating)
    assert "refused" == reason_after(op, *operands(2, 9, 128))
    assert "ULP" in op.gate.events[-1].message


def test_case_27_a_host_build_never_passes_for_the_kernel_on_a_gpu() -> None:
    for op in fg.kernels.FUSIONS:
        assert op.host is not None
        assert f"{op.name}.host" == op.host.name
        assert op.host.gate is not op.gate
        assert op.declines(*arguments(op, operands(2, 9, 128))) == "cpu"


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
def test_case_31_gradients_take_the_reference(op: fg.Fusion) -> None:
    x, scale, shift = operands(2, 9, 128)
    args = arguments(op, (x.requires_grad_(), scale, shift))
    with op.isolated() as fresh:
        assert fresh(*args).grad_fn is not None
        assert {("reference", "autograd"): 1} == fresh.counters


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
def test_case_32_an_unsupported_variant_falls_through_with_a_reason(op: fg.Fusion) -> None:
    x, scale, shift = operands(2, 9, 128)
    for rows in ((x, scale.double(), shift), (x[0], scale[0], shift[0]), (x, scale.expand(-1, 9, -1), shift)):
        args = arguments(op, (rows[0], rows[1], rows[2]))
        with op.isolated() as fresh:
            assert fresh.explain(*args).reason in {"mixed-dtype", "rank", "per-token"}
            assert op.reference(*args).shape == fresh(*args).shape


def test_case_32_eps_of_another_kind_is_a_reason_too() -> None:
    with BY_NAME["composite_rms_norm_modulate"].isolated() as op:
        assert "eps" == op.explain(*operands(2, 9, 128), True).reason
        assert EPS == pytest.approx(1e-6)
