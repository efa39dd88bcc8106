"""The device that subjects run on, and the fixtures that give it to a test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

from fusiongate.io import counted

from .options import is_worker, options

if TYPE_CHECKING:
    import torch

    from fusiongate.matrix import Selected

__all__ = ["fusion_device", "fusion_generator", "require", "select", "selected"]

_KEY: Final = pytest.StashKey["Selected"]()


def select(config: pytest.Config) -> Selected:
    """Give the device of this run, asking torch for it the first time.

    Raises
    ------
    pytest.UsageError
        A GPU was asked for that torch cannot use.
    """
    if _KEY not in config.stash:
        config.stash[_KEY] = _select(config)
    return config.stash[_KEY]


def selected(config: pytest.Config) -> Selected | None:
    """Give the device of this run if it has been asked for already; never imports torch."""
    return config.stash.get(_KEY, None)


def _select(config: pytest.Config) -> Selected:
    from fusiongate.matrix import Selected

    asked = options(config)
    if asked.device == "host":
        return Selected("host")

    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = asked.device_index or 0
    if index < count:
        return Selected("cuda", index)  # only on a GPU: none is selected elsewhere
    if asked.device == "auto" and not asked.require_fused:
        return Selected("host")
    if asked.require_fused:
        switch, way_out = "--fusiongate-require-fused", "run on a machine with a GPU"
    else:
        switch = f"--fusiongate-device={asked.device_name}"
        way_out = "run on a machine that has it, or with --fusiongate-device=host"
    raise pytest.UsageError(
        f"{switch}: torch {torch.__version__} sees {counted(count, 'GPU')} here, so there is no cuda:{index}: {way_out}"
    )


def require(config: pytest.Config) -> None:
    """Select the device now if a GPU was asked for by name; only such a run imports torch before its first fixture.

    Raises
    ------
    pytest.UsageError
        The GPU is not there.
    """
    asked = options(config)
    if asked.device == "cuda" or asked.require_fused:
        select(config)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a missing GPU before anything is collected, once for all workers."""
    if not is_worker(config):
        require(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Say which device subjects run on, as far as that is known without importing torch."""
    chosen = selected(config)
    if chosen is None or chosen.kind == "host":
        return f"fusiongate: device {options(config).device_name}"
    torch = sys.modules["torch"]  # only on a GPU: the host has no name
    return f"fusiongate: device cuda:{chosen.index} ({torch.cuda.get_device_name(chosen.index)})"


@pytest.fixture(scope="session")
def fusion_device(pytestconfig: pytest.Config) -> torch.device:
    """The device that --fusiongate-device selected, as a torch.device: the CPU under host."""
    return select(pytestconfig).torch_device


@pytest.fixture
def fusion_generator(fusion_device: torch.device) -> torch.Generator:
    """A random generator on the selected device, seeded alike for every test."""
    import torch

    return torch.Generator(fusion_device).manual_seed(0)
