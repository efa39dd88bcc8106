"""The nightly workflow's commands: which runners, what is kept, and that silence is an error."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from .nightly import SESSIONS, collect, labels, main, run

JUNIT = """\
<testsuites><testsuite>
<testcase classname="suites.a" name="test_passed" />
<testcase classname="suites.a" name="test_skipped"><skipped /></testcase>{more}
</testsuite></testsuites>
"""
FAILED = '\n<testcase classname="suites.a" name="test_failed"><failure /></testcase>'


class FakeNox:
    """Leaves what the sessions leave."""

    def __init__(self, *, more: str = "", status: int = 0, silent: str = "") -> None:
        self.more = more
        self.status = status
        self.silent = silent
        self.calls: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(arguments)
        options = dict(option.split("=", 1) for option in arguments if "=" in option)
        if self.silent not in arguments:
            Path(options["--junitxml"]).write_text(JUNIT.format(more=self.more))
        if "--benchmark-json" in options:
            Path(options["--benchmark-json"]).write_text(json.dumps({"benchmarks": [{}, {}]}))
        return self.status


@pytest.fixture
def complete(checkout: Path) -> Path:
    """A checkout whose run had a baseline for everything, one of which has changed."""
    (checkout / "snapshots" / "cuda-sm_90" / "new.json").unlink()
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose run has recorded one snapshot and changed another."""
    root = tmp_path / "checkout"
    (root / "snapshots" / "cuda-sm_90").mkdir(parents=True)
    for name in ("kept", "changed", "deleted"):
        (root / "snapshots" / "cuda-sm_90" / f"{name}.json").write_text("{}")
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "--quiet", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    (root / "snapshots" / "cuda-sm_90" / "changed.json").write_text('{"a": 1}')
    (root / "snapshots" / "cuda-sm_90" / "new.json").write_text("{}")
    (root / "snapshots" / "cuda-sm_90" / "deleted.json").unlink()
    return root


def test_a_run_keeps_junit_ledger_timings_and_snapshot_candidates(checkout: Path, tmp_path: Path) -> None:
    nox = FakeNox()
    assert 0 == run("h200", tmp_path / "left" / "h200", nox, checkout)
    assert list(SESSIONS) == [call[call.index("--session") + 1] for call in nox.calls]
    assert all(any(option.startswith("--fusiongate-ledger=") for option in call) for call in nox.calls)
    (report,) = collect(["h200"], tmp_path / "left")
    assert ("1 baseline was missing; what was recorded instead is below: review and commit it",) == report.problems
    assert (2, 2) == (report.tests, report.rows)
    assert ("cuda-sm_90/changed.json", "cuda-sm_90/new.json") == report.snapshots
    assert ("cuda-sm_90/new.json",) == report.missing


def test_both_lanes_of_a_session_count(complete: Path, tmp_path: Path) -> None:
    run("h200", tmp_path / "h200", FakeNox(), complete)
    (tmp_path / "h200" / "gpu-alone.xml").write_text(JUNIT.format(more=FAILED))
    (report,) = collect(["h200"], tmp_path)
    assert 4 == report.tests
    assert ("failed: suites.a::test_failed",) == report.problems


def test_what_is_missing_is_recorded_where_it_is_compared(checkout: Path, tmp_path: Path) -> None:
    """The timings have no baseline in the checkout, so that there is nothing to be missing."""
    nox = FakeNox()
    run("h200", tmp_path / "left" / "h200", nox, checkout)
    recording = {call[call.index("--session") + 1] for call in nox.calls if "--fusiongate-missing=record" in call}
    assert {"gpu"} == recording


