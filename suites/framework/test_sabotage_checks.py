"""Each check of first sight, of the gate and of the matrix is needed: without it a saboteur goes unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate import first_sight, guarded, probes, surroundings, verdicts
from fusiongate.bits import integer_view
from fusiongate.fusions import Fusion
from fusiongate.gates import Every, Policy
from fusiongate.matrix import CellFailure, Matrix, Selected, check
from fusiongate.probes import Operands
from fusiongate.sabotage import saboteur
from fusiongate.verdicts import Verdict

Patch = Callable[[pytest.MonkeyPatch], None]


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def rstd(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6)


def rstd_of_the_reversed_row(x: Tensor) -> Tensor:
    return rstd(x.flip(-1))


def normalized_by(statistic: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.float() * statistic(x).unsqueeze(-1)).to(x.dtype)


def right() -> Fusion:
    return Fusion("modulate", reference=modulate, fused=modulate)


def reordered() -> Fusion:
    """A norm that adds up its row from the other end; almost all rounded outputs agree."""
    return Fusion(
        "norm",
        reference=normalized_by(rstd),
        fused=normalized_by(rstd_of_the_reversed_row),
        witness=(rstd, rstd_of_the_reversed_row),
    )


def normal(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, columns = shape
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (batch, 1, columns), (batch, 1, columns))
    return tuple(torch.randn(each, generator=generator).bfloat16() for each in shapes)  # type: ignore[return-value]


def degenerate(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of zero, as adaLN-zero starts: x comes out as it went in, whatever is rounded."""
    x, scale, shift = normal(*shape)
    return x, torch.zeros_like(scale), torch.zeros_like(shift)


def tiny_row() -> tuple[Tensor]:
    """A norm's single row."""
    return (torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).bfloat16(),)


# What is taken out ----------------------------------------------------------------------------------------------------


def no_probe(*, special: bool) -> Patch:
    """The live operands in the place of one of the two probes."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        redrawn = probes.redrawn

        def live(args: Any, generator: torch.Generator, *, special: bool) -> Operands:
            return probes.live_copies(args) if special is taken else redrawn(args, generator, special=special)

        taken = special
        monkeypatch.setattr(first_sight, "redrawn", live)

    return patch


def no_live_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Operands] = []
    live_copies, attempt = probes.live_copies, first_sight.FirstSight._try

    def noted(args: Any) -> Operands:
        copies.append(live_copies(args))
        return copies[-1]

    def unless_live(self: Any, operands: Operands, *rest: Any) -> Iterator[Verdict]:
        return iter(()) if operands in copies else attempt(self, operands, *rest)

    monkeypatch.setattr(first_sight, "live_copies", noted)
    monkeypatch.setattr(first_sight.FirstSight, "_try", unless_live)


def memory_as_an_allocator_hands_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that the reference's result has just left, instead of poison."""
    monkeypatch.setattr(guarded, "_wrong_everywhere", lambda expected: integer_view(expected).clone())


def nothing(owner: Any, name: str, result: Any = None) -> Patch:
    """A check that finds nothing."""

    def found(*args: Any, **named: Any) -> Any:
        return result

    return lambda monkeypatch: monkeypatch.setattr(owner, name, found)


def constant(name: str, value: int) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(first_sight, name, value)


