"""Faults that people have reported of results, each as an input and the bits that have to come of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg

from ..framework.planted import chain, right
from .operands import HOSTS, arguments, operands, same_bits

BY_NAME = {op.name.removesuffix(".host"): op for op in HOSTS}


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
