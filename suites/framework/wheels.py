"""Wheel and sdist of the source tree, and fresh environments to install them into."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["SOURCE", "TREES", "Distributions", "fresh_environment", "install", "run"]

SOURCE = Path(__file__).parents[2]
TREES = {"fusiongate": "fusiongate", "kernels": "fusiongate/kernels", "suites": "fusiongate/suites"}
_WITHOUT_CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info")


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

    @classmethod
    def within(cls, folder: Path) -> Self:
        """What is in the folder; built first if there is no such folder."""
        source, direct, by_way_of_sdist = folder / "source", folder / "direct", folder / "by-way-of-sdist"
        if not folder.exists():
            # A copy: a build in the checkout would leave folders there that the next build picks up again.
            for tree in TREES:
                shutil.copytree(SOURCE / tree, source / tree, ignore=_WITHOUT_CACHES)
            for file in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(SOURCE / file, source / file)
            build = (sys.executable, "-m", "build", "--no-isolation")
            run(*build, "--outdir", by_way_of_sdist, source, cwd=folder)
            run(*build, "--wheel", "--outdir", direct, source, cwd=folder)
            shutil.rmtree(source / "build")
        [wheel] = direct.glob("*.whl")
        [sdist] = by_way_of_sdist.glob("*.tar.gz")
        [wheel_from_sdist] = by_way_of_sdist.glob("*.whl")
        return cls(source, wheel, sdist, wheel_from_sdist)


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that has to succeed."""
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh_environment(folder: Path) -> Path:
    """The interpreter of a new environment that sees this one's packages, but none of its editable installs."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A line of a .pth file is a folder to search; the .pth files within that folder are not read. There are several
    # where this environment shows an image's packages too.
    outer = [folder for folder in sys.path if Path(folder).name in {"site-packages", "dist-packages"}]
    (Path(packages) / "outer.pth").write_text("\n".join(outer) + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    """Install into the environment of `python`, from nothing but what is there already."""
    offline = ("--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *what, cwd=python.parent)
