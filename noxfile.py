"""Everything that is run on this repository: `nox` for the tests and the linters, `nox -l` for the list."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import site
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# A machine with a GPU usually comes with the torch that fits it, outside any virtual environment.
HAS_NVIDIA = shutil.which("nvidia-smi") is not None
HAS_AMD = Path("/dev/kfd").exists()
SHARED_PACKAGES = ["--system-site-packages"] if HAS_NVIDIA or HAS_AMD else []

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
PLATFORM = "import fusiongate; print(fusiongate.environment().platform)"
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def torch_arguments(requirement: str | None, system: str, has_nvidia: bool) -> list[str]:
    """What pip is told to install as torch.

    `requirement` is the value of FUSIONGATE_TORCH: a requirement, with pip's options after it where they are needed.
    Without it, Linux without an NVIDIA driver gets the CPU build, from the index that has nothing else: PyPI's build
    brings gigabytes of CUDA, and an extra index would lose against PyPI's higher version.
    """
    if requirement:
        return shlex.split(requirement)
    if system == "Linux" and not has_nvidia:
        return ["torch>=2.9", "--index-url", CPU_INDEX]
    return ["torch>=2.9"]


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


def _sees_gpu(session: nox.Session) -> bool:
    # A session without any torch sees no GPU either, so no exit status is a failure here.
    answer = session.run("python", "-c", SEES_GPU, silent=True, log=False, success_codes=range(256))
    return str(answer).strip().endswith("sees a GPU")


def _finds_gpu(session: nox.Session) -> bool:
    """Whether the session's torch sees a GPU; where it has none, look into the environment that nox itself runs in."""
    if not SHARED_PACKAGES:
        return False
    if _sees_gpu(session):
        return True
    if sys.prefix == sys.base_prefix:
        return False
    # `--system-site-packages` shows the base interpreter's packages only; images that keep torch in a virtual
    # environment run nox from there.
    folder = session.run("python", "-c", SITE_PACKAGES, silent=True, log=False)
    (Path(str(folder).strip()) / "nox_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return _sees_gpu(session)


def _install(session: nox.Session, *groups: str) -> None:
    """Install torch, unless there is one that sees a GPU; then this checkout and the dependency groups."""
    if not _finds_gpu(session):
        session.install(*torch_arguments(os.environ.get("FUSIONGATE_TORCH"), platform.system(), HAS_NVIDIA))
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, *groups))


def _pytest(session: nox.Session, *arguments: str) -> None:
    session.run("pytest", *arguments, *session.posargs)


def _status(session: nox.Session, *arguments: str) -> int:
    """Run pytest and give its exit status."""
    try:
        session.run("pytest", *arguments)
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

    Two kinds of machine need not: somebody's own, and a CPU of a kind that has no snapshots at all, because a hosted
    runner has whichever CPU is free. Either names each baseline that it was not compared with as not run.
    """
    if environment.get("CI") and (not platform_key.startswith("cpu-") or platform_key in recorded):
        return "--fusiongate-missing=fail"
    return "--fusiongate-missing=skip"


def _missing_baselines(session: nox.Session) -> str:
    platform_key = str(session.run("python", "-c", PLATFORM, silent=True, log=False)).strip().splitlines()[-1]
    recorded = [folder.name for folder in ROOT.glob("snapshots/*")]
    chosen = missing_baselines(os.environ, platform_key, recorded)
    if platform_key not in recorded:
        session.warn(f"no snapshots of {platform_key}: {chosen}")
    return chosen


@nox.session(venv_params=SHARED_PACKAGES, default=False)
def suite(session: nox.Session) -> None:
    """Run everything that this machine can run: on its GPUs, or on the host builds without any."""
    _install(session, "suite")
    everything = [*MATRIX, "--fusiongate-device=auto", _missing_baselines(session)]
    if _sees_gpu(session):
        _in_lanes(session, *everything, "--fusiongate-pin-gpus")
    else:
        _pytest(session, *everything, *IN_PARALLEL)


@nox.session(venv_params=SHARED_PACKAGES, default=False)
def gpu(session: nox.Session) -> None:
    """Run the suite on the GPUs, where every fused path has to launch; refuse to start without one."""
    if not SHARED_PACKAGES:
        session.error(NO_GPU)
    _install(session, "suite")
    if not _sees_gpu(session):
        session.error(NO_GPU)
    must_launch = ["--fusiongate-device=cuda", "--fusiongate-require-fused", "--fusiongate-pin-gpus"]
    _in_lanes(session, *MATRIX, *must_launch)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of the library and the plugin, on the host builds; the kernels' own are the suite's."""
    _install(session, "test")
    _pytest(session, *TESTS, *IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session))