def no_metadata(kind: str) -> Patch:
    """The comparison without one kind of metadata."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        metadata = verdicts._metadata

        def others(actual: object, expected: Tensor) -> tuple[str, str, str] | None:
            found = metadata(actual, expected)
            return None if found is not None and found[0] == kind else found

        monkeypatch.setattr(verdicts, "_metadata", others)

    return patch


def compared_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(actual: Any, expected: Tensor, *args: Any, **named: Any) -> Verdict:
        return Verdict(True, "equal", verdicts.Exact(), expected.numel())

    monkeypatch.setattr(first_sight, "compare", equal)


# First sight ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needed:
    """A check, how to take it out, and who is then missed on which operands."""

    check: str
    patch: Patch
    saboteur: str
    args: Callable[[], tuple[Any, ...]]


# Enough elements in two probes that nothing is added to them.
LARGE, SMALL = (1, 128, 512), (1, 1, 8)

FIRST_SIGHT = [
    Needed("normal probe", no_probe(special=False), "wrong-on-clean-data", lambda: degenerate(*LARGE)),
    Needed("special probe", no_probe(special=True), "nan-over-the-row", lambda: normal(*LARGE)),
    Needed(
        "taller probe",
        nothing(first_sight.FirstSight, "_taller"),
        "wrong-above-a-row-count",
        lambda: normal(*SMALL),
    ),
    Needed(
        "live operands", no_live_trial, "wrong-on-large-numbers", lambda: (normal(*LARGE)[0] * 64, *normal(*LARGE)[1:])
    ),
    Needed("poison", memory_as_an_allocator_hands_it_out, "nothing-written", lambda: normal(*LARGE)),
    Needed("canary", nothing(guarded.GuardedOperand, "overrun", False), "operand-overrun", lambda: normal(*LARGE)),
    Needed(
        "unchanged inputs", nothing(guarded.GuardedOperand, "changed", False), "rows-changed", lambda: normal(*LARGE)
    ),
    Needed(
        "aliasing an input",
        nothing(first_sight.FirstSight, "_aliasing"),
        "first-operand-handed-back",
        lambda: degenerate(*LARGE),
    ),
    Needed(
        "aliasing an earlier result",
        nothing(first_sight.FirstSight, "_aliasing"),
        "static-output-buffer",
        lambda: normal(*LARGE),
    ),
    Needed(
        "aliasing the reference's result",
        nothing(first_sight.FirstSight, "_aliasing"),
        "references-result-handed-on",
        lambda: normal(*LARGE),
    ),
    Needed(
        "random state", nothing(surroundings.Surroundings, "disturbance"), "random-state-moved", lambda: normal(*LARGE)
    ),
    Needed("bits", compared_as_equal, "last-bit-off", lambda: normal(*LARGE)),
    Needed("dtype", no_metadata("dtype"), "dtype-mislabelled", lambda: normal(*LARGE)),
    Needed("shape", no_metadata("shape"), "another-shape", lambda: normal(*LARGE)),
    Needed("strides", no_metadata("strides"), "other-strides", lambda: normal(*LARGE)),
]


@pytest.mark.parametrize("needed", FIRST_SIGHT, ids=[needed.check.replace(" ", "-") for needed in FIRST_SIGHT])
def test_without_one_check_first_sight_misses_a_saboteur(needed: Needed, monkeypatch: pytest.MonkeyPatch) -> None:
    args = needed.args()
    assert not saboteur(needed.saboteur).apply(right()).verify(*args).ok
    needed.patch(monkeypatch)
    assert saboteur(needed.saboteur).apply(right()).verify(*args).ok


def test_without_the_witness_another_order_of_the_sum_goes_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(1)).bfloat16(),)
    assert reordered().verify(*args).reason == "witness"
    monkeypatch.setattr(first_sight.FirstSight, "_try_witness", nothing_found)
    monkeypatch.setattr(first_sight, "ROWS", 0)
    assert reordered().verify(*args).ok


def nothing_found(*args: Any) -> Iterator[Verdict]:
    return iter(())


def test_few_rows_of_a_witness_agree_by_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reordered().verify(*tiny_row()).ok
    monkeypatch.setattr(first_sight, "ROWS", 0)
    monkeypatch.setattr(first_sight, "ELEMENTS", 0)
    assert reordered().verify(*tiny_row()).ok


def test_few_elements_agree_by_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element, where no rounding of the chain is to be seen."""
    args = degenerate(1, 1, 1)
    assert not saboteur("wrong-above-a-row-count").apply(right()).verify(*args).ok
    monkeypatch.setattr(first_sight, "ELEMENTS", 0)
    assert saboteur("wrong-above-a-row-count").apply(right()).verify(*args).ok


def test_without_many_small_probes_a_scalar_op_is_hardly_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output without a batch cannot be made taller: the same height is tried again and again."""
    args = tuple(torch.zeros(1, dtype=torch.bfloat16) for _ in range(3))
    wide = saboteur("whole-chain-wide")
    assert not wide.apply(right()).verify(*args).ok
    monkeypatch.setattr(first_sight.FirstSight, "_try_many", nothing_found)
    monkeypatch.setattr(first_sight, "redrawn", lambda args, generator, special: probes.live_copies(args))
    assert wide.apply(right()).verify(*args).ok


def test_without_a_recheck_a_kernel_may_turn_wrong_later() -> None:
    late, args = saboteur("wrong-from-the-nth-call"), normal(*LARGE)

    def after_calls(policy: Policy) -> str:
        spoilt = late.apply(right())
        op = Fusion("late", reference=spoilt.reference, fused=spoilt.fused, policy=policy)
        for _ in range(64):
            op(*args)
        return str(op.explain(*args).reason)

    assert "refused" == after_calls(Policy(recheck=Every(2)))
    assert "verified" == after_calls(Policy())


# The matrix -----------------------------------------------------------------------------------------------------------

MATRIX = [
    Needed("paths", nothing(check.PreparedCell, "_check_path"), "last-bit-off", lambda: ("base",)),
    Needed("bits", nothing(check.PreparedCell, "_check_bits"), "wrong-after-first-sight", lambda: ("base",)),
    Needed("inputs", nothing(check._Watched, "changed", False), "rows-changed-later", lambda: ("base",)),
    Needed("memory", nothing(check, "_shares", False), "output-in-its-input-later", lambda: ("zeros",)),
    Needed(
        "must-fuse", nothing(check.PreparedCell, "_check_declared"), "declines-too-much", lambda: ("strided-unbind-4d",)
    ),
]


def checked(op: Fusion, cell: str) -> bool:
    """Whether a cell of the matrix is green."""
    matrix = Matrix(op, sizes=[{"B": 2, "S": 33, "D": 512}])
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
        return self.reference(*args)

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
