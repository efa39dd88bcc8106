"""The recording of everything that a GPU gives: steps that fail, that are held already, that are asked for alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusiongate.platforms import Environment
from fusiongate.report import manifest
from fusiongate.report.manifest import Manifest, check, step_of

from .. import record as recording
from ..record import Command, Origin, Step, main, record, steps
from ..timings.conftest import pytest_benchmark_update_commit_info
from .recorded_runs import environment_record

HERE = dataclasses.replace(
    Environment.from_json(environment_record()), platform="cuda-sm_90", device_name="NVIDIA H200", torch="2.11.0+cu130"
)
PLACE = "cuda-sm_90/nvidia-h200/torch-2.11"
ROOT = Path(manifest.__file__).parents[2]
ORIGIN = Origin(HERE, "c0ffee" * 6, False, manifest.evidence_sources(ROOT))


def python(code: str, prints: Path | None = None, **options: Any) -> Command:
    return Command((sys.executable, "-c", code), prints, **options)


def printing(name: str, kept: str, code: str = "print('8.42 %')", before: Sequence[str] = ()) -> Step:
    """A step whose last process prints a file."""
    return Step(name, lambda _, place: [*map(python, before), python(code, place / kept)])


ACCEPTANCE = printing("acceptance", "acceptance.txt")
FORWARDS = printing("forwards", "timings/forwards.txt")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def run(into: Path, *chosen: Step, origin: Origin = ORIGIN, **options: Any) -> dict[str, str]:
    outcomes = record(chosen, into, origin, **{"limit": 20, "logs": into.parent / "logs", **options})
    return {name: outcome for name, (_, outcome) in outcomes.items()}


def test_each_steps_files_are_put_in_place_and_entered(into: Path) -> None:
    assert {"acceptance": "recorded 1 files", "forwards": "recorded 1 files"} == run(into, ACCEPTANCE, FORWARDS)

    assert "8.42 %\n" == (into / PLACE / "acceptance.txt").read_text()
    assert [] == check(into)
    known = Manifest.load(into / PLACE / manifest.NAME)
    entry = known.files[f"{PLACE}/timings/forwards.txt"]
    assert ("nox -s record -- --only forwards", ORIGIN.commit, False) == (entry.command, entry.commit, entry.dirty)
    assert [HERE.to_json()] == list(known.environments.values())


def test_a_step_that_fails_loses_neither_the_others_nor_what_it_made_before(
    into: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(into, ACCEPTANCE)
    red = printing("acceptance", "acceptance.txt", "print('FAIL 28.42 %'); raise SystemExit(3)")
    told = run(into, red, FORWARDS, again=True)

    log = into.parent / "logs" / "acceptance.log"
    assert {"acceptance": f"failed: exit status 3; see {log}", "forwards": "recorded 1 files"} == told
    assert "    FAIL 28.42 %\n" in capsys.readouterr().out
    assert "8.42 %\n" == (into / PLACE / "acceptance.txt").read_text()
    assert [] == check(into)


def test_a_step_that_takes_too_long_is_ended(into: Path) -> None:
    slow = printing("acceptance", "acceptance.txt", "import time; time.sleep(60)")
    assert "failed: took longer than 1 s" in run(into, slow, FORWARDS, limit=1)["acceptance"]
    assert (into / PLACE / "timings" / "forwards.txt").is_file()


def test_a_step_that_makes_nothing_of_its_own_has_failed(into: Path) -> None:
    stray = printing("acceptance", "notes.txt")
    assert {"acceptance": "failed: it made no file"} == run(into, stray)
    assert not into.exists()


def test_only_a_command_that_may_be_empty_may_select_no_test(into: Path) -> None:
    for may, outcome in ((True, "recorded"), (False, "failed")):
        none = python("raise SystemExit(5)", may_be_empty=may)

        def commands(_: Path, place: Path, none: Command = none) -> list[Command]:
            return [python("print()", place / "acceptance.txt"), none]

        assert run(into, Step("acceptance", commands), again=True)["acceptance"].startswith(outcome)


def test_what_is_held_is_made_again_only_when_it_would_differ_or_is_asked_for(into: Path) -> None:
    held = {"acceptance": "held already"}
    made = {"acceptance": "recorded 1 files"}
    assert made == run(into, ACCEPTANCE)
    assert held == run(into, ACCEPTANCE)
    assert made == run(into, ACCEPTANCE, again=True)
    later = dataclasses.replace(ORIGIN, commit="beef" * 10)
    other = dataclasses.replace(later, sources="0" * 64)
    for origin in (later, other):
        assert made == run(into, ACCEPTANCE, origin=origin)
        assert held == run(into, ACCEPTANCE, origin=origin)
    path = into / PLACE / "acceptance.txt"
    path.write_text("28.42 %")
    assert made == run(into, ACCEPTANCE, origin=other)
    path.unlink()
    assert made == run(into, ACCEPTANCE, origin=other)


def test_a_tree_with_changes_is_told_by_the_check(into: Path) -> None:
    run(into, ACCEPTANCE, origin=dataclasses.replace(ORIGIN, dirty=True))
    (finding,) = check(into)
    assert "recorded from a tree with changes" in str(finding)


def test_what_a_step_no_longer_makes_goes_and_what_others_made_stays(into: Path) -> None:
    gone = [into / "cuda-sm_90/paths/removed.json", into / PLACE / "ledger-largest.jsonl"]
    stays = [into / "cuda-sm_90/nvidia-h100/torch-2.11/ledger.jsonl", into / PLACE / "acceptance.txt"]
    for path in (*gone, *stays):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    code = f"import pathlib; print(pathlib.Path.cwd() == pathlib.Path({str(ROOT)!r}))"
    assert {"paths": "recorded 1 files"} == run(into, printing("paths", "ledger.jsonl", code))
    assert "True\n" == (into / PLACE / "ledger.jsonl").read_text()
    assert [False, False, True, True] == [path.exists() for path in (*gone, *stays)]


def test_a_ledger_names_the_tables_where_they_are_put(into: Path) -> None:
    told = Step("paths", lambda folder, place: [python(f"print({str(folder)!r} + '/x')", place / "ledger.jsonl")])
    run(into, told)
    assert "snapshots/x\n" == (into / PLACE / "ledger.jsonl").read_text()


@pytest.mark.parametrize("device", ["cuda", "host"])
def test_every_step_names_files_that_are_its_own(device: str, tmp_path: Path) -> None:
    place = ORIGIN.folder(tmp_path)
    named = []
    for step in steps(device):
        for command in step.commands(tmp_path, place):
            assert sys.executable == command.words[0]
            files = [Path(word.rpartition("=")[2]) for word in command.words if str(place) in word]
            for path in [*files, *([command.prints] if command.prints else [])]:
                assert step.name == step_of(path.relative_to(tmp_path).as_posix())
        named.append(step.name)
    assert set(named) == {step for step, _ in manifest._STEPS}


@pytest.mark.parametrize("dirty", ["", " M fusiongate/cli.py"])
def test_the_command_runs_the_steps_that_are_named_and_ends_with_a_table(
    into: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dirty: str
) -> None:
    monkeypatch.setattr(recording, "steps", lambda _: (ACCEPTANCE, FORWARDS, printing("timings", "x", "1 / 0")))
    monkeypatch.setattr(recording, "environment", lambda _: HERE)
    monkeypatch.setattr(recording, "_git", lambda word, *_: "c0ffee" if word == "rev-parse" else dirty)
    given = ["--into", str(into), "--logs", str(into.parent)]
    if dirty:
        with pytest.raises(SystemExit, match="2"):
            main(given)
        assert "changes that are in no commit" in capsys.readouterr().err
        given.append("--allow-dirty")
    assert 0 == main([*given, "--only", "forwards"])
    assert [f"{PLACE}/timings/forwards.txt"] == list(Manifest.load(into / PLACE / manifest.NAME).files)
    assert 1 == main(given)
    lines = capsys.readouterr().out.splitlines()
    assert [["acceptance", "recorded"], ["forwards", "held"], ["timings", "failed:"]] == [
        [line.split()[0], line.split()[2]] for line in lines[-3:]
    ]


def test_what_cannot_begin_is_said_in_one_line(
    into: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "environment", lambda _: HERE)
    monkeypatch.setattr(recording, "_git", lambda *_: None)
    (into / PLACE).mkdir(parents=True)
    (into / PLACE / manifest.NAME).write_text("{")
    for words, told in (
        (["--only", "path"], "no step is called path; there are paths, "),
        ([], "name the one that it is with --commit"),
        (["--commit", "c0ffee", "--into", str(into), "--only", "acceptance"], "no manifest can be read"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("changed", "dirty"), [("snapshots/kernels.json", False), ("kernels.cu", True)])
def test_timings_call_a_tree_dirty_for_what_is_not_being_recorded(tmp_path: Path, changed: str, dirty: bool) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    (tmp_path / "snapshots").mkdir()
    for name in ("snapshots/kernels.json", "kernels.cu"):
        (tmp_path / name).write_text("as it was")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / changed).write_text("otherwise")
    told: dict[str, Any] = {"dirty": True}
    pytest_benchmark_update_commit_info(types.SimpleNamespace(rootpath=tmp_path), told)  # type: ignore[arg-type]
    assert {"dirty": dirty} == told
