"""Each look at what a user gives beside the kernel is needed: without it the wrong kernel is verified or blamed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate import verification as first_sight
from fusiongate.gate.fusion import Fusion
from fusiongate.sabotage import saboteur

from .removals import LARGE, Patch, modulate, normal, nothing, right


def told_of(op: Fusion, *args: Tensor) -> str:
    """What first sight says."""
    return str(op.verify(*args))


def fit_but_for(words: str) -> Patch:
    """The look at a probe's operands, without what it tells in these words."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        unfit = first_sight.FirstSight._unfit

        def found(self: first_sight.FirstSight, args: Any) -> str | None:
            fault = unfit(self, args)
            return None if fault is not None and words in fault else fault

        monkeypatch.setattr(first_sight.FirstSight, "_unfit", found)

    return patch


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """A row's bias is a sum, which may be over nothing."""
    return x + bias.sum(-1, keepdim=True)


def without_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + 0


def test_without_a_look_at_the_probe_s_operands_empty_ones_verify_a_kernel_that_never_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randn_like(x), bias[:, :0]

    args = torch.randn(128, 512), torch.zeros(128, 3)
    op = Fusion("biased", reference=biased, fused=without_bias, probe=probe)
    assert "probe= raised UsageError: an operand has no elements" in told_of(op, *args)
    fit_but_for("no elements")(monkeypatch)
    assert op.verify(*args).ok


def test_without_a_look_at_declines_a_probe_launches_a_right_kernel_where_it_may_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes rows that are packed, and its predicate says so."""

    def probe(*args: Tensor) -> tuple[Tensor, ...]:
        x, *_ = normal(*LARGE)
        table = torch.randn(x.shape[0], 2, x.shape[-1] * 2).to(x.dtype)
        return x, table[:, :1, ::2], table[:, 1:, ::2]

    packed_only = saboteur("strides-ignored").apply(right())
    op = Fusion(
        "packed",
        reference=modulate,
        fused=packed_only.fused,
        declines=lambda *args: None if all(arg.is_contiguous() for arg in args) else "stride",
        probe=probe,
    )
    assert "probe= raised UsageError: declines refuses the operands: stride" in told_of(op, *normal(*LARGE))
    fit_but_for("declines refuses")(monkeypatch)
    verdict = op.verify(*normal(*LARGE))
    assert ("bits", False) == (verdict.reason, "probe=" in str(verdict))


def test_without_the_name_of_whose_code_runs_the_gate_is_blamed_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*args: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("no such bucket")

    op = Fusion("modulate", reference=modulate, fused=modulate, probe=probe)
    assert "probe= raised ValueError: no such bucket" in told_of(op, *normal(*LARGE))
    monkeypatch.setattr(first_sight.FirstSight, "_run", lambda self, whose, function, args: function(*args))
    assert (
        "the gate cannot compare results of this kind, which is no fault of the kernel's: it raised ValueError: no such"
        in told_of(op, *normal(*LARGE))
    )


def positive(x: Tensor) -> Tensor:
    """As many elements as there are such numbers."""
    return x[x > 0]


def test_without_a_look_at_the_reference_s_result_live_operands_that_show_nothing_are_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, args = Fusion("positive", reference=positive, fused=positive), -torch.rand(512, 512)
    told = "the reference does not return dense tensors with elements; there is nothing to compare with"
    assert told in told_of(op, args)
    nothing(first_sight, "comparable", True)(monkeypatch)
    assert op.verify(args).ok


def test_without_a_look_at_a_probe_s_result_it_may_be_wasted_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that says something every other time only; one that never did would be asked for ever."""

    def verified() -> str:
        signs = itertools.cycle([-1, 1])
        op = Fusion(
            "positive",
            reference=positive,
            fused=positive,
            probe=lambda x: (next(signs) * torch.rand_like(x),),
        )
        return told_of(op, torch.rand(64, 512))

    assert "the probe's operands give a result without elements" in verified()
    nothing(first_sight, "comparable", True)(monkeypatch)
    assert "equal bit for bit" in verified()
