"""The manifest of what a GPU gave: whatever is falsified, stale, missing or unknown is named, with what to run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusiongate.cli import main
from fusiongate.errors import UsageError
from fusiongate.ledger import environment_key
from fusiongate.report import manifest
from fusiongate.report.manifest import Entry, Manifest, check, command, evidence_sources, sources_of, step_of

PLACE = "cuda-sm_90/nvidia-h200/torch-2.11"
FILES = {
    "cuda-sm_90/paths/modulate.json": "paths",
    f"{PLACE}/ledger.jsonl": "paths",
    f"{PLACE}/ledger-largest.jsonl": "paths",
    "cuda-sm_90/certificates/modulate-bf16.json": "certificates",
    f"{PLACE}/acceptance.txt": "acceptance",
    f"{PLACE}/presets-real.txt": "presets-real",
    f"{PLACE}/test_snapshots/ltx2-real.json": "presets-real",
    f"{PLACE}/test_snapshots/ltx2.json": "snapshots",
    f"{PLACE}/timings/kernels.json": "timings",
    f"{PLACE}/timings/kernels.md": "timings",
    f"{PLACE}/timings/forwards.txt": "forwards",
    f"{PLACE}/timings/calibration.json": "calibration",
}
SOURCES = (
    "kernels/modulate/modulate.cu",
    "kernels/common/numeric.cuh",
    "kernels/launching.py",
    "kernels/predicates.py",
    "fusiongate/gate/fusion.py",
    "fusiongate/jit/load.py",
)
ENVIRONMENT = {"platform": "cuda-sm_90", "driver": "580"}
KEY = environment_key(ENVIRONMENT)


@pytest.fixture(autouse=True)
def certified(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    hashes = {"modulate": "as it was"}
    monkeypatch.setattr(manifest, "certified", lambda: hashes)
    return hashes


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Sources, and everything that there is of evidence on them."""
    for name in SOURCES:
        write(tmp_path / name, "as it was")
    everything = evidence_sources(tmp_path)
    entries = {}
    for name, step in FILES.items():
        text = f"modulate is 8.42 % faster, says {step}"
        write(tmp_path / "snapshots" / name, text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        entries[name] = Entry(digest, sources_of(name, everything), command(step), "c0ffee" * 6, False, KEY)
    Manifest(environments={KEY: ENVIRONMENT}, files=entries).save(tmp_path / "snapshots" / PLACE / manifest.NAME)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(checkout: Path) -> list[str]:
    return [str(finding) for finding in check(checkout / "snapshots", checkout)]


def edited(checkout: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = checkout / "snapshots" / PLACE / manifest.NAME
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_evidence_as_it_was_recorded_has_no_finding(checkout: Path) -> None:
    assert [] == found(checkout)


@pytest.mark.parametrize(("name", "step"), FILES.items())
def test_a_falsified_figure_is_named(checkout: Path, name: str, step: str) -> None:
    path = checkout / "snapshots" / name
    path.write_text(path.read_text().replace("8.42", "28.42"))

    assert [f"{name}: falsified: its content is not what was recorded; run nox -s record -- --only {step}"] == found(
        checkout
    )


@pytest.mark.parametrize("source", SOURCES)
def test_a_changed_source_makes_all_but_the_certificates_stale(checkout: Path, source: str) -> None:
    (checkout / source).write_text("another line")

    assert {name for name, step in FILES.items() if step != "certificates"} == {
        line.partition(": stale: it was recorded from other sources; run nox -s record -- --only ")[0]
        for line in found(checkout)
    }


@pytest.mark.parametrize("source", ["kernels/new.py", "kernels/new/new.cu", "fusiongate/gate/new.py"])
def test_a_new_source_is_seen_and_so_is_one_that_has_gone(checkout: Path, source: str) -> None:
    write(checkout / source, "")
    assert len(FILES) - 1 == len(found(checkout))
    (checkout / source).unlink()
    assert [] == found(checkout)
    (checkout / SOURCES[1]).unlink()
    assert len(FILES) - 1 == len(found(checkout))


def test_a_source_that_nothing_launches_or_judges_with_is_none(checkout: Path) -> None:
    write(checkout / "fusiongate/report/page.py", "a page")
    write(checkout / "kernels/__pycache__/launching.cpython-312.pyc", "bytecode")
    assert [] == found(checkout)


def test_a_certificate_hangs_on_its_own_kernel(checkout: Path, certified: dict[str, str]) -> None:
    certified["modulate"] = "another kernel"
    (line,) = found(checkout)
    assert line.startswith("cuda-sm_90/certificates/modulate-bf16.json: stale: ")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("sha256", "0" * 64, "falsified: its content"),
        ("sources", "0" * 64, "stale: "),
        ("dirty", True, "recorded from a tree with changes that are not in commit c0ffeec0ffee"),
        ("environment", "0" * 16, "falsified: its environment"),
    ],
)
def test_an_edited_entry_is_named(checkout: Path, field: str, value: object, what: str) -> None:
    name = f"{PLACE}/acceptance.txt"
    edited(checkout, lambda record: record["files"][name].update({field: value}))
    (line,) = found(checkout)
    assert line.startswith(f"{name}: {what}")
    assert line.endswith("; run nox -s record -- --only acceptance")


