"""The marker ``fusion_matrix``: a test runs once for each cell of a subject's matrix, and what came of it is recorded.

Cells are neither filtered nor looked up by hardware while tests are collected, so that all workers of pytest-xdist
collect the same; a cell that this machine cannot run is skipped as *not run*, with what is missing.
"""

from __future__ import annotations

import inspect
import re
import time
import unittest
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from fusiongate.errors import FusiongateError
from fusiongate.io import visible

from . import paths
from .causes import cause_of, key_of
from .device import select
from .options import kernels_disabled, options
from .rows import record

if TYPE_CHECKING:
    from fusiongate.matrix import Cell, CellResult, Matrix, PreparedCell, Selected

__all__ = ["FusionCase", "fusion_case"]

_MARKER: Final = "fusion_matrix"
_ENOUGH: Final = 3
"""Cells that a quick run tries for one cause before it leaves the rest of the subject's."""
_CAUSES: Final = pytest.StashKey[dict[tuple[str, str], list[str]]]()
_UNCHECKED: Final = "the test did not call fusion_case.check()"

T = TypeVar("T")


class FusionCase:
    """One cell with its operands made: what the fixture ``fusion_case`` gives a test."""

    __slots__ = ("_causes", "_checked", "_item", "_matrix", "_prepared", "_recorded", "_selected", "_started", "cell")

    def __init__(self, item: pytest.Item, matrix: Matrix, cell: Cell, selected: Selected, checked: bool) -> None:
        self.cell = cell
        """The cell as data."""
        self._item = item
        self._matrix = matrix
        self._selected = selected
        self._checked = checked
        self._recorded = False
        self._started = time.perf_counter()
        self._prepared: PreparedCell | None = None
        self._causes = item.config.stash.setdefault(_CAUSES, {})
        self._prepared = self._told(self._prepare)

    @property
    def args(self) -> tuple[Any, ...]:
        """The operands, in the order of the subject's parameters."""
        return self._ready.args

    @property
    def expected(self) -> Any:
        """What the reference makes of the operands: a tensor, or of several outputs a tuple."""
        return self._ready.expected

    @property
    def path(self) -> str:
        """The path that the call has to take: ``fused``, ``reference`` or ``raises``."""
        return self._ready.path

    @property
    def reason(self) -> str:
        """The published reason for that path."""
        return self._ready.reason

    @property
    def id(self) -> str:
        """The cell's id, which stands in the test's name too."""
        return self.cell.id

    @property
    def _ready(self) -> PreparedCell:
        assert self._prepared is not None
        return self._prepared

    def check(self) -> CellResult:
        """Run the cell: assert its path, its reason and its bits, and hold the path against the committed table.

        Raises
        ------
        CellFailure
            One of them is another than it has to be.
        """
        # The failure tells its story; frames of ours would only push the test's own line out of sight.
        __tracebackhide__ = True
        result = self._told(self._ready.check)
        compared = self._told(lambda: paths.observe(self._item.config, self._selected, self._matrix, result), result)
        self._record({**result.to_json(), **compared})
        return result

    def require_check(self) -> None:
        """Fail a test that has ended without a check, unless its marker says ``checked=False``."""
        if self._checked and not self._recorded:
            self._record(self._without_result("unchecked", _UNCHECKED))
            pytest.fail(
                f"unchecked: {_UNCHECKED}, and proves nothing of its cell: call it, or write checked=False in the "
                f"marker if the test's own assertions are meant",
                pytrace=False,
            )

    def close(self) -> None:
        """Record a test that ended without a check, and let go of the operands."""
        if not self._recorded:
            self._record(self._without_result("unchecked", _UNCHECKED))
        self._ready.close()

    def _prepare(self) -> PreparedCell:
        from fusiongate.matrix import NotRun

        if options(self._item.config).quick:
            for (subject, _), told in self._causes.items():
                if subject == self.cell.subject and len(told) >= _ENOUGH:
                    raise NotRun(f"--fusiongate-quick: {len(told)} cells of {subject} are red already, for: {told[0]}")
        return self._matrix.prepare(self.cell, self._selected)

    def _told(self, step: Callable[[], T], result: CellResult | None = None) -> T:
        """What a step gives; one that cannot be taken here, or fails, is recorded as that."""
        __tracebackhide__ = True
        from fusiongate.matrix import CellFailure, NotRun

        try:
            return step()
        except NotRun as missing:
            self._record(self._without_result("not run", str(missing)))
            pytest.skip(f"not run: {missing}")
        except Exception as error:
            message = str(error) or type(error).__name__
            # What a failed cell launched is not known, unless it failed after its calls or nothing could launch.
            launches = result.launches if result else 0 if kernels_disabled() else None
            row = self._without_result("red", message.splitlines()[0])
            self._causes.setdefault((self.cell.subject, key_of(message)), []).append(cause_of(message))
            self._record({**row, "launches": launches, "message": message})
            if self._prepared is not None and isinstance(error, CellFailure | FusiongateError):
                raise error.with_traceback(None) from None
            raise

    def _without_result(self, outcome: str, reason: str) -> Mapping[str, Any]:
        from fusiongate.matrix import CellResult

        seconds = time.perf_counter() - self._started
        result = CellResult(cell=self.cell, outcome="not run", reason=reason, launches=0, checks=0, seconds=seconds)
        return {**result.to_json(), "outcome": outcome}

    def _record(self, payload: Mapping[str, Any]) -> None:
        self._recorded = True
        row = {
            **payload,
            "expected": None if self._prepared is None else self._prepared.path,
            "must_fuse": self._matrix.must_launch(self.cell),
            "selected": self._selected.kind if self._selected.index is None else str(self._selected.torch_device),
            "test": self._item.nodeid,
        }
        record(self._item, "cell", self.cell.subject, row)
        for name in ("outcome", "reason", "launches"):
            self._item.user_properties.append((f"fusiongate.{name}", str(row[name])))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(subject, inputs=fusiongate.ADALN, sizes=..., must_fuse=['row-broadcast', 'strided-unbind']): "
        f"run the test once for each cell of the subject's matrix; the cell is the fixture fusion_case. checked=False: "
        f"a test need not call its check()",
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
            pytest.param(
                (matrix, cell, marker.kwargs.get("checked", True)),
                id=cell.id if len(markers) == 1 else f"{cell.subject}-{cell.id}",
                marks=[pytest.mark.alone] if matrix.fills_memory(cell) else [],
            )
            for cell in matrix.cells()
            if len(cell.away) <= 1 or not options(metafunc.config).quick
        ]
    metafunc.parametrize("fusion_case", cells, indirect=True)


