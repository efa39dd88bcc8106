"""The matrix: layouts, dtypes, sizes, devices, modes and data as cells, each run against the reference."""

from fusiongate.matrix.cells import Cell, CellFailure, CellResult, NotRun, Selected
from fusiongate.matrix.check import PreparedCell
from fusiongate.matrix.path_table import PathTable
from fusiongate.matrix.plan import Matrix
from fusiongate.subjects import ADALN

__all__ = ["ADALN", "Cell", "CellFailure", "CellResult", "Matrix", "NotRun", "PathTable", "PreparedCell", "Selected"]
