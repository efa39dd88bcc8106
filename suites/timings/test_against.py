"""Today's kernels beside those of another revision, in one process and in pairs: `nox -s bench -- --against REV`."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import pytest
import torch

from .cases import CASES, KERNELS, operands

if TYPE_CHECKING:
    from fusiongate.timing.benchmarks import DeviceBenchmark


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_is_no_slower_than_it_was(
    kernel: str,
    case: str,
    base_kernels: types.ModuleType,
    fusion_device: torch.device,
    device_benchmark: DeviceBenchmark,
) -> None:
    before = {op.name: op for op in base_kernels.FUSIONS}
    if kernel not in before:
        pytest.skip(f"not run: {kernel} did not exist then")
    on_host = fusion_device.type == "cpu"
    if on_host and not CASES[case].on_host:
        pytest.skip("not run: needs a GPU, the shape is too large for a host build")
    margin = 0.2 if on_host else 0.003
    ratio = device_benchmark(
        KERNELS[kernel],
        *operands(kernel, case, fusion_device),
        baseline=before[kernel],
        margin=margin,
        precision=None,
    )
    assert ratio.outcome != "slower", f"{kernel} on {case}: {ratio}"
