"""Declaring presets and running both arms of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.policies import Every, Policy
from fusiongate.presets import PRESETS, Run, first_difference, lookup, missing_for, preset, run_arm, run_preset
from fusiongate.presets.registry import declared
from fusiongate.scanning import rewired

from .toy_presets import Modulated, Sized, steady

CPU = torch.device("cpu")


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


def op(**changes: Any) -> Fusion:
    return Fusion(**{"name": "modulate", "reference": modulated, "fused": modulated, **changes})


@pytest.fixture
def named() -> Iterator[str]:
    """The name of a preset that is forgotten after the test."""
    yield "of-this-test"
    PRESETS.pop("of-this-test", None)


def test_both_arms_give_every_step_and_agree() -> None:
    run = run_preset(steady, ops=[op()])

    assert ["step 0", "step 1", "output"] == list(run.record.fused)
    assert ["x", "mean"] == list(run.record.fused["output"])
    assert first_difference(run.record.reference, run.record.fused) is None
    assert [] == run.record.faults()


def test_the_sites_of_the_fused_arm_are_counted() -> None:
    run = run_preset(steady, ops=[op()])

    (site,) = run.fused.sites
    assert site.name.startswith("Modulated:toy_presets.py:")
    assert {"reference (first-sight)": 1, "fused (verified)": 1} == site.calls
    assert () == run.reference.sites


def test_a_preset_in_which_nothing_was_fused_proves_nothing_unless_it_says_that_it_means_that() -> None:
    (fault,) = run_preset(steady, ops=()).faults()
    assert fault.startswith("nothing fused: no call took a kernel (no fusion was called); ")
    assert fault.endswith("or declare the preset with fused=False if the digests of eager alone are meant")

    meant = dataclasses.replace(steady, fused=False)
    assert [] == run_preset(meant, ops=()).faults()
    assert [] == run_preset(steady, ops=[op()]).faults()


def test_first_sight_alone_is_not_fused(named: str) -> None:
    @preset(named)
    def once(run: Run) -> Any:
        call = op() if run.arm == "fused" else modulated
        yield "output", {"x": call(*(run.normal(name, 2, 8) for name in "xab"))}

    (fault,) = run_preset(once).faults()
    assert "(1 × reference (first-sight))" in fault


@pytest.mark.parametrize("held", [True, False], ids=["held by a module", "made by the preset"])
def test_every_fusion_that_is_called_is_counted_whoever_mounted_it(named: str, held: bool) -> None:
    kept = op(name="mine")

    @preset(named)
    def mounted(run: Run) -> Any:
        mine = kept if held else op(name="mine")
        call = mine if run.arm == "fused" else modulated
        for step in ("first", "second"):
            yield step, {"x": call(*(run.normal(name, 2, 8) for name in "xab"))}

    run = run_preset(mounted)
    (site,) = run.fused.sites
    assert ("mine", {"fused (verified)": 1, "reference (first-sight)": 1}) == (site.name, site.calls)
    assert [] == run.faults()


def test_a_gate_that_refused_before_is_red_in_the_preset_that_calls_it(named: str) -> None:
    """Presets share a process, and fusions of modules with it."""
    mine = op(name="mine", fused=lambda x, scale, shift: modulated(x, scale, shift) + 1)

    @preset(named)
    def mounted(run: Run) -> Any:
        yield "output", {"x": mine(*(run.normal(name, 2, 8) for name in "xab"))}

    for _ in range(2):
        (fault,) = run_preset(mounted).faults()
        assert fault.startswith("the gate at mine refused: ")
        assert fault.endswith("If the kernel is not meant for these arguments, let its declines say so")


def test_changing_the_seed_changes_every_digest() -> None:
    one, other = (run_arm(steady, "reference", seed=seed, device=CPU).steps for seed in (0, 1))

    found = first_difference(one, other)
    assert found is not None
    assert found.differing == found.total


def test_a_runs_numbers_do_not_depend_on_torchs_generator() -> None:
    torch.manual_seed(1)
    one = run_arm(steady, "reference", device=CPU).steps
    torch.manual_seed(2)
    other = run_arm(steady, "reference", device=CPU).steps

    assert first_difference(one, other) is None


def test_a_models_random_buffers_repeat_and_torchs_generator_does_not_notice() -> None:
    run = Run(size="tiny", seed=0, device=CPU, arm="reference")
    before = torch.get_rng_state()

    one, other = (run.model(name, Sized).get_buffer("noise") for name in ("one", "other"))
    assert torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_cpu_run_has_one_thread_and_gives_the_others_back(named: str) -> None:
    before = torch.get_num_threads()
    seen = []

    @preset(named)
    def threads(run: Run) -> Any:
        seen.append(torch.get_num_threads())
        yield "output", {"x": run.normal("x", 4)}

    run_arm(threads, "reference", device=CPU)

    assert [1] == seen
    assert before == torch.get_num_threads()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "yields nothing"),
        ([("a", {"x": torch.ones(2)}), ("a", {"x": torch.ones(2)})], "yields 'a' twice"),
        ([("a", torch.ones(2))], "it yields Tensor; expected a mapping from names to tensors"),
        ([("a", {"x": 3})], "expected a mapping from names to tensors"),
    ],
)
def test_a_preset_that_yields_something_else_says_so(steps: list[Any], message: str, named: str) -> None:
    declared_steps = preset(named)(lambda run: iter(steps))

    with pytest.raises(UsageError, match=message):
        run_arm(declared_steps, "reference", device=CPU)


@pytest.mark.parametrize("name", ["", "Two Words", "UPPER", "a/b", "-a", "a--b", "x" * 101, 3])
def test_a_presets_name_is_fit_for_a_file(name: Any) -> None:
    with pytest.raises(UsageError, match="expected lower case words with hyphens"):
        preset(name)(lambda run: iter(()))


def test_a_presets_sizes_are_known_ones() -> None:
    with pytest.raises(UsageError, match="expected 'tiny', 'real' or both"):
        preset("of-this-test", sizes=["huge"])(lambda run: iter(()))  # type: ignore[list-item]


def test_two_modules_cannot_declare_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file under a second name, as installed package say, is no other module."""
    monkeypatch.setitem(PRESETS, "steady", steady)
    again = declared("steady", steady.steps, sizes=["tiny"], devices=["cpu"], needs=[], module=steady.module)
    assert again.file == steady.file

    with pytest.raises(UsageError, match="has declared it already"):
        declared("steady", steady.steps, sizes=["tiny"], devices=["cpu"], needs=[], module="pytest")


