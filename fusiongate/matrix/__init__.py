"""The matrix: layouts, dtypes, sizes, devices, modes and data as cells, each run against the reference."""

from fusiongate.matrix.cells import Cell, CellFailure, CellResult, NotRun, Selected

__all__ = ["Cell", "CellFailure", "CellResult", "NotRun", "Selected"]
