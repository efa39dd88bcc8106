"""What nox's sessions run, and when they refuse: the parts of the noxfile that decide something."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from .nox_sessions import NOXFILE, Failed, FakeSession, called, load_noxfile

pytestmark = pytest.mark.skipif(not NOXFILE.is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    return load_noxfile()


def test_the_lowest_versions_are_pinned(noxfile: ModuleType) -> None:
    assert ["torch==2.9", "tool[extra]==1.0"] == noxfile.lowest(["torch>=2.9", "tool[extra]>=1.0"])


def test_every_dependency_names_its_lowest_version(noxfile: ModuleType) -> None:
    """Otherwise the session `minimums` would take the newest."""
    assert [] == [pin for pin in noxfile.lowest(noxfile.PROJECT["project"]["dependencies"]) if "==" not in pin]


def test_timings_are_recorded_and_charted_unless_the_caller_says_where(noxfile: ModuleType) -> None:
    folder = Path("folder")
    json, chart = "--benchmark-json=folder/timings.json", "--benchmark-histogram=folder/chart"
    assert [json, chart] == noxfile.recording(["-k", "audio"], folder)
    assert [chart] == noxfile.recording(["--benchmark-json=mine.json"], folder)
    assert [json] == noxfile.recording(["--benchmark-histogram", "mine"], folder)


def test_timings_are_recorded_where_git_does_not_look() -> None:
    assert "/.benchmarks/" in (NOXFILE.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_lines_do_not_count_as_branches(noxfile: ModuleType) -> None:
    totals = {"covered_lines": 99, "num_statements": 100, "covered_branches": 3, "num_branches": 4}
    assert 75.0 == noxfile.branches_covered({"totals": totals})


def test_the_gpu_session_without_a_gpu_is_one_line_and_fails(noxfile: ModuleType, tmp_path: Path) -> None:
    """By nox itself, in the Python that runs the tests."""
    if noxfile.SHARED_PACKAGES:
        pytest.skip("not run: this machine has a GPU")
    command = [sys.executable, "-m", "nox", "--noxfile", str(NOXFILE), "--envdir", str(tmp_path), "--no-venv"]
    command += ["--session", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert 0 != done.returncode
    said = [line for line in (done.stdout + done.stderr).splitlines() if "GPU" in line]
    assert [f"nox > Session gpu aborted: {noxfile.NO_GPU}."] == said
    assert "Traceback" not in done.stderr
    assert "pytest" not in done.stderr


@pytest.mark.parametrize("session", ["gpu", "record"])
@pytest.mark.parametrize("shared", [[], ["--system-site-packages"]], ids=["no-driver", "torch-sees-none"])
def test_what_needs_a_gpu_runs_nothing_where_torch_sees_none(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, shared: list[str], session: str
) -> None:
    monkeypatch.setattr(noxfile, "SHARED_PACKAGES", shared)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(noxfile, "_install", lambda *_: None)
    fake = FakeSession("sees none")
    with pytest.raises(Failed, match="no GPU that torch sees"):
        called(noxfile, session, fake)
    assert not {"pytest", "fusiongate.suites.record"} & {word for command in fake.ran for word in command}


def test_the_recording_is_given_what_the_caller_gives(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile, "SHARED_PACKAGES", ["--system-site-packages"])
    monkeypatch.setattr(noxfile, "_install", lambda *_: None)
    fake = FakeSession("sees a GPU")
    fake.posargs = ("--only", "paths")
    called(noxfile, "record", fake)
    assert ("python", "-P", "-m", "fusiongate.suites.record", "--only", "paths") == fake.ran[-1]


def test_the_gpu_session_requires_the_gpu_that_torch_sees(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile, "SHARED_PACKAGES", ["--system-site-packages"])
    monkeypatch.setattr(noxfile, "_install", lambda *_: None)
    fake = FakeSession("sees a GPU")
    called(noxfile, "gpu", fake)
    beside, alone = fake.ran[-2:]
    assert {("python", "-P", "-m", "pytest")} == {beside[:4], alone[:4]}
    for lane in (beside, alone):
        assert {"--fusiongate-device=cuda", "--fusiongate-require-fused"} <= set(lane)


@pytest.mark.parametrize("answer, markers", [("sees a GPU", ["not alone", "alone"]), ("sees none", [])])
def test_the_suite_runs_in_lanes_beside_a_gpu_and_at_once_without(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str, markers: list[str]
) -> None:
    monkeypatch.setattr(noxfile, "_install", lambda *_: None)
    fake = FakeSession(answer)
    called(noxfile, "suite", fake)
    runs = [run[4:] for run in fake.ran if "suites/kernels" in run]
    assert markers == [run[run.index("-m") + 1] for run in runs if "-m" in run]
    assert max(1, len(markers)) == len(runs)


def test_lanes_are_workers_then_one_process_with_one_ledger(noxfile: ModuleType) -> None:
    beside, alone = noxfile.lanes(["-k", "modulate"], Path("ledger"))
    both = ["-k", "modulate", "--fusiongate-ledger=ledger", "-m"]
    assert ["-n", "auto", "--dist", "worksteal", *both, "not alone"] == beside
    assert [*both, "alone", "-n", "0"] == alone


def test_lanes_keep_what_the_caller_gives(noxfile: ModuleType) -> None:
    given = ["-m", "slow or preset", "-n", "4", "--junitxml=left/gpu.xml", "--fusiongate-ledger", "mine"]
    beside, alone = noxfile.lanes(given, Path("ledger"))
    both = ["-n", "4", "--fusiongate-ledger", "mine", "-m"]
    workers = ["-n", "auto", "--dist", "worksteal"]
    assert [*workers, *both, "(slow or preset) and not alone", "--junitxml=left/gpu.xml"] == beside
    assert [*both, "(slow or preset) and alone", "--junitxml=left/gpu-alone.xml", "-n", "0"] == alone


@pytest.mark.parametrize(
    "beside, alone, told",
    [
        (0, 0, None),
        (0, 5, None),
        (5, 0, None),
        (1, 0, "pytest ended with exit status 1"),
        (0, 1, "pytest ended with exit status 1"),
        (2, 4, "pytest ended with exit status 2, 4"),
        (5, 5, "no test was selected"),
    ],
)
def test_both_lanes_are_run_and_judged(noxfile: ModuleType, beside: int, alone: int, told: str | None) -> None:
    fake = FakeSession(statuses=[beside, alone])
    with nullcontext() if told is None else pytest.raises(Failed, match=f"^{told}$"):
        noxfile._in_lanes(fake, "suites")
    assert ["not alone", "alone"] == [run[run.index("-m", 4) + 1] for run in fake.ran]
    (ledger,) = {word for run in fake.ran for word in run if word.startswith("--fusiongate-ledger=")}
    assert re.fullmatch(r".*/\.fusiongate/ledger-\d{8}T\d{6}Z\.jsonl", ledger)


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({}, "cpu-x86_64", "skip"),
        ({"CI": "true"}, "cpu-x86_64", "fail"),
        ({"CI": "true"}, "cpu-aarch64-sve256", "skip"),
        ({"CI": "true"}, "cuda-sm_90", "fail"),
        ({"CI": "true"}, "rocm-gfx942", "fail"),
    ],
)
def test_unattended_runs_have_baselines_unless_nobody_has_recorded_their_cpu(
    noxfile: ModuleType, environment: dict[str, str], platform: str, expected: str
) -> None:
    recorded = ["cpu", "cpu-x86_64", "cuda-sm_90"]
    assert f"--fusiongate-missing={expected}" == noxfile.missing_baselines(environment, platform, recorded)


def test_a_platform_without_snapshots_is_named(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    fake = FakeSession("a library's greeting\ncpu-unheard-of\n")
    assert "--fusiongate-missing=skip" == noxfile._missing_baselines(fake)
    assert ["no snapshots of cpu-unheard-of: --fusiongate-missing=skip"] == fake.warned


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "default"])
def test_an_x86_64_cpu_has_its_baselines_whatever_its_vector_instructions(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    monkeypatch.setenv("CI", "true")
    fake = FakeSession(f"cpu-x86_64-{instructions}\n")
    assert "--fusiongate-missing=fail" == noxfile._missing_baselines(fake)
    assert [] == fake.warned


def test_actionlint_runs_where_it_is_installed(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "actionlint").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = FakeSession()
    noxfile._actionlint(fake)
    assert [("actionlint",)] == fake.ran


def test_a_missing_actionlint_fails_on_github_only(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also not where `CI` alone is set: there is no telling what such a machine may download."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    fake = FakeSession()
    noxfile._actionlint(fake)
    assert [] == fake.ran
    assert fake.warned[0].startswith("not run: actionlint")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(Failed, match="actionlint is not installed"):
        noxfile._actionlint(fake)


def ci(name: str) -> str:
    return (NOXFILE.parent / name).read_text(encoding="utf-8")


def test_github_has_actionlint_before_anything_asks_for_it() -> None:
    workflow = ci(".github/workflows/ci.yml")
    assert 0 < workflow.index("sha256sum --check") < workflow.index('>> "$GITHUB_PATH"') < workflow.index(".ci/run\n")
