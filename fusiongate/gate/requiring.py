"""Requiring that kernels run: for tests, and for whoever would rather stop than be slow."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from fusiongate.errors import FallbackError

__all__ = ["fell_back", "require_fused"]

_required: contextvars.ContextVar[bool] = contextvars.ContextVar("fusiongate_fused_required", default=False)


@contextlib.contextmanager
def require_fused() -> Iterator[None]:
    """Inside, any call of a fusion that falls back raises, naming the reason; a first sight that verifies is none.

    Raises
    ------
    FallbackError
        From the call that falls back.
    """
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)


def fell_back(name: str, reason: str) -> None:
    """Say that a fusion takes its reference.

    Raises
    ------
    FallbackError
        Inside :func:`require_fused`.
    """
    if _required.get():
        raise FallbackError(name, "reference", str(reason))
