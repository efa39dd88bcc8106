"""Verdicts look at metadata first and at bits then, and say where and by how much two tensors differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.comparison import mismatch_stats, verdicts
from fusiongate.comparison.bits import normalised_strides, slabs, ulp_at, ulp_distance
from fusiongate.comparison.contracts import Contract, Exact, Ulp
from fusiongate.comparison.verdicts import Verdict, bits_differ
from fusiongate.diagnosis.hints import compare
from fusiongate.errors import UsageError

from .allocations import Allocations

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
]
OTHERS = [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stepped(tensor: Tensor, ulps: int) -> Tensor:
    """A floating tensor moved away from zero by some representable values."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return (tensor.view(width) + ulps).view(tensor.dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS], ids=str)
def test_equal_bits_are_equal_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = (filled(3, 5) * 10).abs().to(dtype)

    verdict = compare(tensor.clone(), tensor)

    assert (verdict.ok, verdict.reason, verdict.mismatched, verdict.first_index) == (True, "equal", 0, None)
    assert not bits_differ(tensor.clone(), tensor)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS], ids=str)
def test_one_other_element_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    expected = torch.zeros(3, 5, dtype=torch.uint8).to(dtype)
    actual = expected.clone()
    actual[1, 2] = 1

    verdict = compare(actual, expected)

    assert (verdict.ok, verdict.reason, verdict.mismatched, verdict.first_index) == (False, "bits", 1, (1, 2))
    assert bits_differ(actual, expected)


def test_equal_tensors_cost_one_reduction_and_one_wait() -> None:
    tensor = filled(64, 64)

    with Allocations() as watched:
        compare(tensor.clone(), tensor)

    assert watched.operators.count("_local_scalar_dense") == 1
    assert watched.operators.count("any") == 1
    assert "isnan" not in watched.operators


@pytest.mark.parametrize("contract", [Exact(), Ulp(2)])
def test_bits_differ_never_waits_for_the_device(contract: Contract) -> None:
    tensor = filled(64, 64)

    with Allocations() as watched:
        differ = bits_differ(stepped(tensor, 1), tensor, contract)

    assert differ.shape == ()
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero"} & set(watched.operators)


@pytest.mark.parametrize(
    ("actual", "expected", "reason", "words"),
    [
        (filled(2).bfloat16(), filled(2), "dtype", "dtype differs: got bfloat16, expected float32"),
        (filled(2, 1), filled(2), "shape", "shape differs: got (2, 1), expected (2,)"),
        (filled(2).to("meta"), filled(2), "device", "device differs: got meta, expected cpu"),
        (filled(2, 3).t().contiguous().t(), filled(2, 3), "strides", "strides differs: got (1, 2), expected (3, 1)"),
        (
            filled(2, 2).to_sparse(),
            filled(2, 2),
            "layout",
            "layout differs: got a tensor of layout sparse_coo, expected",
        ),
        (None, filled(2), "type", "type differs: got None, expected a tensor"),
        ([1.0], filled(2), "type", "type differs: got an object of type list, expected a tensor"),
    ],
)
def test_metadata_are_told_apart(actual: Any, expected: Tensor, reason: str, words: str) -> None:
    verdict = compare(actual, expected)

    assert (verdict.ok, verdict.reason, verdict.mismatched, verdict.total) == (False, reason, 0, expected.numel())
    assert str(verdict).startswith(words)
    assert bits_differ(actual, expected)


def test_dtype_comes_before_values_and_shape() -> None:
    """Two tensors of equal values, one promoted: torch.equal calls them the same (pytorch#149222)."""
    half = torch.tensor([0.0, 0.5], dtype=torch.bfloat16)

    assert torch.equal(half.float(), half.float())
    assert compare(half, half.float()).reason == "dtype"
    assert compare(half[:1], half.float()).reason == "dtype"


def test_strides_of_size_one_and_of_empty_dimensions_do_not_count() -> None:
    odd = torch.zeros(100).as_strided((3, 1, 4), (4, 77, 1))

    assert compare(odd, torch.zeros(3, 1, 4)).ok
    assert compare(torch.zeros(9).as_strided((0, 4), (1, 2)), torch.zeros(0, 4)).ok


