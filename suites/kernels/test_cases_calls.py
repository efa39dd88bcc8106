"""Faults that people have reported of calls, each as operands and the way that they have to take, and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusiongate as fg
from fusiongate.sabotage import Detector, caught, saboteur

from ..framework.planted import chain
from .operands import EPS, HOSTS, arguments, operands, same_bits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs a GPU")

BY_NAME = {op.name.removesuffix(".host"): op for op in HOSTS}


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


@pytest.mark.parametrize("name", ["raises-at-launch", "declines-too-much"])
def test_case_02_a_cell_without_a_completed_launch_is_red(name: str) -> None:
    """Although its bits are right: they are the reference's."""
    catch = caught(saboteur(name), Detector.MATRIX, torch.device("cpu"))

    assert catch, catch.story


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("op", fg.kernels.FUSIONS, ids=lambda op: op.name)
def test_case_03_the_reference_gives_the_same_bits_at_every_alignment_that_is_launched(
    op: fg.Fusion, device: str
) -> None:
    """Otherwise no kernel could be right at all of them."""
    op = op if device == "cuda" or op.host is None else op.host
    x, scale, shift = operands(2, 33, 512, device=device)
    memory = torch.empty(x.numel() + 64, dtype=x.dtype, device=device)
    results = []
    for offset in (0, 32, 16, 8, 4):
        moved = memory[offset : offset + x.numel()].view(x.shape).copy_(x)
        args = arguments(op, (moved, scale, shift))
        assert op.declines(*args) is None
        results.append(op.reference(*args))

    assert all(same_bits(result, results[0]) for result in results)


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
