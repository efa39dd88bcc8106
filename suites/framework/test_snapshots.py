"""md5_snapshot: recorded, held, explained, updated; in projects of their own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from syrupy.data import Snapshot, SnapshotCollection

from fusiongate.plugin.snapshot_files import extension_for
from fusiongate.presets import PRESETS

from .projects import Project

PROJECT = '''
import os
import time
import torch
from torch import nn
from fusiongate import Fusion
from fusiongate.presets import preset

def changed(run):
    """What a test has switched on: a fault of the kernels, of the reference, or of both."""
    fault = torch.zeros(())
    if run.arm == "fused":
        fault = fault + float(os.environ.get("KERNEL", 0))
    return fault + float(os.environ.get("REFERENCE", 0))

def declare(name):
    @preset(name, fused=False)
    def steps(run):
        x = run.normal(name, 2, 8, dtype=torch.float32)
        yield "first", {"x": x}
        x = x * float(os.environ.get("FACTOR", 2)) + changed(run)
        yield "second", {"x": x, "y": x.clone()}
    return steps

one, two = declare("one"), declare("two")

@preset("restless", fused=False)
def restless(run):
    generator = torch.Generator().manual_seed(os.getpid() if "STEADY" not in os.environ else 1)
    yield "output", {"x": torch.rand(4, generator=generator) + changed(run)}

@preset("erratic", fused=False)
def erratic(run):
    generator = torch.Generator().manual_seed(time.time_ns())
    yield "output", {"x": torch.rand(4, generator=generator)}

def modulated(x, scale, shift):
    return x * (1 + scale) + shift

def wrong(x, scale, shift):
    return modulated(x, scale, shift) + 1

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift

@preset("mounted")
def mounted(run):
    fused = wrong if "WRONG" in os.environ else modulated
    run.ops = (Fusion("modulate", reference=modulated, fused=fused),)
    model = run.model("model", Block)
    for step in ("first sight", "output"):
        yield step, {"x": model(*(run.normal(name, 2, size, 8) for name, size in [("x", 3), ("a", 1), ("b", 1)]))}

@preset("idle", fused=False)
def idle(run):
    yield "output", {"x": torch.zeros(4)}

@preset("fatal", fused=False)
def fatal(run):
    os._exit(7)
    yield "output", {"x": run.normal("x", 4)}

@preset("elsewhere", devices=["cuda"])
def elsewhere(run):
    yield "output", {"x": run.normal("x", 4)}
'''

TESTS = """
import pytest
from project_presets import elsewhere, erratic, fatal, idle, mounted, one, restless, two

@pytest.mark.preset(one)
def test_one(md5_snapshot):
    md5_snapshot.check()

def test_two(md5_snapshot):
    md5_snapshot.check(two)

def test_restless(md5_snapshot):
    md5_snapshot.check(restless)

def test_erratic(md5_snapshot):
    md5_snapshot.check(erratic)

def test_mounted(md5_snapshot):
    md5_snapshot.check(mounted)

def test_idle(md5_snapshot):
    md5_snapshot.check(idle)

def test_fatal(md5_snapshot):
    md5_snapshot.check(fatal)

def test_elsewhere(md5_snapshot):
    md5_snapshot.check(elsewhere)

def test_nothing(md5_snapshot):
    md5_snapshot.check()
