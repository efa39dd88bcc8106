"""The page's part about time: each measured arm with its time, its ratio to the reference, and a bar."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from fusiongate._telling import counted
from fusiongate.timing.recorded import Bounds, RecordedRow

from .charts import bar, scale_of
from .evidence import Evidence, TimedRun
from .markup import Html, element, table

__all__ = ["timings"]

_KERNEL = "kernel"
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s"))


def timings(evidence: Evidence) -> Iterator[Html]:
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
    if not runs:
        yield element("p", "No timing was recorded.")
        return
    yield element(
        "p",
        "A ratio is an arm's time over its reference's, measured in pairs, with its interval: below 1 the arm is "
        "faster. The speed-up is its inverse. In the pictures the bar is the ratio, the line across its end is the "
        "interval, and the upright line is the reference's time.",
    )
    for run in runs:
        sources = sorted({row.sources[:12] for row in run.rows if row.sources})
        measured = f": {counted(len(run.rows), 'row')}, {', '.join(map(evidence.label, run.environments))}"
        yield element(
            "p", element("b", run.name), measured + (f", kernel sources {', '.join(sources)}" * bool(sources))
        )
    for subject, shapes in subjects.items():
        taken = [(shape, run, rows) for shape, several in shapes.items() for run, rows in several]
        scale = scale_of(row.ratio for _, _, rows in taken for row in rows if row.ratio)
        titles = [shape + _where(evidence, run) * (len(runs) > 1) for shape, run, _ in taken]
        groups = [[_row(row, {one.arm for one in rows}, scale) for row in rows] for _, _, rows in taken]
        headings = ["arm", "time", "of the copy’s bandwidth", "speed-up", "ratio", f"0 to {scale:.2f}"]
        yield table(f"Timings of {subject}", headings, groups, numbers=4, titles=titles)


def _where(evidence: Evidence, run: TimedRun) -> str:
    return f": {run.name}, {', '.join(map(evidence.label, run.environments))}"


def _row(row: RecordedRow, arms: AbstractSet[str], scale: float) -> Sequence[str]:
    share = "–" if row.share is None else f"{row.share:.1%}"
    arm = element("b", row.arm) if row.arm == _KERNEL else row.arm
    if row.ratio is None:
        told = ["–", "the reference" if row.arm == row.reference else "–", ""]
    else:
        of = "" if row.reference in arms else f" of {row.reference}"
        told = [
            _speedup(row.ratio),
            f"{row.ratio.value:.4f}{of} ({row.ratio.low:.4f} to {_end(row.ratio.high, '.4f')})",
            bar(row.ratio, scale, emphasised=row.arm == _KERNEL),
        ]
    return [arm, _time(row.median_s), share, *told]


def _time(time: Bounds) -> str:
    factor, unit = next((factor, unit) for limit, factor, unit in _UNITS if time.value < limit)
    low, high = time.low * factor, time.high * factor
    return f"{time.value * factor:.2f} {unit} ({low:.2f} to {_end(high, '.2f')})"


def _speedup(ratio: Bounds) -> str:
    fastest = 1 / ratio.low if ratio.low > 0 else math.inf
    return f"{1 / ratio.value:.2f}× ({1 / ratio.high:.2f} to {_end(fastest, '.2f')})"


def _end(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "unknown"
