"""A GPU of its own, seen first, for each worker of pytest-xdist, when ``--fusiongate-pin-gpus`` asks for it.

The controller sets the variable before the worker starts, so that no import in the worker comes too early for it, and
the replacement of a crashed worker keeps its list. The other GPUs come after its own: what takes two of them runs too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from fusiongate.platforms import available_cores

from .device import require
from .options import options

__all__: list[str] = []

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


# First: pytest-xdist implements it too, and whichever entry point was loaded later would decide.
@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Let ``-n auto`` mean several workers a GPU, and no more than there are cores."""
    asked = options(config)
    # A number in the environment was set by somebody, for pytest-xdist to read.
    if not asked.pin_gpus or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    gpus = len(_visible(config))
    return min(asked.workers_per_gpu * gpus, max(available_cores(), gpus))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Show each worker the caller's GPUs, beginning with another one in turn."""
    if not options(config).pin_gpus:
        return
    gpus = _visible(config)
    for index, spec in enumerate(specs):
        first = index % len(gpus)
        for variable in _VARIABLES:
            # Both: each vendor's runtime reads its own, and ROCm's reads the two.
            spec.env[variable] = ",".join(gpus[first:] + gpus[:first])


def _visible(config: pytest.Config) -> list[str]:
    # This comes before the options are checked; a GPU that is not there at all is the plainer thing to say.
    require(config)
    for variable in reversed(_VARIABLES):
        listed = os.environ.get(variable)
        if listed is not None:
            gpus = [entry.strip() for entry in listed.split(",")]
            # The runtimes ignore what follows the first entry that names no GPU.
            named = gpus[: next((index for index, gpu in enumerate(gpus) if gpu in ("", "-1")), None)]
            if not named:
                raise pytest.UsageError(f"--fusiongate-pin-gpus: {variable}={listed} names no GPU to pin a worker to")
            return named

    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise pytest.UsageError(
            f"--fusiongate-pin-gpus: torch {torch.__version__} sees no GPU here to pin a worker to: "
            f"leave the option out"
        )
    return [str(index) for index in range(count)]
