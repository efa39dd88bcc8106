"""Every kernel through the matrix, on the selected device: a GPU, or the host builds.

A kernel for each of the three sources goes through all of it, its siblings through each axis alone.
"""

from __future__ import annotations

import dataclasses

import pytest

import fusiongate as fg

NORM = {**fg.ADALN, "eps": 1e-6}
WEIGHTED = {**NORM, "weight": "D"}

NORM_SIZES = [
    # The base is small: a norm's first sight compares 4,096 rows, whatever the size.
    {"B": 2, "S": 17, "D": 128},
    {"B": 2, "S": 33, "D": 512},
    # LTX-2: video tokens at its width, and audio at its own.
    {"B": 2, "S": 517, "D": 4096},
    {"B": 1, "S": 126, "D": 2048},
    # Odd tails, in both directions, and rows of every length of grid.
    {"B": 2, "S": 1, "D": 4096},
    {"B": 2, "S": 127, "D": 132},
    {"B": 3, "S": 129, "D": 516},
    {"B": 1, "S": 33, "D": 2240},
    {"B": 1, "S": 7, "D": 4100},
    {"B": 1, "S": 20, "D": 8192},
    {"B": 1, "S": 65_600, "D": 128},
    {"B": 65_600, "S": 1, "D": 128},
    # 2**31 + 4096 elements: an offset of 32 bits has wrapped.
    {"B": 1, "S": 524_289, "D": 4096},
]

OTHER_ORDERS = [{"B": 2, "S": 5, "D": 130}, {"B": 2, "S": 5, "D": 64}, {"B": 1, "S": 2, "D": 65_536}]
"""Rows that ATen sums in another order, or that are longer than its order is known for: each kernel declines some."""

FEW = [{"B": 2, "S": 17, "D": 128}, {"B": 1, "S": 126, "D": 2048}]


def variant(op: fg.Fusion, name: str) -> fg.Subject:
    """A fusion under a name of its own, for cells on other operands than its namesake's."""
    return dataclasses.replace(fg.Subject.of(op), name=f"{op.name}-{name}")


@pytest.mark.fusion_matrix(fg.kernels.modulate, inputs=fg.ADALN)
def test_modulate(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(fg.kernels.modulate_fp32, pairs=False)
def test_modulate_fp32(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(fg.kernels.rms_norm_modulate, inputs=NORM, sizes=NORM_SIZES)
def test_rms_norm_modulate(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(variant(fg.kernels.rms_norm_modulate, "weighted"), inputs=WEIGHTED, sizes=FEW, pairs=False)
def test_rms_norm_modulate_weighted(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(fg.kernels.composite_rms_norm_modulate, inputs=NORM, sizes=NORM_SIZES)
def test_composite_rms_norm_modulate(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(
    variant(fg.kernels.composite_rms_norm_modulate, "weighted"), inputs=WEIGHTED, sizes=FEW, pairs=False
)
def test_composite_rms_norm_modulate_weighted(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(
    variant(fg.kernels.rms_norm_modulate, "other-orders"), inputs=NORM, sizes=OTHER_ORDERS, must_fuse=[], pairs=False
)
def test_rms_norm_modulate_in_other_orders(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(
    variant(fg.kernels.composite_rms_norm_modulate, "other-orders"),
    inputs=NORM,
    sizes=OTHER_ORDERS,
    must_fuse=[],
    pairs=False,
)
def test_composite_rms_norm_modulate_in_other_orders(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()


@pytest.mark.fusion_matrix(
    fg.kernels.rms_norm_modulate_high, inputs=NORM, sizes=FEW, may_decline={"fp32": "dtype"}, pairs=False
)
def test_rms_norm_modulate_high(fusion_case: fg.FusionCase) -> None:
    fusion_case.check()
