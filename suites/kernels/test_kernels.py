"""The kernels' host builds against their references, through a gate and past it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fusiongate as fg

from .operands import DTYPES, EPS, HOSTS, arguments, operands, same_bits

BY_NAME = {op.name.removesuffix(".host"): op for op in HOSTS}
SHAPES = ((2, 33, 512), (1, 7, 1024), (3, 5, 4), (2, 40, 64), (1, 3, 132), (2, 9, 516), (1, 1, 8))
WIDE = (
    (1, 3, 2240),
    (1, 5, 3072),
    (2, 2, 4096),
    (1, 2, 4100),
    (2, 3, 5120),
    (1, 2, 8192),
    (1, 1, 16384),
    (3, 1, 32768),
)


@pytest.fixture(params=HOSTS, ids=lambda op: op.name)
def kernel(request: pytest.FixtureRequest) -> Iterator[fg.Fusion]:
    """Each host build with a fresh gate."""
    with request.param.isolated() as fresh:
        yield fresh


def fresh(name: str) -> AbstractContextManager[fg.Fusion]:
    return BY_NAME[name].isolated()


def verified(op: fg.Fusion, *args: Any) -> bool:
    return op.explain(*args).reason == "verified"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_verified_kernel_keeps_its_contract_on_other_numbers(
    kernel: fg.Fusion, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args, others = (arguments(kernel, operands(*shape, dtype, seed=seed)) for seed in (0, 1))
    reason = kernel.declines(*args)
    if reason is not None:
        narrow = shape[2] < 128 and "composite" in kernel.name
        assert ("reduction-order" if narrow else "dtype") == reason
        assert narrow or ("high" in kernel.name and dtype == torch.float32)
        return

    assert same_bits(kernel(*args), kernel.reference(*args))
    actual, expected = kernel(*others), kernel.reference(*others)

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == kernel.counters, kernel.gate.events
    assert fg.compare(actual, expected, kernel.contract, kernel.reference, others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_rows_are_taken_too(kernel: fg.Fusion, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    args = arguments(kernel, operands(*shape, dtype))
    if kernel.declines(*args) is not None:
        assert ("rms_norm_modulate_high.host", torch.float32) == (kernel.name, dtype)
        return
    verdict = fg.compare(kernel.fused(*args), kernel.reference(*args), kernel.contract, kernel.reference, args)

    assert verdict, verdict


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 127, 130, 255, 1025], ids=str)
@pytest.mark.parametrize("name", ["modulate", "modulate_fp32"])
def test_the_modulations_take_any_width(name: str, columns: int) -> None:
    with fresh(name) as op:
        for tokens in (1, 2, 63, 129):
            args = operands(2, tokens, columns)
            fg.warm_up(op, args)
            assert same_bits(op.fused(*args), op.reference(*args))
        assert {("reference", "first-sight")} == {key for key in op.counters if key[0] == "reference"}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_fp32_rows_are_taken_by_the_modulation_in_fp32(dtype: torch.dtype) -> None:
    x, scale, shift = operands(2, 9, 64, dtype)
    with fresh("modulate_fp32") as op, fresh("modulate") as other:
        for _ in range(2):
            assert same_bits(op(x, scale.float(), shift.float()), op.reference(x, scale.float(), shift.float()))
        assert verified(op, x, scale.float(), shift.float())
        assert "mixed-dtype" == other.explain(x, scale.float(), shift.float()).reason


@pytest.mark.parametrize(
    "rows",
    [
        lambda table: (table[:, 1:2], table[:, 0:1]),
        lambda table: (table[:1, 1:2], table[:, 0:1]),
        lambda table: (table[:1, 1:2], table[:1, 0:1]),
        lambda table: (table[:1, 1:2].expand(3, 1, -1), table[:, 0:1]),
        lambda table: tuple(row.unsqueeze(1) for row in table.unbind(1)[:2]),
        lambda table: tuple(row.unsqueeze(1) for row in table.flatten(1).chunk(6, -1)[2:4]),
        lambda table: (table[:, 1:2].contiguous(), table[:, 5:6]),
    ],
    ids=["strided", "shared-scale", "shared", "expanded", "unbind", "chunk", "one-contiguous"],
)
def test_rows_of_any_batch_stride_fuse(kernel: fg.Fusion, rows: Any) -> None:
    """Without a copy that makes them dense."""
    x = operands(3, 5, 128)[0]
    scale, shift = rows(torch.randn(3, 6, 128, generator=torch.Generator().manual_seed(2)).bfloat16())
    args = arguments(kernel, (x, scale, shift))

    results = [kernel(*args) for _ in range(2)]

    assert verified(kernel, *args), kernel.gate.events
    assert all(fg.compare(result, kernel.reference(*args), kernel.contract, args=args) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_a_weight_is_part_of_the_norm(name: str, dtype: torch.dtype) -> None:
    args = (*operands(2, 9, 128, dtype), EPS, torch.randn(128, generator=torch.Generator().manual_seed(3)).to(dtype))
    with fresh(name) as op:
        for _ in range(2):
            assert same_bits(op(*args), op.reference(*args))
        assert verified(op, *args), op.gate.events
        assert not verified(op, *args[:4])


@pytest.mark.parametrize("dtype, weighted", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
@pytest.mark.parametrize("columns", [520, 1024, 1536, 2240, 3072, 4096, 5120, 5376, 7168, 7680, 8192, 12288], ids=str)
@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_a_norm_is_exact_by_whichever_way_its_kernel_goes_through_a_row(
    name: str, columns: int, dtype: torch.dtype, weighted: bool
) -> None:
    """By the number of vectors that a thread has; 16 rows, from which on the composite's common grid is taken."""
    op = BY_NAME[name]
    x, *rows = operands(1, 16, columns, dtype)
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(3)).to(dtype) if weighted else None
    args = (x, *rows, EPS, weight)
    of_reference, of_kernel = op.witness or pytest.fail("no witness")

    assert same_bits(op.fused(*args), op.reference(*args))
    assert same_bits(of_kernel(*args), of_reference(*args))


