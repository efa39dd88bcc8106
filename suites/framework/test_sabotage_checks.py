"""Each check of first sight and of the gate is needed: without it a saboteur goes unseen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusiongate.comparison.contracts import Ulp
from fusiongate.comparison.verdicts import Verdict
from fusiongate.errors import PoisonedDevice
from fusiongate.gate import (
    device_state as surroundings,
)
from fusiongate.gate import (
    guarded,
    judging,
    launch_checks,
    probes,
    signatures,
)
from fusiongate.gate import (
    verification as first_sight,
)
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.global_state import GlobalState
from fusiongate.gate.policies import Every, Policy
from fusiongate.gate.states import State
from fusiongate.sabotage import Detector, saboteur

from .removals import (
    LARGE,
    SMALL,
    Needed,
    aligned_probes,
    all_of,
    compared_as_equal,
    degenerate,
    larger_memory_as_an_allocator_hands_it_out,
    memory_as_an_allocator_hands_it_out,
    no_live_trial,
    no_metadata,
    no_probe,
    no_ring,
    normal,
    nothing,
    nothing_about,
    nothing_found,
    nothing_outside_of_the_contract,
    only_normal_numbers,
    probes_at_other_addresses,
    reordered,
    right,
    tiny_row,
    undisturbed_generators,
)


def off_a_cache_line(*shape: int) -> tuple[Tensor, ...]:
    """Operands eight bytes after one."""

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 4, dtype=tensor.dtype)
        return memory[4:].view(tensor.shape).copy_(tensor)

    return tuple(map(moved, normal(*shape)))


# First sight ----------------------------------------------------------------------------------------------------------


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
    Needed(
        "poison of larger memory",
        larger_memory_as_an_allocator_hands_it_out,
        "larger-buffer-unwritten",
        lambda: normal(*LARGE),
    ),
    Needed("alignment of the probes", aligned_probes, "wrong-at-one-alignment", lambda: off_a_cache_line(*LARGE)),
    Needed("canary", nothing(guarded.GuardedOperand, "overrun", False), "operand-overrun", lambda: normal(*LARGE)),
    Needed(
        "unchanged inputs",
        all_of(nothing(guarded.GuardedOperand, "changed", False), no_ring),
        "rows-changed",
        lambda: normal(*LARGE),
    ),
    Needed(
        "aliasing an input",
        nothing_about("an input", first_sight.FirstSight, "_aliasing"),
        "first-operand-handed-back",
        lambda: degenerate(*LARGE),
    ),
    Needed(
        "aliasing an earlier result",
        nothing_about("an earlier call's result", first_sight.FirstSight, "_aliasing"),
        "static-output-buffer",
        lambda: normal(*LARGE),
    ),
    Needed(
        "aliasing the reference's result",
        all_of(nothing_about("the reference's result", first_sight.FirstSight, "_aliasing"), no_ring),
        "references-result-handed-on",
        lambda: normal(*LARGE),
    ),
    Needed(
        "random state",
        undisturbed_generators,
        "random-state-moved",
        lambda: normal(*LARGE),
    ),
    Needed(
        "the process's random states",
        nothing(GlobalState, "_generator_states", {}),
        "numpy-random-state-moved",
        lambda: normal(*LARGE),
    ),
    Needed("settings", nothing(GlobalState, "_changed_settings"), "threads-left-changed", lambda: normal(*LARGE)),
    Needed("same memory again", probes_at_other_addresses, "rows-kept-by-address", lambda: normal(*LARGE)),
    Needed("several results", no_ring, "ring-of-output-buffers", lambda: normal(*LARGE)),
    Needed(
        "canary of the output", nothing(guarded.LaunchGuard, "overrun", False), "output-overrun", lambda: normal(*LARGE)
    ),
    Needed("class and flags", nothing(launch_checks, "unlike"), "output-of-inference-mode", lambda: normal(*LARGE)),
    Needed("any magnitude", only_normal_numbers, "wrong-at-some-magnitudes", lambda: normal(*LARGE)),
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
    nothing(probes.Operands, "refill")(monkeypatch)
    monkeypatch.setattr(first_sight, "redrawn", lambda args, *_: probes.live_copies(args))
    assert wide.apply(right()).verify(*args).ok


@pytest.mark.parametrize(
    "kind, name", [("type", "nothing-returned"), ("layout", "another-layout"), ("device", "another-device")]
)
def test_without_one_kind_of_metadata_the_comparison_only_breaks_down(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such results cannot be compared at all; that they are another kind of result is what goes unsaid."""
    one = saboteur(name)
    words = one.detectors[Detector.FIRST_SIGHT]
    assert words in str(one.apply(right()).verify(*normal(*LARGE)))
    no_metadata(kind)(monkeypatch)
    verdict = one.apply(right()).verify(*normal(*LARGE))
    assert "not-comparable" == verdict.reason
    assert words not in str(verdict)


