"""What is built from the source tree, and what a fresh environment can import of it."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

SOURCE = Path(__file__).parents[2]
TREES = {"fusiongate": "fusiongate", "kernels": "fusiongate/kernels", "suites": "fusiongate/suites"}
WITHOUT_CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")

pytestmark = pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="needs the source tree")


@dataclass(frozen=True, slots=True)
class Distributions:
    """What `python -m build` makes of the source tree."""

    source: Path
    """The copy that was built: its folders show what belongs into the wheel."""
    wheel: Path
    """Built from the source tree."""
    sdist: Path
    """Built from the source tree."""
    wheel_from_sdist: Path
    """Built from the unpacked sdist."""


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that has to succeed."""
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Distributions:
    """Wheel and sdist, built once, however many workers share the tests of this file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "distributions"
    source, direct, by_way_of_sdist = folder / "source", folder / "direct", folder / "by-way-of-sdist"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            # A copy: a build in the checkout would leave folders there that the next build picks up again.
            for tree in TREES:
                shutil.copytree(SOURCE / tree, source / tree, ignore=WITHOUT_CACHES)
            for file in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(SOURCE / file, source / file)
            build = (sys.executable, "-m", "build", "--no-isolation")
            run(*build, "--outdir", by_way_of_sdist, source, cwd=folder)
            run(*build, "--wheel", "--outdir", direct, source, cwd=folder)
            shutil.rmtree(source / "build")
    [wheel] = direct.glob("*.whl")
    [sdist] = by_way_of_sdist.glob("*.tar.gz")
    [wheel_from_sdist] = by_way_of_sdist.glob("*.whl")
    return Distributions(source, wheel, sdist, wheel_from_sdist)


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """The interpreter of a new environment that sees this one's packages, but none of its editable installs."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # A line of a .pth file is a folder to search; the .pth files within that folder are not read.
    (Path(packages) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    """Install into the environment of `python`, from nothing but what is there already."""
    offline = ("--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *what, cwd=python.parent)


def loads_torch(python: Path, statement: str, cwd: Path) -> bool:
    """Whether torch has been imported after `statement` in a new process."""
    answer = run(python, "-c", f"{statement}\nimport sys\nprint('torch' in sys.modules)", cwd=cwd)
    return answer.splitlines()[-1] == "True"


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_package_is_listed() -> None:
    """setuptools cannot search for packages under mapped names, so pyproject.toml lists them."""
    with (SOURCE / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = [
        ".".join([name.replace("/", "."), *folder.parts])
        for tree, name in TREES.items()
        for folder in (init.parent.relative_to(SOURCE / tree) for init in (SOURCE / tree).rglob("__init__.py"))
        # Below a folder that is no package stand other people's projects, which travel as data.
        if all((SOURCE / tree / parent / "__init__.py").is_file() for parent in folder.parents)
    ]
    assert sorted(folders) == sorted(listed)


def test_the_wheel_installs_one_import_name(distributions: Distributions) -> None:
    top_level = {name.split("/")[0] for name in members(distributions.wheel)}
    [metadata] = [name for name in top_level if name.endswith(".dist-info")]
    assert top_level == {"fusiongate", metadata}


def test_the_wheel_holds_every_file_of_the_three_trees(distributions: Distributions) -> None:
    expected = {
        f"{name}/{path.relative_to(distributions.source / tree)}"
        for tree, name in TREES.items()
        for path in (distributions.source / tree).rglob("*")
        if path.is_file()
    }
    actual = {name for name in members(distributions.wheel) if name.startswith("fusiongate/")}
    assert expected == actual


def test_the_wheel_holds_kernel_sources_and_the_typing_marker(distributions: Distributions) -> None:
    suffixes = {Path(name).suffix for name in members(distributions.wheel) if name.startswith("fusiongate/kernels/")}
    assert {".cu", ".cuh"} <= suffixes
    assert "fusiongate/py.typed" in members(distributions.wheel)


def test_the_sdist_builds_the_same_wheel(distributions: Distributions) -> None:
    assert members(distributions.wheel) == members(distributions.wheel_from_sdist)


def test_the_sdist_holds_the_licence(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        assert [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/LICENSE")] != []


@pytest.mark.parametrize("form", ["wheel", "wheel_from_sdist", "editable"])
def test_an_installed_copy_imports_by_its_own_name(
    distributions: Distributions, fresh_python: Path, tmp_path: Path, form: str
) -> None:
    if form == "editable":
        install(fresh_python, "--editable", distributions.source)
        expected = [str(distributions.source / tree / "__init__.py") for tree in TREES]
    else:
        install(fresh_python, getattr(distributions, form))
        packages = run(fresh_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
        expected = [f"{packages.strip()}/{name}/__init__.py" for name in TREES.values()]
    statement = "import fusiongate, fusiongate.kernels, fusiongate.suites as suites"
    files = "print(fusiongate.__file__, fusiongate.kernels.__file__, suites.__file__, sep='\\n')"
    assert expected == run(fresh_python, "-c", f"{statement}\n{files}", cwd=tmp_path).splitlines()
    for shadowing in ("kernels", "suites"):
        absent = f"import importlib.util; print(importlib.util.find_spec({shadowing!r}))"
        assert run(fresh_python, "-c", absent, cwd=tmp_path) == "None\n"


@pytest.mark.parametrize(
    "statement",
    ["import fusiongate", "import fusiongate.plugin.hooks", "import pytest\npytest.main(['--markers'])"],
    ids=["package", "plugin-module", "pytest-with-the-plugin"],
)
def test_neither_the_package_nor_the_plugin_loads_torch(
    distributions: Distributions, fresh_python: Path, tmp_path: Path, statement: str
) -> None:
    install(fresh_python, distributions.wheel)
    assert not loads_torch(fresh_python, statement, cwd=tmp_path)


@pytest.mark.parametrize(
    ("module", "statement"),
    [("__init__.py", "import fusiongate"), ("plugin/hooks.py", "import pytest\npytest.main(['--markers'])")],
    ids=["package", "plugin"],
)
def test_a_planted_import_of_torch_is_seen(
    distributions: Distributions, fresh_python: Path, tmp_path: Path, module: str, statement: str
) -> None:
    """The test above can fail."""
    install(fresh_python, distributions.wheel)
    find = "import importlib.util; print(importlib.util.find_spec('fusiongate').submodule_search_locations[0])"
    installed = Path(run(fresh_python, "-c", find, cwd=tmp_path).strip())
    with (installed / module).open("a") as file:
        file.write("\nimport torch\n")
    assert loads_torch(fresh_python, statement, cwd=tmp_path)
