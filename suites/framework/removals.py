"""Each check of gate and matrix, and how to take it out; and right fusions of the adaLN chain to plant saboteurs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.comparison import verdicts
from fusiongate.comparison.bits import as_real, integer_view
from fusiongate.comparison.contracts import Contract, Exact, outside_of
from fusiongate.comparison.verdicts import Verdict
from fusiongate.gate import guarded, launch_checks, probe_values, probes
from fusiongate.gate import verification as first_sight
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.global_state import GlobalState
from fusiongate.gate.guarded import GuardedOperand, LaunchGuard, span_of
from fusiongate.gate.probes import Operands

__all__ = [
    "LARGE",
    "SMALL",
    "Needed",
    "Patch",
    "aligned_probes",
    "all_of",
    "compared_as_equal",
    "degenerate",
    "larger_memory_as_an_allocator_hands_it_out",
    "memory_as_an_allocator_hands_it_out",
    "modulate",
    "no_live_trial",
    "no_metadata",
    "no_probe",
    "no_ring",
    "normal",
    "nothing",
    "nothing_about",
    "nothing_found",
    "nothing_outside_of_the_contract",
    "only_normal_numbers",
    "probes_at_other_addresses",
    "reordered",
    "right",
    "tiny_row",
    "undisturbed_generators",
    "unwatched",
    "unwatched_device",
]

Patch = Callable[[pytest.MonkeyPatch], None]

LARGE, SMALL = (1, 128, 512), (1, 1, 8)
"""Shapes of x: two probes of the large one have enough elements, so that nothing is added to them."""


@dataclass(frozen=True)
class Needed:
    """A check, how to take it out, and who is then missed."""

    check: str
    """For the test's id."""
    patch: Patch
    """Takes it out."""
    saboteur: str
    """Who goes unseen without it."""
    args: Callable[[], tuple[Any, ...]]
    """On which operands; in the matrix, in which cell."""


# Fusions and operands -------------------------------------------------------------------------------------------------


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def _rstd(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6)


def _rstd_of_the_reversed_row(x: Tensor) -> Tensor:
    return _rstd(x.flip(-1))


def _normalized_by(statistic: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.float() * statistic(x).unsqueeze(-1)).to(x.dtype)


def right(**options: Any) -> Fusion:
    """A fusion whose kernel is its reference."""
    return Fusion("modulate", reference=modulate, fused=modulate, **options)


def reordered() -> Fusion:
    """A norm that adds up its row from the other end; almost all rounded outputs agree."""
    return Fusion(
        "norm",
        reference=_normalized_by(_rstd),
        fused=_normalized_by(_rstd_of_the_reversed_row),
        witness=(_rstd, _rstd_of_the_reversed_row),
    )