"""


@pytest.fixture
def project(project: Project, forked: None) -> Iterator[Project]:
    """A project with presets that a test can change through the environment."""
    project.write("project_presets.py", PROJECT)
    project.write("test_digests.py", TESTS)
    project.write("pytest.ini", "[pytest]\npythonpath = .\nfusiongate_snapshots = kept\nfusiongate_device = host\n")
    yield project
    for name in ("one", "two", "restless", "erratic", "mounted", "idle", "fatal", "elsewhere"):
        PRESETS.pop(name, None)


def kept(project: Project) -> dict[str, str]:
    """The snapshots of a project, by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in (project.path / "kept").rglob("*.json")}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs them leaves the recorded snapshots for the others."""
    return tmp_path_factory.mktemp("shelf") / "kept"


@pytest.fixture
def recorded(project: Project, shelf: Path) -> Project:
    """A project whose first two presets are recorded."""
    if not shelf.exists():
        project.run("--snapshot-update", "-k", "one or two").assert_outcomes(passed=2)
        shutil.copytree(project.path / "kept", shelf)
    else:
        shutil.copytree(shelf, project.path / "kept")
    return project


def test_a_missing_snapshot_fails_with_the_command_that_records_it(project: Project) -> None:
    result = project.run("-k", "one")

    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [r"preset 'one': arms agree; no baseline for torch (\d+\.\d+): no snapshot kept/cpu-[\w-]+/any/torch-\1/.*"]
    )
    result.stdout.fnmatch_lines(["*/one.json; record it: pytest test_digests.py::test_one --snapshot-update"])


def test_a_missing_snapshot_is_not_run_where_that_is_asked_for(project: Project) -> None:
    result = project.run("-k", "one", "--fusiongate-missing=skip", "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not run: arms agree; no baseline for torch *one.json; record it: pytest *-update"])


def test_without_a_baseline_arms_that_part_are_red_all_the_same(project: Project) -> None:
    """A new torch has none, and its kernels can be wrong."""
    project.setenv("KERNEL", "1")

    result = project.run("-k", "one", "--fusiongate-missing=skip")

    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"preset 'one': with kernels it gives something else than without, first at step 'second', tensor 'x': .*",
            r"  no baseline for torch \d+\.\d+: no snapshot kept/.*/one\.json",
        ]
    )
    (row,) = project.rows("digest")
    assert "red" == row.payload["outcome"]


def test_without_a_baseline_arms_of_a_preset_that_does_not_repeat_prove_nothing(project: Project) -> None:
    """They part by chance, not by a kernel's fault."""
    result = project.run("-k", "erratic", "--fusiongate-missing=skip", "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not run: it does not repeat: *; no baseline for torch *"])


@pytest.mark.parametrize("missing", ["fail", "skip"])
def test_without_a_baseline_a_kernel_that_its_gate_refused_is_red(project: Project, missing: str) -> None:
    """The arms agree: both are the reference's."""
    project.run("-k", "mounted", "--fusiongate-missing=skip").assert_outcomes(skipped=1)
    project.setenv("WRONG", "1")

    result = project.run("-k", "mounted", f"--fusiongate-missing={missing}")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["preset 'mounted': it proves nothing: the gate at Block:project_presets.py:* refused: *"]
    )


def test_a_kernel_that_its_gate_refused_is_neither_recorded_nor_the_same(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.setenv("WRONG", "1")
    result = project.run("-k", "mounted", "--snapshot-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'mounted' proves nothing and is not recorded: the gate at * refused: *"])
    assert {} == kept(project)

    monkeypatch.delenv("WRONG")
    project.run("-k", "mounted", "--snapshot-update").assert_outcomes(passed=1)
    project.run("-k", "mounted").assert_outcomes(passed=1)

    project.setenv("WRONG", "1")
    result = project.run("-k", "mounted")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'mounted': it proves nothing: the gate at * refused: *"])


def test_what_is_missing_may_be_recorded_in_a_run_that_says_so_and_fails(project: Project) -> None:
    """A run on a new kind of machine: it leaves candidates for a person to look at."""
    result = project.run("-k", "one or two", "--fusiongate-missing=record")

    result.assert_outcomes(passed=2)
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    assert {"one", "two"} == kept(project).keys()
    (red,) = (line for line in Project.summary(result) if line.startswith("red: "))
    assert re.fullmatch(
        r"red: --fusiongate-missing=record: 2 presets had no committed digests; candidates are in "
        r"kept/cpu-\S+/one\.json, kept/cpu-\S+/two\.json: review and commit them",
        red,
    )
    held = project.run("-k", "one or two", "--fusiongate-missing=record")
    held.assert_outcomes(passed=2)
    assert pytest.ExitCode.OK == held.ret