def test_an_edited_environment_is_named_for_all_that_was_made_in_it(checkout: Path) -> None:
    edited(checkout, lambda record: record["environments"][KEY].update(driver="999"))
    assert len(FILES) == sum("falsified: its environment" in line for line in found(checkout))


def test_a_missing_file_and_unknown_ones_are_named(checkout: Path) -> None:
    (checkout / "snapshots" / PLACE / "acceptance.txt").unlink()
    write(checkout / "snapshots/rocm-gfx942/paths/modulate.json", "{}")
    write(checkout / "snapshots" / PLACE / "notes.txt", "")
    write(checkout / "snapshots/cpu/paths/modulate.json", "of no GPU")
    missing, notes, other = found(checkout)
    assert missing.startswith(f"{PLACE}/acceptance.txt: missing: No such file")
    assert f"{PLACE}/notes.txt: not in the manifest, and made by no step: delete it; run nox -s record" == notes
    assert "rocm-gfx942/paths/modulate.json: not in the manifest; run nox -s record -- --only paths" == other


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1, "files": {"a": {}}}', '{"more": 1}'])
def test_a_damaged_manifest_is_named(checkout: Path, content: str) -> None:
    (checkout / "snapshots" / PLACE / manifest.NAME).write_text(content)
    lines = found(checkout)
    assert 1 == sum(line.startswith(f"{PLACE}/manifest.json: damaged: ") for line in lines)
    assert len(FILES) == sum(": not in the manifest; " in line for line in lines)


def test_what_another_device_of_the_platform_has_recorded_last_is_right(checkout: Path) -> None:
    """Path tables are shared, and the later recording has written over them."""
    shared = "cuda-sm_90/paths/modulate.json"
    known = Manifest.load(checkout / "snapshots" / PLACE / manifest.NAME)
    other = Manifest(environments=known.environments, files={shared: known.files[shared]})
    other.save(checkout / "snapshots/cuda-sm_90/nvidia-h100/torch-2.11" / manifest.NAME)
    edited(checkout, lambda record: record["files"][shared].update(sha256="0" * 64))
    assert [] == found(checkout)


def test_where_there_are_no_sources_or_no_snapshots_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no kernels"):
        evidence_sources(tmp_path)
    with pytest.raises(UsageError, match="no folder"):
        check(tmp_path / "snapshots")


def test_the_command_prints_the_findings_and_exits_with_1_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / PLACE / "acceptance.txt", "everything holds")
    assert 0 == main(["evidence", str(tmp_path)])
    assert 1 == main(["evidence", "--check", str(tmp_path)])
    line = f"{PLACE}/acceptance.txt: not in the manifest; run nox -s record -- --only acceptance\n"
    assert 2 * line == capsys.readouterr().out
    (tmp_path / PLACE / "acceptance.txt").unlink()
    assert 0 == main(["evidence", "--check", str(tmp_path)])


def test_of_these_sources_every_kernel_has_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from fusiongate.kernels import FUSIONS

    assert {fusion.name for fusion in FUSIONS} == manifest.certified().keys()
    assert 64 == len(evidence_sources(Path(manifest.__file__).parents[2]))


def test_every_pattern_is_tried() -> None:
    assert FILES == {name: step_of(name) for name in FILES}
