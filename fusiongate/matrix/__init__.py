"""The matrix: layouts, dtypes, sizes, devices, modes and data as cells, each run against the reference."""

from fusiongate.subjects import ADALN

from .cells import Cell, CellFailure, CellResult, NotRun, Selected
from .check import PreparedCell
from .operands import operand
from .path_table import PathTable
from .plan import Matrix

__all__ = [
    "ADALN",
    "Cell",
    "CellFailure",
    "CellResult",
    "Matrix",
    "NotRun",
    "PathTable",
    "PreparedCell",
    "Selected",
    "operand",
]
