"""Presets in processes of their own, and where two of them part."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.platforms import cpu_architecture, environment
from fusiongate.presets import (
    PRESETS,
    Preset,
    PresetProcess,
    PresetRun,
    Run,
    first_difference,
    judge,
    lookup,
    parting,
    run_fresh,
    run_preset,
)
from fusiongate.presets.op_bisect import OpRecord, fingerprint, trace
from fusiongate.presets.worker import ProcessFailed, cpu_settings
from fusiongate.switches import PORTABLE

from .toy_presets import flat, noisy, steady

ELSEWHERE = """
import os
import sys
from fusiongate.presets import preset

@preset("elsewhere")
def elsewhere(run):
    print("a library that talks")
    os.write(1, b"and one that talks past python")
    x = run.normal("x", 3)
    if run.seed == 1:
        os._exit(7)
    if run.seed == 2:
        from fusiongate.errors import UsageError
        raise UsageError("not with this seed")
    if run.seed == 3:
        raise KeyError("a bug of the preset's")
    yield "output", {"x": x}
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preset]:
    """A preset in a module of its own, forgotten after the test."""
    (tmp_path / "elsewhere_presets.py").write_text(ELSEWHERE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("elsewhere_presets").elsewhere
    PRESETS.pop("elsewhere", None)


@pytest.fixture(scope="module")
def fresh() -> list[PresetRun]:
    """A preset twice in a process that was started for it, from an environment that asks for something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        patch.setenv("OMP_NUM_THREADS", "3")
        return list(run_fresh([steady, steady]))


def test_another_process_gives_the_same_and_runs_several_one_after_another(
    fresh: list[PresetRun],
) -> None:
    first, second = fresh

    assert judge(first.record, second.record)
    assert run_preset(steady).fused.calls() == first.fused.calls()


def test_a_process_on_a_cpu_is_held_to_one_thread_and_one_instruction_set(fresh: list[PresetRun]) -> None:
    """The environment that is recorded says so."""
    where = fresh[0].record.environment

    assert 1 == where.threads
    if cpu_architecture() == "x86_64":
        assert PORTABLE.items() <= where.switches.items()
        assert ("cpu-x86_64-default", "cpu-x86_64") == (where.platform, where.digest_platform)
    else:
        assert environment("cpu").platform == where.platform == where.digest_platform


def test_an_architecture_that_was_not_shown_to_repeat_keeps_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} == cpu_settings()


@pytest.mark.usefixtures("forked")
def test_what_a_preset_prints_is_no_answer(elsewhere: Preset) -> None:
    (run,) = run_fresh([elsewhere])

    assert ["output"] == list(run.record.reference)


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_is_reported_with_what_it_printed(elsewhere: Preset) -> None:
    with (
        pytest.raises(ProcessFailed, match=r"(?s)the process that ran it exited with 7.*talks past python"),
        PresetProcess() as process,
    ):
        process.run(elsewhere, seed=1)


@pytest.mark.usefixtures("forked")
def test_an_error_of_a_preset_is_raised_here_and_the_process_lives_on(elsewhere: Preset) -> None:
    with PresetProcess() as process:
        with pytest.raises(UsageError, match="not with this seed"):
            process.run(elsewhere, seed=2)
        assert process.run(elsewhere).record.preset == "elsewhere"


@pytest.mark.usefixtures("forked")
def test_a_bug_of_a_preset_is_reported_with_its_traceback(elsewhere: Preset) -> None:
    with pytest.raises(ProcessFailed, match='KeyError: "a bug of the preset\'s"'), PresetProcess() as process:
        process.run(elsewhere, seed=3)


def test_presets_of_a_test_package_are_found_in_another_process() -> None:
    """Their package is on no path that a fresh process searches."""
    assert steady.module.endswith("framework.toy_presets")
    assert lookup("steady") is steady


@pytest.mark.usefixtures("forked")
def test_where_two_processes_part_the_operator_and_its_step_are_named() -> None:
    with PresetProcess() as one, PresetProcess() as other:
        found = parting(one.trace(noisy), other.trace(noisy))
        assert parting(one.trace(steady), other.trace(steady)) is None

    assert found is not None
    assert ("second", "", "aten.rand.generator") == (found.step, found.module, found.op)
    assert str(found).startswith("step 'second', outside of any module, aten.rand.generator")


def test_an_operators_module_is_the_innermost_that_runs() -> None:
    ops = trace(steady, device=torch.device("cpu"))

    assert ("step 0", "model.norm (LayerNorm)") in {
        (op.step, op.module) for op in ops if op.op == "aten.native_layer_norm.default"
    }
    assert {"model.rows (Linear)", "model.out (Linear)"} == {op.module for op in ops if "addmm" in op.op}


def test_runs_of_different_lengths_part_where_the_shorter_one_ends() -> None:
    ops = [OpRecord("a", "", f"op{number}", number) for number in range(3)]

    found = parting(ops[:2], ops)
    assert found is not None
    assert ("op2", 3, 3) == (found.op, found.position, found.total)
    assert parting(ops, ops) is None


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([2.0, 1.0, 3.0]),
        torch.tensor([1.0, 2.0, torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0, 3.0, 0.0]),
        torch.tensor([-0.0, 2.0, 3.0]),
    ],
)
def test_a_fingerprint_sees_every_bit_and_its_place(other: torch.Tensor) -> None:
    one = torch.tensor([1.0, 2.0, 3.0])

    assert fingerprint([one]) == fingerprint([one.clone()])
    assert fingerprint([one]) != fingerprint([other])


def test_the_trace_watches_without_switching_gates_off() -> None:
    """Under another dispatch mode a gate would take its reference."""
    assert len(trace(flat, device=torch.device("cpu"))) > 0
    assert first_difference(run_preset(steady).fused.steps, run_preset(steady).reference.steps) is None
    assert isinstance(Run(size="tiny", seed=0, device=torch.device("cpu"), arm="reference"), Run)
