"""Options and fixtures of the timings."""

from __future__ import annotations

import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .revisions import kernels_at

__all__ = ["base_kernels", "not_beside_a_revision"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the revision to measure against."""
    parser.getgroup("fusiongate").addoption(
        "--against",
        metavar="REV",
        help="measure today's kernels beside those of this git revision, in pairs, instead of beside their references",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """Call a tree dirty for what may move a timing: not for the snapshots, which a recording is about to change."""
    if commit_info["dirty"]:
        others = ["git", "-C", str(config.rootpath), "diff", "--quiet", "HEAD", "--", ".", ":!snapshots"]
        commit_info["dirty"] = subprocess.run(others, check=False).returncode != 0


@pytest.fixture
def not_beside_a_revision(pytestconfig: pytest.Config) -> None:
    """Skip what is held against no revision in a run that measures against one."""
    if pytestconfig.getoption("--against", default=None):
        pytest.skip("not run: --against measures revisions beside each other")


@pytest.fixture(scope="session")
def base_kernels(pytestconfig: pytest.Config) -> Iterator[types.ModuleType]:
    """The kernels of the revision that ``--against`` names."""
    # The option exists only in runs that name this folder.
    revision = pytestconfig.getoption("--against", default=None)
    if revision is None:
        pytest.skip("not run: no revision to measure against; name one: pytest suites/timings --against REV")
    with kernels_at(revision, Path(__file__).parent) as module:
        yield module
