"""Every saboteur, by name."""

from __future__ import annotations

from fusiongate.errors import UsageError
from fusiongate.sabotage.compiled import COMPILED
from fusiongate.sabotage.conduct import CONDUCT
from fusiongate.sabotage.misreadings import MISREADINGS
from fusiongate.sabotage.outputs import OUTPUTS
from fusiongate.sabotage.saboteurs import Saboteur
from fusiongate.sabotage.values import VALUES

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
