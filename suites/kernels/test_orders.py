"""The emulated orders of summation, each step held against exact arithmetic or against a sum that tells its order."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusiongate.kernels.orders import composite_rstd, fused_multiply_add, lane_grid, plus_square, row_kernel_rstd

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> Tensor:
    """The fp32 number nearest to an exact one, ties to even."""
    guess = torch.tensor(float(exact), dtype=torch.float64).float()
    inf = torch.tensor(float("inf"))
    candidates = [guess, torch.nextafter(guess, inf), torch.nextafter(guess, -inf)]
    finite = [candidate for candidate in candidates if candidate.isfinite()]

    def distance(candidate: Tensor) -> tuple[Fraction, int]:
        odd = int(candidate.view(torch.int32)) & 1
        return abs(Fraction(float(candidate)) - exact), odd

    return min(finite, key=distance)


@settings(deadline=None)  # a machine may be busy
@given(FLOAT32, FLOAT32, FLOAT32)
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) >= Fraction(2) ** 127:
        return

    actual = fused_multiply_add(*(torch.tensor(value, dtype=torch.float32) for value in (a, b, c)))

    assert float(rounded(exact)) == float(actual)


def test_a_fused_multiply_add_differs_from_two_roundings_where_it_should() -> None:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24: rounding the product first leaves nothing of it."""
    a, c = torch.tensor(1 + 2**-12), torch.tensor(-(1 + 2**-11))

    assert (2**-24, 0.0) == (float(fused_multiply_add(a, a, c)), float(a * a + c))


@settings(deadline=None)  # a machine may be busy
@given(st.floats(1.0, 2.0, width=32), st.floats(1.0, 2.0, width=32), st.integers(-80, 80), st.booleans())
def test_a_fused_multiply_add_survives_the_second_rounding(a: float, b: float, shift: int, negative: bool) -> None:
    """By way of fp64 a sum is rounded twice; rounding to odd first makes that harmless."""
    c = (-1.0 if negative else 1.0) * 2.0**shift
    actual = fused_multiply_add(*(torch.tensor(value, dtype=torch.float32) for value in (a, b, c)))

    assert float(rounded(Fraction(a) * Fraction(b) + Fraction(c))) == float(actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_square_of_16_bits_is_added_with_one_rounding(dtype: torch.dtype) -> None:
    """Each to addends of its own magnitude, and of any other."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    generator = torch.Generator().manual_seed(0)
    for distance in (None, *range(-60, 60, 4)):
        if distance is None:
            addend = torch.randint(0, 0x7F80_0000, values.shape, generator=generator, dtype=torch.int32).view(
                torch.float32
            )
        else:
            addend = (values.square() * 2.0**distance * (1 + torch.rand(values.shape, generator=generator))).clamp(
                max=3e38
            )

        actual, expected = plus_square(values, addend), fused_multiply_add(values, values, addend)

        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("columns", [4, 64, 132, 512, 2240, 4096, 4100, 8192])
@pytest.mark.parametrize("rstd", [row_kernel_rstd, composite_rstd])
def test_a_statistic_is_right_to_a_few_ulps(rstd: object, columns: int) -> None:
    if rstd is composite_rstd and columns < 128:
        return
    x = torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
    exact = 1 / (x.double().pow(2).mean(-1) + 1e-6).sqrt()

    actual = rstd(x, 1e-6)  # type: ignore[operator]

    assert (50,) == actual.shape
    assert float(((actual.double() - exact) / exact).abs().max()) < 4 * 2**-23


@pytest.mark.parametrize("rstd", [row_kernel_rstd, composite_rstd])
def test_no_rows_have_no_statistics(rstd: object) -> None:
    assert (0,) == rstd(torch.empty(0, 5, 512), 1e-6).shape  # type: ignore[operator]


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("rstd", [row_kernel_rstd, composite_rstd])
def test_rows_of_zeros_and_subnormals_have_the_statistic_of_their_mean_square(rstd: object, eps: float) -> None:
    x = torch.zeros(3, 128)
    x[1] = 1e-39
    x[2] = 1e-22

    actual = rstd(x, eps)  # type: ignore[operator]

    expected = [1e3, 1e3, 1e3] if eps else [float("inf"), float("inf"), 1e22]
    # The square of 1e-22 is a subnormal number of few bits.
    assert expected == pytest.approx(actual.tolist(), rel=2e-2)


def test_the_row_kernel_s_order_is_its_own() -> None:
    """Among thousands of rows some differ from any other order of the same sum."""
    x = torch.randn(4000, 512, generator=torch.Generator().manual_seed(0))
    sequential = torch.rsqrt(x.pow(2).cumsum(-1)[:, -1] / 512 + 1e-6)

    assert 0.01 < float((row_kernel_rstd(x, 1e-6) != sequential).float().mean()) < 0.95
    assert not torch.equal(row_kernel_rstd(x, 1e-6), composite_rstd(x, 1e-6))


@pytest.mark.parametrize(
    "rows, columns, grid",
    [
        (1, 128, (32, 1)),
        (1, 4096, (512, 1)),
        (3, 1024, (256, 1)),
        (100, 4096, (32, 1)),
        (14592, 4096, (32, 1)),
        (40, 32768, (32, 16)),
        (7, 4096, (128, 1)),
    ],
)
def test_the_grid_follows_rows_and_columns(rows: int, columns: int, grid: tuple[int, int]) -> None:
    assert grid == lane_grid(rows, columns)


@settings(deadline=None)  # a machine may be busy
@given(st.integers(1, 1 << 20), st.integers(32, 8192).map(lambda n: 4 * n))
def test_a_grid_is_one_that_the_kernel_has(rows: int, columns: int) -> None:
    width, height = lane_grid(rows, columns)

    assert (width, height) in {
        *((32, 1), (64, 1), (128, 1), (256, 1), (512, 1)),
        *((32, 16), (64, 8), (128, 4), (256, 2)),
    }


def test_a_row_s_statistic_does_not_depend_on_what_stands_beside_it() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))

    assert torch.equal(row_kernel_rstd(x, 1e-6)[5:9], row_kernel_rstd(x[5:9], 1e-6))
