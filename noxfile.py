"""Everything that is run on this repository: `nox` for the tests and the linters, `nox -l` for the list."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2026.7.11"  # the first that tells a failed command's exit status
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # uv's environments have no pip, which the packaging tests run

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
STACK = ROOT / ".ci" / "stack.txt"
"""The one known-good version of everything, as constraints of pip."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 5
"""How long PyTorch's own index is given to answer, once: pip would try again and again."""
IS_THERE = "import sys, urllib.request as web; web.urlopen(web.Request(sys.argv[1], method='HEAD'))"

# A machine with a GPU usually comes with the torch that fits it, outside any virtual environment.
HAS_NVIDIA = shutil.which("nvidia-smi") is not None
HAS_AMD = Path("/dev/kfd").exists()
SHARED_PACKAGES = ["--system-site-packages"] if HAS_NVIDIA or HAS_AMD else []
# One environment for all that runs on the pinned stack: a second torch would take gigabytes where only PyPI's build is
# to be had. Nox has one environment a session, so that these sessions have none of nox's.
SHARED = ROOT / ".nox" / f"stack-{platform.python_version()}"
GROUPS = ("bench", "coverage", "lint", "suite", "test")
"""The dependency groups of that environment."""

TESTS = ["suites/framework"]
TESTS_AND_KERNELS = [*TESTS, "suites/kernels"]
MATRIX = ["suites/kernels", "suites/models", "suites/downstream"]
IN_PARALLEL = ["-n", "auto", "--dist", "worksteal"]
NO_TEST = 5  # pytest's exit status where it has selected none
NO_GPU = (
    "no GPU that torch sees: run this beside a driver and a torch that sees the GPU, or name the build to install in "
    "FUSIONGATE_TORCH; `nox -s suite` runs without one"
)
SEES_GPU = "import torch; print('sees a GPU' if torch.cuda.is_available() else 'sees none')"
IS_THE_IMAGES = "import sys, torch; print('session' if torch.__file__.startswith(sys.prefix) else 'image')"
INSTALLED = "from importlib.metadata import distributions as d; print(sorted({(x.name, x.version) for x in d()}))"
PLATFORM = "import fusiongate; print(fusiongate.environment().platform)"
PREFIX = "import sys; print(sys.prefix)"
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Some images forbid it: then each of the hundreds of processes that the tests start would compile the same modules, and
# pytest rewrite its plugins', for one to three seconds each. An empty value is none.
KEEPS_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def torch_arguments(
    requirement: str | None, system: str, has_nvidia: bool, index_answers: Callable[[], bool]
) -> list[str]:
    """What pip is told to install as torch.

    `requirement` is the value of FUSIONGATE_TORCH: a requirement, with pip's options after it where they are needed.
    Without it, Linux without an NVIDIA driver is offered the CPU build from PyTorch's own index beside PyPI's, if that
    index answers: of one pinned version pip prefers the local one, `+cpu`. Where only PyPI can be reached, its build is
    taken, which brings gigabytes of CUDA and works.
    """
    if requirement:
        return shlex.split(requirement)
    if system == "Linux" and not has_nvidia and index_answers():
        return ["torch>=2.9", "--extra-index-url", CPU_INDEX]
    return ["torch>=2.9"]


@functools.cache
def cpu_index_answers() -> bool:
    """Whether PyTorch's index of CPU builds can be reached; asked once, and not at all where pip may ask no index.

    By a process that can be ended: looking a name up and trying one address after another know no limit.
    """
    if os.environ.get("PIP_NO_INDEX"):
        return False
    certificates = os.environ.get("PIP_CERT")
    environment = {**os.environ, "SSL_CERT_FILE": certificates} if certificates else None
    ask = [sys.executable, "-c", IS_THERE, f"{CPU_INDEX}/torch/"]
    try:
        subprocess.run(ask, check=True, capture_output=True, timeout=PATIENCE_S, env=environment)
    except subprocess.SubprocessError:
        return False
    return True


