"""Fixtures of the framework's own tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from .forks import ForkServer
from .projects import Modules, Project
from .tiny_sources import write_tiny
from .wheels import SOURCE, Distributions, fresh_environment, install


@pytest.fixture
def modules() -> Iterator[Modules]:
    """What inner runs have imported, put back after pytester has forgotten it at the end of the test."""
    kept = Modules()
    yield kept
    kept.restore()


@pytest.fixture
def project(modules: Modules, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """An empty downstream project."""
    yield Project(pytester, monkeypatch, modules)
    modules.keep(pytester.path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of builds in the test's own folder, and a process that has loaded nothing."""
    from fusiongate.jit import forget
    from fusiongate.jit.cache import CACHE_VARIABLE

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def built_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the tiny library, built and probed once for all tests; copy it, don't use it."""
    from fusiongate.jit import Target, forget, library
    from fusiongate.jit.cache import CACHE_VARIABLE

    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        library(write_tiny(folder), Target.host())
    forget()
    return folder / "cache"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that has compiled nothing."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quiet_gates() -> Iterator[None]:
    """Gates that refuse on purpose, and need not say so."""
    logger = logging.getLogger("fusiongate")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Distributions:
    """Wheel and sdist, built once, however many workers and tests share them."""
    if not (SOURCE / "pyproject.toml").is_file():
        pytest.skip("needs the source tree")
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "distributions"
    with FileLock(f"{folder}.lock"):
        return Distributions.within(folder)


@pytest.fixture(scope="session")
def python_with_the_wheel(distributions: Distributions) -> Path:
    """The interpreter of a fresh environment with the built wheel, made once for all workers; leave it as it is."""
    folder = distributions.wheel.parent / "environment"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            install(fresh_environment(folder), distributions.wheel)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What tests fork presets' processes from, so that each need not load torch anew."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def forked(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of presets that are forked, for tests that are not about how one is started; what they declare goes."""
    from fusiongate.presets import PRESETS, worker

    monkeypatch.setattr(worker, "_started", fork_server.start)
    with mock.patch.dict(PRESETS):
        yield
