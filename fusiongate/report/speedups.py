"""The page's part about time: each measured arm with its time, its ratio to the reference, and a bar."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from fusiongate.io import counted
from fusiongate.timing.recorded import Bounds, RecordedRow

from .charts import bar, scale_of
from .evidence import Evidence, TimedRun
from .text import marked

__all__ = ["slower", "timing_view"]

_KERNEL: Final = "kernel"
_UNITS: Final = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s"))


def slower(evidence: Evidence) -> tuple[int, list[tuple[str, str]]]:
    """How many kernels were timed, and each whose whole interval lies above its reference's time, with its story."""
    kernels = [(run, row) for run in evidence.timed for row in run.rows if row.arm == _KERNEL and row.ratio]
    told = [
        (f"{row.case} is slower than its reference{_where(evidence, run)}", f"{_ratio(row.ratio)} of {row.reference}")
        for run, row in kernels
        if row.ratio is not None and row.ratio.low > 1
    ]
    return len(kernels), told


def timing_view(evidence: Evidence) -> dict[str, Any]:
    """One table a subject, with a row for each arm, grouped by case, and by run where there are several."""
    runs = evidence.timed
    subjects: dict[str, dict[str, list[tuple[TimedRun, list[RecordedRow]]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        cases: dict[str, list[RecordedRow]] = defaultdict(list)
        for row in run.rows:
            cases[row.case].append(row)
        for case, rows in cases.items():
            subject, _, shape = case.partition("[")
            subjects[subject][shape.removesuffix("]")].append((run, rows))
    return {
        "timed_runs": [(run.name, _measured(evidence, run)) for run in runs],
        "timings": [_table(evidence, subject, shapes, len(runs) > 1) for subject, shapes in subjects.items()],
        "side_by_side": _side_by_side(evidence),
    }


def _measured(evidence: Evidence, run: TimedRun) -> str:
    sources = sorted({row.sources[:12] for row in run.rows if row.sources})
    told = f": {counted(len(run.rows), 'row')}, {', '.join(map(evidence.label, run.environments))}"
    return told + (f", kernel sources {', '.join(sources)}" if sources else "")


def _table(
    evidence: Evidence, subject: str, shapes: dict[str, list[tuple[TimedRun, list[RecordedRow]]]], several: bool
) -> dict[str, Any]:
    taken = [(shape, run, rows) for shape, runs in shapes.items() for run, rows in runs]
    scale = scale_of(row.ratio for _, _, rows in taken for row in rows if row.ratio)
    return {
        "subject": subject,
        "titles": [shape + (_where(evidence, run) if several else "") for shape, run, _ in taken],
        "groups": [[_row(row, {one.arm for one in rows}, scale) for row in rows] for _, _, rows in taken],
        "headings": ["arm", "time", "of the copy’s bandwidth", "speed-up", "ratio", f"0 to {scale:.2f}"],
    }


def _side_by_side(evidence: Evidence) -> dict[str, Any] | None:
    """The kernels' speed-ups, a column an environment; None where there is only one to show."""
    seen: dict[str, dict[int, Bounds]] = defaultdict(dict)
    for run in evidence.timed:
        for row in run.rows:
            if row.arm == _KERNEL and row.ratio is not None and len(run.environments) == 1:
                seen[row.case][run.environments[0]] = row.ratio
    numbers = sorted({number for ratios in seen.values() for number in ratios})
    if len(numbers) < 2:
        return None
    rows = [[case, *(_told(ratios.get(number)) for number in numbers)] for case, ratios in seen.items()]
    return {"headings": ["kernel", *(evidence.label(number) for number in numbers)], "rows": rows}


def _told(ratio: Bounds | None) -> str:
    if ratio is None:
        return "–"
    return marked("red", _speedup(ratio)) if ratio.low > 1 else _speedup(ratio)


def _where(evidence: Evidence, run: TimedRun) -> str:
    return f": {run.name}, {', '.join(map(evidence.label, run.environments))}"


def _row(row: RecordedRow, arms: AbstractSet[str], scale: float) -> Sequence[str]:
    share = "–" if row.share is None else f"{row.share:.1%}"
    arm = marked("arm", row.arm) if row.arm == _KERNEL else row.arm
    if row.ratio is None:
        told = ["–", "the reference" if row.arm == row.reference else "–", ""]
    else:
        of = "" if row.reference in arms else f" of {row.reference}"
        told = [
            _told(row.ratio) if row.arm == _KERNEL else _speedup(row.ratio),
            _ratio(row.ratio, of),
            bar(row.ratio, scale, emphasised=row.arm == _KERNEL),
        ]
    return [arm, _time(row.median_s), share, *told]


def _time(time: Bounds) -> str:
    factor, unit = next((factor, unit) for limit, factor, unit in _UNITS if time.value < limit)
    low, high = time.low * factor, time.high * factor
    return f"{time.value * factor:.2f} {unit} ({low:.2f} to {_end(high, '.2f')})"


def _ratio(ratio: Bounds, of: str = "") -> str:
    return f"{ratio.value:.4f}{of} ({ratio.low:.4f} to {_end(ratio.high, '.4f')})"


def _speedup(ratio: Bounds) -> str:
    fastest = 1 / ratio.low if ratio.low > 0 else math.inf
    return f"{1 / ratio.value:.2f}× ({1 / ratio.high:.2f} to {_end(fastest, '.2f')})"


def _end(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "unknown"
