"""What nox's sessions install, and when they refuse: the parts of the noxfile that decide something."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from nox.command import CommandFailed

NOXFILE = Path(__file__).parents[2] / "noxfile.py"

pytestmark = pytest.mark.skipif(not NOXFILE.is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    """The noxfile as a module, loaded once: that registers its sessions and runs none."""
    spec = importlib.util.spec_from_file_location("fusiongate_noxfile", NOXFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def torch_arguments(noxfile: ModuleType) -> Callable[..., list[str]]:
    function: Callable[..., list[str]] = noxfile.torch_arguments
    return function


CPU_BUILDS = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def unasked() -> bool:
    raise AssertionError("nothing is to be asked of PyTorch's index here")


def test_linux_without_a_driver_is_offered_the_cpu_build_where_its_index_answers(
    torch_arguments: Callable[..., list[str]],
) -> None:
    assert ["torch>=2.9", *CPU_BUILDS] == torch_arguments(None, "Linux", False, lambda: True)


def test_where_the_index_does_not_answer_pypi_s_build_is_taken(torch_arguments: Callable[..., list[str]]) -> None:
    assert ["torch>=2.9"] == torch_arguments(None, "Linux", False, lambda: False)


@pytest.mark.parametrize(("system", "has_nvidia"), [("Linux", True), ("Darwin", False)])
def test_elsewhere_pypi_has_the_right_build(
    torch_arguments: Callable[..., list[str]], system: str, has_nvidia: bool
) -> None:
    assert ["torch>=2.9"] == torch_arguments(None, system, has_nvidia, unasked)


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch==2.13.0", ["torch==2.13.0"]),
        (
            "torch==2.9.1 --index-url https://example.org/rocm",
            ["torch==2.9.1", "--index-url", "https://example.org/rocm"],
        ),
    ],
)
def test_a_named_torch_is_installed_as_it_is_named(
    torch_arguments: Callable[..., list[str]], requirement: str, expected: list[str]
) -> None:
    assert expected == torch_arguments(requirement, "Linux", False, unasked)


def test_an_empty_variable_counts_as_unset(torch_arguments: Callable[..., list[str]]) -> None:
    assert ["torch>=2.9"] == torch_arguments("", "Linux", True, unasked)


def test_an_index_that_does_not_answer_is_asked_once_and_not_for_long(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(noxfile, "CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(noxfile, "PATIENCE_S", 0.2)
        noxfile.cpu_index_answers.cache_clear()
        started = time.monotonic()
        answers = [noxfile.cpu_index_answers() for _ in range(5)]
    noxfile.cpu_index_answers.cache_clear()
    assert [False] * 5 == answers
    assert time.monotonic() - started < 1


def test_the_stack_pins_everything_that_is_asked_for(noxfile: ModuleType) -> None:
    pins = dict(line.split("==") for line in noxfile.constraints(noxfile.STACK.read_text()).splitlines())
    named = [*noxfile.PROJECT["project"]["dependencies"]]
    for group in noxfile.GROUPS:
        named += noxfile.nox.project.dependency_groups(noxfile.PROJECT, group)
    asked = {re.match(r"[\w.-]+", requirement)[0] for requirement in named}  # type: ignore[index]
    assert set() == asked - set(pins)


def test_a_torch_that_is_named_is_not_pinned_to_another(noxfile: ModuleType) -> None:
    stack = "# why\nnumpy==1.0\ntorch==2.13.0\ntorch-like==1\n"
    assert "numpy==1.0\ntorch-like==1\n" == noxfile.constraints(stack, without="torch")


def test_an_image_s_pytest_on_path_is_not_the_one_that_runs(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image has pytest and xdist, and stands first on PATH; it knows no option of fusiongate."""
    image = tmp_path / "image"
    image.mkdir()
    program = image / "pytest"
    program.write_text('#!/bin/sh\necho "error: unrecognized arguments: $*" >&2\nexit 4\n', encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "test_one.py").write_text(
        "import sys\n\ndef test_one(pytestconfig):\n"
        "    assert pytestconfig.getoption('--fusiongate-device') == 'host'\n"
        "    assert '' not in sys.path\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PATH", f"{image}{os.pathsep}{os.environ['PATH']}")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)

    class Session(FakeSession):
        def run(self, *command: str, **_: object) -> str:
            assert "python" == command[0]
            done = subprocess.run(
                [sys.executable, *command[1:]], cwd=tmp_path, check=False, capture_output=True, text=True
            )
            assert 0 == done.returncode, done.stdout + done.stderr
            return done.stdout

    noxfile._run_pytest(Session(), "test_one.py", "--fusiongate-device=host", "-n", "1", "--import-mode=importlib")


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


class Failed(Exception):
    """What a session's `error` raises, which ends it."""


class FakeSession:
    """Keeps what a session runs and says, and answers each question about the machine alike."""

    posargs: tuple[str, ...] = ()
    venv_backend = "virtualenv"

    def __init__(self, answer: str = "", statuses: Sequence[int] = ()) -> None:
        self.answer = answer
        self.statuses = list(statuses)
        self.ran: list[tuple[str, ...]] = []
        self.warned: list[str] = []

    def run(self, *command: str, **_: object) -> str:
        self.ran.append(command)
        if status := self.statuses.pop(0) if self.statuses else 0:
            raise CommandFailed(f"Returned code {status}", return_code=status)
        return self.answer

    def install(self, *arguments: str) -> None:
        pass

    def log(self, message: str) -> None:
        pass

    def create_tmp(self) -> str:
        return tempfile.mkdtemp()

    def warn(self, message: str) -> None:
        self.warned.append(message)

    def error(self, message: str) -> None:
        raise Failed(message)


def called(noxfile: ModuleType, session: str, fake: FakeSession) -> None:
    function = getattr(noxfile, session)
    # A session is registered as an object around its function.
    getattr(function, "func", function)(fake)


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


@pytest.mark.parametrize("shared", [[], ["--system-site-packages"]], ids=["no-driver", "torch-sees-none"])
def test_the_gpu_session_runs_no_test_where_torch_sees_no_gpu(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, shared: list[str]
) -> None:
    monkeypatch.setattr(noxfile, "SHARED_PACKAGES", shared)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(noxfile, "_install", lambda *_: None)
    fake = FakeSession("sees none")
    with pytest.raises(Failed, match="no GPU that torch sees"):
        called(noxfile, "gpu", fake)
    assert "pytest" not in {word for command in fake.ran for word in command}


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