@pytest.mark.parametrize(
    ("shape", "strides", "normal"),
    [
        ((), (), ()),
        ((3, 1, 4), (4, 77, 1), (4, 0, 1)),
        ((1, 1), (5, 6), (0, 0)),
        ((2, 0, 4), (9, 8, 7), (0, 0, 0)),
        ((2, 3), (0, 1), (0, 1)),
    ],
)
def test_normalised_strides_are_those_that_decide_where_elements_lie(
    shape: tuple[int, ...], strides: tuple[int, ...], normal: tuple[int, ...]
) -> None:
    assert normal == normalised_strides(shape, strides)


@pytest.mark.parametrize("contract", [Exact(), Ulp(0)])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_nan_equals_nan_by_position_whatever_its_bits(dtype: torch.dtype, contract: Contract) -> None:
    expected = torch.tensor([1.0, torch.nan, 2.0]).to(dtype)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    negative = (expected.view(width) ^ torch.iinfo(width).min).view(dtype)
    actual = torch.where(expected.isnan(), negative, expected)

    assert compare(actual, expected, contract).ok
    assert not bits_differ(actual, expected, contract)


@pytest.mark.parametrize("contract", [Exact(), Ulp(1000)])
@pytest.mark.parametrize("side", ["actual", "expected"])
def test_nan_on_one_side_is_a_mismatch(side: str, contract: Contract) -> None:
    number, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    actual, expected = (nan, number) if side == "actual" else (number, nan)

    verdict = compare(actual, expected, contract)

    assert (verdict.reason, verdict.first_index, verdict.ulp_histogram) == ("nan", (1,), {"nan": 1})
    assert bits_differ(actual, expected, contract)


def test_zeros_of_both_signs_differ_in_bits_but_not_in_ulps() -> None:
    negative, positive = torch.tensor([-0.0]), torch.tensor([0.0])

    verdict = compare(positive, negative)

    assert (verdict.reason, verdict.ulp_histogram) == ("bits", {"0": 1})
    assert compare(positive, negative, Ulp(0)).reason == "within"


def test_a_tensor_is_compared_with_itself_by_its_bits() -> None:
    """torch.equal answers at once for the same storage, so a NaN there is equal to a number in no other way."""
    tensor = torch.tensor([1.0, torch.nan])

    assert compare(tensor, tensor).ok
    assert not compare(tensor.expand(3, 2), tensor.flip(0).expand(3, 2)).ok


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "0-dim"])
def test_strided_tensors_are_compared_where_they_lie(layout: str) -> None:
    base = filled(4, 6, 8, dtype=torch.bfloat16)
    wrong = base.clone()
    wrong[0, 0, 0] += 1
    cuts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.transpose(0, 2),
        "sliced": lambda t: t[::2, 1:, ::3],
        "expanded": lambda t: t[:, :1].expand(4, 6, 8),
        "0-dim": lambda t: t[0, 0, 0],
    }
    cut = cuts[layout]

    assert compare(cut(base), cut(base.clone())).ok
    assert compare(cut(wrong), cut(wrong.clone())).ok
    assert compare(cut(wrong), cut(base)).ok == (layout == "sliced")


