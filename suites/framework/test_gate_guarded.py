"""Operands between canaries, and outputs that begin wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusiongate.gate.guarded import GuardedOperand, LaunchGuard, span_of, storage_range
from fusiongate.gate.signatures import alignment

from .planted import same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool]


def guarded(tensor: Tensor) -> GuardedOperand:
    return GuardedOperand.of(tensor, tensor.shape, tensor.stride(), lambda _: span_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_has_values_layout_and_alignment(dtype: torch.dtype) -> None:
    for offset in (0, 1, 3, 8):
        tensor = (torch.randn(500) * 3).to(dtype)[offset : offset + 120].view(2, 60)[:, 5:40]

        guard = guarded(tensor)

        assert same_bits(guard.view, tensor)
        assert tensor.stride() == guard.view.stride()
        assert alignment(tensor) == alignment(guard.view)
        assert not guard.changed()
        assert not guard.overrun()


@settings(deadline=None)  # a machine may be busy
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), order=st.randoms(), expanded=st.booleans())
def test_a_copy_of_any_layout_is_the_same_tensor(shape: list[int], order: object, expanded: bool) -> None:
    tensor = torch.randn(*shape)
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)  # type: ignore[attr-defined]
    tensor = tensor.permute(dimensions)
    if expanded:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)

    guard = guarded(tensor)

    assert torch.equal(tensor, guard.view)
    assert tensor.stride() == guard.view.stride()


@pytest.mark.parametrize("index", [-1, 24, -64, 80])
def test_a_write_outside_of_the_operand_is_an_overrun(index: int) -> None:
    guard = guarded(torch.zeros(24))
    offset = guard.view.storage_offset()
    guard.view.as_strided((1,), (1,), offset + index).fill_(1.0)

    assert guard.overrun()
    assert not guard.changed()


@pytest.mark.parametrize("index", [0, 7, 23])
def test_a_write_into_the_operand_is_a_change(index: int) -> None:
    guard = guarded(torch.zeros(24))
    guard.view[index] = -0.0

    assert guard.changed()
    assert not guard.overrun()


def test_a_write_into_a_gap_of_the_operand_is_a_change() -> None:
    """Between strided rows lies other live data."""
    guard = guarded(torch.zeros(4, 6, 8)[:, 0])
    guard.memory[10] = 1.0

    assert guard.changed()


def test_nan_in_an_operand_is_no_change() -> None:
    guard = guarded(torch.full((4,), float("nan")))

    assert not guard.changed()


def test_the_live_tensor_is_never_touched() -> None:
    live = torch.randn(3, 4)
    before = live.clone()
    guard = guarded(live)
    guard.view.zero_()

    assert torch.equal(before, live)


@pytest.mark.parametrize(
    "allocate",
    [
        torch.empty_like,
        lambda x: torch.empty(x.shape, dtype=x.dtype),
        lambda x: x.new_empty(x.shape),
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype),
        lambda x: x.new_empty_strided(x.shape, x.stride()),
    ],
    ids=["empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided"],
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_an_output_begins_wrong_in_every_element(allocate: object, dtype: torch.dtype) -> None:
    expected = (torch.randn(5, 7) * 3).to(dtype)
    poison = LaunchGuard((expected,))
    with poison:
        actual = allocate(expected)  # type: ignore[operator]

    held = actual.view(torch.uint8) if dtype != torch.bool else actual.view(torch.int8)
    assert not torch.any(
        held.reshape(35, -1).eq(expected.view(held.dtype).reshape(35, -1)).all(1),
    )
    told = poison.poison(actual, expected)
    if dtype == torch.complex64:
        assert told is None
    elif dtype != torch.bool:
        assert told is not None
        assert same_bits(told, actual)


@pytest.mark.parametrize("pattern", [0xFFFF, 0x7FFF, 0x7FC0], ids=hex)
def test_where_nan_is_expected_an_output_begins_as_neither_nan_nor_zero(pattern: int) -> None:
    """A kernel that swallows NaN writes zero there; that must not pass for memory that it did not write."""
    expected = torch.tensor([pattern - (1 << 16) if pattern >> 15 else pattern], dtype=torch.int16).view(torch.bfloat16)
    with LaunchGuard((expected,)):
        actual = torch.empty_like(expected)

    assert actual.isfinite().all()
    assert actual.view(torch.int16).ne(0).all()


def test_memory_of_another_shape_begins_as_nan() -> None:
    with LaunchGuard((torch.zeros(4, 4),)):
        scratch = torch.empty(3, 2)

    assert scratch.isnan().all()


def test_an_output_in_memory_of_another_shape_is_known_to_have_held_ones() -> None:
    """Until that memory is handed out again, as an output of the expected shape."""
    expected = torch.randn(4, 4)
    poison = LaunchGuard((expected,))
    with poison:
        inside = torch.empty(100)[:16].view(4, 4)
        flat = torch.empty(16).view(4, 4)
        own = torch.empty(4, 4)
        larger = torch.empty(100)
        poison._poison(larger.resize_(4, 4))

    for output in (inside, flat, own, larger):
        told = poison.poison(output, expected)
        assert told is not None
        assert same_bits(told, output)
    assert poison.poison(None, expected) is not None
    assert LaunchGuard((expected,)).poison(expected, expected.to_sparse()) is None


def test_empty_allocations_are_left_alone() -> None:
    with LaunchGuard((torch.zeros(4),)):
        assert 0 == torch.empty(0).numel()


def test_a_storage_range_covers_views() -> None:
    tensor = torch.zeros(10)
    begin, end = storage_range(tensor[4:])

    assert (tensor.data_ptr(), tensor.data_ptr() + 40) == (begin, end)
