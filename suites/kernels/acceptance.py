"""What only a GPU can show of the library, shown and asserted.

``python -m fusiongate.suites.kernels.acceptance [part …]`` looks at all parts, or at those named. It exits with
1 if anything does not hold, after everything has been looked at.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusiongate as fg
from fusiongate.kernels.launching import Entry
from fusiongate.kernels.sources import source
from fusiongate.models import ltx2
from fusiongate.progress import track

from ..models.mounts import Block, composite_norm, recording_backend, row_kernel_norm
from .operands import DTYPES, EPS, arguments, operands

LTX2_SHAPES = ((2, 517, 4096), (2, 33, 512), (1, 126, 2048), (1, 14592, 4096))
"""(B, S, D)."""
WIDTHS = (4, 64, 130, 132, 516, 2240, 3072, 4100, 5120, 8192, 16384)
"""D, in elements: vectors of each width, and tails."""
LEAST_SHARE_OF_COPY = 0.95
"""Of the bandwidth of a copy of as many bytes."""
MOST_HOST_COST = 1.5
"""Of a verified gated call, over allocating the output and launching the kernel."""
LEAST_ROWS = 100_000
"""On which each witness is compared."""


class Findings:
    """What was looked at, and how much of it did not hold."""

    def __init__(self) -> None:
        self.failed = 0

    def expect(self, holds: bool, what: str) -> None:
        """Print a finding, and count it if it is a bad one."""
        print(f"{'ok  ' if holds else 'FAIL'} {what}", flush=True)
        self.failed += not holds


def exactness(findings: Findings) -> None:
    """Every kernel on every shape and dtype: bits, the contract, or the reason."""
    for op in fg.kernels.FUSIONS:
        for dtype in DTYPES:
            for shape in (*LTX2_SHAPES, *((2, 77, width) for width in WIDTHS)):
                args = arguments(op, operands(*shape, dtype, device="cuda"))
                reason = op.declines(*args)
                what = f"{op.name} {str(dtype)[6:]} {shape}"
                if reason is not None:
                    high_in_fp32 = op is fg.kernels.rms_norm_modulate_high and dtype == torch.float32
                    known = "dtype" if high_in_fp32 else "reduction-order"
                    findings.expect(reason == known, f"{what}: declined, {reason}")
                    continue
                with op.isolated() as fresh:
                    first, second = fresh(*args), fresh(*args)
                    expected = op.reference(*args)
                    verdict = fg.compare(second, expected, op.contract, op.reference, args)
                    fused = fresh.counters["fused", "verified"] == 1
                    findings.expect(bool(verdict) and fused and torch.equal(first, expected), f"{what}: {verdict}")
    x, scale, shift = operands(2, 33, 512, device="cuda")
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    misaligned = buffer[1:].view(x.shape).copy_(x)
    for op in fg.kernels.FUSIONS:
        reason = op.explain(*arguments(op, (misaligned, scale, shift))).reason
        findings.expect(reason == "alignment", f"{op.name} misaligned x: declined, {reason}")


def witnesses(findings: Findings) -> None:
    """Each reduction's statistic itself, over many rows of several widths."""
    shapes = (
        *LTX2_SHAPES,
        (2, 4000, 2240),
        (1, 5000, 5120),
        (1, 14592, 3072),
        (4, 500, 8192),
        (8, 1, 4096),
        (1, 3, 3072),
    )
    for op in (fg.kernels.rms_norm_modulate, fg.kernels.composite_rms_norm_modulate):
        assert op.witness is not None
        rows = wrong = 0
        for dtype in DTYPES:
            for seed, shape in enumerate(shapes):
                args = (*operands(*shape, dtype, seed=seed, device="cuda"), EPS)
                expected, actual = (statistic(*args) for statistic in op.witness)
                wrong += fg.compare(actual, expected).mismatched
                rows += expected.numel()
        findings.expect(wrong == 0 and rows >= LEAST_ROWS, f"{op.name}: rstd of {rows:,} rows, {wrong} differ")


def device_kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels that a call ran on the device, by the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


def launches(findings: Findings) -> None:
    """Exactly one device kernel a fused call."""
    for op in fg.kernels.FUSIONS:
        args = arguments(op, operands(2, 517, 4096, device="cuda"))
        fg.warm_up(op, args)
        names = device_kernels(lambda op=op, args=args: op(*args))  # type: ignore[misc]
        one = len(names) == 1 and "fusiongate_kernel" in names[0]
        findings.expect(one, f"{op.name}: {len(names)} device kernel(s) a call")