@pytest.mark.parametrize("eps", [0.0, 1e-38, EPS])
@pytest.mark.parametrize("magnitude", [1e-19, 1e-20, 1e-21])
def test_squares_that_are_subnormal_round_as_eager_s_do(magnitude: float, eps: float) -> None:
    """A fused multiply-add would keep what the product loses there: only an ordinary eps hides it."""
    x, scale, shift = operands(1, 64, 2048)
    of_reference, of_kernel = BY_NAME["composite_rms_norm_modulate"].witness or pytest.fail("no witness")
    args = (x * magnitude, scale, shift, eps)

    assert same_bits(of_kernel(*args), of_reference(*args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 4100), (3, 1, 12), (1, 1, 4), (1, 129, 20)], ids=str)
@pytest.mark.parametrize("name", ["modulate", "modulate_fp32"])
def test_a_line_that_ends_within_16_bytes_is_modulated_to_its_end(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args = operands(*shape, dtype)

    assert same_bits(BY_NAME[name].fused(*args), BY_NAME[name].reference(*args))


@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_the_statistic_is_equal_over_thousands_of_rows(name: str) -> None:
    """The host build repeats the GPU's order: rstd itself, in fp32, not what is left of it after rounding."""
    of_reference, of_kernel = BY_NAME[name].witness or pytest.fail("no witness")
    for columns, tokens in ((128, 3000), (512, 2000), (1152, 500), (4096, 100), (8192, 40), (16384, 9), (4100, 5)):
        for scale in (1.0, 1e-3, 30.0):
            x, *rows = operands(1, tokens, columns, torch.float32)
            args = (x * scale, *rows, EPS)
            verdict = fg.compare(of_kernel(*args), of_reference(*args))
            assert verdict, f"D {columns}, x * {scale}: {verdict}"


@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_a_norm_on_the_cpu_sums_in_another_order(name: str) -> None:
    """So the gate refuses the host build there: a real refusal. Its statistic differs on a part of the rows."""
    eager = getattr(fg.kernels, name).reference
    args = (*operands(2, 2000, 512), EPS)
    with fresh(name) as op:
        at_site = op.with_reference(eager, name="a site on the CPU")
        for _ in range(2):
            assert same_bits(at_site(*args), eager(*args))
        assert "refused" == at_site.explain(*args).reason

        of_emulation, _ = op.witness or pytest.fail("no witness")
    x = args[0].float()
    of_eager = torch.rsqrt(x.pow(2).mean(-1) + EPS).reshape(-1)
    differing = float((of_eager != of_emulation(x, *args[1:])).float().mean())
    assert 0.01 < differing < 0.6


@pytest.mark.parametrize("columns", [4, 64, 132, 512, 4096])
def test_the_high_variant_stays_within_its_contract(columns: int) -> None:
    """In ULPs at the largest intermediate: after cancellation with shift they may be hundreds of the result."""
    with fresh("rms_norm_modulate_high") as op:
        for seed in range(2):
            x, scale, shift = operands(2, 60, columns, seed=seed)
            y = torch.nn.functional.rms_norm(x, (columns,), None, EPS) * (1 + scale)
            for rows in ((scale, shift), (scale, -y[:, :1].contiguous())):
                args = (x, *rows, EPS)
                verdict = fg.compare(op.fused(*args), op.reference(*args), op.contract, args=args)
                assert verdict, verdict


def test_the_high_variant_declines_what_its_contract_does_not_cover() -> None:
    with fresh("rms_norm_modulate_high") as op:
        assert "dtype" == op.explain(*operands(1, 4, 128, torch.float32), EPS).reason
        assert "reduction-order" == op.explain(*operands(1, 4, 130), EPS).reason
        assert "first-sight" == op.explain(*operands(1, 4, 132), EPS).reason


def test_without_a_host_build_a_cpu_tensor_is_declined() -> None:
    """There is no CPU kernel in production."""
    for op in fg.kernels.FUSIONS:
        with op.isolated() as gated:
            args = arguments(op, operands(2, 5, 128))
            assert same_bits(gated(*args), op.reference(*args))
            assert {("reference", "cpu"): 1} == gated.counters
            assert 0 == gated.launches


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda x, a, b: (x.transpose(1, 2).contiguous().transpose(1, 2), a, b), "stride"),
        (lambda x, a, b: (x, a.expand(-1, 5, -1).contiguous(), b), "per-token"),
        (lambda x, a, b: (x, a.unsqueeze(2), b.unsqueeze(2)), "rank"),
        (lambda x, a, b: (x[0], a[0], b[0]), "rank"),
        (lambda x, a, b: (x.double(), a.double(), b.double()), "dtype"),
        (lambda x, a, b: (x.float(), a, b), "mixed-dtype"),
        (lambda x, a, b: (x, a, b.half()), "mixed-dtype"),
        (lambda x, a, b: (x, a[:, :, :1].expand(-1, -1, 128), b), "stride"),
        (lambda x, a, b: (torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x), a, b), "alignment"),
        (lambda x, a, b: (x, torch.empty(257, dtype=x.dtype)[1:].view(2, 1, 128).copy_(a), b), "alignment"),
    ],
    ids=[
        *("permuted", "per-token", "frame-rows", "rank-2", "fp64", "fp32-x", "mixed-rows", "expanded-row"),
        *("misaligned-x", "misaligned-row"),
    ],
)
def test_every_other_layout_gives_eager_s_bits(kernel: fg.Fusion, change: Any, reason: str) -> None:
    args = arguments(kernel, change(*operands(2, 5, 128)))

    assert reason == kernel.declines(*args)
    try:
        expected = kernel.reference(*args)
    except RuntimeError:
        # The emulation of a norm's order knows (B, S, D) only; on a GPU the reference is eager itself.
        assert "norm" in kernel.name
        return
    assert same_bits(kernel(*args), expected)
    assert 0 == kernel.launches