def test_a_kind_of_gpu_without_baselines_fails_and_leaves_candidates(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a new architecture's files: they are kept, and no run of it passes before they are committed."""
    names = [
        f"rocm-gfx942/{kind}.json" for kind in ("certificates/modulate-bf16", "paths/modulate", "test_snapshots/a")
    ]
    for name in names:
        file = checkout / "snapshots" / name
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    run("mi300x", tmp_path / "left" / "mi300x", FakeNox(), checkout)
    assert 1 == main(["collect", str(tmp_path / "left")], {"NIGHTLY_RUNNERS": "mi300x"}, FakeNox())
    printed = capsys.readouterr().out
    assert "- 4 baselines were missing;" in printed
    for name in names:
        assert f"- snapshot candidate, missing: `{name}`" in printed
        assert (tmp_path / "left" / "mi300x" / "snapshots" / name).is_file()
    assert "- snapshot candidate, changed: `cuda-sm_90/changed.json`" in printed


def test_the_later_session_runs_where_the_earlier_one_failed(checkout: Path, tmp_path: Path) -> None:
    nox = FakeNox(more=FAILED, status=1)
    assert 1 == run("h200", tmp_path / "left" / "h200", nox, checkout)
    assert len(SESSIONS) == len(nox.calls)
    (report,) = collect(["h200"], tmp_path / "left")
    assert "nox -s gpu failed with exit status 1" in report.problems
    assert "failed: suites.a::test_failed" in report.problems


def test_a_runner_that_did_not_report_is_an_error(
    complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("h200", tmp_path / "left" / "h200", FakeNox(), complete)
    status = main(["collect", str(tmp_path / "left")], {"NIGHTLY_RUNNERS": "h200, mi300x"}, FakeNox())
    assert 1 == status
    printed = capsys.readouterr().out
    assert "| h200 | 2 | 2 | 1 | passed |" in printed
    assert "| mi300x | 0 | 0 | 0 | **failed** |" in printed
    assert "did not report" in printed


def test_a_runner_that_was_cut_off_is_an_error(checkout: Path, tmp_path: Path) -> None:
    """Its files arrive, but not the one that is written last."""
    folder = tmp_path / "left" / "h200"
    run("h200", folder, FakeNox(), checkout)
    (folder / "report.json").unlink()
    (report,) = collect(["h200"], tmp_path / "left")
    assert report.problems[0].startswith("did not report")


@pytest.mark.parametrize("silent", SESSIONS)
def test_a_session_without_tests_is_an_error_even_when_nox_is_content(
    silent: str, complete: Path, tmp_path: Path
) -> None:
    run("h200", tmp_path / "left" / "h200", FakeNox(silent=silent), complete)
    (report,) = collect(["h200"], tmp_path / "left")
    assert (f"nox -s {silent} ran no test",) == report.problems


def test_all_reported_is_a_pass_and_stands_in_the_jobs_summary(complete: Path, tmp_path: Path) -> None:
    run("h200", tmp_path / "left" / "h200", FakeNox(), complete)
    summary = tmp_path / "summary.md"
    environment = {"NIGHTLY_RUNNERS": "h200", "GITHUB_STEP_SUMMARY": str(summary)}
    assert 0 == main(["collect", str(tmp_path / "left")], environment, FakeNox())
    assert "- snapshot candidate, changed: `cuda-sm_90/changed.json`" in summary.read_text()


def test_the_runners_are_given_as_github_wants_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["runners"], {"NIGHTLY_RUNNERS": "h200,mi300x"}, FakeNox())
    assert 'runners=["h200", "mi300x"]\n' == capsys.readouterr().out


@pytest.mark.parametrize(
    "listed, message",
    [(None, "names no runner"), (" , ", "names no runner"), ("a,a", "twice"), ("../a", "is no label")],
)
def test_a_list_of_runners_that_means_nothing_is_refused(listed: str | None, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        labels(listed)


def test_the_workflow_leaves_the_logic_to_the_script() -> None:
    workflow = (Path(__file__).parents[2] / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    for command in ("runners", "run", "collect"):
        assert f"suites/framework/nightly.py {command}" in workflow
    assert "if [" not in workflow
