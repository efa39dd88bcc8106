"""A spec is data: it refuses what it cannot be made of, names its arguments, and tells a call's outputs."""

from __future__ import annotations

import pytest
from torch import Tensor

from fusiongate.gate.spec import FusionSpec


@pytest.mark.parametrize(
    "args, named, expected",
    [
        ((1, 2), {}, (1, 2)),
        ((1,), {"b": 2}, (1, 2)),
        ((), {"b": 2, "a": 1}, (1, 2)),
        ((1, 2), {"d": 5}, (1, 2, 3, 5)),
        ((1, 2), {"c": 9}, (1, 2, 9)),
    ],
)
def test_named_arguments_take_their_places(
    args: tuple[int, ...], named: dict[str, int], expected: tuple[int, ...]
) -> None:
    def reference(a: int, b: int, c: int = 3, d: int = 4) -> Tensor:
        raise AssertionError("called")

    assert expected == FusionSpec(name="op", reference=reference, fused=reference).positional(args, named)
