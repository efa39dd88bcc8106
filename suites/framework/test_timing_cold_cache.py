"""Rotating inputs: how many, that they have the original's layout, and the caches that they have to outgrow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusiongate.timing import cold_cache as rotation
from fusiongate.timing.cold_cache import bytes_moved, cache_bytes, copied, copies_needed

LAYOUTS = {
    "contiguous": lambda: torch.arange(60.0).reshape(3, 4, 5),
    "unbound": lambda: torch.arange(96.0).reshape(2, 1, 6, 8).unbind(2)[3],
    "expanded": lambda: torch.arange(8.0).expand(3, 8),
    "transposed": lambda: torch.arange(60.0).reshape(3, 4, 5).transpose(0, 2),
    "offset": lambda: torch.arange(64.0)[3:35],
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4),
    "bfloat16": lambda: torch.arange(64.0).bfloat16()[1:33],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_the_values_strides_and_alignment_and_memory_of_its_own(layout: str) -> None:
    original = LAYOUTS[layout]()
    copy = copied(original)
    assert torch.equal(original, copy)
    assert (original.stride(), original.dtype) == (copy.stride(), copy.dtype)
    assert original.data_ptr() % 512 == copy.data_ptr() % 512
    assert not original.numel() or original.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()


def test_the_rotation_begins_with_the_arguments_themselves_and_leaves_numbers_alone() -> None:
    x = torch.ones(3)
    sets = rotation.rotation((x, 1e-6, [x, None]), 3)
    assert 3 == len(sets)
    assert sets[0][0] is x
    assert [1e-6] * 3 == [entry[1] for entry in sets]
    assert 5 == len({tensor.data_ptr() for entry in sets for tensor in (entry[0], entry[2][0])})


@pytest.mark.parametrize(
    "bytes_a_call, cache, expected",
    [(1 << 30, 50 << 20, 2), (100 << 20, 50 << 20, 2), (10 << 20, 50 << 20, 15), (1, 50 << 20, 512), (0, 0, 2)],
)
def test_copies_hold_three_times_the_caches_within_reason(bytes_a_call: int, cache: int, expected: int) -> None:
    assert expected == copies_needed(bytes_a_call, cache)


def test_bytes_moved_count_each_element_once() -> None:
    x, row = torch.zeros(2, 5, 8), torch.zeros(1, 1, 8)
    assert 4 * (80 + 8 + 80) == bytes_moved((x, row, 1e-6), torch.zeros(2, 5, 8))
    assert 4 * 8 == bytes_moved((row.expand(2, 5, 8),), None)
    assert 0 == bytes_moved((torch.empty(0, 3),), None)


def test_a_cpu_has_a_cache_of_some_size() -> None:
    assert 1 << 16 <= cache_bytes(torch.device("cpu")) <= 64 << 20


def test_the_largest_cache_of_a_cpu_counts_and_a_servers_is_capped(tmp_path: Path) -> None:
    for number, size in enumerate(("32K", "1024K", "20M")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert 20 << 20 == rotation._cpu_cache_bytes(tmp_path)
    (tmp_path / "index2" / "size").write_text("512M\n")
    assert 64 << 20 == rotation._cpu_cache_bytes(tmp_path)
    assert 32 << 20 == rotation._cpu_cache_bytes(tmp_path / "absent")


def test_the_last_level_of_an_amd_gpu_is_found_and_a_cpus_is_not(tmp_path: Path) -> None:
    def node(name: str, simd_count: int, caches: list[tuple[int, int]]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd_count}\n")
        for number, (level, kilobytes) in enumerate(caches):
            cache = folder / "caches" / str(number)
            cache.mkdir(parents=True)
            (cache / "properties").write_text(f"level {level}\nsize {kilobytes}\n")

    node("0", 0, [(3, 1 << 20)])
    assert 0 == rotation._last_level_bytes(tmp_path)
    node("1", 1216, [(1, 32), (2, 4096), (3, 262144)])
    assert 256 << 20 == rotation._last_level_bytes(tmp_path)
    assert 0 == rotation._last_level_bytes(tmp_path / "absent")
