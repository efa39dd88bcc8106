"""What nox's sessions install: the pinned stack or an image's own torch, once, and with whose pytest they run."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .nox_sessions import NOXFILE, FakeSession, load_noxfile

pytestmark = pytest.mark.skipif(not NOXFILE.is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    return load_noxfile()


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


@pytest.fixture
def index_at(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put PyTorch's index at another address, and let nobody remember whether one has answered."""
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    noxfile.cpu_index_answers.cache_clear()
    yield lambda address: monkeypatch.setattr(noxfile, "CPU_INDEX", address)
    noxfile.cpu_index_answers.cache_clear()


@pytest.fixture
def cpu_builds(tmp_path: Path, noxfile: ModuleType) -> Iterator[str]:
    """The address of an index that answers, and that has a CPU build of the pinned torch."""
    wheel(tmp_path / "cpu" / "torch", f"{pinned(noxfile)['torch']}+cpu")
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "cpu"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def wheel(folder: Path, version: str) -> None:
    """A wheel of torch, as far as pip looks before it installs one."""
    folder.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def pinned(noxfile: ModuleType) -> dict[str, str]:
    lines = noxfile.constraints(noxfile.STACK.read_text(encoding="utf-8")).splitlines()
    return dict(line.split("==") for line in lines)


def taken(noxfile: ModuleType, pypi: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of torch that pip would install, told what nox tells it, with a folder as PyPI."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    told = noxfile.torch_arguments(None, "Linux", False, noxfile.cpu_index_answers)
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--report", "-", "--index-url", pypi.as_uri(), "--constraint", noxfile.STACK, *told]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    (installed,) = json.loads(done.stdout)["install"]
    return str(installed["metadata"]["version"])


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "does-not"])
def test_pip_takes_the_pinned_torch_as_the_index_of_cpu_builds_answers(
    noxfile: ModuleType,
    tmp_path: Path,
    cpu_builds: str,
    index_at: Callable[[str], None],
    answers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyPI's newer one never comes, and of one version the CPU build does, if it is to be had."""
    version = pinned(noxfile)["torch"]
    for known in (version, "999.0"):
        wheel(tmp_path / known / "torch", known)
    pypi = tmp_path / "pypi" / "torch"
    pypi.mkdir(parents=True)
    for known in (version, "999.0"):
        (file,) = (tmp_path / known / "torch").iterdir()
        file.rename(pypi / file.name)
    (pypi / "index.html").write_text("".join(f'<a href="{file.name}">{file.name}</a>' for file in pypi.iterdir()))
    index_at(cpu_builds if answers else "http://127.0.0.1:9")

    assert (f"{version}+cpu" if answers else version) == taken(noxfile, tmp_path / "pypi", monkeypatch)


def test_an_index_that_does_not_answer_is_asked_once_and_not_for_long(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, index_at: Callable[[str], None]
) -> None:
    monkeypatch.setattr(noxfile, "PATIENCE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        assert [False] * 5 == [noxfile.cpu_index_answers() for _ in range(5)]
    assert time.monotonic() - started < 4


def test_no_index_is_asked_where_pip_may_ask_none(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, cpu_builds: str, index_at: Callable[[str], None]
) -> None:
    index_at(cpu_builds)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert not noxfile.cpu_index_answers()


def test_the_stack_pins_what_is_asked_for_and_what_that_brings(noxfile: ModuleType) -> None:
    """As far as it is installed here; versions that nobody has asked for are those that surprise."""
    project, dependency_groups = noxfile.PROJECT, noxfile.nox.project.dependency_groups
    pins = pinned(noxfile)
    waiting = [*project["project"]["dependencies"], *dependency_groups(project, *noxfile.GROUPS, "docs")]
    outside, seen = set(), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if not any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if name not in pins or not requirement.specifier.contains(pins[name]):
            outside.add(str(requirement))
        # The torch of PyPI brings its own packages of CUDA.
        if name == "torch" or (name, *sorted(extras)) in seen:
            continue
        seen.add((name, *sorted(extras)))
        with suppress(PackageNotFoundError):
            for brought in map(Requirement, distribution(name).requires or []):
                if brought.marker is None or any(brought.marker.evaluate({"extra": extra}) for extra in extras):
                    brought.marker = None
                    waiting.append(str(brought))
    assert set() == outside


def test_a_torch_that_is_named_is_not_pinned_to_another(noxfile: ModuleType) -> None:
    stack = "# why\nnumpy==1.0\ntorch==2.13.0\ntorch-like==1\n"
    assert "numpy==1.0\ntorch-like==1\n" == noxfile.constraints(stack, without="torch")


class Machine(FakeSession):
    """A session with packages. Its torch, if there is one, sees a GPU; it is the `image`'s or the `session`'s."""

    def __init__(self, noxfile: ModuleType, prefix: Path, torch: str | None = None) -> None:
        super().__init__()
        self.packages = ["pip"]
        self.installs: list[list[str]] = []
        self.constraints: list[str] = []
        self.answers = {
            noxfile.SEES_GPU: "sees none" if torch is None else "sees a GPU",
            noxfile.IS_THE_IMAGES: torch or "",
            noxfile.PREFIX: str(prefix),
        }

    def run(self, *command: str, **_: object) -> str:
        python, unsafe, option, what, *arguments = command
        assert ("python", "-P") == (python, unsafe)
        if option == "-c":
            return self.answers.get(what) or str(self.packages)
        assert ("-m", "pip", "install", "--constraint") == (option, what, *arguments[:2])
        self.constraints = Path(arguments[2]).read_text(encoding="utf-8").splitlines()
        self.installs.append(arguments[3:])
        self.packages += arguments[3:]
        return ""


@pytest.fixture
def machine(tmp_path: Path, noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Make a machine; one with a torch has a driver too."""
    monkeypatch.delenv("FUSIONGATE_TORCH", raising=False)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(noxfile, "cpu_index_answers", lambda: False)

    def make(torch: str | None = None) -> Machine:
        monkeypatch.setattr(noxfile, "SHARED_PACKAGES", ["--system-site-packages"] if torch else [])
        return Machine(noxfile, tmp_path, torch)

    return make


def test_whatever_comes_second_installs_nothing(noxfile: ModuleType, machine: Callable[..., Machine]) -> None:
    """The first session brings what all of them need: no second torch, and no half a minute at each start."""
    session = machine()
    for group in ("suite", "test", "lint", "test"):
        noxfile._install(session, group)
    torch, others = session.installs
    assert ["torch>=2.9"] == torch
    assert {"-e", "mypy>=1.15", "diffusers>=0.35", "av>=15.0"} <= set(others)
    assert f"torch=={pinned(noxfile)['torch']}" in session.constraints


def test_what_was_taken_away_or_is_asked_for_anew_is_installed(
    noxfile: ModuleType, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = machine()
    noxfile._install(session)
    session.packages.pop()
    noxfile._install(session)
    assert 4 == len(session.installs)
    monkeypatch.setitem(noxfile.PROJECT["project"], "dependencies", ["torch>=2.9", "more>=1"])
    noxfile._install(session)
    assert "more>=1" not in session.installs[3]
    assert 6 == len(session.installs)


def test_an_image_keeps_its_torch_and_gets_what_the_session_needs_unpinned(
    noxfile: ModuleType, machine: Callable[..., Machine]
) -> None:
    session = machine("image")
    noxfile._install(session, "suite")
    noxfile._install(session, "suite")
    (installed,) = session.installs
    assert [] == session.constraints
    assert {"-e", "diffusers>=0.35"} <= set(installed)
    assert not {"mypy>=1.15", "av>=15.0"} & set(installed)


def test_a_torch_that_a_session_installed_is_none_of_the_image(
    noxfile: ModuleType, machine: Callable[..., Machine]
) -> None:
    session = machine("session")
    noxfile._install(session, "suite")
    assert ["torch>=2.9"] == session.installs[0]
    assert f"torch=={pinned(noxfile)['torch']}" in session.constraints


def test_a_named_torch_comes_before_the_image_s(
    noxfile: ModuleType, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = machine("image")
    monkeypatch.setenv("FUSIONGATE_TORCH", "torch==2.14.1 --no-deps")
    noxfile._install(session, "suite")
    assert ["torch==2.14.1", "--no-deps"] == session.installs[0]
    assert "torch" not in {pin.partition("==")[0] for pin in session.constraints}


OF_THE_IMAGE = re.compile(
    r"(_?pytest|pytest_xdist|xdist|execnet|pluggy|iniconfig|packaging|pygments|py)(-.*|\.py)?$", re.IGNORECASE
)
"""What an image has of its own in its folder of packages: pytest, xdist, and what they import."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pytest and xdist, that knows nothing of fusiongate; `session` beside it has all the rest."""
    folder = tmp_path_factory.mktemp("machine")
    for name in ("image", "session"):
        venv.create(folder / name, symlinks=True)
    homes = {name: next((folder / name).glob("lib/python*/site-packages")) for name in ("image", "session")}
    for packages in map(Path, sys.path):
        if packages.name != "site-packages":
            continue
        for entry in packages.iterdir():
            # A .pth file that only names folders would show the session the pytest that runs this test.
            if entry.suffix != ".pth" or entry.read_text(encoding="utf-8").startswith("import "):
                link = homes["image" if OF_THE_IMAGE.match(entry.name) else "session"] / entry.name
                with suppress(FileExistsError):
                    link.symlink_to(entry)
    (homes["session"] / "nox_environment.pth").write_text(f"{homes['image']}\n", encoding="utf-8")
    program = folder / "image" / "bin" / "pytest"
    program.write_text(f"#!{folder}/image/bin/python\nimport pytest\nraise SystemExit(pytest.main())\n")
    program.chmod(0o755)
    return folder / "image"


@pytest.fixture
def on_the_image(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a test to run, and the image's programs first on PATH."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "test_one.py").write_text(
        "import sys\nfrom pathlib import Path\n\n\n"
        "def test_one(pytestconfig):\n"
        "    assert pytestconfig.getoption('--fusiongate-device') == 'host'\n"
        "    assert not {'', str(Path(__file__).parent)} & set(sys.path)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{image}/bin{os.pathsep}{os.environ['PATH']}")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)


OPTIONS = ("test_one.py", "--fusiongate-device=host", "--import-mode=importlib")


@pytest.mark.usefixtures("on_the_image")
def test_an_image_s_own_pytest_knows_no_fusiongate() -> None:
    """What a session has to keep away from."""
    done = subprocess.run(["pytest", *OPTIONS, "-n", "1"], check=False, capture_output=True, text=True)
    assert 0 != done.returncode
    assert "unrecognized arguments: --fusiongate-device=host" in done.stderr


@pytest.mark.usefixtures("on_the_image")
def test_a_session_runs_its_own_pytest_with_the_image_s_first_on_path(noxfile: ModuleType, image: Path) -> None:
    class OnTheImage(FakeSession):
        said = ""

        def run(self, *command: str, **_: object) -> str:
            python = image.parent / "session" / "bin" / "python"
            words = [str(python) if word == "python" else word for word in command]
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            assert 0 == done.returncode, done.stdout + done.stderr
            self.said += done.stdout
            return done.stdout

    session = OnTheImage()
    noxfile._run_pytest(session, *OPTIONS, "-n", "1", "-v", "--fusiongate-missing=skip")
    noxfile._python(session, "-c", "import pytest; print(pytest.__file__)")
    assert "1 passed" in session.said
    assert session.said.splitlines()[-1].startswith(str(image))


@pytest.mark.parametrize("backend", ["virtualenv", "none"])
def test_processes_keep_their_bytecode_where_an_image_forbids_it(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The tests start hundreds of them; what a session says itself goes first."""
    environments = []

    class Kept(FakeSession):
        venv_backend = backend

        def run(self, *command: str, **options: Any) -> str:
            environments.append(options["env"])
            return ""

    (tmp_path / "pyvenv.cfg").touch()
    monkeypatch.setattr(noxfile, "SHARED", tmp_path)
    noxfile._python(Kept(), "-c", "pass")
    noxfile._python(Kept(), "-c", "pass", env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert ["", "1"] == [env["PYTHONDONTWRITEBYTECODE"] for env in environments]