def _matrix(test: str, marker: pytest.Mark) -> Matrix:
    from fusiongate.matrix import Matrix

    try:
        return Matrix(*marker.args, **{name: value for name, value in marker.kwargs.items() if name != "checked"})
    except (FusiongateError, TypeError) as error:
        raise pytest.Collector.CollectError(visible(f"{test}: @pytest.mark.{_MARKER}: {error}")) from None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a method of a ``unittest.TestCase``, of which unittest makes no test a cell."""
    if not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, unittest.TestCase)):
        return
    if item.get_closest_marker(_MARKER) or "fusion_case" in inspect.signature(item.obj).parameters:
        pytest.fail(
            f"@pytest.mark.{_MARKER} and the fixture fusion_case make a test a cell, and a method of "
            f"unittest.TestCase can be neither parametrised nor given a fixture: write a function, or a class without "
            f"unittest.TestCase",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Let no cell pass whose test has not checked it."""
    yield
    case = getattr(item, "funcargs", {}).get("fusion_case")
    if isinstance(case, FusionCase):
        case.require_check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell once what the gate logged: a cell's failure carries it."""
    report = yield
    if report.failed and isinstance(getattr(item, "funcargs", {}).get("fusion_case"), FusionCase):
        report.sections = [(title, text) for title, text in report.sections if not _logged_by_us_alone(title, text)]
    return report


def _logged_by_us_alone(title: str, text: str) -> bool:
    loggers = re.findall(r"^[A-Z]+ +([\w.]+):", text, re.MULTILINE)
    return title == "Captured log call" and set(loggers) == {"fusiongate"}


@pytest.fixture
def fusion_case(request: pytest.FixtureRequest) -> Iterator[FusionCase]:
    """One cell of the marker's matrix, on a fresh gate: call ``check()``, or use ``args`` and ``expected``."""
    if not hasattr(request, "param"):
        pytest.fail(f"fusion_case needs a matrix: mark the test with @pytest.mark.{_MARKER}(op)", pytrace=False)
    matrix, cell, checked = request.param
    case = FusionCase(request.node, matrix, cell, select(request.config), checked)
    yield case
    case.close()
