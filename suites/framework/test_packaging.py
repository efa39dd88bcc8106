"""What is built from the source tree, and what a fresh environment can import of it."""

import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from .wheels import SOURCE, TREES, Distributions, fresh_environment, install, run


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """The interpreter of an environment that nothing has been installed into."""
    return fresh_environment(tmp_path / "environment")


def loads_torch(python: Path, statement: str, cwd: Path) -> bool:
    """Whether torch has been imported after `statement` in a new process."""
    answer = run(python, "-c", f"{statement}\nimport sys\nprint('torch' in sys.modules)", cwd=cwd)
    return answer.splitlines()[-1] == "True"


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="needs the source tree")
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
    distributions: Distributions, request: pytest.FixtureRequest, tmp_path: Path, form: str
) -> None:
    python: Path = request.getfixturevalue("python_with_the_wheel" if form == "wheel" else "fresh_python")
    if form == "editable":
        install(python, "--editable", distributions.source)
        expected = [str(distributions.source / tree / "__init__.py") for tree in TREES]
    else:
        if form == "wheel_from_sdist":
            install(python, distributions.wheel_from_sdist)
        packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
        expected = [f"{packages.strip()}/{name}/__init__.py" for name in TREES.values()]
    statement = "import fusiongate, fusiongate.kernels, fusiongate.suites as suites"
    files = "print(fusiongate.__file__, fusiongate.kernels.__file__, suites.__file__, sep='\\n')"
    assert expected == run(python, "-c", f"{statement}\n{files}", cwd=tmp_path).splitlines()
    for shadowing in ("kernels", "suites"):
        absent = f"import importlib.util; print(importlib.util.find_spec({shadowing!r}))"
        assert run(python, "-c", absent, cwd=tmp_path) == "None\n"


@pytest.mark.parametrize(
    "statement",
    ["import fusiongate", "import fusiongate.plugin.hooks", "import pytest\npytest.main(['--markers'])"],
    ids=["package", "plugin-module", "pytest-with-the-plugin"],
)
def test_neither_the_package_nor_the_plugin_loads_torch(
    python_with_the_wheel: Path, tmp_path: Path, statement: str
) -> None:
    assert not loads_torch(python_with_the_wheel, statement, cwd=tmp_path)


@pytest.mark.parametrize(
    ("module", "statement"),
    [("__init__.py", "import fusiongate"), ("plugin/hooks.py", "import pytest\npytest.main(['--markers'])")],
    ids=["package", "plugin"],
)
def test_a_planted_import_of_torch_is_seen(
    distributions: Distributions,
    python_with_the_wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    statement: str,
) -> None:
    """The test above can fail."""
    shutil.unpack_archive(distributions.wheel, tmp_path / "planted", "zip")
    with (tmp_path / "planted" / "fusiongate" / module).open("a") as file:
        file.write("\nimport torch\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))  # before what is installed
    assert loads_torch(python_with_the_wheel, statement, cwd=tmp_path)
