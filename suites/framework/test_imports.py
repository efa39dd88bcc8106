"""The direction of imports, as `nox -s lint` holds it, and the names that modules must not take."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusiongate
import fusiongate.kernels

SOURCE = Path(__file__).parents[2]
LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"
OPTIONS = [str(SOURCE / "pyproject.toml"), "--no-cache", "--no-logo"]

pytestmark = pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="needs the source tree")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The three trees of the checkout under the one name that they are installed by."""
    only_python = shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh", "*.json", "downstream")
    for tree, place in (("fusiongate", "."), ("kernels", "kernels"), ("suites", "suites")):
        shutil.copytree(SOURCE / tree, tmp_path / "fusiongate" / place, ignore=only_python, dirs_exist_ok=True)
    return tmp_path


def linted(installed: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINTER, *OPTIONS],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_this_checkout_keeps_the_rules(installed: Path) -> None:
    run = linted(installed)
    assert 0 == run.returncode, run.stdout


@pytest.mark.parametrize(
    ("path", "planted", "expected"),
    [
        ("errors.py", "from .gate import x", "errors -> fusiongate.gate (l."),
        ("comparison/verdicts.py", "def f():\n    from fusiongate.gate import x", "verdicts -> fusiongate.gate (l."),
        ("kernels/orders.py", "from fusiongate.matrix import x", "kernels.orders -> fusiongate.matrix (l."),
        ("matrix/check.py", "from ..timing import pairing", "check -> fusiongate.timing.pairing (l."),
        ("gate/states.py", "import fusiongate as fg", "states -> fusiongate (l."),
        ("gate/states.py", "from fusiongate import compare", "states -> fusiongate (l."),
        ("helpers.py", "", "- fusiongate.helpers"),
        ("suites/kernels/test_evidence.py", "from fusiongate.gate import x", "test_evidence -> fusiongate.gate (l."),
    ],
)
def test_a_planted_breach_is_found(installed: Path, path: str, planted: str, expected: str) -> None:
    with (installed / "fusiongate" / path).open("a") as module:
        module.write(f"\n{planted}\n")
    run = linted(installed)
    assert 1 == run.returncode
    assert expected in re.sub(r"\s+", " ", run.stdout)


def misnamed(folder: Path, *names: str) -> list[str]:
    """Absolute imports by one of the names, as `file: name`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"{path.name}: {name}" for one in imported for name in names if f"{one}.".startswith(f"{name}.")]
    return found


@pytest.mark.parametrize("tree", ["fusiongate", "kernels", "suites"])
def test_trees_are_imported_by_names_that_checkout_and_wheel_share(tree: str, tmp_path: Path) -> None:
    names = ["kernels", "suites", "fusiongate.suites", *["fusiongate.kernels"] * (tree == "kernels")]
    assert [] == misnamed(SOURCE / tree, *names)
    (tmp_path / "planted.py").write_text("".join(f"def f():\n    from {name} import x\n" for name in names))
    assert [f"planted.py: {name}" for name in names] == misnamed(tmp_path, *names)


def shadowing(folder: Path, public: set[str]) -> list[str]:
    """The modules and packages in a folder that bear a public name."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.stem in public and (path.suffix == ".py" or (path / "__init__.py").is_file())
    )


PUBLIC = {
    "fusiongate": set(fusiongate.__all__) - {"kernels"},
    "kernels": set(fusiongate.kernels.__all__),
}
"""What is exported by each package of the checkout."""


@pytest.mark.parametrize("tree", PUBLIC)
def test_no_module_takes_the_name_of_a_public_function(tree: str) -> None:
    """To import it would put it in the function's place."""
    assert PUBLIC[tree]
    assert [] == shadowing(SOURCE / tree, PUBLIC[tree])


@pytest.mark.parametrize("name", ["compare.py", "compare/__init__.py"])
def test_a_module_named_like_a_public_function_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "verdicts.py").write_text("")
    assert [name.partition("/")[0]] == shadowing(tmp_path, PUBLIC["fusiongate"])


def test_no_file_is_loaded_under_two_names() -> None:
    """A checkout can be imported as `suites` and as `fusiongate.suites`; two copies would keep two sets of state."""
    files = [
        module.__file__
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in {"fusiongate", "kernels", "suites"} and getattr(module, "__file__", None)
    ]
    assert sorted(set(map(str, files))) == sorted(map(str, files))
