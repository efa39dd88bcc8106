"""The module that pytest's entry point names, so that no package attribute is touched when pytest loads it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Open the option group that fusiongate's options stand in."""
    parser.getgroup("fusiongate", "fused kernels against their reference")
