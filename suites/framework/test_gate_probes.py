"""Fresh operands: the live call's layout, other numbers, and more of them where the live call is small."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate.probes import Operands, live_copies, redrawn, taller
from fusiongate.gate.signatures import alignment

from .planted import chain, rows, same_bits


def special(args: tuple[Any, ...]) -> Operands:
    operands = redrawn(args, Random(1))
    operands.refill(Random(1))
    return operands


def is_special(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite() | (tensor == 0) | (tensor.abs() < torch.finfo(tensor.dtype).smallest_normal)


def test_live_copies_are_the_live_arguments() -> None:
    x, scale, shift = rows()
    copies = live_copies((x, scale, shift, 1e-6, None))

    assert all(map(same_bits, copies.args[:3], (x, scale, shift)))
    assert (1e-6, None) == copies.args[3:]
    assert [x.stride(), scale.stride(), shift.stride()] == [tensor.stride() for tensor in copies.tensors()]


def test_fresh_numbers_have_the_live_layout() -> None:
    args = rows()
    fresh = redrawn(args, Random(1))

    for live, tensor in zip(args, fresh.tensors(), strict=True):
        assert (live.shape, live.stride(), live.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert alignment(live) == alignment(tensor)
        assert not torch.equal(live, tensor)
        assert not is_special(tensor).any()


def test_integers_bools_and_numbers_stay_live() -> None:
    """They may be indices, masks and sizes."""
    index, mask, values = torch.tensor([3, 1]), torch.tensor([True, False]), torch.randn(2)
    fresh = special((index, mask, values, 7, "gelu", None))

    assert torch.equal(index, fresh.args[0])
    assert torch.equal(mask, fresh.args[1])
    assert not torch.equal(values, fresh.args[2])
    assert (7, "gelu", None) == fresh.args[3:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_special_numbers_meet_in_the_operands(dtype: torch.dtype) -> None:
    """A sign of zero is lost only where zeros meet, a subnormal only where nothing is added to it."""
    fresh = special(rows(2, 40, 64, dtype))
    x, _, shift = fresh.args
    negative_zeros = (x == 0) & x.signbit() & (shift == 0) & shift.signbit()
    tiny = torch.finfo(dtype).smallest_normal
    subnormal_alone = (x != 0) & (x.abs() < tiny) & (shift == 0)

    assert negative_zeros.any()
    assert subnormal_alone.any()
    assert x.isnan().any()
    assert x.isinf().any()
    assert 0.5 > is_special(x).float().mean()


def test_most_rows_stay_clean_for_a_norm() -> None:
    fresh = taller((torch.randn(1, 1, 64),), torch.empty(1, 1, 64), 4096, Random(1))
    assert fresh is not None

    assert 3072 < int(fresh.args[0].isfinite().all(-1).sum())


def test_a_taller_probe_has_more_in_the_direction_of_the_batch() -> None:
    args = rows(2, 5, 64)
    fresh = taller(args, chain(*args), 3, Random(1))
    assert fresh is not None

    assert [(6, 5, 64), (6, 1, 64), (6, 1, 64)] == [tuple(tensor.shape) for tensor in fresh.tensors()]
    assert [tensor.stride() for tensor in args] == [tensor.stride() for tensor in fresh.tensors()]
    assert [alignment(tensor) for tensor in args] == [alignment(tensor) for tensor in fresh.tensors()]
    assert 6 == fresh.batch(3)


def test_a_batch_of_one_gets_rows_that_differ() -> None:
    """One row that all entries share would hide a kernel that mixes entries up."""
    args = rows(1, 5, 64)
    fresh = taller(args, chain(*args), 8, Random(1))
    assert fresh is not None

    assert [(8, 5, 64), (8, 1, 64), (8, 1, 64)] == [tuple(tensor.shape) for tensor in fresh.tensors()]
    assert not torch.equal(fresh.args[1][0], fresh.args[1][1])


def test_every_entry_of_a_strided_batch_keeps_the_alignment() -> None:
    x = torch.zeros(1, 3, 40, dtype=torch.bfloat16)[:, :, 4:37]
    fresh = taller((x,), torch.empty(1, 3, 33), 8, Random(1))
    assert fresh is not None

    assert [alignment(x)] * 8 == [alignment(entry) for entry in fresh.args[0]]


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(8),),
        (torch.randn(4, 8), torch.tensor([1, 2])),
        (torch.randn(2, 3, 4).permute(2, 0, 1),),
        (torch.randn(8),) * 2,
    ],
    ids=["no-batch", "indices", "batch-not-outermost", "no-batch-in-two"],
)
def test_what_cannot_be_made_taller_is_left_as_it_is(args: tuple[Any, ...]) -> None:
    assert taller(args, args[0], 2, Random(1)) is None


def test_a_taller_probe_of_a_large_call_stays_bounded() -> None:
    x = torch.empty(1, 1, 1 << 20)
    fresh = taller((x,), x, 4096, Random(1))
    assert fresh is not None

    assert (32, 1, 1 << 20) == fresh.args[0].shape
    assert taller((x,), torch.empty(1, 1 << 25, device="meta"), 2, Random(1)) is None


def test_a_refill_brings_the_same_numbers_again_into_the_same_memory() -> None:
    operands = redrawn((*rows(1, 1, 8), torch.tensor([1])), Random(1))
    before = [tensor.data_ptr() for tensor in operands.tensors()]

    def filled(number: int) -> list[float]:
        operands.refill(Random(number), special=False)
        return operands.args[0].flatten().tolist()  # type: ignore[no-any-return]

    assert filled(1) == filled(1)
    assert 5 == len({tuple(filled(number)) for number in range(5)})
    assert before == [tensor.data_ptr() for tensor in operands.tensors()]
    assert torch.equal(torch.tensor([1]), operands.args[3])
    assert operands.fault(str) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_exponents_are_drawn_from_the_whole_range(dtype: torch.dtype) -> None:
    (x,) = special((torch.empty(1, 512, 128, dtype=dtype),)).args
    powers = torch.frexp(x[x.isfinite() & (x != 0)].double()).exponent
    least, most = (
        torch.frexp(torch.tensor(getattr(torch.finfo(dtype), end)).double()).exponent for end in ("tiny", "max")
    )

    met = set(powers.tolist())
    assert 0.99 < len(met & set(range(int(least), int(most) + 1))) / (int(most) - int(least) + 1)


def test_a_norm_s_row_may_be_of_any_scale() -> None:
    (x,) = special((torch.empty(1, 512, 128),)).args
    (rows_of_scale,) = torch.where((x.abs().amax(-1) < 1e-20)[0])

    assert len(rows_of_scale)
    assert x[0, rows_of_scale].count_nonzero(-1).min() > 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_and_products_lie_halfway(dtype: torch.dtype) -> None:
    x, scale, shift = (
        tensor.double() for tensor in special(tuple(torch.empty(1, 512, 128, dtype=dtype) for _ in "xyz")).args
    )

    for exact in (x * scale, x + shift):
        near = exact.to(dtype)
        error = (exact - near.double()).abs()
        step = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(near.double().abs())))
        assert (error == step / 2).sum() > 100


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
)
def test_numbers_of_few_bits_are_drawn_too(dtype: torch.dtype) -> None:
    operands = special((torch.zeros(64, 64, dtype=torch.uint8).view(dtype),))

    assert 32 < len(operands.args[0].view(torch.uint8).unique())
    assert operands.fault(str) is None


def test_a_fault_names_the_operand() -> None:
    operands = redrawn(rows(), Random(1))
    operands.args[1].zero_()

    assert ("input-changed", "the kernel changed its input `scale`") == operands.fault(
        ["x", "scale", "shift"].__getitem__
    )
