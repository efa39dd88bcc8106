"""The LTX-2 mounts on every layout that a model may hand them, around both norms: eager's bits, the due kernel."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusiongate as fg
from fusiongate.models import ltx2

from .mounts import EPS, Block, composite_norm, recording_backend, row_kernel_norm

Operands = tuple[Tensor, Tensor, Tensor]


def row_broadcast(x: Tensor, table: Tensor) -> Operands:
    return x, table[:, :1].contiguous(), table[:, 1:2].contiguous()


def strided_unbind(x: Tensor, table: Tensor) -> Operands:
    shift, scale = table.unsqueeze(1).unbind(dim=2)[:2]
    return x, scale, shift


def per_token(x: Tensor, table: Tensor) -> Operands:
    scale, shift = (table[:, i : i + 1].expand(-1, x.shape[1], -1).contiguous() for i in (0, 1))
    return x, scale, shift


def frame_rows(x: Tensor, table: Tensor) -> Operands:
    return x.unflatten(1, (2, -1)), table[:, :2].unsqueeze(2), table[:, 2:4].unsqueeze(2)


def rank_2(x: Tensor, table: Tensor) -> Operands:
    return x[0], table[0, 0], table[0, 1]


def permuted(x: Tensor, table: Tensor) -> Operands:
    return x.transpose(1, 2).contiguous().transpose(1, 2), table[:, :1], table[:, 1:2]


def double(x: Tensor, table: Tensor) -> Operands:
    return x.double(), table[:, :1].double(), table[:, 1:2].double()


def fp32_rows(x: Tensor, table: Tensor) -> Operands:
    return x, table[:, :1].float(), table[:, 1:2].float()


LAUNCHED = (row_broadcast, strided_unbind)
DECLINED = (per_token, frame_rows, rank_2, permuted, double, fp32_rows)


@pytest.fixture(params=[row_kernel_norm, composite_norm])
def norm(request: pytest.FixtureRequest) -> ltx2.Norm:
    chosen: ltx2.Norm = request.param
    return chosen


@pytest.fixture(params=[*LAUNCHED, *DECLINED])
def layout(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Operands]:
    chosen: Callable[[Tensor, Tensor], Operands] = request.param
    return chosen


def made(layout: Callable[[Tensor, Tensor], Operands], device: torch.device) -> Operands:
    generator = torch.Generator().manual_seed(3)
    x, table = (torch.randn(shape, generator=generator) for shape in ((2, 34, 512), (2, 6, 512)))
    return layout(x.to(device, torch.bfloat16), table.to(device, torch.bfloat16))


def test_the_modulation_gives_eagers_bits(
    layout: Callable[[Tensor, Tensor], Operands], fusion_device: torch.device
) -> None:
    x, scale, shift = made(layout, fusion_device)
    before = fg.kernels.modulate.launches
    for _ in range(3):
        assert fg.compare(ltx2.ltx2_modulate(x, scale, shift), x * (1 + scale) + shift)
    assert (fg.kernels.modulate.launches > before) == (layout in LAUNCHED and fusion_device.type == "cuda")


def test_the_norm_and_modulation_give_eagers_bits(
    norm: ltx2.Norm, layout: Callable[[Tensor, Tensor], Operands], fusion_device: torch.device
) -> None:
    x, scale, shift = made(layout, fusion_device)
    for _ in range(3):
        result = ltx2.ltx2_rms_norm_modulate(nn.Module(), norm, x, scale, shift, EPS)
        assert fg.compare(result, norm(x, EPS) * (1 + scale) + shift)


def test_a_norm_takes_the_kernel_that_sums_in_its_order(norm: ltx2.Norm, fusion_device: torch.device) -> None:
    if fusion_device.type != "cuda":
        pytest.skip("not run: needs a GPU")
    args = made(strided_unbind, fusion_device)
    ltx2.ltx2_rms_norm_modulate(nn.Module(), norm, *args, EPS)
    due = "rms_norm_modulate" if norm is row_kernel_norm else "composite_rms_norm_modulate"
    launched = {}
    for fusion in ltx2._exact_for(norm):
        before = fusion.counters["fused", "verified"]
        ltx2.ltx2_rms_norm_modulate(nn.Module(), norm, *args, EPS)
        launched[fusion.name] = fusion.counters["fused", "verified"] - before
    assert {name for name, count in launched.items() if count} == {f"ltx2.{due}"}


@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_only_a_block_mounted_at_high_quality_may_be_within_ulps(quality: str, fusion_device: torch.device) -> None:
    block = nn.Module()
    ltx2.attach_high(block)
    args = made(strided_unbind, fusion_device)
    op = fg.kernels.rms_norm_modulate_high
    before = op.counters.total()
    with fg.mounted(block, quality=quality) as report:  # type: ignore[arg-type]
        result = ltx2.ltx2_rms_norm_modulate(block, row_kernel_norm, *args, EPS)
    expected = row_kernel_norm(args[0], EPS) * (1 + args[1]) + args[2]
    assert fg.compare(result, expected, op.contract, args=(*args, EPS))
    assert bool(report.mounted) == (quality == "high")
    assert (op.counters.total() > before) == (quality == "high" and fusion_device.type == "cuda")


def test_while_compiling_the_chain_is_plain_and_no_gate_is_asked(fusion_device: torch.device) -> None:
    args = made(strided_unbind, fusion_device)
    before = fg.kernels.modulate.counters
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        result = ltx2.ltx2_rms_norm_modulate(nn.Module(), row_kernel_norm, *args, EPS)
        modulated = ltx2.ltx2_modulate(*args)
    assert fg.compare(result, row_kernel_norm(args[0], EPS) * (1 + args[1]) + args[2])
    assert fg.compare(modulated, args[0] * (1 + args[1]) + args[2])
    assert fg.kernels.modulate.counters == before


@pytest.mark.parametrize(("quality", "ops"), [("lossless", 0), ("high", 1)])
def test_a_compiled_block_is_one_graph(quality: str, ops: int, fusion_device: torch.device) -> None:
    """The lossless path has no custom op in it, a mounted high kernel is one."""
    graphs: list[torch.fx.GraphModule] = []
    block = Block()
    ltx2.attach_high(block)
    args = made(strided_unbind, fusion_device)
    torch._dynamo.reset()
    with fg.mounted(block, quality=quality), torch.no_grad():  # type: ignore[arg-type]
        compiled = torch.compile(block, fullgraph=True, backend=recording_backend(graphs))
        result = compiled(*args)
        compiled(*args)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 1
    assert sum("fusiongate" in str(node.target) for node in nodes) == ops
    if quality == "lossless":
        normalized = row_kernel_norm(args[0], EPS) * (1 + args[1]) + args[2]
        assert fg.compare(result, normalized * (1 + args[1]) + args[2])


def by_make_fx(block: Block, args: Operands) -> Tensor:
    graph = make_fx(block)(*(tensor + 1 for tensor in args))
    result: Tensor = graph(*args)
    return result


def by_vmap(block: Block, args: Operands) -> Tensor:
    mapped: Tensor = torch.func.vmap(block)(*(tensor.unsqueeze(0) for tensor in args))
    return mapped.squeeze(0)


@pytest.mark.parametrize("transform", [by_make_fx, by_vmap])
def test_a_traced_block_gives_eagers_result(
    transform: Callable[[Block, Operands], Tensor], fusion_device: torch.device
) -> None:
    args = made(strided_unbind, fusion_device)
    with torch.no_grad():
        result = transform(Block(), args)
    normalized = row_kernel_norm(args[0], EPS) * (1 + args[1]) + args[2]
    assert fg.compare(result, normalized * (1 + args[1]) + args[2])


def test_a_verdict_makes_nothing_compile_again(fusion_device: torch.device) -> None:
    """Cold, warm, and refused: one graph."""
    graphs: list[torch.fx.GraphModule] = []
    block, args = Block(), made(strided_unbind, fusion_device)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=recording_backend(graphs))
    with torch.no_grad():
        compiled(*args)
        block(*args)
        block(*args)
        compiled(*args)
    assert len(graphs) == 1
