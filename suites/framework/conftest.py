"""Fixtures of the framework's own tests."""

from __future__ import annotations

import pytest

from .projects import Project


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty downstream project."""
    return Project(pytester, monkeypatch)
