"""Bits: views as integers, equality and distance, for every dtype that torch has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusiongate.comparison.bits import as_real, ulp_distance, unequal_bits

PACKED = getattr(torch, "float4_e2m1fn_x2", None)
EXPONENTS = getattr(torch, "float8_e8m0fnu", None)


def neighbours(values: Tensor) -> list[int]:
    return ulp_distance(values[:-1], values[1:]).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_zeros_are_one_value_and_neighbours_one_apart(dtype: torch.dtype) -> None:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    up = torch.tensor([0, 1, 2, 3], dtype=integer).view(dtype)
    down = torch.tensor([0, 1, 2, 3], dtype=integer) + torch.iinfo(integer).min
    assert [1, 1, 1] == neighbours(up)
    assert [1, 1, 1] == neighbours(down.view(dtype))
    assert [0, 2, 4, 6] == ulp_distance(up, down.view(dtype)).tolist()


@pytest.mark.skipif(EXPONENTS is None, reason="this torch has no float8_e8m0fnu")
def test_a_float_without_a_sign_is_ordered_by_its_exponent() -> None:
    assert EXPONENTS is not None
    values = torch.tensor([0, 1, 127, 128, 254], dtype=torch.uint8).view(EXPONENTS)
    assert [1, 126, 1, 126] == neighbours(values)


def test_unsigned_integers_are_ordered_through_all_of_their_range() -> None:
    values = torch.tensor([0, 1, 2**63 - 1, -(2**63), -1]).view(torch.uint64)
    assert [1, 2**63 - 2, 1, 2**63 - 1] == neighbours(values)


def test_a_distance_that_no_int64_holds_saturates() -> None:
    ends = torch.tensor([-(2**63), 2**63 - 1])
    assert [2**63 - 1] == neighbours(ends)


@pytest.mark.skipif(PACKED is None, reason="this torch has no float4_e2m1fn_x2")
def test_packed_floats_are_compared_as_bytes() -> None:
    assert PACKED is not None
    values = torch.tensor([0x12, 0x34], dtype=torch.uint8)
    assert torch.equal(values, as_real(values.view(PACKED)))


def test_complex_numbers_are_compared_by_their_parts() -> None:
    assert torch.equal(torch.tensor([[1.0, -2.0]]), as_real(torch.tensor([1 + 2j]).conj()))


def test_nans_of_any_payload_are_equal_and_zeros_of_two_signs_are_not() -> None:
    one = torch.tensor([0x7FC0, 0x7FC0, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([0x7FC1, 0x3F80, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert [False, True, True] == unequal_bits(one, other).tolist()