def test_a_kernel_called_directly_refuses_what_it_would_misread(kernel: fg.Fusion) -> None:
    """The last line, for whoever goes past the predicate."""
    x, scale, shift = operands(2, 5, 128)
    for rows in ((x, scale[..., :64], shift), (x, scale.expand(-1, 5, -1), shift), (x.double(), scale, shift)):
        with pytest.raises(Exception, match=r"must|expected|differ|dtype"):
            kernel.fused(*arguments(kernel, rows))


@pytest.mark.parametrize("tokens, columns", [(1, 130), (127, 2240), (129, 4100), (1, 128), (3, 512)])
def test_nothing_outside_of_the_operands_is_written(kernel: fg.Fusion, tokens: int, columns: int) -> None:
    """All operands carved from one slab, canaries between them."""
    source = operands(2, tokens, columns)
    if kernel.declines(*arguments(kernel, source)) is not None:
        return
    slab = torch.full((sum(tensor.numel() for tensor in source) + 4 * 256,), -7.5, dtype=torch.bfloat16)
    start, carved, gaps = 256, [], [slab[:256]]
    for tensor in source:
        piece = slab[start : start + tensor.numel()].view(tensor.shape)
        carved.append(piece.copy_(tensor))
        start += tensor.numel()
        gaps.append(slab[start : start + 256 - start % 64])
        start += 256 - start % 64
    args = arguments(kernel, (carved[0], carved[1], carved[2]))

    result = kernel.fused(*args)

    assert all(bool((gap == -7.5).all()) for gap in gaps)
    assert all(map(torch.equal, carved, source))
    assert fg.compare(result, kernel.reference(*args), kernel.contract, args=args)


