"""Saboteurs: kernels that are wrong on purpose, and the proof that each is caught.

``SABOTEURS`` has them all; ``Saboteur.apply`` plants one into a fusion, and ``caught`` lets a detector look at it.
"""

from fusiongate.sabotage.compiled import COMPILED, built
from fusiongate.sabotage.detecting import Catch, Stage, caught, looked_at
from fusiongate.sabotage.registry import GENERIC, SABOTEURS, saboteur
from fusiongate.sabotage.saboteurs import Detector, Saboteur
from fusiongate.sabotage.tables import Outcome, markdown, summary, table

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
    "markdown",
    "saboteur",
    "summary",
    "table",
]
