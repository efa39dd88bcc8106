"""Every kernel beside its reference, torch.compile and a copy, over the shapes of real models.

`nox -s bench` records them; the rows' times, ratios and host costs are what is wanted. A test fails where a kernel is
not launched, is wrong after it was timed, or is slower than what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .cases import CASES, KERNELS, operands

pytestmark = pytest.mark.usefixtures("not_beside_a_revision")

if TYPE_CHECKING:
    from fusiongate.timing.benchmarks import DeviceBenchmark


def compiled(reference: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The reference as Inductor compiles it, by its defaults and with eager's roundings.

    The options make them two back ends to Dynamo, which would else hand the first one's code to the second.
    """
    torch._dynamo.reset()
    emulated: dict[str, Any] = {"emulate_precision_casts": True}
    return {
        "compile": torch.compile(reference, fullgraph=True, dynamic=False),
        "compile-emulated": torch.compile(reference, fullgraph=True, dynamic=False, options=emulated),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str, case: str, fusion_device: torch.device, device_benchmark: DeviceBenchmark) -> None:
    op = KERNELS[kernel]
    args = operands(kernel, case, fusion_device)
    if fusion_device.type == "cpu":
        if not CASES[case].on_host:
            pytest.skip("not run: needs a GPU, the shape is too large for a host build")
        # A host build emulates the GPU's order: its time is recorded and promises nothing.
        assert device_benchmark(op, *args, seconds=0.3, margin=0.1, precision=None).value > 0
        return
    ratio = device_benchmark(op, *args, arms=compiled(op.reference), seconds=0.5)
    assert ratio.outcome != "slower", f"{kernel} on {case}: {ratio}"