def constraints(stack: str, *, without: str = "") -> str:
    """The stack's pins, less one package's: a torch that is given already, or named, is not to be replaced."""
    pins = [line for line in stack.splitlines() if line and not line.startswith("#")]
    return "".join(f"{pin}\n" for pin in pins if pin.partition("==")[0] != without)


def lowest(requirements: list[str]) -> list[str]:
    """The same requirements, each pinned to the lowest version that it allows."""
    return [requirement.replace(">=", "==") for requirement in requirements]


def recording(given: Sequence[str], folder: Path) -> list[str]:
    """The options that keep a run's timings, for `fusiongate judge`, and chart them; what is given already stays."""
    options = {"--benchmark-json": folder / "timings.json", "--benchmark-histogram": folder / "chart"}
    return [
        f"{option}={path}"
        for option, path in options.items()
        if not any(word == option or word.startswith(f"{option}=") for word in given)
    ]


def lanes(given: Sequence[str], ledger: Path) -> tuple[list[str], list[str]]:
    """The arguments of the two runs that are one job: with workers what may run beside others, then alone what may not.

    What the caller gives goes to both; a marker expression of the caller's narrows both. Both append to one ledger, and
    a JUnit file would be written over: the second run's has another name.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="markers")
    parser.add_argument("--junitxml", "--junit-xml", dest="junit", type=Path)
    own, others = parser.parse_known_args(given)
    if not any(word.split("=")[0] == "--fusiongate-ledger" for word in others):
        others.append(f"--fusiongate-ledger={ledger}")
    runs = []
    for lane, workers in (("not alone", IN_PARALLEL), ("alone", [])):
        run = [*workers, *others, "-m", f"({own.markers}) and {lane}" if own.markers else lane]
        if own.junit:
            junit = own.junit if workers else own.junit.with_stem(f"{own.junit.stem}-alone")
            run.append(f"--junitxml={junit}")
        # Whatever number of workers the caller gives, there are none here.
        runs.append(run if workers else [*run, "-n", "0"])
    return runs[0], runs[1]


def branches_covered(measured: Mapping[str, Any]) -> float:
    """The percentage of branches that were taken, out of what `coverage json` writes."""
    totals = measured["totals"]
    return float(100 * totals["covered_branches"] / totals["num_branches"])


def _python(session: nox.Session, *arguments: str, **options: Any) -> Any:
    """Run the session's own Python; that of the shared environment in a session that has none.

    -P keeps the working directory off sys.path, where the checkout's `kernels` would hide another package.
    """
    environment = KEEPS_BYTECODE | options.pop("env", {})
    if session.venv_backend != "none":
        return session.run("python", "-P", *arguments, env=environment, **options)
    if not (SHARED / "pyvenv.cfg").is_file():
        session.run(sys.executable, "-m", "virtualenv", *SHARED_PACKAGES, str(SHARED), external=True, silent=True)
    folder = SHARED / ("Scripts" if os.name == "nt" else "bin")
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {"PATH": path, "VIRTUAL_ENV": str(SHARED)} | environment
    return session.run(str(folder / "python"), "-P", *arguments, external=True, env=environment, **options)


def _answer(session: nox.Session, code: str) -> str:
    """The last line that the session's Python prints; empty where the code fails, as without a torch."""
    said = str(_python(session, "-c", code, silent=True, log=False, success_codes=range(256))).strip()
    return said.splitlines()[-1] if said else ""


def _sees_gpu(session: nox.Session) -> bool:
    return _answer(session, SEES_GPU) == "sees a GPU"