def test_without_its_distances_a_contract_is_kept_by_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = saboteur("operands-exchanged")
    assert "ulp" == exchanged.apply(right(contract=Ulp(2))).verify(*normal(*LARGE)).reason
    nothing_outside_of_the_contract(monkeypatch)
    assert exchanged.apply(right(contract=Ulp(2))).verify(*normal(*LARGE)).ok


# The gate -------------------------------------------------------------------------------------------------------------


def reason_after_calls(name: str, policy: Policy | None = None, calls: int = 64) -> str:
    """What the gate says of the last operands after many calls with them."""
    spoilt, args = saboteur(name).apply(right()), normal(*LARGE)
    op = Fusion("late", reference=spoilt.reference, fused=spoilt.fused, policy=policy or Policy())
    for _ in range(calls):
        op(*args)
    return str(op.explain(*args).reason)


def test_without_a_recheck_a_kernel_may_turn_wrong_later() -> None:
    assert "refused" == reason_after_calls("wrong-from-the-nth-call", Policy(recheck=Every(2)))
    assert "verified" == reason_after_calls("wrong-from-the-nth-call")


def test_without_metadata_a_recheck_misses_the_right_bits_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "refused" == reason_after_calls("dtype-mislabelled-later", Policy(recheck=Every(2)))
    no_metadata("dtype")(monkeypatch)
    assert "verified" == reason_after_calls("dtype-mislabelled-later", Policy(recheck=Every(2)))


@pytest.mark.parametrize("name, left", [("raises-at-launch", "first-sight"), ("raises-later", "verified")])
def test_without_an_eye_on_errors_a_kernel_that_fails_is_launched_again_and_again(
    name: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "refused" == reason_after_calls(name, calls=8)
    nothing(judging.Judge, "fail", Verdict(False, "raised", right().contract, 0))(monkeypatch)
    assert left == reason_after_calls(name, calls=8)


def test_without_alignment_in_the_signature_one_verdict_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason_elsewhere() -> str:
        op = saboteur("wrong-at-one-alignment").apply(right())
        op(*normal(*LARGE))
        op(*off_a_cache_line(*LARGE))
        return str(op.explain(*off_a_cache_line(*LARGE)).reason)

    assert "refused" == reason_elsewhere()
    monkeypatch.setattr(signatures, "alignment", lambda tensor: signatures.ALIGNMENT)
    assert "verified" == reason_elsewhere()


def test_without_a_look_at_the_device_its_loss_is_one_more_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: operands on the CPU pass for ones on a GPU, which answers no more once the launch has failed."""

    def no_answer() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(surroundings, "device_of", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr("fusiongate.gate.fusion.capturing", lambda args: False)
    monkeypatch.setattr(surroundings, "capturing", lambda args: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=no_answer))
    fatal, args = saboteur("raises-asynchronously"), normal(*LARGE)
    with pytest.raises(PoisonedDevice, match="device context is unusable"):
        fatal.apply(right())(*args)
    nothing(judging, "is_poisoned", False)(monkeypatch)
    op = fatal.apply(right())
    op(*args)
    assert State.REFUSED == op.standing(*args)


def test_without_the_bucket_s_other_rows_a_verdict_covers_launches_that_never_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no row is left over, a kernel that gets those wrong is right."""

    def bucket(x: Tensor, *rows: Tensor) -> tuple[int, ...]:
        return x.shape[0], x.shape[1].bit_length(), x.shape[2]

    wrong, args = saboteur("wrong-in-the-remainder"), normal(*LARGE)
    assert "bits" == wrong.apply(right(signature=bucket)).verify(*args).reason
    nothing(first_sight, "sharing", [])(monkeypatch)
    op = wrong.apply(right(signature=bucket))
    assert op.verify(*args).ok
    assert "verified" == op.explain(*normal(1, 129, 512)).reason
