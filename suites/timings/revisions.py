"""The kernels of another revision of this repository, loaded beside today's under a name of their own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["kernels_at"]


@contextlib.contextmanager
def kernels_at(revision: str, repository: Path) -> Iterator[types.ModuleType]:
    """The kernels package of a revision: its sources and its launchers, on today's library.

    Its sources lie in a folder of their own, and so are built, cached and loaded as libraries of their own. Everything
    else in the repository is as it is checked out now.

    Parameters
    ----------
    revision
        Whatever git takes for a commit: a tag, a branch, ``HEAD~3``.
    repository
        A folder of the checkout.

    Raises
    ------
    pytest.UsageError
        There is no such revision or no git, or its kernels do not work with today's library.
    """
    # Paths in an archive begin at the folder that git runs in.
    top = Path(_git(repository, "rev-parse", "--show-toplevel", wrong=revision).decode().strip())
    commit = _git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", wrong=revision)
    sha = commit.decode().strip()
    archive = _git(top, "archive", sha, "kernels", wrong=revision)
    name = f"fusiongate_kernels_at_{sha[:12]}"
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
        try:
            yield _imported(name, Path(folder) / "kernels", revision)
        finally:
            for module in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
                del sys.modules[module]


def _git(repository: Path, *command: str, wrong: str) -> bytes:
    try:
        told = subprocess.run(["git", "-C", str(repository), *command], capture_output=True, check=False)
    except OSError as error:
        raise pytest.UsageError(f"revision {wrong}: git cannot be run: {error}") from error
    if told.returncode:
        why = told.stderr.decode(errors="replace").strip() or "there is no such revision"
        raise pytest.UsageError(f"revision {wrong} in {repository}: {why}; expected a commit that holds kernels/")
    return told.stdout


def _imported(name: str, folder: Path, revision: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise pytest.UsageError(
            f"revision {revision}: its kernels/ is no Python package, so nothing can be loaded from it"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise pytest.UsageError(
            f"revision {revision}: its kernels do not work with this library: {type(error).__name__}: {error}"
        ) from error
    return module
