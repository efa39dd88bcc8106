"""Each check of the matrix is needed: without it a cell is green that has to be red."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from fusiongate.gate import verification as first_sight
from fusiongate.gate.fusion import Fusion
from fusiongate.matrix import CellFailure, Matrix, Selected, check, operands
from fusiongate.sabotage import saboteur
from fusiongate.subjects import Subject

from .planted import strict
from .removals import Needed, modulate, nothing, nothing_found, reordered, right

MATRIX = [
    Needed("paths", nothing(check.PreparedCell, "_check_path"), "last-bit-off", lambda: ("base",)),
    Needed("bits", nothing(check.PreparedCell, "_check_bits"), "wrong-after-first-sight", lambda: ("base",)),
    Needed("inputs", nothing(operands.Watched, "changed", False), "rows-changed-later", lambda: ("base",)),
    Needed("memory", nothing(check, "shares_memory", False), "output-in-its-input-later", lambda: ("zeros",)),
    Needed(
        "must-fuse", nothing(check.PreparedCell, "_check_declared"), "declines-too-much", lambda: ("strided-unbind-4d",)
    ),
]


def checked(op: Fusion | Subject, cell: str, may_decline: Mapping[str, str] | None = None) -> bool:
    """Whether a cell of the matrix is green."""
    matrix = Matrix(op, sizes=[{"B": 2, "S": 33, "D": 512}], may_decline=may_decline)
    prepared = matrix.prepare({one.id: one for one in matrix.cells()}[cell], Selected("host"))
    try:
        prepared.check()
    except CellFailure:
        return False
    return True


@pytest.mark.parametrize("needed", MATRIX, ids=[needed.check for needed in MATRIX])
def test_without_one_check_the_matrix_misses_a_saboteur(needed: Needed, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = needed.args()
    assert checked(right(), cell)
    assert not checked(saboteur(needed.saboteur).apply(right()), cell)
    needed.patch(monkeypatch)
    assert checked(saboteur(needed.saboteur).apply(right()), cell)


def test_without_the_count_of_launches_the_matrix_believes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that says "fused" and runs the reference."""

    def pretending(self: Fusion, slot: object, args: tuple[Any, ...]) -> Tensor:
        self._tallies.add(("fused", "verified"))
        result: Tensor = self.reference(*args)
        return result

    monkeypatch.setattr(Fusion, "_fuse", pretending)
    assert not checked(right(), "base")
    monkeypatch.setattr(check.PreparedCell, "_check_launches", lambda *args: None)
    assert checked(right(), "base")


def test_the_matrix_compares_the_witness_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a gate that does not."""
    monkeypatch.setattr(first_sight.FirstSight, "_try_witness", nothing_found)
    monkeypatch.setattr(first_sight, "ROWS", 0)

    def green() -> bool:
        matrix = Matrix(reordered(), inputs={"x": "B S D"}, sizes=[{"B": 1, "S": 64, "D": 256}])
        try:
            matrix.prepare(matrix.cells()[0], Selected("host")).check()
        except CellFailure:
            return False
        return True

    assert not green()
    monkeypatch.setattr(check.PreparedCell, "_check_witness", lambda self: None)
    assert green()


def test_without_a_look_at_errors_a_cell_may_raise_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cell where eager raises, nothing but the kind of error tells the two apart."""

    op = Fusion("strict", reference=strict, fused=strict)
    spoilt = saboteur("declines-by-flag").apply(op)
    assert checked(op, "scalar")
    assert not checked(spoilt, "scalar")
    nothing(check.PreparedCell, "_check_raised")(monkeypatch)
    assert checked(spoilt, "scalar")


def test_without_the_documented_declines_a_document_may_stay_behind_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, documented = "strided-unbind-4d", {"strided-unbind-4d": "stride"}
    assert checked(saboteur("declines-too-much").apply(right()), cell, documented)
    assert not checked(right(), cell, documented)
    nothing(check.PreparedCell, "_check_declared")(monkeypatch)
    assert checked(right(), cell, documented)


