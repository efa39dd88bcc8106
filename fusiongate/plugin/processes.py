"""The processes of a run: how many threads a worker of pytest-xdist starts, and how each process ends.

A worker's share of the cores is in OMP_NUM_THREADS, unless somebody has set that: each worker would start a thread a
core, and two workers that get into one another's way are slower than one. MKL and OpenBLAS take OMP_NUM_THREADS where
their own variables are not set.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Sequence
from typing import Any, Final

import pytest

from fusiongate.platforms import available_cores

__all__: list[str] = []

_VARIABLE: Final = "OMP_NUM_THREADS"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Give each worker on this machine its share, before it has loaded any library that asks for it."""
    share = max(1, available_cores() // len(specs))
    for spec in specs:
        if spec.popen and _VARIABLE not in os.environ:
            spec.env.setdefault(_VARIABLE, str(share))


def pytest_configure() -> None:
    """Let no process search all that it has loaded for garbage before it ends: with a compiler, that takes a second."""
    atexit.unregister(gc.freeze)  # of an earlier run in this process
    atexit.register(gc.freeze)
