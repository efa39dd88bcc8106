"""What a run leaves behind, and the verdict on two of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from fusiongate.errors import SnapshotError
from fusiongate.platforms import environment
from fusiongate.presets import PresetRecord, first_difference, judge, run_arm
from fusiongate.presets.records import ArmRecord, TensorRecord

from .toy_presets import flat, steady

HERE = environment("cpu")


def tensor(md5: str, **changes: Any) -> TensorRecord:
    return dataclasses.replace(TensorRecord("bfloat16", (2, 3), md5, 0, False), **changes)


def arm(*digests: str) -> ArmRecord:
    return {f"step {number}": {"x": tensor(digest)} for number, digest in enumerate(digests)}


def record(fused: ArmRecord, reference: ArmRecord) -> PresetRecord:
    return PresetRecord("toy", "tiny", 0, fused, reference, "a" * 64, HERE)


@pytest.mark.parametrize(
    "kept",
    [
        tensor("0" * 32),
        tensor("1" * 32, shape=()),
        tensor("2" * 32, shape=(0,)),
        tensor("3" * 32, nonfinite=12, constant=True),
        tensor("4" * 32, constant=True),
    ],
)
def test_a_tensors_record_survives_its_file(kept: TensorRecord) -> None:
    assert kept == TensorRecord.from_json(kept.to_json())


def test_a_record_survives_its_file() -> None:
    kept = record(arm("a", "b"), arm("a", "b"))

    assert kept == PresetRecord.from_json(json.loads(kept.text()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "damaged: Expected `object`, got `array`; record it again"),
        ({"schema": 99}, "schema 99; expected 1"),
        ({"schema": 1}, "damaged: Object missing required field `preset`"),
        ({**record(arm("a"), arm("a")).to_json(), "fused": {"step": {"x": "abc"}}}, "expected its md5, its dtype"),
        (
            {**record(arm("a"), arm("a")).to_json(), "environment": {}},
            "environment record: .* required field `platform`",
        ),
        ({**record(arm("a"), arm("a")).to_json(), "seed": "0"}, r"Expected `int`, got `str` - at `\$\.seed`"),
    ],
)
def test_a_damaged_record_says_what_is_wrong_with_it(fields: object, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        PresetRecord.from_json(fields)


def test_outputs_that_are_constant_or_not_finite_are_faults() -> None:
    steps = run_arm(flat, "reference", device=torch.device("cpu")).steps

    faults = record(steps, arm("a")).faults()
    assert ["3 elements are not finite", "all elements are the same"] == [fault.partition(": ")[2] for fault in faults]
    assert "fused arm, step 'output', tensor 'x'" in faults[0]
    assert "tensor 'y'" in faults[1]


def test_an_arm_in_which_every_tensor_is_empty_is_a_fault() -> None:
    """An empty tensor has the md5 of nothing; beside others it may be right."""
    empty = tensor("a", shape=(2, 0))

    assert ["empty: every tensor of the reference arm is without elements; yield what kernels write"] == record(
        arm("a"), {"step 0": {"x": empty, "y": empty}}
    ).faults()
    assert [] == record(arm("a"), {"step 0": {"x": empty, "y": tensor("b")}}).faults()


def test_a_run_that_means_something_has_no_faults() -> None:
    steps = run_arm(steady, "reference", device=torch.device("cpu")).steps

    assert [] == record(steps, steps).faults()


def test_the_first_difference_is_first_in_the_order_of_the_run() -> None:
    found = first_difference(arm("a", "b", "c"), arm("a", "x", "y"))

    assert found is not None
    assert ("step 1", "x", 2, 3) == (found.step, found.tensor, found.differing, found.total)
    assert "step 'step 1', tensor 'x': md5 b → x (2 of 3 tensors differ)" == str(found)


def test_equal_arms_have_no_difference() -> None:
    assert first_difference(arm("a", "b"), arm("a", "b")) is None


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (arm("a"), arm("a", "b"), "step 'step 1', tensor 'x': is new"),
        (arm("a", "b"), arm("a"), "step 'step 1', tensor 'x': is gone"),
        (arm("a"), {"step 0": {"x": tensor("a", dtype="float32")}}, "bfloat16[2, 3] → float32[2, 3]"),
        (arm("a"), {"step 0": {"x": tensor("a", shape=(6,))}}, "bfloat16[2, 3] → bfloat16[6]"),
    ],
)
def test_a_difference_says_what_it_is(before: ArmRecord, after: ArmRecord, text: str) -> None:
    assert text in str(first_difference(before, after))


KEPT = record(arm("a", "b"), arm("a", "b"))


@pytest.mark.parametrize(
    ("fused", "reference", "change"),
    [
        (arm("a", "b"), arm("a", "b"), "nothing changed"),
        (arm("a", "x"), arm("a", "b"), "kernel changed"),
        (arm("a", "b"), arm("a", "x"), "reference changed"),
        (arm("a", "x"), arm("a", "x"), "reference changed"),
        (arm("a", "x"), arm("a", "y"), "both changed"),
    ],
)
def test_the_verdict_tells_kernel_and_reference_apart(fused: ArmRecord, reference: ArmRecord, change: str) -> None:
    """Where both arms moved together, the kernels followed the reference and are not to blame."""
    judgement = judge(KEPT, record(fused, reference))

    assert change == judgement.change
    assert bool(judgement) is (change == "nothing changed")
    assert str(judgement).startswith(change)


def test_the_verdict_names_the_first_step_and_what_else_moved() -> None:
    elsewhere = dataclasses.replace(HERE, torch="2.99.0", libraries={**HERE.libraries, "numpy": "99"})
    now = dataclasses.replace(record(arm("a", "x"), arm("a", "b")), environment=elsewhere, sources="b" * 64)

    text = str(judge(KEPT, now))

    assert "with kernels, first at step 'step 1', tensor 'x'" in text
    assert f"torch {HERE.torch} → 2.99.0" in text
    assert "numpy" in text
    assert "the kernels' sources aaaaaaaaaaaa → bbbbbbbbbbbb" in text


def test_an_environment_alone_changes_nothing() -> None:
    now = dataclasses.replace(KEPT, environment=dataclasses.replace(HERE, driver="1"), sources="b" * 64)

    assert judge(KEPT, now)