def test_what_prepares_a_model_has_the_last_word() -> None:
    """A timing compiles the models of a preset by this way, after they were filled and mounted."""
    seen: list[torch.nn.Module] = []

    def replaced(model: torch.nn.Module) -> torch.nn.Module:
        seen.append(model)
        return torch.nn.Identity()

    run = Run(size="tiny", seed=0, device=CPU, arm="reference", prepare=replaced)
    assert isinstance(run.model("model", Modulated), torch.nn.Identity)
    (filled,) = seen
    assert isinstance(filled, Modulated)
    assert filled.out.weight.abs().max() > 0


def test_parts_of_a_model_stay_in_fp32_where_a_preset_says_so() -> None:
    run = Run(size="tiny", seed=0, device=CPU, arm="reference")
    model = run.model("model", Modulated, in_fp32=["out"])
    assert {torch.bfloat16} == {model.rows.weight.dtype, model.rows.bias.dtype}
    assert {torch.float32} == {model.out.weight.dtype, model.out.bias.dtype}


def test_uniform_numbers_lie_between_zero_and_one_and_follow_the_seed() -> None:
    one, other = (Run(size="tiny", seed=seed, device=CPU, arm="reference").uniform("x", 1000) for seed in (0, 1))
    assert torch.bfloat16 == one.dtype
    assert 0 <= one.min() < 0.05 < 0.95 < one.max() <= 1
    assert not torch.equal(one, other)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no preset 'sturdy'.*steady"):
        lookup("sturdy")


def test_what_is_missing_for_a_preset_is_said(named: str) -> None:
    demanding = preset(named, devices=["cuda"], needs=["no_such_module"])(lambda run: iter(()))

    assert "no_such_module not installed: pip install 'fusiongate[models]'" == missing_for(demanding, "tiny", CPU)
    assert "it has no size 'real'" == missing_for(steady, "real", CPU)
    assert missing_for(steady, "tiny", CPU) is None
    PRESETS.pop(named)
    large = preset(named, sizes=["tiny", "real"], devices=["cuda", "cpu"])(lambda run: iter(()))
    assert "the real size needs a GPU" == missing_for(large, "real", CPU)
    assert missing_for(large, "real", torch.device("cuda")) is None
    PRESETS.pop(named)
    elsewhere = preset(named, devices=["cuda"])(lambda run: iter(()))
    assert "it runs on cuda only" == missing_for(elsewhere, "tiny", CPU)
    assert Path(__file__).with_name("toy_presets.py") == steady.file


def test_a_kernel_that_goes_wrong_after_a_thousand_calls_is_caught_by_looking_again() -> None:
    """The warning names the range of calls that it may have spoilt."""
    called = 0

    def fused(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        result = modulated(x, scale, shift)
        return result + 1.0 if called > 1000 else result

    model = Modulated().bfloat16()
    rechecked = op(fused=fused, policy=Policy(recheck=Every(100)))
    x, condition = torch.randn(2, 16, 16).bfloat16(), torch.randn(2, 16).bfloat16()

    with torch.no_grad(), rewired(model, [rechecked]) as report:
        for called in range(1300):  # noqa: B007 - the kernel reads it
            model(x, condition)

    (site,) = report.mounted
    assert site.fusion is not None
    refusals = [event for event in site.fusion.gate.events if event.kind == "refused"]
    assert 1 == len(refusals)
    assert "a recheck found call 1100 of this signature wrong" in refusals[0].message
    assert "the last one known to be right is call 1000" in refusals[0].message
    assert site.counters["reference", "refused"] > 150