def normal(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """x of this shape, and rows."""
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
        def live(args: Any, rng: Any, *layout: Any) -> Operands:
            return probes.live_copies(args)

        def not_refilled(self: Operands, rng: Any, **kind: Any) -> None:
            pass

        if special:
            monkeypatch.setattr(Operands, "refill", not_refilled)
        else:
            monkeypatch.setattr(first_sight, "redrawn", live)

    return patch


def no_live_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """First sight without the copies of the live operands."""
    copies: list[Operands] = []
    live_copies, attempt = probes.live_copies, first_sight.FirstSight._try

    def noted(args: Any) -> Operands:
        copies.append(live_copies(args))
        return copies[-1]

    def unless_live(self: Any, operands: Operands, *rest: Any) -> Iterator[Verdict]:
        return iter(()) if operands in copies else attempt(self, operands, *rest)

    monkeypatch.setattr(first_sight, "live_copies", noted)
    monkeypatch.setattr(first_sight.FirstSight, "_try", unless_live)
    no_ring(monkeypatch)


def no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """First sight without the launches that only show whether results lie apart."""
    monkeypatch.setattr(first_sight.FirstSight, "_try_ring", nothing_found)


def aligned_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of a probe at whole cache lines, wherever the live ones are."""
    of = GuardedOperand.of

    def aligned(like: Tensor, *rest: Any) -> GuardedOperand:
        return of(torch.empty(1, dtype=like.dtype, device=like.device), *rest)

    monkeypatch.setattr(GuardedOperand, "of", aligned)


def undisturbed_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """First sight without a look at the random generators, and at the ops that draw from them."""
    monkeypatch.setattr(GlobalState, "_generator_states", lambda self: {})
    monkeypatch.setattr(guarded, "draws", lambda *op: False)


def only_normal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of one kind of numbers, with zeros, subnormals, infinities and NaN among them."""

    def mix(values: Tensor, block: int, generator: torch.Generator) -> None:
        most = torch.finfo(values.dtype).max
        probe_values._strew(values, 64, [float("nan"), float("inf"), most, 0.0, -0.0], generator)

    probe_values._pool.cache_clear()
    monkeypatch.setattr(probe_values, "_mix", mix)
    monkeypatch.setattr(probe_values, "_pool", probe_values._pool.__wrapped__)


def probes_at_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory for each set of numbers."""
    kept: list[Any] = []

    def elsewhere(self: Operands, rng: Any, *, special: bool = True) -> None:
        kept.append(self._guards)
        fresh = probes.live_copies(self.args)
        self._guards, self.args = fresh._guards, fresh.args
        filled(self, rng, special=special)

    filled = Operands.refill
    monkeypatch.setattr(Operands, "refill", elsewhere)


def memory_as_an_allocator_hands_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that the reference's result has just left, instead of poison."""
    monkeypatch.setattr(guarded, "_wrong_everywhere", lambda expected: integer_view(expected).clone())
    no_ring(monkeypatch)


def larger_memory_as_an_allocator_hands_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise where the kernel allocates more than its output takes."""
    poison = LaunchGuard._poison

    def left_behind(self: LaunchGuard, fresh: Tensor) -> None:
        (expected,) = self._expected
        if fresh.dtype == expected.dtype and fresh.numel() > expected.numel():
            before = integer_view(as_real(expected)).reshape(-1)
            integer_view(as_real(span_of(fresh)))[: before.numel()] = before
        else:
            poison(self, fresh)

    monkeypatch.setattr(LaunchGuard, "_poison", left_behind)
    no_ring(monkeypatch)


def nothing(owner: Any, name: str, result: Any = None) -> Patch:
    """A check that finds nothing."""

    def found(*args: Any, **named: Any) -> Any:
        return result

    return lambda monkeypatch: monkeypatch.setattr(owner, name, found)


def all_of(*patches: Patch) -> Patch:
    """Several checks taken out together, of which each would do."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for one in patches:
            one(monkeypatch)

    return patch


def nothing_about(words: str, owner: Any, name: str) -> Patch:
    """A check of several things that lets one of them pass: that which it tells in these words."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        check = getattr(owner, name)

        def found(*args: Any) -> tuple[str, str] | None:
            fault: tuple[str, str] | None = check(*args)
            return None if fault is not None and words in fault[1] else fault

        monkeypatch.setattr(owner, name, found)

    return patch


def nothing_found(*args: Any) -> Iterator[Verdict]:
    """No verdict of a trial."""
    return iter(())


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
    """A first sight for which all bits are equal."""

    def equal(actual: Any, expected: Tensor, *args: Any, **named: Any) -> Verdict:
        return Verdict(True, "equal", Exact(), expected.numel())

    monkeypatch.setattr(first_sight, "compare", equal)
    monkeypatch.setattr(launch_checks, "compare", equal)


def nothing_outside_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract in ULPs that every distance keeps."""

    def kept(actual: Tensor, expected: Tensor, contract: Contract, magnitude: Tensor | None) -> Any:
        outside = outside_of(actual, expected, contract, magnitude)

        def nowhere(index: Any) -> tuple[Tensor, Tensor | None]:
            broken, distance = outside(index)
            return torch.zeros_like(broken), distance

        return nowhere

    monkeypatch.setattr(verdicts, "outside_of", kept)


def unwatched(words: str) -> Patch:
    """What is around a launch, watched but for what is told in these words."""
    return nothing_about(words, GlobalState, "fault")


class _AnyDevice(int):
    """A device's number that differs from no other."""

    def __ne__(self, other: object) -> bool:
        return False


def unwatched_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise but for the current device; what is asked after that still is."""
    note = GlobalState.note

    def blind(self: GlobalState) -> None:
        note(self)
        self._current = _AnyDevice(self._current)

    monkeypatch.setattr(GlobalState, "note", blind)
