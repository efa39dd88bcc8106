"""The direction of imports, and the names that modules must not take."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import import_rules

SOURCE = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="needs the source tree")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small tree that keeps every rule."""
    files = {
        "fusiongate/__init__.py": '__all__ = ["compare", "kernels"]\n',
        "fusiongate/errors.py": "import math\n",
        "fusiongate/comparison/verdicts.py": "from .errors import math\n",
        "fusiongate/gate/states.py": "import fusiongate.comparison\n",
        "fusiongate/jit/__init__.py": "from ..gate import fusiongate\nfrom .. import errors\n",
        "kernels/__init__.py": "from .modulation import math\n",
        "kernels/modulation.py": "from fusiongate.jit import errors\nimport math\n",
        "suites/__init__.py": "",
        "suites/framework/test_gates.py": "from fusiongate.gate import fusiongate\n",
        "suites/kernels/test_modulate.py": "import fusiongate as fg\nfrom fusiongate.kernels import math\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_this_checkout_keeps_the_rules() -> None:
    assert list(map(str, import_rules.violations(SOURCE))) == []


def test_no_module_takes_the_name_of_a_public_function() -> None:
    assert list(map(str, import_rules.shadowing_modules(SOURCE))) == []


def test_a_tree_that_keeps_the_rules_is_left_in_peace(checkout: Path) -> None:
    assert import_rules.violations(checkout) == []
    assert import_rules.shadowing_modules(checkout) == []


@pytest.mark.parametrize(
    ("path", "planted", "expected"),
    [
        (
            "fusiongate/comparison/verdicts.py",
            "from ..gate import x",
            "`comparison` imports `fusiongate.gate`, which stands above it",
        ),
        (
            "fusiongate/comparison/verdicts.py",
            "from . import gates",
            "`comparison` imports `fusiongate.gate`, which stands above it",
        ),
        ("fusiongate/comparison/verdicts.py", "import fusiongate.gate", "`comparison` imports `fusiongate.gate`"),
        (
            "fusiongate/comparison/verdicts.py",
            "def f():\n    from fusiongate.gate import x",
            "`comparison` imports `fusiongate.gate`",
        ),
        ("fusiongate/comparison/verdicts.py", "import fusiongate as fg", "`comparison` imports `fusiongate` itself"),
        (
            "fusiongate/comparison/verdicts.py",
            "from fusiongate import compare",
            "imports `fusiongate.compare`, which stands in no layer",
        ),
        ("fusiongate/comparison/verdicts.py", "from ..gate import x, y", "`comparison` imports `fusiongate.gate`"),
        ("fusiongate/jit/cache.py", "from ..kernels import x", "`jit` imports `fusiongate.kernels`"),
        ("fusiongate/gate/states.py", "from kernels import x", "`kernels` is installed as `fusiongate.kernels`"),
        ("fusiongate/helpers.py", "", "`helpers` stands in no layer"),
        ("kernels/modulation.py", "from fusiongate.matrix import x", "`kernels` imports `fusiongate.matrix`"),
        ("kernels/modulation.py", "from fusiongate.kernels import x", "inside kernels/ import relatively"),
        ("suites/framework/test_gates.py", "from suites import x", "import relatively within suites/"),
        ("suites/kernels/test_modulate.py", "from fusiongate.suites import x", "import relatively within suites/"),
        ("suites/kernels/test_modulate.py", "from fusiongate.gate import x", "`fusiongate.gate` is no public name"),
    ],
)
def test_a_planted_breach_is_found(checkout: Path, path: str, planted: str, expected: str) -> None:
    (checkout / path).write_text(planted + "\n")
    [violation] = import_rules.violations(checkout)
    assert str(violation.path) == path
    assert expected in violation.message


def test_a_breach_is_told_with_the_line_it_stands_on(checkout: Path) -> None:
    (checkout / "fusiongate" / "errors.py").write_text("import math\n\nfrom ..gate import x\n")
    [violation] = import_rules.violations(checkout)
    assert str(violation).startswith("fusiongate/errors.py:3: `errors` imports `fusiongate.gate`")


@pytest.mark.parametrize(
    "path",
    ["fusiongate/compare.py", "fusiongate/compare/__init__.py", "kernels/modulate.py", "kernels/modulate/__init__.py"],
)
def test_a_module_named_like_a_public_function_is_found(checkout: Path, path: str) -> None:
    (checkout / path).parent.mkdir(exist_ok=True)
    (checkout / path).write_text("")
    [violation] = import_rules.shadowing_modules(checkout)
    assert str(violation.path) == path


def test_a_package_without_a_list_of_public_names_is_refused(checkout: Path) -> None:
    (checkout / "fusiongate" / "__init__.py").write_text("")
    with pytest.raises(LookupError, match="assigns no __all__"):
        import_rules.public_names(checkout)


def test_the_command_fails_and_names_the_breach(checkout: Path) -> None:
    """The linter's own run: the script looks at the checkout that it lies in."""
    script = checkout / "suites" / "framework" / "import_rules.py"
    shutil.copy(import_rules.__file__, script)
    command = [sys.executable, str(script)]
    assert subprocess.run(command, check=False, capture_output=True, text=True).returncode == 0
    (checkout / "fusiongate" / "errors.py").write_text("from ..gate import x\n")
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "fusiongate/errors.py:1: `errors` imports `fusiongate.gate`" in failed.stderr


def test_no_file_is_loaded_under_two_names() -> None:
    """A checkout can be imported as `suites` and as `fusiongate.suites`; two copies would keep two sets of state."""
    files = [
        module.__file__
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in {"fusiongate", "kernels", "suites"} and getattr(module, "__file__", None)
    ]
    assert sorted(set(map(str, files))) == sorted(map(str, files))
