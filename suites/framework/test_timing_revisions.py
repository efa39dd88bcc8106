"""Another revision's kernels beside today's, from a repository of two commits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..timings.revisions import kernels_at

UsageError = pytest.UsageError


def git(repository: Path, *command: str) -> None:
    subprocess.run(["git", "-C", str(repository), *command], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit with kernels, then one with other kernels, then changes that are not committed."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "test")
    git(tmp_path, "config", "user.email", "test@example.org")
    (tmp_path / "kernels" / "modulate").mkdir(parents=True)
    (tmp_path / "kernels" / "part.py").write_text("from pathlib import Path\nFOLDER = Path(__file__).parent\n")
    for number in (1, 2, 3):
        (tmp_path / "kernels" / "__init__.py").write_text(f"from .part import FOLDER\nNUMBER = {number}\n")
        (tmp_path / "kernels" / "modulate" / "modulate.cu").write_text(f"// {number}\n")
        if number < 3:
            git(tmp_path, "add", "kernels")
            git(tmp_path, "commit", "--quiet", "-m", str(number))
    return tmp_path


def test_the_kernels_of_each_revision_are_loaded_with_their_own_sources(repository: Path) -> None:
    with kernels_at("HEAD~1", repository) as before, kernels_at("HEAD", repository / "kernels") as now:
        assert (1, 2) == (before.NUMBER, now.NUMBER)
        assert ["// 1\n", "// 2\n"] == [(m.FOLDER / "modulate" / "modulate.cu").read_text() for m in (before, now)]


def test_nothing_is_left_behind(repository: Path) -> None:
    with kernels_at("HEAD", repository) as module:
        folder, name = module.FOLDER, module.__name__
        assert {name, f"{name}.part"} <= set(sys.modules)
    assert not folder.exists()
    assert not [known for known in sys.modules if known.startswith(name)]


def test_a_revision_that_is_not_there_is_refused(repository: Path) -> None:
    refused = pytest.raises(UsageError, match=r"^revision absent in .*: there is no such revision")
    with refused, kernels_at("absent", repository):
        pass


def test_a_revision_without_kernels_is_refused(repository: Path) -> None:
    git(repository, "rm", "--quiet", "-r", "--cached", "kernels")
    git(repository, "commit", "--quiet", "-m", "without")
    with (
        pytest.raises(UsageError, match="expected a commit that holds kernels/"),
        kernels_at("HEAD", repository),
    ):
        pass


def test_kernels_that_do_not_work_with_this_library_are_refused_with_the_reason(repository: Path) -> None:
    (repository / "kernels" / "__init__.py").write_text("import fusiongate.absent\n")
    git(repository, "commit", "--quiet", "--all", "-m", "broken")
    refused = pytest.raises(UsageError, match="do not work with this library: ModuleNotFoundError: No module named")
    with refused, kernels_at("HEAD", repository):
        pass
    assert not [known for known in sys.modules if known.startswith("fusiongate_kernels_at_")]


def test_a_folder_that_is_no_package_is_refused(repository: Path) -> None:
    git(repository, "rm", "--quiet", "--force", "kernels/__init__.py")
    git(repository, "commit", "--quiet", "-m", "no package")
    refused = pytest.raises(UsageError, match="revision HEAD: its kernels/ is no Python package")
    with refused, kernels_at("HEAD", repository):
        pass


def test_a_machine_without_git_is_told_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    with pytest.raises(UsageError, match="revision HEAD: git cannot be run: "), kernels_at("HEAD", repository):
        pass
