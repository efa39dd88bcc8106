"""A subject's benchmark: its rows, their names, and what stands beside the times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.errors import TimingError, UsageError
from fusiongate.timing.benchmarks import Benchmark, benchmark
from fusiongate.timing.pairing import Settings
from fusiongate.timing.recorded import TimedRow

QUICK = Settings(seconds=0.02, margin=0.5, precision=None)


def reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def kernel(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x.mul(scale.add(1)).add(shift)


def gated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Looks the launcher up where it stands."""
    return kernel(x, scale, shift)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, scale, shift = (torch.randn(2, rows, 64, generator=generator) for rows in (16, 1, 1))
    return x, scale, shift


@pytest.fixture
def taken() -> Benchmark:
    op = fg.Fusion("adaln", reference=reference, fused=kernel)
    return benchmark(op, operands(), settings=QUICK, hot=True, arms={"mine": reference})


def test_there_is_a_row_for_each_arm_named_by_subject_shape_dtype_and_arm(taken: Benchmark) -> None:
    assert [f"adaln[2x16x64-float32-{arm}]" for arm in ("eager", "kernel", "mine", "copy")] == [
        row.name for row in taken.rows
    ]
    assert {"adaln[2x16x64-float32]"} == {row.group for row in taken.rows}


def test_the_kernels_row_tells_bytes_bandwidth_ratio_and_paths(taken: Benchmark) -> None:
    row = next(row for row in taken.rows if row.arm == "kernel")
    assert 4 * (2 * 2 * 16 * 64 + 2 * 2 * 64) == row.info["bytes_moved"]
    copy = next(row for row in taken.rows if row.arm == "copy")
    share = row.info["bytes_per_second"] / copy.info["bytes_per_second"]
    assert share == pytest.approx(row.info["share_of_copy_bandwidth"])
    assert taken.ratio.value == row.info["ratio"]["value"]
    assert ["fused verified"] == list(row.info["paths"])
    assert row.info["paths"]["fused verified"] >= len(row.seconds) * row.calls
    assert ("hot", "wall", None) == (row.info["cache"], row.info["timer"], row.info["host_s"])


def test_the_reference_has_no_ratio_and_no_paths(taken: Benchmark) -> None:
    assert (None, None) == (taken.rows[0].info["ratio"], taken.rows[0].info["paths"])


def test_a_row_travels_as_json(taken: Benchmark) -> None:
    for row in taken.rows:
        assert row.to_json() == TimedRow.from_json(row.to_json()).to_json()


def test_a_label_stands_for_the_shape() -> None:
    op = fg.Fusion("adaln", reference=reference, fused=kernel)
    rows = benchmark(op, operands(), settings=QUICK, hot=True, label="strided").rows
    assert "adaln[strided-float32-kernel]" == rows[1].name


def test_a_wrong_kernel_is_not_timed() -> None:
    op = fg.Fusion("adaln", reference=reference, fused=lambda x, scale, shift: x + shift)
    with pytest.raises(TimingError, match=r"^adaln: a kernel that is wrong is not timed: "):
        benchmark(op, operands(), settings=QUICK, hot=True)


def test_a_kernel_that_declines_is_not_timed() -> None:
    op = fg.Fusion("adaln", reference=reference, fused=kernel, declines=lambda *args: "stride")
    with pytest.raises(UsageError, match="stride"):
        benchmark(op, operands(), settings=QUICK, hot=True)


def test_a_users_own_gate_is_timed_where_its_launcher_is_looked_up() -> None:
    subject = fg.Subject("mine", call=gated, reference=reference, fused=kernel)
    taken = benchmark(subject, operands(), settings=QUICK, hot=True)
    row = next(row for row in taken.rows if row.arm == "kernel")
    assert row.info["launches"] >= len(row.seconds) * row.calls
    assert row.info["paths"] is None


def test_a_users_own_gate_that_never_reaches_its_launcher_is_no_timing() -> None:
    subject = fg.Subject("mine", call=reference, reference=reference, fused=kernel)
    with pytest.raises(TimingError, match="0 launches"):
        benchmark(subject, operands(), settings=QUICK, hot=True)


def test_another_build_of_the_kernel_takes_the_references_place() -> None:
    op = fg.Fusion("adaln", reference=reference, fused=kernel)
    base = fg.Fusion("adaln", reference=reference, fused=gated)
    taken = benchmark(op, operands(), baseline=base, settings=QUICK, hot=True)
    assert ["base", "kernel", "copy"] == [row.arm for row in taken.rows]
    assert {"base"} == {row.info["reference"] for row in taken.rows}


def test_an_arm_that_takes_a_name_that_is_taken_is_refused() -> None:
    op = fg.Fusion("adaln", reference=reference, fused=kernel)
    with pytest.raises(UsageError, match="of different names"):
        benchmark(op, operands(), settings=QUICK, hot=True, arms={"copy": reference})


def test_our_kernels_give_way_to_their_host_builds_on_cpu_tensors() -> None:
    taken = benchmark(fg.kernels.modulate, operands(), settings=QUICK, hot=True)
    assert "modulate.host[2x16x64-float32-kernel]" == taken.rows[1].name


def test_a_benchmark_without_a_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a tensor"):
        benchmark(fg.Fusion("adaln", reference=reference, fused=kernel), (1.0,), settings=QUICK)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seconds": []}, "positive number of seconds"),
        ({"seconds": [0.0]}, "positive number"),
        ({"more": 1}, "wrong fields"),
    ],
)
def test_a_damaged_row_is_refused(taken: Benchmark, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TimedRow.from_json({**taken.rows[0].to_json(), **change})
