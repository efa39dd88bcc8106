"""A matrix expands to the base cell, each axis alone and telling pairs: named once, in one order, everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.matrix.cells import AXES, Cell, Selected
from fusiongate.matrix.expansion import PAIRINGS, axis_values, expand
from fusiongate.matrix.plan import Matrix
from fusiongate.subjects import Subject


def residual_gate(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return residual + update * gate


def launch(*args: torch.Tensor) -> torch.Tensor:
    return residual_gate(*args)


SUBJECT = Subject("residual-gate", call=residual_gate, reference=residual_gate, fused=launch)
CELLS = Matrix(SUBJECT).cells()


def test_the_base_comes_first_and_the_others_by_id() -> None:
    ids = [cell.id for cell in CELLS]
    assert "base" == ids[0]
    assert sorted(ids[1:]) == ids[1:]


def test_no_id_stands_twice_and_all_are_safe_in_a_path() -> None:
    assert len(CELLS) == len({cell.id for cell in CELLS})
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", cell.id) for cell in CELLS)


def test_a_cell_is_away_from_the_base_on_two_axes_at_most() -> None:
    assert {0, 1, 2} == {len(cell.away) for cell in CELLS}


def test_every_value_of_every_axis_stands_alone() -> None:
    alone = {axis: {getattr(cell, axis) for cell in CELLS if cell.away == (axis,)} for axis in AXES}
    for axis, values in axis_values().items():
        foreign = {"build-fails", "out-of-memory", "disabled", "declines-raised", "capacity"}
        assert set(values[1:]) - foreign == alone[axis], axis


def test_there_are_hundreds_of_cells() -> None:
    assert 400 <= len(CELLS) <= 800


def test_a_large_size_stands_alone() -> None:
    """Its pairs would cost seconds each."""
    assert [("size",)] == [cell.away for cell in CELLS if cell.size == "B2S517D4096"]


def test_pairings_name_values_that_exist() -> None:
    """A misspelt value would silently pair with nothing."""
    matrix = Matrix(SUBJECT)
    known: dict[str, set[str]] = {
        "layout": set(matrix._layouts),
        "dtype": set(matrix._dtypes),
        "size": set(matrix.sizes),
        **{axis: set(values) for axis, values in axis_values().items()},
    }
    for pairing in PAIRINGS:
        assert set(pairing.only_first or ()) <= known[pairing.first], pairing
        assert set(pairing.only_second or ()) <= known[pairing.second], pairing
        assert pairing.why


def test_unknown_values_are_crossed_only_where_both_axes_take_all() -> None:
    axes = {axis: (f"{axis} base", f"{axis} other") for axis in AXES}
    away = [tuple(axis for axis in AXES if point[axis].endswith("other")) for point in expand(axes)]
    assert [(), *((axis,) for axis in AXES), ("dtype", "data")] == away


def test_a_value_that_stands_alone_is_not_crossed() -> None:
    axes = {axis: (f"{axis} base", f"{axis} other") for axis in AXES}
    assert len(AXES) + 1 == len(list(expand(axes, unpaired=frozenset({"data other"}))))


def test_cells_are_the_same_in_another_process() -> None:
    """Neither the seed of string hashes nor the order of imports shows."""
    code = (
        "import fusiongate.matrix as matrix, fusiongate.subjects as subjects, json\n"
        "same = lambda x, scale, shift: x\n"
        "cells = matrix.Matrix(subjects.Subject('residual-gate', same, same, 'json:dumps')).cells()\n"
        "found = json.dumps([cell.id for cell in cells])"
    )
    here: dict[str, str] = {}
    exec(code, {}, here)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(found)"],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert here["found"] == there.stdout.strip()


def test_must_launch_covers_its_layouts_in_every_launchable_dtype_and_size() -> None:
    matrix = Matrix(SUBJECT)
    covered = [cell for cell in CELLS if matrix.must_launch(cell)]
    assert {"row-broadcast", "strided-unbind-4d", "strided-unbind-3d"} == {cell.layout for cell in covered}
    assert {"bf16", "fp16", "fp32"} == {cell.dtype for cell in covered}
    assert set(matrix.sizes) == {cell.size for cell in covered}
    assert {("eager", "normal", "current", "verified")} == {
        (cell.mode, cell.data, cell.device, cell.lifecycle) for cell in covered
    }


def test_what_may_be_declined_need_not_launch() -> None:
    matrix = Matrix(SUBJECT, may_decline={"B2S5D130": "vector-width"})
    assert not matrix.must_launch(Cell("residual-gate", "row-broadcast", "bf16", "B2S5D130", base_size="B2S33D512"))


def test_without_rows_the_base_layout_must_fuse() -> None:
    assert ("contiguous",) == Matrix(SUBJECT, dict.fromkeys("xyz", "N D"), [{"N": 2, "D": 8}]).must_fuse


def test_a_factory_has_one_layout_and_its_own_data() -> None:
    cells = Matrix(SUBJECT, lambda *_: (), [{"N": 2}]).cells()
    assert {"as-given"} == {cell.layout for cell in cells}
    assert {"normal"} == {cell.data for cell in cells}


@pytest.mark.parametrize(
    "options, told",
    [
        (
            {"must_fuse": ["row-brodcast"]},
            "no layout of residual-gate begins with 'row-brodcast'; its layouts are row-",
        ),
        ({"may_decline": {"B9": "tail"}}, "residual-gate has no layout, dtype or size 'B9'; it has B"),
        ({"inputs": {"residual": "B S D"}}, "and is called with residual: missing a required argument: 'update'; give"),
        ({"inputs": lambda: ()}, "residual-gate takes () and is called with size, dtype, device, generator: too many"),
    ],
)
def test_names_that_are_not_there_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Matrix(SUBJECT, **options)
    assert told in str(caught.value)


@pytest.mark.parametrize("subject", [3, None, lambda x: x])
def test_something_that_has_no_gate_has_no_matrix(subject: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a fusiongate\.Fusion or a fusiongate\.Subject"):
        Matrix(subject)


def test_a_factory_that_makes_no_arguments_is_told() -> None:
    three: Any = lambda size, dtype, device, generator: 3
    matrix = Matrix(SUBJECT, inputs=three, sizes=[{"B": 2}])
    with pytest.raises(UsageError, match="inputs of residual-gate made 3; expected a tuple of arguments"):
        matrix.prepare(matrix.cells()[0], Selected("host"))
