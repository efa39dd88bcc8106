"""Fixtures of fusiongate's own kernels, for the selected device and with fresh gates.

Each test gets a gate and counts of its own, so that what one test has taught a gate cannot reach the next: there is
nothing to reset between tests, and the gates that an application has mounted are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .device import select

if TYPE_CHECKING:
    from fusiongate.gate.fusion import Fusion

__all__ = ["composite_rms_norm_modulate", "modulate", "rms_norm_modulate"]


@pytest.fixture
def modulate(pytestconfig: pytest.Config) -> Iterator[Fusion]:
    """``fusiongate.kernels.modulate`` with a fresh gate; its host build under host."""
    yield from _fresh("modulate", pytestconfig)


@pytest.fixture
def rms_norm_modulate(pytestconfig: pytest.Config) -> Iterator[Fusion]:
    """``fusiongate.kernels.rms_norm_modulate`` with a fresh gate; its host build under host."""
    yield from _fresh("rms_norm_modulate", pytestconfig)


@pytest.fixture
def composite_rms_norm_modulate(pytestconfig: pytest.Config) -> Iterator[Fusion]:
    """``fusiongate.kernels.composite_rms_norm_modulate`` with a fresh gate; its host build under host."""
    yield from _fresh("composite_rms_norm_modulate", pytestconfig)


def _fresh(name: str, config: pytest.Config) -> Iterator[Fusion]:
    from fusiongate import kernels

    fusion: Fusion = getattr(kernels, name)
    if select(config).kind == "host":
        # Every kernel of ours has a host build.
        assert fusion.host is not None
        fusion = fusion.host
    with fusion.isolated() as fresh:
        yield fresh