def test_recording_what_is_missing_leaves_what_is_there(recorded: Project) -> None:
    before = kept(recorded)
    (path,) = (recorded.path / "kept").rglob("two.json")
    path.unlink()
    recorded.setenv("REFERENCE", "1")

    result = recorded.run("-k", "one or two", "--fusiongate-missing=record")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["preset 'one': reference changed*"])
    assert before["one"] == kept(recorded)["one"]
    assert "two" in kept(recorded)


def test_other_snapshots_are_not_recorded_with_what_is_missing(project: Project) -> None:
    """The project's own are compared by syrupy as ever."""
    project.write("test_own.py", "def test_own(snapshot):\n    assert snapshot == 1\n")
    result = project.run("test_own.py", "--fusiongate-missing=record")
    result.assert_outcomes(failed=1)
    assert not (project.path / "__snapshots__").exists()


def test_a_preset_that_takes_its_process_with_it_fails_no_other(recorded: Project) -> None:
    result = recorded.run("test_digests.py::test_fatal", "test_digests.py::test_one")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["preset 'fatal': the process that ran it exited with 7;*"])


def test_a_recorded_preset_is_held_and_its_digests_stand_in_the_ledger(recorded: Project) -> None:
    recorded.run("-k", "one or two").assert_outcomes(passed=2)

    rows = {row.subject: row.payload for row in recorded.rows("digest")}
    assert {"one", "two"} == rows.keys()
    assert "same" == rows["one"]["outcome"]
    assert json.loads(kept(recorded)["one"])["fused"] == rows["one"]["fused"]
    assert rows["one"]["sources"]