@nox.session(venv_params=SHARED_PACKAGES, default=False)
def bench(session: nox.Session) -> None:
    """Time each kernel against its reference, in pairs, on the device's clock; keep the timings in .benchmarks/."""
    _install(session, "bench")
    folder = ROOT / ".benchmarks" / f"{datetime.now(tz=UTC):%Y%m%dT%H%M%SZ}"
    folder.mkdir(parents=True, exist_ok=True)
    # Serial: a second process on the same device would be part of what is measured.
    _pytest(session, "suites/timings", *recording(session.posargs, folder))


@nox.session(venv_params=SHARED_PACKAGES, default=False)
def sabotage(session: nox.Session) -> None:
    """Let the suite catch every kernel that is wrong on purpose."""
    _install(session, "suite")
    _pytest(session, "suites/kernels/test_sabotage.py", _missing_baselines(session))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, the direction of imports, the workflows, and the types of the installed tree."""
    session.install(*torch_arguments(os.environ.get("FUSIONGATE_TORCH"), platform.system(), HAS_NVIDIA))
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    workflows = sorted(str(path) for path in ROOT.glob(".github/workflows/*.yml"))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    _actionlint(session)
    session.run("mypy", "noxfile.py")
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
        session.run("python", "-m", "build", "--no-isolation", "--outdir", folder, silent=True)
        wheel = next(Path(folder).glob("*.whl"))
        session.install("--no-deps", "--force-reinstall", str(wheel))
        # Out of the checkout, whose `fusiongate` folder would come before the installed one.
        with session.chdir(folder):
            project, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
            session.run("lint-imports", "--no-cache", "--no-logo", str(project))
            session.run("mypy", f"--config-file={project}", f"--cache-dir={cache}", "-p", "fusiongate")


@nox.session(default=False)
def amd_compile(session: nox.Session) -> None:
    """Compile every kernel for gfx90a and gfx942; running them takes an AMD GPU and `nox -s gpu`."""
    _install(session)
    session.run("python", "-m", "fusiongate.suites.framework.amd_compile", *session.posargs)


@nox.session(python="3.11", default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests on the lowest versions that the wheel claims to work with."""
    pins = lowest(PROJECT["project"]["dependencies"])
    torch = next(pin for pin in pins if pin.startswith("torch"))
    session.install(*torch_arguments(None, platform.system(), HAS_NVIDIA)[1:], torch)
    session.install("-e", ".", *pins, *nox.project.dependency_groups(PROJECT, "test"))
    _pytest(session, *TESTS_AND_KERNELS, *IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session))


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Measure which branches of the library the tests run without a GPU; fail below 95 %."""
    _install(session, "suite", "test", "coverage")
    # Coverage has to start before pytest, which loads the plugin before pytest-cov could look. It is given a script
    # and no module: `-m` puts the checkout on sys.path, where pytest takes it for one more installed plugin.
    pytest = ["coverage", "run", str(Path(session.bin) / "pytest")]
    options = [*IN_PARALLEL, "--fusiongate-device=host", _missing_baselines(session)]
    session.run("coverage", "erase")
    session.run(*pytest, *TESTS, *MATRIX, *options, *session.posargs)
    session.run("coverage", "combine")
    session.run("coverage", "report")
    # What `report` and its fail_under judge is lines and branches together, and the lines alone would carry it.
    written = Path(session.create_tmp()) / "coverage.json"
    session.run("coverage", "json", "-o", str(written))
    covered = branches_covered(json.loads(written.read_text(encoding="utf-8")))
    session.log(f"{covered:.2f} % of the branches")
    least = PROJECT["tool"]["coverage"]["report"]["fail_under"]
    if covered < least:
        session.error(f"the tests run {covered:.2f} % of the branches, expected at least {least} %")
