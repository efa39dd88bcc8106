"""Numbers that are the same on every platform: the constants here are what a GPU has to give as well."""

from __future__ import annotations

import pytest
import torch

from fusiongate.comparison.digests import md5
from fusiongate.presets import fill, normal, uniform
from fusiongate.presets import rng as draws

from .toy_presets import Sized

NORMAL = [-1097226528, -1094940332, -1073550656, 1058494083, 1062955181, 1069317871]
UNIFORM = [1059560737, 1033005952, 1035124904, 1061640556, 1064860295, 1053227930]


def test_normal_numbers_are_these_on_every_platform() -> None:
    assert NORMAL == normal("x", (6,)).view(torch.int32).tolist()
    assert "3d3c440d5f9a84c4a433f43f38dc3336" == md5(normal("x", (1000,)))
    assert "4e723f067168533ba1fd151ce5982fc5" == md5(normal("x", (1000,), dtype=torch.bfloat16))
    assert "1920321a5dc473ded6403071617b02e7" == md5(normal("x", (1000,), std=0.3, mean=1.0, dtype=torch.float16))


def test_uniform_numbers_are_these_on_every_platform() -> None:
    assert UNIFORM == uniform("x", (6,)).view(torch.int32).tolist()
    assert "8fa31a46b6b5bf4a4dbff9f46f48788a" == md5(uniform("x", (1000,)))


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_size_of_the_chunks_does_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = normal("x", (3, 40))
    monkeypatch.setattr(draws, "_CHUNK", chunk)

    assert torch.equal(expected, normal("x", (3, 40)))


def test_another_name_or_seed_gives_other_numbers() -> None:
    drawn = [normal("x", (8,)), normal("y", (8,)), normal("x", (8,), seed=1), normal("x", (8,), seed=-1)]

    assert 4 == len({md5(tensor) for tensor in drawn})


def test_a_longer_tensor_begins_with_the_shorter_one() -> None:
    """Each number depends on its own position only."""
    assert torch.equal(normal("x", (5,)), normal("x", (50,))[:5])


def test_normal_numbers_are_bell_shaped() -> None:
    x = normal("x", (200_000,), dtype=torch.float64)

    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert 0.65 < (x.abs() < 1).double().mean() < 0.69
    assert x.abs().max() < 3.5
    assert abs((x[1:] * x[:-1]).mean()) < 0.01


def test_uniform_numbers_fill_the_interval_from_0_to_1() -> None:
    x = uniform("x", (200_000,))

    assert 0 <= x.min() < 1e-4
    assert 1 - 1e-4 < x.max() < 1
    assert abs(x.mean() - 0.5) < 0.005


def test_every_parameter_is_filled_whatever_its_constructor_drew() -> None:
    one, other = Sized().bfloat16(), Sized().bfloat16()
    for module in (one, other):
        fill(module, seed=3)

    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.count_nonzero() == mine.numel(), name
    assert 0.1 < one.linear.weight.float().std() * 8 < 1.2