@pytest.mark.parametrize(
    ("faults", "verdict", "arms"),
    [
        ({"KERNEL": "1"}, "kernel changed", ["with kernels"]),
        ({"REFERENCE": "1"}, "reference changed", ["with kernels", "without kernels"]),
        ({"KERNEL": "1", "REFERENCE": "1"}, "both changed", ["with kernels", "without kernels"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_tells_what_changed_and_where_first(
    recorded: Project, faults: dict[str, str], verdict: str, arms: list[str]
) -> None:
    for name, value in faults.items():
        recorded.setenv(name, value)

    result = recorded.run("-k", "one")

    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert f"preset 'one': {verdict}" in text
    for arm in arms:
        assert re.search(rf"{arm}, first at step 'second', tensor 'x': md5 \w+ → \w+ \(2 of 3 tensors differ\)", text)
    assert "since the record: nothing else changed" in text


def test_an_environment_that_moved_is_no_failure_and_is_named_in_one(recorded: Project) -> None:
    """The snapshot is rewritten as if another numpy had made it."""
    (path,) = (recorded.path / "kept").rglob("one.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["environment"]["libraries"]["numpy"] = "0.1"
    fields["sources"] = "0" * 64
    path.write_text(json.dumps(fields), encoding="utf-8")

    recorded.run("-k", "one").assert_outcomes(passed=1)

    recorded.setenv("KERNEL", "1")
    result = recorded.run("-k", "one")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r".*since the record: numpy 0\.1 → .*, the kernels' sources 000000000000 → .*"])


def test_an_update_in_a_worker_touches_what_ran_and_nothing_else(recorded: Project) -> None:
    """The other snapshot, one of another machine and one that nobody asks for stay byte for byte."""
    other = recorded.write("kept/cuda-sm_00/a-gpu/torch-9.9/test_digests/one.json", "{}")
    orphan = next((recorded.path / "kept").rglob("one.json")).with_name("orphan.json")
    orphan.write_text("{}", encoding="utf-8")
    before = kept(recorded)
    recorded.setenv("REFERENCE", "1")

    recorded.run("-n", "1", "-k", "two", "--snapshot-update").assert_outcomes(passed=1)

    after = kept(recorded)
    assert before.keys() == after.keys()
    assert {"two"} == {name for name in before if before[name] != after[name]}
    assert other.exists()


def test_a_bare_update_deletes_nothing(recorded: Project) -> None:
    before = kept(recorded)

    recorded.run("--snapshot-update", "test_digests.py::test_one").assert_outcomes(passed=1)

    assert before == kept(recorded)


def test_recording_asks_that_both_arms_agree(project: Project) -> None:
    project.setenv("KERNEL", "1")

    result = project.run("-k", "one", "--snapshot-update")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'one' is not recorded: with kernels it gives something else than without*"])
    assert {} == kept(project)


def test_an_output_that_proves_nothing_is_not_recorded(project: Project) -> None:
    result = project.run("-k", "idle", "--snapshot-update")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'idle' proves nothing and is not recorded: *all elements are the same*"])
    assert {} == kept(project)


def test_a_preset_that_does_not_repeat_gets_a_finding_and_never_an_md5(project: Project) -> None:
    """From then on it passes while gates and steps hold it, and no update gives it an md5, repeat as it may."""
    project.run("-k", "restless", "--snapshot-update").assert_outcomes(passed=1)

    found = json.loads(kept(project)["restless"])
    assert ("nondeterministic", "output", "x", "aten.rand.generator") == tuple(
        found[name] for name in ("class", "step", "tensor", "op")
    )

    project.setenv("STEADY", "1")
    project.run("-k", "restless", "--snapshot-update").assert_outcomes(passed=1)
    assert found == json.loads(kept(project)["restless"])
    (row,) = project.rows("digest")
    assert "nondeterministic" == row.payload["outcome"]


def test_a_preset_without_an_md5_is_held_to_agree_with_deterministic_operators(project: Project) -> None:
    project.run("-k", "restless", "--snapshot-update").assert_outcomes(passed=1)

    project.run("-k", "restless").assert_outcomes(passed=1)

    project.setenv("KERNEL", "1")
    result = project.run("-k", "restless")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [r"preset 'restless', .*: with deterministic operators the arm with kernels differs, first at step 'output'.*"]
    )
    (row,) = project.rows("digest")
    assert "red" == row.payload["outcome"]


def test_a_recorded_preset_that_stops_repeating_is_told_from_one_that_changed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.setenv("STEADY", "1")
    project.run("-k", "restless", "--snapshot-update").assert_outcomes(passed=1)
    monkeypatch.delenv("STEADY")

    result = project.run("-k", "restless")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'restless': it does not repeat: *"])


def test_a_check_without_a_preset_says_what_it_needs(project: Project) -> None:
    result = project.run("-k", "nothing")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*was given no preset: pass one, or mark the test with @pytest.mark.preset(preset)*"])


def test_a_damaged_snapshot_names_its_file(recorded: Project) -> None:
    (path,) = (recorded.path / "kept").rglob("one.json")
    path.write_text('{"schema": 1', encoding="utf-8")

    result = recorded.run("-k", "one")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*one.json: Expecting*"])


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new text goes to a file of another name first."""
    path = tmp_path / "one.json"
    path.write_text("old", encoding="utf-8")
    killed: Callable[..., None] = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    monkeypatch.setattr(Path, "replace", killed)
    collection = SnapshotCollection(location=str(path))
    collection.add(Snapshot(name="one", data="new"))

    with pytest.raises(KeyboardInterrupt):
        extension_for(path, any_difference=True).write_snapshot_collection(snapshot_collection=collection)

    assert "old" == path.read_text(encoding="utf-8")
    assert [path] == list(tmp_path.iterdir())


def test_an_output_that_proves_nothing_any_more_is_no_baseline(recorded: Project) -> None:
    recorded.setenv("FACTOR", "0")

    result = recorded.run("-k", "one")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["preset 'one': it proves nothing: *all elements are the same*"])


def test_a_preset_for_other_devices_is_not_run(project: Project) -> None:
    result = project.run("-k", "elsewhere", "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not run: it runs on cuda only"])


def test_a_project_that_names_no_folder_has_its_snapshots_beside_the_ini_file(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\npythonpath = .\nfusiongate_device = host\n")

    project.run("-k", "one", "--snapshot-update").assert_outcomes(passed=1)

    assert ["one.json"] == [path.name for path in (project.path / "snapshots").rglob("*.json")]
