"""Fixtures of the framework's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .projects import Modules, Project


@pytest.fixture
def modules() -> Iterator[Modules]:
    """What inner runs have imported, put back after pytester has forgotten it at the end of the test."""
    kept = Modules()
    yield kept
    kept.restore()


@pytest.fixture
def project(modules: Modules, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty downstream project."""
    return Project(pytester, monkeypatch, modules)
