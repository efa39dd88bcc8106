"""The predicates and the native checks say the same, and what is fused has the reference's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusiongate as fg
from fusiongate.kernels.predicates import row_bucket

from .operands import DTYPES, EPS, HOSTS, operands, same_bits

EXACT = [op for op in HOSTS if isinstance(op.contract, fg.Exact)]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an operand lies in memory."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""
    order: tuple[int, ...]
    """Its dimensions from the outermost to the innermost in memory."""
    padding: int
    """Elements left out after each line of the innermost dimension."""
    offset: int
    """Elements before the first."""
    expanded: tuple[int, ...] = ()
    """Dimensions of stride 0."""

    def make(self, seed: int) -> Tensor:
        """A tensor that lies so, with normal numbers."""
        strides, step = [0] * len(self.shape), 1
        for place, dimension in enumerate(reversed(self.order)):
            if dimension not in self.expanded:
                strides[dimension] = step
                step *= self.shape[dimension]
            if place == 0:
                step += self.padding
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        memory = torch.randn(length + self.offset, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return memory.as_strided(self.shape, strides, self.offset)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, *, usual: bool) -> Layout:
    if usual or draw(st.booleans()):
        return Layout(shape, dtype, tuple(range(len(shape))), 0, draw(st.sampled_from([0, 0, 0, 4, 8])))
    order = tuple(draw(st.permutations(range(len(shape)))))
    expanded = tuple(draw(st.sets(st.integers(0, len(shape) - 1), max_size=1)))
    padding, offset = draw(st.sampled_from([0, 1, 4, 12])), draw(st.integers(0, 9))
    return Layout(shape, dtype, order, padding, offset, expanded)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of which most are nearly what a kernel takes."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    columns = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 20, 128, 132, 256]))
    dtype = draw(st.sampled_from(DTYPES))
    kinds = [dtype] * 6 + [torch.float32, torch.float16, torch.float64]
    x_shape = draw(st.sampled_from([(batch, tokens, columns)] * 8 + [(tokens, columns), (batch, 1, tokens, columns)]))
    x = draw(layouts(x_shape, draw(st.sampled_from(kinds)), usual=draw(st.booleans())))
    rows = []
    for _ in range(2):
        shape = draw(
            st.sampled_from(
                [(batch, 1, columns)] * 6 + [(1, 1, columns), (batch, tokens, columns), (batch, columns), (columns,)]
            )
        )
        if draw(st.integers(0, 19)) == 0:
            shape = (*shape[:-1], 1)
        rows.append(draw(layouts(shape, draw(st.sampled_from(kinds)), usual=draw(st.booleans()))))
    return x.make(0), rows[0].make(1), rows[1].make(2)


@pytest.mark.parametrize("op", EXACT, ids=lambda op: op.name)
@settings(max_examples=300, deadline=None)
@given(calls())
def test_a_kernel_takes_exactly_what_its_predicate_does_not_decline(op: fg.Fusion, rows: tuple[Tensor, ...]) -> None:
    """And what it takes it computes as the reference does."""
    args: tuple[Any, ...] = (*rows, EPS) if "norm" in op.name else rows
    if op.declines(*args) is None:
        assert same_bits(op.fused(*args), op.reference(*args))
    else:
        # By the native checks, or before them for want of a dimension; nothing is launched then.
        with pytest.raises((RuntimeError, IndexError), match=r"Check failed|out of range"):
            op.fused(*args)


@settings(max_examples=100, deadline=None)
@given(calls())
def test_a_gated_call_is_eager_s_whatever_the_layout(rows: tuple[Tensor, ...]) -> None:
    op = fg.kernels.modulate.host
    assert op is not None
    try:
        expected = op.reference(*rows)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            op(*rows)
        return
    with op.isolated() as fresh:
        for _ in range(2):
            verdict = fg.compare(fresh(*rows), expected)
            assert verdict, verdict


@pytest.mark.parametrize("eps", [None, True, "1e-6"], ids=repr)
@pytest.mark.parametrize("op", [op for op in HOSTS if "norm" in op.name], ids=lambda op: op.name)
def test_eps_has_to_be_a_number(op: fg.Fusion, eps: Any) -> None:
    """None means another number in another release."""
    assert "eps" == op.declines(*operands(2, 5, 128), eps)


@pytest.mark.parametrize("op", [op for op in HOSTS if "norm" in op.name], ids=lambda op: op.name)
def test_a_norm_under_autocast_is_declined(op: fg.Fusion) -> None:
    """Torch 2.12 runs rms_norm in fp32 there, 2.11 does not."""
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" == op.declines(*operands(2, 5, 128), EPS)


@pytest.mark.parametrize(
    "weight, reason",
    [
        (torch.ones(128).bfloat16(), None),
        (torch.ones(128), "mixed-dtype"),
        (torch.ones(64).bfloat16(), "shape"),
        (torch.ones(1, 128).bfloat16(), "shape"),
        (torch.ones(256).bfloat16()[::2], "stride"),
        (torch.ones(129).bfloat16()[1:], "alignment"),
        (3, "shape"),
    ],
    ids=["right", "mixed", "short", "rank-2", "strided", "misaligned", "number"],
)
@pytest.mark.parametrize("name", ["rms_norm_modulate", "composite_rms_norm_modulate"])
def test_a_weight_that_does_not_fit_is_declined(name: str, weight: Any, reason: str | None) -> None:
    op = getattr(fg.kernels, name).host

    assert reason == op.declines(*operands(2, 5, 128), EPS, weight)


@pytest.mark.parametrize("op", HOSTS, ids=lambda op: op.name)
@pytest.mark.parametrize(
    "args", [(1, 2, 3), ("x", None, None), (torch.zeros(2, 3, 128), 1.0, None)], ids=["ints", "words", "numbers"]
)
def test_what_is_no_tensor_is_declined_and_never_raises(op: fg.Fusion, args: tuple[Any, ...]) -> None:
    assert "rank" == op.declines(*args, *([EPS] if "norm" in op.name else []))


def test_a_grid_that_is_too_large_is_declined() -> None:
    """Meta tensors have the sizes without the memory."""
    declines = fg.kernels.modulate.declines
    row = torch.empty(1, 1, 4, device="meta")

    # A meta tensor is on no device that the kernel is built for: that is said first.
    assert "device" == declines(torch.empty(1, 1 << 32, 4, device="meta"), row, row)


def test_few_buckets_hold_many_shapes() -> None:
    buckets = {row_bucket(*operands(batch, tokens, 64)) for batch in (1, 2, 3) for tokens in range(1, 129)}

    assert len(buckets) <= 48
    assert row_bucket(*operands(1, 7, 64)) != row_bucket(*operands(2, 7, 64))
    assert row_bucket(*operands(2, 7, 64)) != row_bucket(*operands(2, 7, 128))
    # The last 16 bytes of x are cut where an odd number of such rows end.
    assert row_bucket(*operands(1, 6, 68)) != row_bucket(*operands(1, 7, 68))
    assert row_bucket(*operands(1, 6, 64)) == row_bucket(*operands(1, 7, 64))