def test_a_verdict_counts_all_places_and_measures_them() -> None:
    expected = filled(7, 11, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[1, 4] = stepped(expected[1, 4], 1)
    actual[2, 0] = stepped(expected[2, 0], 3)
    actual[6, 10] = stepped(expected[6, 10], 200)
    actual[3, 3] = torch.inf

    verdict = compare(actual, expected)

    assert (verdict.mismatched, verdict.total, verdict.first_index) == (4, 77, (1, 4))
    assert verdict.ulp_histogram == {"inf": 1, "1": 1, "3-4": 1, "17-256": 1}


@pytest.mark.parametrize("limit", [1, 2, 5, 11, 30, 1000])
def test_slabs_change_no_verdict(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    expected = filled(3, 7, 4)
    actual = expected.clone()
    actual[1, 2, 3], actual[2, 6, 0], actual[2, 6, 3] = torch.nan, 5.0, stepped(expected[2, 6, 3], 2)
    whole = (
        compare(actual, expected),
        compare(actual, expected, Ulp(1)),
        compare(stepped(expected, 1), expected, Ulp(1)),
    )

    for module in (verdicts, mismatch_stats):
        monkeypatch.setattr(module, "SLAB", limit)
    monkeypatch.setattr(verdicts, "_BITS_SLAB", limit)

    assert (
        compare(actual, expected),
        compare(actual, expected, Ulp(1)),
        compare(stepped(expected, 1), expected, Ulp(1)),
    ) == whole
    assert bits_differ(actual, expected)
    assert bits_differ(actual, expected, Ulp(1))
    assert not bits_differ(stepped(expected, 1), expected, Ulp(1))


@pytest.mark.parametrize("limit", [1, 3, 4, 12, 13, 1000])
def test_slabs_cover_a_shape_once_and_in_order(limit: int) -> None:
    tensor = torch.arange(60).reshape(3, 5, 4)

    pieces = [(start, tensor[index].flatten()) for start, index in slabs(tensor.shape, limit)]

    assert torch.equal(torch.cat([piece for _, piece in pieces]), tensor.flatten())
    assert all(piece[0] == start and piece.numel() <= limit for start, piece in pieces)


def test_temporaries_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verdicts, mismatch_stats):
        monkeypatch.setattr(module, "SLAB", 1 << 10)
    monkeypatch.setattr(verdicts, "_BITS_SLAB", 1 << 13)
    expected = filled(1 << 9, 1 << 9)
    actual = stepped(expected, 5)

    with Allocations() as watched:
        verdict = compare(actual, expected, Ulp(2))
        bits_differ(actual, expected, Ulp(2))

    assert verdict.mismatched == 1 << 18
    assert watched.largest <= 1 << 13


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_distances_count_representable_values(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    pairs = [
        (1.0, 1.0 + limits.eps, 1),
        (1.0, 1.0 - limits.eps / 2, 1),
        (0.0, -0.0, 0),
        (0.0, limits.smallest_normal * limits.eps, 1),
        (-limits.smallest_normal * limits.eps, limits.smallest_normal * limits.eps, 2),
        (limits.max, math.inf, 1),
    ]
    actual, expected = (torch.tensor([p[i] for p in pairs], dtype=torch.float64).to(dtype) for i in (0, 1))

    assert ulp_distance(actual, expected).tolist() == [p[2] for p in pairs]
    assert ulp_distance(expected, actual).tolist() == [p[2] for p in pairs]


def test_distances_saturate_where_int64_ends() -> None:
    assert ulp_distance(torch.tensor(-math.inf).double(), torch.tensor(math.inf).double()).item() == 2**63 - 1
    assert ulp_distance(torch.tensor(-(2**63)), torch.tensor(2**63 - 1)).item() == 2**63 - 1
    assert ulp_distance(torch.tensor(2**62), torch.tensor(2**62 + 1)).item() == 1
    assert ulp_distance(torch.tensor(0, dtype=torch.uint64), torch.tensor(3, dtype=torch.uint64)).item() == 3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_ulp_is_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, limits.smallest_normal * limits.eps, limits.smallest_normal, 0.75, 1.0, 1.5, 4.0, limits.max / 2],
        dtype=torch.float64,
    ).to(dtype)

    assert torch.equal(ulp_at(values, dtype), stepped(values, 1).double() - values.double())
    assert ulp_at(torch.tensor(math.inf), dtype).item() == ulp_at(torch.tensor(limits.max), dtype).item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_contract_holds_up_to_its_ulps_and_no_further(dtype: torch.dtype) -> None:
    expected = torch.tensor([1.5, -3.25, 0.0, 7e-5, 900.0], dtype=dtype)

    for n in (1, 2, 5):
        verdict = compare(stepped(expected, n), expected, Ulp(n))
        assert (verdict.ok, verdict.reason, verdict.max_ulp) == (True, "within", n)
        assert not bits_differ(stepped(expected, n), expected, Ulp(n))

        verdict = compare(stepped(expected, n), expected, Ulp(n - 0.5))
        assert (verdict.ok, verdict.reason, verdict.mismatched) == (False, "ulp", 5)
        assert bits_differ(stepped(expected, n), expected, Ulp(n - 0.5))


@pytest.mark.parametrize("pair", [(math.inf, -math.inf), (math.inf, 3e38), (3e38, math.inf)])
def test_infinities_are_within_no_distance_of_anything_else(pair: tuple[float, float]) -> None:
    actual, expected = torch.tensor([pair[0]]), torch.tensor([pair[1]])

    verdict = compare(actual, expected, Ulp(1e30))

    assert (verdict.ok, verdict.max_ulp, verdict.ulp_histogram) == (False, math.inf, {"inf": 1})
    assert compare(expected, expected.clone(), Ulp(0)).ok


def test_integers_have_no_ulp_and_must_be_equal() -> None:
    assert not compare(torch.tensor([3]), torch.tensor([4]), Ulp(5)).ok
    assert bits_differ(torch.tensor([3]), torch.tensor([4]), Ulp(5))
    assert compare(torch.tensor([True]), torch.tensor([True]), Ulp(5)).ok


