"""The marker ``alone``: what measures time or fills a GPU's memory runs alone on the machine.

A run with workers is two: ``pytest -n auto -m "not alone"``, then ``pytest -m alone``. A test that measures with
``device_benchmark`` is marked here, and a cell too large to lie beside others where cells are made; a serial run needs
no lanes and runs everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

__all__: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "alone: the test measures time or fills a GPU's memory, so that nothing may run beside it: "
        'run -m "not alone" with workers, then -m alone without',
    )


# First: pytest deselects by -m in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that measure with ``device_benchmark``."""
    for item in items:
        if "device_benchmark" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")
