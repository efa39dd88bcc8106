"""The marker ``fusion_matrix``: a test runs once for each cell of a subject's matrix, and what came of it is recorded.

Cells are neither filtered nor looked up by hardware while tests are collected, so that all workers of pytest-xdist
collect the same; a cell that this machine cannot run is skipped as *not run*, with what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

from fusiongate.errors import FusiongateError

from . import paths
from .device import select
from .options import kernels_disabled
from .rows import record

if TYPE_CHECKING:
    import torch

    from fusiongate.matrix import Cell, CellResult, Matrix, PreparedCell, Selected

__all__ = ["FusionCase", "fusion_case"]

_MARKER: Final = "fusion_matrix"


class FusionCase:
    """One cell with its operands made: what the fixture ``fusion_case`` gives a test."""

    __slots__ = ("_log", "_prepared")

    def __init__(self, prepared: PreparedCell, log: _Log) -> None:
        self._prepared = prepared
        self._log = log

    @property
    def args(self) -> tuple[Any, ...]:
        """The operands, in the order of the subject's parameters."""
        return self._prepared.args

    @property
    def expected(self) -> torch.Tensor:
        """What the reference makes of the operands."""
        return self._prepared.expected

    @property
    def path(self) -> str:
        """The path that the call has to take: ``fused``, ``reference`` or ``raises``."""
        return self._prepared.path

    @property
    def reason(self) -> str:
        """The published reason for that path."""
        return self._prepared.reason

    @property
    def id(self) -> str:
        """The cell's id, which stands in the test's name too."""
        return self._prepared.id

    @property
    def cell(self) -> Cell:
        """The cell as data."""
        return self._prepared.cell

    def check(self) -> CellResult:
        """Run the cell: assert its path, its reason and its bits, and hold the path against the committed table.

        Raises
        ------
        CellFailure
            One of them is another than it has to be.
        """
        from fusiongate.matrix import CellFailure, NotRun

        # The failure tells its story; frames of ours would only push the test's own line out of sight.
        __tracebackhide__ = True
        try:
            result = self._prepared.check()
            self._log.result = result
            compared = paths.observe(self._log.item.config, self._log.selected, self._log.matrix, result)
        except NotRun as missing:
            self._log.not_run(missing)
            pytest.skip(f"not run: {missing}")
        except (CellFailure, FusiongateError) as failure:
            self._log.red(failure)
            raise failure.with_traceback(None) from None
        except Exception as error:
            self._log.red(error)
            raise
        self._log.ran(result, compared)
        return result


class _Log:
    """Records what becomes of one cell, once."""

    def __init__(self, item: pytest.Item, matrix: Matrix, cell: Cell, selected: Selected) -> None:
        self.item = item
        self.selected = selected
        self.done = False
        self.expected: str | None = None
        self.matrix = matrix
        self.result: CellResult | None = None
        self._cell = cell
        self._started = time.perf_counter()

    def ran(self, result: CellResult, compared: Mapping[str, Any]) -> None:
        self._record({**result.to_json(), **compared})

    def not_run(self, missing: Exception) -> None:
        self._record(self._without_result("not run", str(missing)))

    def red(self, error: BaseException) -> None:
        message = str(error) or type(error).__name__
        # What a failed cell launched is not known, unless it failed after its calls or nothing could launch.
        launches = self.result.launches if self.result else 0 if kernels_disabled() else None
        row = self._without_result("red", message.splitlines()[0])
        self._record({**row, "launches": launches, "message": message})

    def unchecked(self) -> None:
        if not self.done:
            self._record(self._without_result("unchecked", "the test did not call fusion_case.check()"))

    def _without_result(self, outcome: str, reason: str) -> Mapping[str, Any]:
        from fusiongate.matrix import CellResult

        seconds = time.perf_counter() - self._started
        result = CellResult(
            cell=self._cell, outcome="not run", reason=reason, launches=0, checks=0, seconds=seconds, note=None
        )
        return {**result.to_json(), "outcome": outcome}

    def _record(self, payload: Mapping[str, Any]) -> None:
        self.done = True
        row = {
            **payload,
            "expected": self.expected,
            "must_fuse": self.matrix.must_launch(self._cell),
            "selected": self.selected.kind if self.selected.index is None else str(self.selected.torch_device),
            "test": self.item.nodeid,
        }
        record(self.item, "cell", self._cell.subject, row)
        for name in ("outcome", "reason", "launches"):
            self.item.user_properties.append((f"fusiongate.{name}", str(row[name])))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(subject, inputs=fusiongate.ADALN, sizes=..., must_fuse=['row-broadcast', 'strided-unbind']): "
        f"run the test once for each cell of the subject's matrix; the cell is the fixture fusion_case",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Expand the marker into one test a cell."""
    markers = list(metafunc.definition.iter_markers(_MARKER))
    if not markers:
        return
    if "fusion_case" not in metafunc.fixturenames:
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.nodeid}: @pytest.mark.{_MARKER} gives its cells through the fixture fusion_case: "
            f"expected it among the test's parameters"
        )
    cells = []
    for marker in markers:
        matrix = _matrix(metafunc.definition.nodeid, marker)
        cells += [
            pytest.param((matrix, cell), id=cell.id if len(markers) == 1 else f"{cell.subject}-{cell.id}")
            for cell in matrix.cells()
        ]
    metafunc.parametrize("fusion_case", cells, indirect=True)


def _matrix(test: str, marker: pytest.Mark) -> Matrix:
    from fusiongate.matrix import Matrix

    try:
        return Matrix(*marker.args, **marker.kwargs)
    except (FusiongateError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{test}: @pytest.mark.{_MARKER}: {error}") from error


@pytest.fixture
def fusion_case(request: pytest.FixtureRequest) -> Iterator[FusionCase]:
    """One cell of the marker's matrix, on a fresh gate: call ``check()``, or use ``args`` and ``expected``."""
    from fusiongate.matrix import NotRun

    if not hasattr(request, "param"):
        pytest.fail(f"fusion_case needs a matrix: mark the test with @pytest.mark.{_MARKER}(op)", pytrace=False)
    matrix, cell = request.param
    log = _Log(request.node, matrix, cell, select(request.config))
    try:
        prepared = matrix.prepare(cell, log.selected)
    except NotRun as missing:
        log.not_run(missing)
        pytest.skip(f"not run: {missing}")
    except Exception as error:
        log.red(error)
        raise
    log.expected = prepared.path
    yield FusionCase(prepared, log)
    log.unchecked()
    prepared.close()
