"""Cold caches: copies of the inputs in turn, so many that the first has left every cache when its turn comes again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["bytes_moved", "cache_bytes", "copied", "copies_needed", "rotation"]

_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# Caches are not strictly least-recently-used: a working set of just their size still hits now and then.
_TIMES_THE_CACHE = 3
_MOST_COPIES = 512
_CPU_CACHE_LIMIT = 64 << 20
_TYPICAL_CPU_CACHE = 32 << 20


def cache_bytes(device: torch.device) -> int:
    """The bytes of all the device's shared caches: L2, and on AMD the large last level that torch does not know."""
    if device.type == "cpu":
        return _cpu_cache_bytes(_CPU_CACHES)
    l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)  # only on a GPU: its own cache
    return l2 + (_last_level_bytes(_TOPOLOGY) if torch.version.hip else 0)  # only on a GPU: its own cache


def _last_level_bytes(topology: Path) -> int:
    """The largest cache of level 3 that the AMD driver lists for any GPU; 0 where there is none."""
    sizes = [0]
    for path in topology.glob("*/caches/*/properties"):
        properties = _properties(path)
        # The nodes of CPUs list caches too; only a GPU's node has compute units.
        if properties.get("level") == 3 and _properties(path.parents[2] / "properties").get("simd_count"):
            sizes.append(properties.get("size", 0) * 1024)
    return max(sizes)


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _cpu_cache_bytes(caches: Path) -> int:
    sizes = []
    for path in caches.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
        sizes.append(int(text[:-1]) * unit if unit else int(text))
    # A server's last level is shared by dozens of cores, and one process is seldom given all of it.
    return min(max(sizes, default=_TYPICAL_CPU_CACHE), _CPU_CACHE_LIMIT)


def copies_needed(bytes_a_call: int, cache: int) -> int:
    """How many copies of the inputs to rotate: at least two, at most 512, together three times the caches between.

    Parameters
    ----------
    bytes_a_call
        What one call reads and writes, in bytes.
    cache
        The caches, in bytes.
    """
    return max(2, min(_MOST_COPIES, math.ceil(_TIMES_THE_CACHE * cache / max(1, bytes_a_call))))


def rotation(args: tuple[Any, ...], copies: int) -> list[tuple[Any, ...]]:
    """The arguments themselves, and copies of them in memory of their own; tensors may be nested in them.

    A copy has the original's values, strides and alignment, so that it has the same signature to a gate.
    """
    return [args, *(tree_map(lambda a: copied(a) if isinstance(a, Tensor) else a, args) for _ in range(copies - 1))]


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same values, strides and alignment, in memory of its own."""
    if tensor.numel() == 0:
        return tensor.detach().clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Where the original lies within 512 bytes, more than any vector load or gate asks for.
    size = tensor.element_size()
    memory = torch.empty(512 // size + reach, dtype=tensor.dtype, device=tensor.device)
    offset = (tensor.data_ptr() - memory.data_ptr()) % 512 // size
    copy = memory.as_strided(tensor.shape, tensor.stride(), offset)
    with torch.no_grad():
        # Elements that share memory, as in an expanded row, are written once.
        once = tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())
        copy[once].copy_(tensor.detach()[once])
    return copy


def bytes_moved(args: Sequence[Any], result: object) -> int:
    """The bytes that a call has to move at least: each element of its inputs read once, of its outputs written once."""
    return sum(map(_extent, _tensors((args, result))))


def _tensors(tree: object) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))


def _extent(tensor: Tensor) -> int:
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return distinct * tensor.element_size() if tensor.numel() else 0
