"""Every saboteur, by name."""

from __future__ import annotations

from fusiongate.errors import UsageError

from .compiled import COMPILED
from .conduct import CONDUCT
from .misreadings import MISREADINGS
from .outputs import OUTPUTS
from .saboteurs import Saboteur
from .values import VALUES

__all__ = ["GENERIC", "SABOTEURS", "saboteur"]

GENERIC: tuple[Saboteur, ...] = (*MISREADINGS, *VALUES, *OUTPUTS, *CONDUCT)
"""Those that spoil the kernel of any fusion."""

SABOTEURS: tuple[Saboteur, ...] = (*COMPILED, *GENERIC)
"""All of them."""


def saboteur(name: str) -> Saboteur:
    """The saboteur of that name.

    Raises
    ------
    UsageError
        There is none.
    """
    for one in SABOTEURS:
        if one.name == name:
            return one
    raise UsageError(f"no saboteur is called {name!r}; there are {', '.join(one.name for one in SABOTEURS)}")