def device_microseconds(calls: list[Callable[[], Any]], repeats: int = 40) -> float:
    """Median time of one call on the device, by replay of a graph of calls that rotate through their operands."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(repeats):
            calls[index % len(calls)]()
    times: list[float] = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats * 1e3)
    return statistics.median(times)


def bandwidth(findings: Findings) -> None:
    """The kernels against a copy of the same bytes; cold, by rotating through more operands than a cache holds."""
    for shape in ((1, 32768, 4096), (1, 14592, 4096), (1, 4216, 4096), (2, 517, 4096), (1, 4096, 3072)):
        numbers = range(min(16, max(3, int(6e8 // (4 * torch.Size(shape).numel())))))
        sets = [operands(*shape, seed=seed, device="cuda") for seed in numbers]
        pairs = [(x, torch.empty_like(x)) for x, _, _ in sets]
        copy = device_microseconds([lambda x=x, y=y: y.copy_(x) for x, y in pairs])  # type: ignore[misc]
        print(f"     {shape} bfloat16: copy {copy:.1f} us")
        for op in fg.kernels.FUSIONS:
            calls = [lambda op=op, rows=rows: op.fused(*arguments(op, rows)) for rows in sets]
            time_us = device_microseconds(calls)  # type: ignore[arg-type]
            what = f"{op.name} {shape}: {time_us:.1f} us, {copy / time_us:.3f} of the copy's rate"
            if shape == (1, 32768, 4096) and op.name in ("modulate", "rms_norm_modulate"):
                findings.expect(copy / time_us >= LEAST_SHARE_OF_COPY, what)
            else:
                print(f"     {what}", flush=True)


def host_microseconds(call: Callable[[], Any], calls: int = 400) -> float:
    """Median time of one call on the host, over batches."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def host_cost(findings: Findings) -> None:
    """A verified gated call with strided rows against allocating and launching."""
    op = fg.kernels.modulate
    args = operands(2, 33, 512, device="cuda")
    out = torch.empty_like(args[0])
    native = Entry(source("modulate"), "modulate").on(out.device)
    fg.warm_up(op, args)
    launch = host_microseconds(lambda: native(out, *args))
    bare = host_microseconds(lambda: native(torch.empty_like(args[0]), *args))
    fused = host_microseconds(lambda: op.fused(*args))
    gated = host_microseconds(lambda: op(*args))
    eager = host_microseconds(lambda: op.reference(*args))
    print(
        f"     host us a call: launch {launch:.2f}, allocate and launch {bare:.2f}, the kernel's launcher {fused:.2f}, "
        f"eager {eager:.2f}"
    )
    what = f"a verified gated call costs {gated:.2f} us on the host, {gated / bare:.2f} times allocate and launch"
    findings.expect(gated <= MOST_HOST_COST * bare, what)


def capture(findings: Findings) -> None:
    """Cold and warm gates in graphs."""
    args = operands(2, 33, 512, device="cuda")
    with fg.kernels.modulate.isolated() as op:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(*args)
        graph.replay()
        signature = op.explain(*args).signature
        assert signature is not None
        cold = op.counters["reference", "capturing"] == 1 and op.launches == 0 and op.gate.state(signature) == "unseen"
        same = torch.equal(out, op.reference(*args))
        findings.expect(cold and same, "a cold gate records the reference and stores nothing")
        fg.warm_up(op, args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(*args)
        for live, new in zip(args, operands(2, 33, 512, seed=7, device="cuda"), strict=True):
            live.copy_(new)
        graph.replay()
        fused = op.counters["fused", "verified"] == 1
        same = torch.equal(out, op.reference(*args))
        findings.expect(fused and same, "a warm gate records the kernel, and replay on changed inputs equals eager")


def mounts(findings: Findings) -> None:
    """The LTX-2 mounts, eager and compiled."""
    args = operands(2, 517, 4096, device="cuda")
    for own in (row_kernel_norm, composite_norm):
        site = nn.Module()
        expected = own(args[0], EPS) * (1 + args[1]) + args[2]

        def call(own: ltx2.Norm = own, site: nn.Module = site) -> Tensor:
            return ltx2.ltx2_rms_norm_modulate(site, own, *args, EPS)

        same = all(torch.equal(call(), expected) for _ in range(3))
        names = device_kernels(call)
        what = f"the mount over {own.__name__}: bit-equal, {len(names)} device kernel(s) a call"
        findings.expect(same and len(names) == 1, what)

    block = Block()
    graphs: list[torch.fx.GraphModule] = []

    def custom_ops() -> int:
        graphs.clear()
        torch._dynamo.reset()
        torch.compile(block, fullgraph=True, backend=recording_backend(graphs))(*args)
        return sum("fusiongate" in str(node.target) for graph in graphs for node in graph.graph.nodes)

    before = fg.kernels.modulate.counters
    lossless = custom_ops() == 0 and len(graphs) == 1 and fg.kernels.modulate.counters == before
    findings.expect(lossless, "compiled, lossless: one graph, no custom op, the gate untouched")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    names = device_kernels(lambda: compiled(*args))
    findings.expect(len(names) == 1, f"compiled by Inductor, lossless: {len(names)} device kernel(s)")
    ltx2.attach_high(block)
    with fg.mounted(block, quality="high"):
        findings.expect(custom_ops() == 1 and len(graphs) == 1, "compiled, high: one graph, one custom op")
        op = fg.kernels.rms_norm_modulate_high
        block(*args)
        fused = op.counters["fused", "verified"]
        block(*args)
        findings.expect(op.counters["fused", "verified"] == fused + 1, "eager, high: the kernel within ULPs runs")


PARTS = (exactness, witnesses, launches, capture, mounts, host_cost, bandwidth)


def main(names: Sequence[str] = ()) -> int:
    """Look at the named parts, or at everything; 0 if all of it holds."""
    unknown = sorted(set(names) - {part.__name__ for part in PARTS})
    if unknown:
        known = ", ".join(part.__name__ for part in PARTS)
        print(f"acceptance: no part is called {', '.join(unknown)}; there are {known}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("acceptance: torch sees no GPU; run it on a machine that has one", file=sys.stderr)
        return 2
    print(fg.environment("cuda").summary())
    findings = Findings()
    torch.set_grad_enabled(False)
    parts = [part for part in PARTS if not names or part.__name__ in names]
    for part in track(parts, "acceptance", [part.__name__ for part in parts]):
        print(f"-- {part.__name__}: {part.__doc__}")
        part(findings)
    print(f"{findings.failed} finding(s) do not hold" if findings.failed else "everything holds")
    return int(findings.failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