# Gates of other projects, which publish neither path nor reason -------------------------------------------------------


def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return modulate(x, scale, shift)


def launch_by_name(*args: Tensor) -> Tensor:
    return launch(*args)


def foreign(call: Any, reference: Any = modulate, **options: Any) -> Subject:
    return Subject("foreign", call=call, reference=reference, fused=launch, **options)


def test_without_a_look_at_errors_a_foreign_gate_may_raise_where_eager_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Tensor) -> Tensor:
        raise KeyError("no such configuration")

    subject = foreign(raising, declines=lambda *args: "never launched")
    assert not checked(subject, "zeros")
    nothing(check.PreparedCell, "_check_raised")(monkeypatch)
    assert checked(subject, "zeros")


@pytest.mark.parametrize(
    "check_of_raising, wrong",
    [
        ("_check_returned", modulate),
        ("_check_not_launched", lambda *args: (launch(*args), strict(*args))[1]),
    ],
    ids=["returns", "launches"],
)
def test_without_a_look_where_eager_raises_a_foreign_gate_may_do_as_it_likes(
    check_of_raising: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may return something, or launch before it raises."""
    if check_of_raising == "_check_returned":
        # A call that raises has no results that could be compared with anything.
        monkeypatch.setattr(check.PreparedCell, "_check_bits", lambda *args: None)
    assert checked(foreign(strict, strict), "scalar")
    assert not checked(foreign(wrong, strict), "scalar")
    nothing(check.PreparedCell, check_of_raising)(monkeypatch)
    assert checked(foreign(wrong, strict), "scalar")


def test_without_a_look_at_errors_a_gate_may_launch_where_eager_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that launches before it has seen the reference; its kernel takes a number where eager does not."""
    unverified = Fusion._unverified

    def hasty(self: Fusion, slot: Any, args: tuple[Any, ...]) -> Tensor:
        self.fused(*args)
        result: Tensor = unverified(self, slot, args)
        return result

    op = Fusion("strict", reference=strict, fused=modulate)
    assert checked(op, "scalar")
    monkeypatch.setattr(Fusion, "_unverified", hasty)
    assert not checked(op, "scalar")
    nothing(check.PreparedCell, "_check_not_launched")(monkeypatch)
    assert checked(op, "scalar")


def nothing_but_a_launch(*args: Tensor) -> tuple[Tensor, ...]:
    launch(*args)
    return ()


def one_more(*args: Tensor) -> tuple[Tensor, ...]:
    result = launch(*args)
    return result, result


@pytest.mark.parametrize("wrong", [nothing_but_a_launch, one_more])
def test_without_the_number_of_results_a_foreign_gate_may_give_none_or_more(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there differs from nothing."""
    assert checked(foreign(launch_by_name), "base")
    assert not checked(foreign(wrong), "base")
    nothing(check.PreparedCell, "_check_number")(monkeypatch)
    assert checked(foreign(wrong), "base")


def test_without_the_forbidden_launcher_a_first_launch_while_compiling_goes_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def at_first(*args: Tensor) -> Tensor:
        seen.append(len(seen))
        return launch(*args) if len(seen) == 1 else modulate(*args)

    subject = foreign(at_first, reset=seen.clear)
    assert not checked(subject, "compiling-patched")
    monkeypatch.setattr(check, "Forbidden", lambda: modulate)
    assert checked(subject, "compiling-patched")


def test_without_metadata_a_foreign_gate_may_promise_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result without values is nothing but its metadata."""

    def flat_on_meta(*args: Tensor) -> Tensor:
        result = modulate(*args)
        return result.flatten() if result.is_meta else result

    assert checked(foreign(modulate), "meta")
    assert not checked(foreign(flat_on_meta), "meta")
    monkeypatch.setattr(check, "metadata_of", lambda tensor: ())
    assert checked(foreign(flat_on_meta), "meta")
