"""What nox's sessions install: the parts of the noxfile that decide something."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

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


def test_linux_without_a_driver_gets_the_cpu_build_from_its_own_index(
    torch_arguments: Callable[..., list[str]],
) -> None:
    expected = ["torch>=2.9", "--index-url", "https://download.pytorch.org/whl/cpu"]
    assert expected == torch_arguments(None, "Linux", has_nvidia=False)


@pytest.mark.parametrize(("system", "has_nvidia"), [("Linux", True), ("Darwin", False)])
def test_elsewhere_pypi_has_the_right_build(
    torch_arguments: Callable[..., list[str]], system: str, has_nvidia: bool
) -> None:
    assert ["torch>=2.9"] == torch_arguments(None, system, has_nvidia=has_nvidia)


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
    assert expected == torch_arguments(requirement, "Linux", has_nvidia=False)


def test_an_empty_variable_counts_as_unset(torch_arguments: Callable[..., list[str]]) -> None:
    assert ["torch>=2.9"] == torch_arguments("", "Linux", has_nvidia=True)


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
