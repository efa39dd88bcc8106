"""Hand-written gates, whose own tests pass, fail cells of the matrix; a fusion around the same kernel passes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from fusiongate.gate.fusion import Fusion
from fusiongate.matrix import CellFailure, Matrix, Selected
from fusiongate.subjects import Subject

from ..downstream.foreign_gates import once_for_all, per_signature

HOST = Selected("host")


@pytest.fixture(autouse=True)
def quiet_gates() -> Iterator[None]:
    """All of them refuse on purpose here, and say so."""
    names = ("fusiongate", per_signature.__name__)
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)


def foreign(module: ModuleType, launcher: str) -> Subject:
    return Subject(
        module.__name__.rpartition(".")[2],
        call=module.fused_modulate,
        reference=once_for_all.reference_modulate,
        fused=f"{module.__name__}:{launcher}",
        declines=once_for_all.why_not,
        reset=module.reset,
    )


def why_not_exactly(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> str | None:
    """The same ladder, with what the matrix has taught."""
    reason = once_for_all.why_not(x, scale, shift)
    if reason is None and not x.dtype == scale.dtype == shift.dtype:
        reason = "mixed-dtype"
    if reason is None and not x.is_contiguous():
        reason = "stride"
    return reason


RIGHT = Fusion(
    "right",
    reference=once_for_all.reference_modulate,
    fused=per_signature.launch,
    declines=why_not_exactly,
)

# Each cell, and what the matrix says happened in it.
ONCE_FOR_ALL = {
    # A first call that proves nothing: adaLN-zero, or a dummy warm-up.
    "zeros-first-refused": "594 of 33,792 elements (1.76 %) are not equal bit for bit",
    # torch.equal calls NaN unequal to itself, and the gate never looks again.
    "nan-first": "happened: no launch",
    "nan-inf": "happened: no launch",
    # Verified on one shape, trusted on all.
    "verified-elsewhere": "594 of 33,792 elements (1.76 %) are not equal bit for bit",
    # The fall-back ladder looks at one operand's dtype: a promoted result differs, and the kernel is off for good.
    "mixed": "happened: no launch",
    # ... and where the values agree, torch.equal does not see the dtype.
    "mixed-zeros-first": "dtype differs: got bfloat16, expected float32",
    # torch.equal does not see strides.
    "permuted": "strides differs: got (16896, 512, 1), expected (16896, 1, 33)",
    # Nobody compared the inputs.
    "mutates-input": "happened: it changed an input",
    # Nobody caught the launch.
    "launch-raises": "happened: it raised RuntimeError: the launch failed",
    # An empty call verifies any kernel.
    "empty-tokens": "happened: 1 launch",
    # The gradient is gone.
    "grad": "does not require grad",
    # Tracers and transforms look like tensors.
    "make-fx": "happened: it raised RuntimeError",
    "vmap": "happened: it raised RuntimeError",
}

PER_SIGNATURE = {
    "zeros-first-refused": "594 of 33,792 elements (1.76 %) are not equal bit for bit",
    # The verdict is keyed by one operand.
    "mixed": "happened: no launch",
    "mixed-zeros-first": "dtype differs: got bfloat16, expected float32",
    "permuted": "strides differs: got (16896, 512, 1), expected (16896, 1, 33)",
    "mutates-input": "happened: it changed an input",
    "make-fx": "happened: it raised RuntimeError",
    "fake-tensor": "happened: it raised",
}

# What the second gate does better than the first.
CURED = {"nan-first", "nan-inf", "verified-elsewhere", "launch-raises", "empty-tokens", "grad"}


def check(subject: Subject | Fusion, cell_id: str) -> str | None:
    """Run a cell; the message if it is red."""
    matrix = Matrix(subject)
    cell = next(cell for cell in matrix.cells() if cell.id == cell_id)
    try:
        matrix.prepare(cell, HOST).check()
    except CellFailure as failure:
        return str(failure)
    return None


@pytest.mark.parametrize("cell_id", ONCE_FOR_ALL)
def test_a_gate_that_looks_once_for_all_fails(cell_id: str) -> None:
    message = check(foreign(once_for_all, "launch_modulate"), cell_id)
    assert message is not None
    assert ONCE_FOR_ALL[cell_id] in message


@pytest.mark.parametrize("cell_id", PER_SIGNATURE)
def test_a_gate_with_a_verdict_a_shape_fails(cell_id: str) -> None:
    message = check(foreign(per_signature, "launch"), cell_id)
    assert message is not None
    assert PER_SIGNATURE[cell_id] in message


@pytest.mark.parametrize("cell_id", sorted(CURED))
def test_a_gate_with_a_verdict_a_shape_passes_what_that_cures(cell_id: str) -> None:
    assert None is check(foreign(per_signature, "launch"), cell_id)


@pytest.mark.parametrize("cell_id", sorted({*ONCE_FOR_ALL, *PER_SIGNATURE}))
def test_a_fusion_around_the_same_kernel_passes(cell_id: str) -> None:
    assert None is check(RIGHT, cell_id)


@pytest.mark.parametrize("cell_id", ["base", "strided-unbind-4d", "strided-unbind-3d", "per-token", "fp64", "B2S1D512"])
@pytest.mark.parametrize("gate", ["once-for-all", "per-signature"])
def test_what_their_own_tests_cover_is_green(gate: str, cell_id: str) -> None:
    """The matrix does not condemn them wholesale: what their authors tried is right."""
    subject = {
        "once-for-all": foreign(once_for_all, "launch_modulate"),
        "per-signature": foreign(per_signature, "launch"),
    }[gate]
    assert None is check(subject, cell_id)
