"""The md5 is hashlib's over the bytes in C order, whatever the tensor's layout; digests refuse what cannot be held."""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fusiongate.comparison import digests
from fusiongate.comparison.digests import Digest, digest, md5
from fusiongate.errors import UsageError

from .allocations import Allocations

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.complex64, torch.complex128),
]


def plain_md5(tensor: Tensor) -> str:
    """The definition, without chunks."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return hashlib.md5(ctypes.string_at(dense.data_ptr(), dense.nbytes)).hexdigest()


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 40
    return values.to(dtype) if dtype.is_signed else values.abs().to(dtype)


LAYOUTS: dict[str, Tensor] = {
    "contiguous": filled(3, 5, 8),
    "transposed": filled(3, 5, 8).transpose(0, 2),
    "sliced": filled(3, 5, 8)[1:, ::2, 1:7],
    "expanded": filled(3, 1, 8).expand(3, 5, 8),
    "offset": filled(121)[1:].view(3, 5, 8),
    "one-dimensional, strided": filled(64)[::3],
    "0-dim": filled(3)[1],
    "empty": filled(3, 0, 8),
    "size-1 dims": filled(1, 1, 40),
}


@pytest.mark.parametrize("chunk", [8, 64, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_md5_equals_hashlib_for_every_layout_and_chunk(
    monkeypatch: pytest.MonkeyPatch, layout: str, chunk: int
) -> None:
    monkeypatch.setattr(digests, "_CHUNK", chunk)

    assert md5(LAYOUTS[layout]) == plain_md5(LAYOUTS[layout])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_md5_equals_hashlib_for_every_dtype(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(digests, "_CHUNK", 64)
    tensor = filled(4, 6, 10, dtype=dtype).transpose(0, 1)

    assert md5(tensor) == plain_md5(tensor)


def test_md5_is_the_published_one() -> None:
    assert md5(torch.tensor(list(b"abc"), dtype=torch.uint8)) == "900150983cd24fb0d6963f7d28e17f72"


def test_md5_sees_lazy_conjugation_and_negation() -> None:
    values = torch.complex(filled(4), filled(4))

    assert md5(values.conj()) == md5(values.conj().resolve_conj()) != md5(values)
    assert md5(values.conj().imag) == md5(-values.imag)


def test_md5_tells_zeros_and_nan_apart_by_their_bits() -> None:
    assert md5(torch.tensor(-0.0)) != md5(torch.tensor(0.0))


def test_md5_of_a_parameter_that_wants_a_gradient() -> None:
    values = filled(4)

    assert md5(torch.nn.Parameter(values)) == md5(values)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_md5_makes_no_copy_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(digests, "_CHUNK", 1 << 10)
    tensor = {"expanded": filled(64, 1, 64).expand(64, 32, 64), "transposed": filled(64, 512).t()}[layout]

    with Allocations() as watched:
        hashed = md5(tensor)

    assert hashed == plain_md5(tensor)
    assert 0 < watched.largest <= 1 << 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0], "md5: expected a tensor, got list"),
        (torch.empty(2, device="meta"), "md5: expected a dense tensor with data, got a strided one on meta"),
        (torch.eye(2).to_sparse(), "md5: expected a dense tensor with data, got a sparse_coo one on cpu"),
    ],
)
def test_md5_refuses_what_has_no_bytes(wrong: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        md5(wrong)

    assert str(raised.value) == message


@dataclass
class Output:
    sample: Tensor
    extra: list[Tensor]


class Pair(NamedTuple):
    left: Tensor
    right: tuple[Tensor, ...]


def test_a_nest_is_digested_by_path() -> None:
    tree = OrderedDict(
        blocks=[{"latents": filled(2)}, Output(filled(3), [filled(4)])], pair=Pair(filled(5), (filled(6),))
    )

    assert list(digest(tree)) == [
        "blocks.0.latents",
        "blocks.1.sample",
        "blocks.1.extra.0",
        "pair.left",
        "pair.right.0",
    ]


def test_a_digest_says_dtype_shape_md5_and_what_is_not_finite() -> None:
    tensor = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]], dtype=torch.bfloat16)

    assert digest(tensor) == {".": Digest("bfloat16", (2, 2), md5(tensor), nonfinite=2)}


@pytest.mark.parametrize(
    ("tensor", "nonfinite"),
    [
        (torch.tensor([complex(torch.nan, torch.inf), 1j]), 1),
        (torch.tensor([1, 2]), 0),
        (torch.tensor([torch.nan, 1.0]).to(torch.float8_e4m3fn), 1),
        (torch.zeros(0), 0),
    ],
)
def test_non_finite_elements_are_counted_in_every_dtype(tensor: Tensor, nonfinite: int) -> None:
    assert digest(tensor)["."].nonfinite == nonfinite


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "digest: nothing to digest, the dict is empty"),
        ({"a": [filled(1)], "b": []}, "digest: 'b': nothing to digest, the list is empty"),
        ({"a": {"b": 3}}, "digest: 'a.b': expected tensors, got int"),
        ("text", "digest: expected tensors, got str"),
        (None, "digest: expected tensors, got NoneType"),
        (CYCLE, "digest: '0': the nest contains itself"),
        (
            {"a": torch.eye(2).to_sparse()},
            "digest: 'a': expected a dense tensor with data, got a sparse_coo one on cpu",
        ),
        (
            {"a": {"b": filled(1)}, "a.b": filled(1)},
            "digest: two tensors have the path 'a.b'; rename a key that contains a dot",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(tree: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        digest(tree)

    assert str(raised.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: there is no GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_md5_of_a_gpu_tensor_is_that_of_its_copy(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Two pinned buffers take turns, so that a chunk hashed too late or too early shows in several small chunks."""
    monkeypatch.setattr(digests, "_CHUNK", 64)
    base = LAYOUTS[layout]
    moved = torch.empty(base.untyped_storage().nbytes() // 4, device="cuda").as_strided(base.shape, base.stride())
    if 0 not in base.stride():
        moved.copy_(base)
    else:
        moved.zero_()

    assert md5(moved) == plain_md5(moved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: there is no GPU")
def test_md5_of_a_large_gpu_tensor() -> None:
    tensor = torch.randn(50_000_000, device="cuda")

    assert md5(tensor) == plain_md5(tensor)