def _keeps_torch(session: nox.Session) -> bool:
    """Whether the image has a torch that sees a GPU, seen from the session; it stays, unless another one is named."""
    if not SHARED_PACKAGES or os.environ.get("FUSIONGATE_TORCH"):
        return False
    if not _sees_gpu(session) and sys.prefix != sys.base_prefix:
        # `--system-site-packages` shows the base interpreter's packages only; images that keep torch in a virtual
        # environment run nox from there.
        packages = Path(_answer(session, SITE_PACKAGES))
        (packages / "nox_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return _sees_gpu(session) and _answer(session, IS_THE_IMAGES) == "image"


def _install(session: nox.Session, *groups: str) -> None:
    """Install torch, this checkout and dependency groups, unless what was installed for them is what is there.

    Beside an image's torch nothing is pinned, and no group is taken but the session's own: what fits that torch is the
    image's to say, and it may have no index to take more from.
    """
    torch, pins = [], ""
    if not _keeps_torch(session):
        named = os.environ.get("FUSIONGATE_TORCH")
        torch = torch_arguments(named, platform.system(), HAS_NVIDIA, cpu_index_answers)
        pins = constraints(STACK.read_text(encoding="utf-8"), without="torch" if named else "")
        groups = GROUPS
    packages = ["-e", ".", *dict.fromkeys(nox.project.dependency_groups(PROJECT, *groups))]
    built = [PROJECT[table] for table in ("build-system", "project")], PROJECT["tool"]["setuptools"]
    digest = hashlib.sha256(json.dumps([str(ROOT), torch[:1], pins, packages, built]).encode()).hexdigest()
    # Its name says what was asked for, its text what that gave.
    stamp = Path(_answer(session, PREFIX)) / f"fusiongate-{digest[:16]}.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == _answer(session, INSTALLED):
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text(pins, encoding="utf-8")
        install = ("-m", "pip", "install", "--constraint", str(file))
        if torch:
            # Not silent: where only PyPI's build is to be had, it brings gigabytes.
            _python(session, *install, *torch)
        _python(session, *install, *packages, silent=True)
    stamp.write_text(_answer(session, INSTALLED), encoding="utf-8")
    session.log(f"installed in {time.monotonic() - started:.0f} s")


def _run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run this environment's pytest: the first one on PATH may be an image's, which knows nothing of what is here."""
    started = time.monotonic()
    try:
        _python(session, "-m", "pytest", *arguments)
    finally:
        session.log(f"pytest took {time.monotonic() - started:.0f} s")


def _pytest(session: nox.Session, *arguments: str) -> None:
    _run_pytest(session, *arguments, *session.posargs)


def _status(session: nox.Session, *arguments: str) -> int:
    """Run pytest and give its exit status."""
    try:
        _run_pytest(session, *arguments)
    except CommandFailed as failed:
        return failed.return_code or 1
    return 0


def _in_lanes(session: nox.Session, *arguments: str) -> None:
    """Run the tests in two lanes, the second one whatever has come of the first; each of them is judged."""
    ledger = ROOT / ".fusiongate" / f"ledger-{datetime.now(tz=UTC):%Y%m%dT%H%M%SZ}.jsonl"
    statuses = [_status(session, *arguments, *lane) for lane in lanes(session.posargs, ledger)]
    if failed := set(statuses) - {0, NO_TEST}:
        session.error(f"pytest ended with exit status {', '.join(map(str, sorted(failed)))}")
    if set(statuses) == {NO_TEST}:
        session.error("no test was selected")


def missing_baselines(environment: Mapping[str, str], platform_key: str, recorded: Sequence[str]) -> str:
    """What a missing baseline means: what runs unattended has to have its own.

    Two kinds of machine need not: somebody's own, and a CPU of an architecture that has no snapshots at all. Either
    names each baseline that it was not compared with as not run.
    """
    if environment.get("CI") and (not platform_key.startswith("cpu-") or platform_key in recorded):
        return "--fusiongate-missing=fail"
    return "--fusiongate-missing=skip"


def _missing_baselines(session: nox.Session) -> str:
    told = _answer(session, PLATFORM)
    # Whatever vector instructions an x86-64 CPU has, its digests are the same.
    platform_key = "cpu-x86_64" if told.startswith("cpu-x86_64-") else told
    recorded = [folder.name for folder in ROOT.glob("snapshots/*")]
    chosen = missing_baselines(os.environ, platform_key, recorded)
    if platform_key not in recorded:
        session.warn(f"no snapshots of {platform_key}: {chosen}")
    return chosen


@nox.session(venv_backend="none", default=False)
def suite(session: nox.Session) -> None:
    """Run everything that this machine can run: on its GPUs, or on the host builds without any."""
    _install(session, "suite")
    everything = [*MATRIX, "--fusiongate-device=auto", _missing_baselines(session)]
    if _sees_gpu(session):
        _in_lanes(session, *everything, "--fusiongate-pin-gpus")
    else:
        _pytest(session, *everything, *IN_PARALLEL)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Run the suite on the GPUs, where every fused path has to launch; refuse to start without one."""
    if not SHARED_PACKAGES:
        session.error(NO_GPU)
    _install(session, "suite")
    if not _sees_gpu(session):
        session.error(NO_GPU)
    must_launch = ["--fusiongate-device=cuda", "--fusiongate-require-fused", "--fusiongate-pin-gpus"]
    _in_lanes(session, *MATRIX, *must_launch)


@nox.session(venv_backend="none", default=False)
def record(session: nox.Session) -> None:
    """Record everything that a GPU gives, and enter it in the manifest; refuse to start without a GPU."""
    if not SHARED_PACKAGES:
        session.error(NO_GPU)
    _install(session, "suite", "bench")
    if not _sees_gpu(session):
        session.error(NO_GPU)
    _python(session, "-m", "fusiongate.suites.record", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of the library and the plugin, on the host builds; the kernels' own are the suite's."""
    _install(session, "test")
    _pytest(session, *TESTS, *IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session))


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Time each kernel against its reference, in pairs, on the device's clock; keep the timings in .benchmarks/."""
    _install(session, "bench")
    folder = ROOT / ".benchmarks" / f"{datetime.now(tz=UTC):%Y%m%dT%H%M%SZ}"
    folder.mkdir(parents=True, exist_ok=True)
    # Serial: a second process on the same device would be part of what is measured.
    _pytest(session, "suites/timings", *recording(session.posargs, folder))


@nox.session(venv_backend="none", default=False)
def sabotage(session: nox.Session) -> None:
    """Let the suite catch every kernel that is wrong on purpose."""
    _install(session, "suite")
    _pytest(session, "suites/kernels/test_sabotage.py", _missing_baselines(session))


@nox.session(venv_backend="none", default=False)
def rewired(session: nox.Session) -> None:
    """Draw 2,000 models, and hold each rewired against eager; the tests draw 100. Takes minutes."""
    _install(session, "test")
    session.env["FUSIONGATE_SCANNED_PROGRAMS"] = "2000"
    _pytest(session, "suites/framework/test_scan_programs.py", "--fusiongate-device=host")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, the direction of imports, the workflows, and the types of the installed tree."""
    _install(session, "lint")
    _python(session, "-m", "ruff", "check")
    _python(session, "-m", "ruff", "format", "--check")
    workflows = sorted(str(path) for path in ROOT.glob(".github/workflows/*.yml"))
    _python(session, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    _actionlint(session)
    _python(session, "-m", "mypy", "noxfile.py")
    _check_installed_tree(session)


def _actionlint(session: nox.Session) -> None:
    """Check the workflows' expressions and scripts; where the workflows run, the tool has to be there."""
    if shutil.which("actionlint"):
        session.run("actionlint", external=True)
    elif os.environ.get("GITHUB_ACTIONS"):
        session.error("actionlint is not installed: .github/workflows/ci.yml puts it on PATH before `nox -s lint`")
    else:
        session.warn("not run: actionlint, which is not installed (its PyPI package downloads a binary of its own)")


def _check_installed_tree(session: nox.Session) -> None:
    """Check imports and types as a wheel installs the package: in a checkout `fusiongate.kernels` has another name."""
    with tempfile.TemporaryDirectory() as folder:
        # By way of the sdist: a wheel built in the checkout would pick up what an earlier build left there.
        _python(session, "-m", "build", "--no-isolation", "--outdir", folder, silent=True)
        wheel = next(Path(folder).glob("*.whl"))
        tree = Path(folder) / "tree"
        shutil.unpack_archive(wheel, tree, "zip")
        # Both look into the folder that they run in first.
        with session.chdir(tree):
            project, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
            _python(session, "-c", LINT_IMPORTS, "--no-cache", "--no-logo", str(project))
            _python(session, "-m", "mypy", f"--config-file={project}", f"--cache-dir={cache}", "-p", "fusiongate")


@nox.session(venv_backend="none", default=False)
def amd_compile(session: nox.Session) -> None:
    """Compile every kernel for gfx90a and gfx942; running them takes an AMD GPU and `nox -s gpu`."""
    _install(session, "suite")
    _python(session, "-m", "fusiongate.suites.framework.amd_compile", *session.posargs)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Run tests and suite on whatever is newest, torch included, and list it: what is green can be pinned."""
    torch = torch_arguments(os.environ.get("FUSIONGATE_TORCH"), platform.system(), HAS_NVIDIA, cpu_index_answers)
    groups = nox.project.dependency_groups(PROJECT, "suite", "test")
    session.install("--upgrade", "--upgrade-strategy", "eager", *torch, "-e", ".", *groups, silent=False)
    try:
        _pytest(session, *TESTS, *MATRIX, *IN_PARALLEL, "--fusiongate-device=host", "--fusiongate-missing=skip")
    finally:
        _python(session, "-m", "pip", "list", "--format=freeze", "--exclude-editable")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation as a site in build/site; a broken link or name fails."""
    session.install("--constraint", str(STACK), *nox.project.dependency_groups(PROJECT, "docs"))
    with session.chdir(ROOT / "docs" / "site"):
        _python(session, "-m", "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python="3.11", default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests on the lowest versions that the wheel claims to work with."""
    pins = lowest(PROJECT["project"]["dependencies"])
    torch = next(pin for pin in pins if pin.startswith("torch"))
    session.install(torch, *torch_arguments(None, platform.system(), HAS_NVIDIA, cpu_index_answers)[1:])
    session.install("-e", ".", *pins, *nox.project.dependency_groups(PROJECT, "test"))
    _pytest(session, *TESTS_AND_KERNELS, *IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session))


@nox.session(venv_backend="none", default=False)
def portable(session: nox.Session) -> None:
    """Hold every preset's digests on emulated x86-64 CPUs against those of this one; takes qemu-user, and minutes."""
    if shutil.which("qemu-x86_64") is None:
        session.error("no qemu-x86_64: apt-get install qemu-user")
    _install(session, "suite")
    session.env["FUSIONGATE_EMULATE"] = "1"
    # A class is a CPU, whose process runs one preset after another.
    by_cpu = ["-n", "auto", "--dist", "loadscope", "--fusiongate-device=host"]
    _pytest(session, "suites/models/test_portable.py", *by_cpu)


@nox.session(venv_backend="none", default=False)
def coverage(session: nox.Session) -> None:
    """Measure which branches of the library the tests run without a GPU; fail below 95 %."""
    _install(session, "coverage")
    # Coverage has to start before pytest, which loads the plugin before pytest-cov could look.
    options = [*IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session)]
    cover = ("-m", "coverage")
    _python(session, *cover, "erase")
    _python(session, *cover, "run", "-m", "pytest", *TESTS, *MATRIX, *options, *session.posargs)
    _python(session, *cover, "combine")
    _python(session, *cover, "report")
    # What `report` and its fail_under judge is lines and branches together, and the lines alone would carry it.
    written = str(_python(session, *cover, "json", "-o", "-", silent=True))
    covered = branches_covered(json.loads(written))
    session.log(f"{covered:.2f} % of the branches")
    least = PROJECT["tool"]["coverage"]["report"]["fail_under"]
    if covered < least:
        session.error(f"the tests run {covered:.2f} % of the branches, expected at least {least} %")
