"""Saboteurs: kernels that are wrong on purpose, and the proof that each is caught.

``SABOTEURS`` has them all; ``Saboteur.apply`` plants one into a fusion, and ``caught`` lets a detector look at it.
"""

from .compiled import COMPILED, built
from .detecting import Catch, Stage, caught, looked_at
from .registry import GENERIC, SABOTEURS, saboteur
from .saboteurs import Detector, Saboteur
from .tables import Outcome, summary, table

__all__ = [
    "COMPILED",
    "GENERIC",
    "SABOTEURS",
    "Catch",
    "Detector",
    "Outcome",
    "Saboteur",
    "Stage",
    "built",
    "caught",
    "looked_at",
    "saboteur",
    "summary",
    "table",
]