def broken(kernel: fg.Fusion, spoil: Any) -> fg.Fusion:
    """The same fusion with a kernel that is spoilt after it ran."""

    def fused(*args: Any) -> Tensor:
        result: Tensor = kernel.fused(*args)
        spoil(result, args)
        return result

    return fg.Fusion.of(dataclasses.replace(kernel.spec, fused=fused))


@pytest.mark.parametrize(
    "spoil, tells",
    [
        (lambda out, args: out[-1, -1, -1:].view(torch.int16).bitwise_xor_(1), "elements"),
        (lambda out, args: out[-1].copy_(args[0][-1]), "elements"),
        (lambda out, args: args[1].zero_(), "the kernel changed its input `scale`"),
        (lambda out, args: out.nan_to_num_(0.0, math.inf, -math.inf), "NaN is swallowed"),
    ],
    ids=["last-bit", "last-batch", "input", "nan"],
)
def test_a_spoilt_kernel_is_refused(
    kernel: fg.Fusion, spoil: Any, tells: str, caplog: pytest.LogCaptureFixture
) -> None:
    op = broken(kernel, spoil)
    if tells == "elements" and not isinstance(op.contract, fg.Exact):
        # One ULP is within its contract.
        spoil = lambda out, args: out[-1, -1, -1:].add_(1.0)
        op = broken(kernel, spoil)
    args = arguments(op, operands(2, 5, 128))
    before = [arg.clone() for arg in args[:3]]

    results = [op(*args) for _ in range(2)]

    assert all(same_bits(result, op.reference(*args)) for result in results)
    assert all(map(torch.equal, args[:3], before))
    assert {("reference", "first-sight"): 1, ("reference", "refused"): 1} == op.counters
    (message,) = caplog.messages
    assert tells in message


# -- calls that the library recognises by itself ---------------------------------------------------------------------


def admitted(op: fg.Fusion, *args: Any) -> None:
    """Bring a call so far that the native library launches it at once."""
    for _ in range(3):
        op(*args)
    assert 2 == op.counters["fused", "verified"]


def test_a_recognised_call_launches_and_is_counted(kernel: fg.Fusion) -> None:
    args = arguments(kernel, operands(2, 5, 128))
    admitted(kernel, *args)
    launches = kernel.launches

    for seed in range(4):
        others = arguments(kernel, operands(2, 5, 128, seed=seed))
        assert fg.compare(kernel(*others), kernel.reference(*others), kernel.contract, args=others)

    assert launches + 4 == kernel.launches
    assert 6 == kernel.counters["fused", "verified"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda x, a, b: (x.clone().requires_grad_(), a, b), "autograd"),
        (lambda x, a, b: (x, torch.nn.Parameter(a), b), "autograd"),
        (lambda x, a, b: (x, a, b.half()), "mixed-dtype"),
        (lambda x, a, b: (x[:, :0], a, b), "empty"),
        (lambda x, a, b: (x, a.expand(-1, 5, -1), b), "per-token"),
        (lambda x, a, b: (torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x), a, b), "alignment"),
        (lambda x, a, b: (x.transpose(1, 2).contiguous().transpose(1, 2), a, b), "stride"),
        (lambda x, a, b: tuple(tensor.to("meta") for tensor in (x, a, b)), "tracing"),
        (lambda x, a, b: tuple(map(FakeTensorMode().from_tensor, (x, a, b))), "tracing"),
    ],
    ids=["grad", "parameter", "mixed", "empty", "per-token", "misaligned", "permuted", "meta", "fake"],
)
def test_a_recognised_call_is_recognised_by_everything_that_matters(change: Any, reason: str) -> None:
    with fresh("modulate") as op:
        args = operands(2, 5, 128)
        admitted(op, *args)
        changed = change(*args)
        launches = op.launches

        result = op(*changed)

        assert reason in {key[1] for key in op.counters if key[0] == "reference"}
        assert launches == op.launches
        assert op.reference(*changed).shape == result.shape


