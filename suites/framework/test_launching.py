"""A launcher allocates a kernel's outputs, one or several, and recognises the calls that a gate has verified."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusiongate.jit import Source, Target
from fusiongate.kernels.launching import AdmittedCalls, Entry, Launcher
from fusiongate.kernels.sources import SOURCES

BOTH = """
#include "admitted.cuh"

namespace fusiongate {
namespace {

void both(TensorView sum, TensorView product, TensorView x, TensorView y) {
  const float* a = static_cast<const float*>(x.data_ptr());
  const float* b = static_cast<const float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) {
    static_cast<float*>(sum.data_ptr())[i] = a[i] + b[i];
    static_cast<float*>(product.data_ptr())[i] = a[i] * b[i];
  }
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(both, fusiongate::both);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED_PAIR(both);
"""


def operands(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """A kernel with two outputs, built for the host."""
    if Target.of(torch.device("cpu")) != Target.host():
        pytest.skip("not run: no host target")
    file = tmp_path_factory.mktemp("source") / "both.cu"
    file.write_text(BOTH)
    return Launcher(Entry(Source("both", (file,), SOURCES[0].include), "both"), operands, outputs=2)


def right(results: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> bool:
    return torch.equal(results[0], x + y) and torch.equal(results[1], x * y)


def test_several_outputs_come_as_a_tuple(both: Launcher) -> None:
    x, y = torch.randn(2, 3, 8)
    results = both(x, y)

    assert tuple is type(results)
    assert right(results, x, y)


def test_a_call_with_several_outputs_is_recognised_by_its_operands(both: Launcher) -> None:
    calls: AdmittedCalls = both.admission()
    x, y = torch.randn(2, 3, 8)
    assert calls((x, y)) is None
    calls.admit((x, y))

    for _ in range(2):
        assert right(calls((x, y.add_(1))), x, y)
    assert calls((torch.randn(3, 9), torch.randn(3, 9))) is None
    calls.forget()
    assert calls((x, y)) is None


def test_a_child_keeps_calls_of_its_own(both: Launcher) -> None:
    """A thread of its parent may have been at the parent's."""
    calls = both.admission()
    x, y = torch.randn(2, 3, 8)
    calls.admit((x, y))
    calls.leave()
    assert calls((x, y)) is None
    calls.admit((x, y))

    assert right(calls((x, y)), x, y)
