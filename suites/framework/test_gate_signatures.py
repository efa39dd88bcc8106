"""What a call is keyed by: which calls share a verdict, and which never see a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusiongate.gate.signatures import (
    ALIGNMENT,
    AUTOGRAD,
    TRACING,
    UNSUPPORTED,
    alignment,
    call_key,
    is_plain_call,
    not_plain,
    signature_of,
)

from .allocations import Allocations


def signature(*args: Any, bucket: Callable[..., Hashable] | None = None) -> Hashable:
    assert not isinstance(call_key(args), str)
    return signature_of(args, bucket)


def at_offset(elements: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor whose address lies a number of elements after an aligned one."""
    return torch.zeros(elements + math.prod(shape), dtype=dtype)[elements:].view(shape)


def test_fresh_tensors_of_one_kind_share_a_signature() -> None:
    """Whatever else their addresses are: torch aligns all of them at least as far as a signature tells apart."""
    kept = [torch.randn(2, 3, size) for size in (64, 7, 640, 33, 64, 8192)]
    same = [torch.randn(5, 11, dtype=torch.bfloat16) for _ in range(40)]

    assert 1 == len({signature(tensor) for tensor in same})
    assert 5 == len({signature(tensor) for tensor in kept})


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float16)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2, 64), torch.zeros(2, 6, 64)[:, 0]),
        (torch.zeros(2, 3), torch.zeros(1, 3).expand(2, 3)),
        (at_offset(0, 4, 8), at_offset(1, 4, 8)),
        (at_offset(4, 4, 8), at_offset(8, 4, 8)),
        (1e-6, 1e-5),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (None, 0),
        (torch.float16, torch.bfloat16),
        ("gelu", "silu"),
    ],
    ids=[
        *("shape", "dtype", "transposed", "strided", "expanded", "misaligned", "aligned-less"),
        *("number", "int-float", "int-bool", "sign-of-zero", "none", "a-dtype", "a-word"),
    ],
)
def test_what_may_matter_to_a_kernel_is_told_apart(one: Any, other: Any) -> None:
    assert signature(one) != signature(other)
    assert call_key((one,)) != call_key((other,))


def test_nan_is_one_number() -> None:
    assert signature(math.nan) == signature(-float("nan"))
    assert call_key((math.nan,)) == call_key((float("nan"),))


def test_strides_of_dimensions_of_size_one_do_not_count() -> None:
    odd = torch.zeros(64).as_strided((1, 4, 1, 8), (999, 8, 77, 1))

    assert signature(torch.zeros(1, 4, 1, 8)) == signature(odd)


def test_c_order_is_one_layout_for_a_bucket_of_shapes() -> None:
    """Else the strides would tell apart what the bucket puts together."""
    by_columns: Callable[..., Hashable] = lambda x: x.shape[-1]

    assert signature(torch.zeros(2, 3, 8), bucket=by_columns) == signature(torch.zeros(7, 5, 8), bucket=by_columns)
    assert signature(torch.zeros(2, 8), bucket=by_columns) != signature(torch.zeros(2, 16)[:, :8], bucket=by_columns)


def test_a_bucket_replaces_the_shapes_only() -> None:
    nothing: Callable[..., Hashable] = lambda *args: ()

    assert signature(torch.zeros(4), bucket=nothing) == signature(torch.zeros(9), bucket=nothing)
    assert signature(torch.zeros(4), bucket=nothing) != signature(torch.zeros(4).half(), bucket=nothing)
    assert signature(torch.zeros(4), 1.0, bucket=nothing) != signature(torch.zeros(4), 2.0, bucket=nothing)


def test_the_autocast_state_counts() -> None:
    tensor = torch.zeros(4)
    outside, key = signature(tensor), call_key((tensor,))
    with torch.autocast("cpu", torch.bfloat16):
        half, half_key = signature(tensor), call_key((tensor,))
    with torch.autocast("cpu", torch.float16):
        other, other_key = signature(tensor), call_key((tensor,))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        off = signature(tensor)

    assert 3 == len({outside, half, other})
    assert 3 == len({key, half_key, other_key})
    assert off == outside


@settings(deadline=None)  # a machine may be busy
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    offset=st.integers(0, 40),
    padding=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_equal_call_keys_have_equal_signatures(shape: list[int], offset: int, padding: list[int]) -> None:
    """A key only finds a signature: it must be the finer of the two."""
    strides = [1]
    for size, more in zip(reversed(shape[1:]), padding, strict=False):
        strides.insert(0, strides[0] * (size + more))
    length = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    one = torch.zeros(length).as_strided(shape, strides, offset)
    other = torch.zeros(length + 3).as_strided(shape, strides, offset)

    if call_key((one,)) == call_key((other,)):
        assert signature(one) == signature(other)
    assert alignment(one) == min(ALIGNMENT, (one.data_ptr() & -one.data_ptr()))


class Subclass(Tensor):
    """Somebody's tensor."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).as_subclass(Subclass),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        FakeTensorMode().from_tensor(torch.zeros(2)),
    ],
    ids=["subclass", "sparse", "lazily-negated", "fake"],
)
def test_a_tensor_that_is_no_plain_memory_is_for_the_reference(tensor: Tensor) -> None:
    assert TRACING == call_key((tensor,))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
    ids=["meta", "lazily-conjugated"],
)
def test_what_looks_plain_is_looked_at_twice(tensor: Tensor) -> None:
    assert not_plain((tensor,))
    assert not not_plain((torch.zeros(2), 1.0, None))


def test_a_parameter_is_a_plain_tensor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))

    with torch.no_grad():
        assert call_key((torch.zeros(2),)) == call_key((parameter,))
        assert is_plain_call((parameter, 1.0, None))
    assert AUTOGRAD == call_key((parameter,))
    assert not is_plain_call((parameter,))


@pytest.mark.parametrize("arg", [[1], (1, 2), {}, object(), 1j, torch.Generator()], ids=lambda a: type(a).__name__)
def test_what_no_signature_can_hold_is_unsupported(arg: Any) -> None:
    assert UNSUPPORTED == call_key((torch.zeros(2), arg))


def test_a_mode_of_somebody_else_is_tracing() -> None:
    with Allocations():
        assert TRACING == call_key((torch.zeros(2),))
        assert not is_plain_call((torch.zeros(2),))


def test_a_default_device_is_no_tracing() -> None:
    """Its mode redirects factory functions and nothing else."""
    with torch.device("cpu"):
        assert call_key((torch.ones(2),)) != TRACING


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize, torch.func.grad])
def test_functorch_is_tracing(transform: Callable[[Any], Callable[[Tensor], Any]]) -> None:
    seen: list[Any] = []

    def called(x: Tensor) -> Tensor:
        # Not its operand, which says so itself: a plain tensor from outside.
        seen.append(call_key((torch.zeros(2),)))
        return x.sum()

    transform(called)(torch.ones(3))

    assert [TRACING] == seen


def test_forward_mode_is_tracing() -> None:
    context: AbstractContextManager[Any] = torch.autograd.forward_ad.dual_level()
    with context:
        assert TRACING == call_key((torch.zeros(2),))