def test_another_eps_is_another_call() -> None:
    with fresh("rms_norm_modulate") as op:
        args = (*operands(2, 5, 128), EPS)
        admitted(op, *args)
        for eps in (1e-3, 0.0, 1):
            result = op(*args[:3], eps)
            assert same_bits(result, op.reference(*args[:3], eps))
        assert 4 == op.counters["reference", "first-sight"]


def test_a_recognised_call_is_traced_as_any_other() -> None:
    with fresh("modulate") as op:
        args = operands(2, 5, 128)
        admitted(op, *args)
        mapped = torch.func.vmap(op)(*(tensor.unsqueeze(0) for tensor in args))
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = op(*args)

        assert same_bits(mapped[0], op.reference(*args))
        assert same_bits(under_autocast, op.reference(*args))
        assert 1 == op.counters["reference", "tracing"]
        assert 2 == op.counters["reference", "first-sight"]


def test_a_verdict_that_changes_takes_the_recognition_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh("modulate") as op:
        args = operands(2, 5, 128)
        admitted(op, *args)
        with monkeypatch.context() as spoilt:
            spoilt.setattr(type(op.fused), "__call__", lambda _kernel, *operands: torch.zeros_like(operands[0]))
            assert not op.verify(*args, quiet=True)

        assert same_bits(op(*args), op.reference(*args))
        assert 1 == op.counters["reference", "refused"]


def test_gates_recognise_their_own_calls_only() -> None:
    with fresh("modulate") as one, fresh("modulate") as other:
        args = operands(2, 5, 128)
        admitted(one, *args)
        other(*args)

        assert {("reference", "first-sight"): 1} == other.counters


def test_threads_share_recognised_calls() -> None:
    with fresh("modulate") as op:
        ready = threading.Barrier(16)

        def run(number: int) -> bool:
            ready.wait()
            same = True
            for turn in range(60):
                args = operands(1 + turn % 3, 5, 64, seed=number)
                same &= same_bits(op(*args), op.reference(*args))
            return same

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(run, range(16)))
        assert {("reference", "first-sight"): 2, ("fused", "verified"): 16 * 60 - 2} == op.counters


# -- torch.compile ---------------------------------------------------------------------------------------------------


def test_compiled_lossless_kernels_are_plain_expressions() -> None:
    torch._dynamo.reset()
    with fresh("modulate") as modulate, fresh("composite_rms_norm_modulate") as composite:
        counter = CompileCounterWithBackend("eager")

        def block(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            result: Tensor = modulate(composite(x, scale, shift, EPS), scale, shift)
            return result

        args = operands(2, 5, 128)
        compiled = torch.compile(block, fullgraph=True, backend=counter)
        before = compiled(*args)
        block(*args)
        block(*args)
        after = compiled(*args)

        assert same_bits(before, after)
        assert 1 == counter.frame_count
        assert not [node for node in counter.graphs[0].graph.nodes if "fusiongate" in str(node.target)]
        assert 1 == modulate.counters["fused", "verified"] == composite.counters["fused", "verified"]


def test_a_compiled_high_kernel_is_one_op() -> None:
    torch._dynamo.reset()
    with fresh("rms_norm_modulate_high") as high, fresh("modulate") as modulate:
        counter = CompileCounterWithBackend("aot_eager")

        def block(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            result: Tensor = modulate(high(x, scale, shift, EPS), scale, shift)
            return result

        args = operands(2, 5, 128)
        compiled = torch.compile(block, fullgraph=True, backend=counter)
        for _ in range(3):
            compiled(*args)

        targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
        assert 1 == counter.frame_count
        assert 1 == sum("fusiongate" in target for target in targets)
        assert {("reference", "first-sight"): 1, ("fused", "verified"): 2} == high.counters
        assert {} == modulate.counters