def test_a_scale_says_at_which_magnitude_ulps_are_meant() -> None:
    """After cancellation the output is small, and the ULP of what was cancelled is what the kernel answers for."""
    x, shift = torch.tensor([1024.0]), torch.tensor([-1023.0])
    actual = torch.tensor([1.0 + 2 * 2**-13])

    def largest(x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        return torch.maximum(x.abs(), torch.maximum(shift.abs(), out.abs()))

    assert not compare(actual, x + shift, Ulp(2), args=(x, shift)).ok
    assert compare(actual, x + shift, Ulp(2, scale=largest), args=(x, shift)).max_ulp == 2
    assert not compare(actual, x + shift, Ulp(1.9, scale=largest), args=(x, shift)).ok
    assert not bits_differ(actual, x + shift, Ulp(2, scale=largest), (x, shift))


def test_a_magnitude_that_is_no_number_measures_nothing() -> None:
    expected = torch.tensor([1.0, 1.0])
    contract = Ulp(1, scale=lambda out: torch.full_like(out, torch.nan))

    assert compare(stepped(expected, 1), expected, contract).ok
    assert not compare(stepped(expected, 2), expected, contract).ok


def test_a_scale_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"returned shape \(3,\), which does not broadcast to the output's shape \(2,\)"
    ):
        compare(torch.ones(2), torch.zeros(2), Ulp(1, scale=lambda out: torch.ones(3)))
    with pytest.raises(UsageError, match="the scale returned an object of type float, not a tensor of magnitudes"):
        compare(torch.ones(2), torch.zeros(2), Ulp(1, scale=lambda out: 1.0))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("n", [-1, math.inf, math.nan, True, "2", None])
def test_a_number_of_ulps_is_finite_and_not_negative(n: Any) -> None:
    with pytest.raises(UsageError, match="n is a finite number of ULPs, 0 or more"):
        Ulp(n)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(UsageError, match="scale is a callable"):
        Ulp(1, scale=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^compare: expected is a dense tensor, not an object of type float$"):
        compare(filled(2), 1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^compare: contract is fusiongate.Exact\(\) or fusiongate.Ulp\(n\), not 2$"):
        compare(filled(2), filled(2), 2)  # type: ignore[arg-type]


def test_a_verdict_is_true_when_the_contract_is_kept() -> None:
    """Otherwise `assert compare(a, b)` could never fail."""
    assert bool(compare(filled(2), filled(2))) is True
    assert bool(compare(filled(2), filled(2, seed=1))) is False


def test_the_whole_story_of_a_mismatch() -> None:
    expected = torch.full((2, 3), 1.984375, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[1, 1] = 1.9921875
    verdict = compare(actual, expected)

    assert str(verdict) == (
        "1 of 6 elements (16.7 %) are not equal bit for bit (reason: bits), at most 1 ULP apart\n"
        "first at (1, 1): got 1.9921875 (0x3fff), expected 1.984375 (0x3ffe)\n"
        "elements by ULPs: 1: 1"
    )


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (compare(filled(2), filled(2)), "equal bit for bit: 2 elements"),
        (
            compare(torch.tensor([1.0 + 2**-23]), torch.tensor([1.0]), Ulp(2)),
            "within 2 ULP at |expected|: 1 elements, at most 1 ULP apart",
        ),
    ],
)
def test_the_whole_story_of_an_agreement(verdict: Verdict, text: str) -> None:
    assert str(verdict) == text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: there is no GPU")
@pytest.mark.parametrize("contract", [Exact(), Ulp(1), Ulp(1, scale=torch.abs)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gpu_gives_the_same_verdict_and_recheck_never_waits(dtype: torch.dtype, contract: Contract) -> None:
    expected = filled(7, 11, 64, dtype=dtype)
    actual = expected.clone()
    actual[1, 4, :9] = stepped(expected[1, 4, :9], 3)
    moved = actual.cuda(), expected.cuda()

    torch.cuda.set_sync_debug_mode("error")
    try:
        differ = bits_differ(*moved, contract, ())
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert differ
    on_cpu, on_gpu = compare(actual, expected, contract), compare(*moved, contract)
    assert (on_gpu.first_index, on_gpu.ulp_histogram) == (on_cpu.first_index, on_cpu.ulp_histogram)
