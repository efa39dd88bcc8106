"""The md5 of a tensor's bytes, and the digests of a whole nest of tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from fusiongate.errors import UsageError

from .bits import as_real, dtype_name, slabs

__all__ = ["Digest", "digest", "md5"]

_CHUNK = 32 << 20
"""Bytes that are copied and hashed at a time."""


@dataclass(frozen=True, slots=True)
class Digest:
    """What a tensor was, in a few words."""

    dtype: str
    """Its dtype without the module: ``bfloat16``."""
    shape: tuple[int, ...]
    """Its shape."""
    md5: str
    """The md5 of its bytes, see :func:`md5`."""
    nonfinite: int
    """How many of its elements are NaN or infinite; a complex one counts once."""


def md5(tensor: Tensor) -> str:
    """The hexadecimal md5 of a tensor's raw bytes in logical (C) order.

    It equals hashlib's over the bytes of ``tensor.detach().cpu().contiguous()``, for any strides and dtype and on any
    device. Beyond the tensor it needs about 100 MB at most; on a GPU, copying overlaps hashing.

    Raises
    ------
    UsageError
        If it is no dense tensor with data.
    """
    _check("md5", tensor)
    hashed = hashlib.md5(usedforsecurity=False)
    with torch.no_grad():
        chunks = _chunks(tensor.detach())
        for chunk in _copied(chunks, tensor.device) if tensor.device.type == "cuda" else chunks:
            resolved = chunk.cpu().resolve_conj().resolve_neg().contiguous()
            if resolved.numel():
                # The address spares numpy, which knows neither bfloat16 nor the eight-bit floats.
                hashed.update((ctypes.c_ubyte * resolved.nbytes).from_address(resolved.data_ptr()))
    return hashed.hexdigest()


def digest(tree: object) -> dict[str, Digest]:
    """The digest of every tensor in a nest, by its path.

    Parameters
    ----------
    tree
        A tensor, or mappings, lists, tuples and dataclasses of them to any depth.

    Returns
    -------
    dict
        Paths such as ``blocks.0.latents`` in the nest's own order; a tensor that stands alone has the path ``.``.

    Raises
    ------
    UsageError
        If the nest or any part of it is empty, if a leaf is no dense tensor with data, or if two have the same path.
    """
    found: dict[str, Digest] = {}
    for path, tensor in _leaves(tree, (), ()):
        name = ".".join(path) or "."
        if name in found:
            raise UsageError(f"digest: two tensors have the path {name!r}; rename a key that contains a dot")
        _check(f"digest: {name!r}", tensor)
        found[name] = Digest(dtype_name(tensor.dtype), tuple(tensor.shape), md5(tensor), _nonfinite(tensor))
    return found


def _check(where: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{where}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{where}: expected a dense tensor with data, got a {kind} one on {tensor.device}")


def _leaves(tree: object, path: tuple[str, ...], inside: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    where = f"digest: {'.'.join(path)!r}" if path else "digest"
    if id(tree) in inside:
        raise UsageError(f"{where}: the nest contains itself")
    children: list[tuple[str, object]]
    if isinstance(tree, Mapping):
        children = [(str(key), value) for key, value in tree.items()]
    elif is_dataclass(tree) and not isinstance(tree, type):
        children = [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, bytearray)):
        names = getattr(tree, "_fields", map(str, range(len(tree))))
        children = list(zip(names, tree, strict=True))
    else:
        raise UsageError(f"{where}: expected tensors, got {type(tree).__name__}")
    if not children:
        raise UsageError(f"{where}: nothing to digest, the {type(tree).__name__} is empty")
    for name, child in children:
        yield from _leaves(child, (*path, name), (*inside, id(tree)))


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    for _, index in slabs(tensor.shape, _CHUNK // tensor.element_size()):
        yield tensor[index]


def _copied(chunks: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:  # only on a GPU: pins memory
    """The chunks in pinned host memory, each while the next is on its way."""
    with torch.cuda.device(device):
        buffers = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        pending: tuple[Tensor, torch.cuda.Event] | None = None
        for number, chunk in enumerate(chunks):
            # The buffer's former content was hashed before this generator was resumed.
            dense = chunk.resolve_conj().resolve_neg().contiguous()
            landed = buffers[number % 2][: dense.nbytes].view(dense.dtype).view(dense.shape)
            landed.copy_(dense, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            if pending is not None:
                pending[1].synchronize()
                yield pending[0]
            pending = landed, event
        if pending is not None:
            pending[1].synchronize()
            yield pending[0]


def _nonfinite(tensor: Tensor) -> int:
    real = as_real(tensor)
    if not real.is_floating_point():
        return 0
    number = torch.zeros((), dtype=torch.int64, device=real.device)
    for chunk in _chunks(real):
        # isfinite does not know every eight-bit float.
        wrong = ~(chunk.float() if chunk.element_size() == 1 else chunk).isfinite()
        number += (wrong.any(-1) if tensor.is_complex() else wrong).sum()
    return int(number)
