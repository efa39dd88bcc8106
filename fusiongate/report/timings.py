"""A recorded run as a table: for each shape the times of all arms, the bandwidth, and the ratio with its interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from fusiongate.platforms import Environment
from fusiongate.timing.recorded import RecordedRow, Run

from .text import templates

__all__ = ["markdown"]

_KERNEL = "kernel"


def markdown(run: Run) -> str:
    """The table: one row a case, one column an arm, in the order of the run; times in µs.

    Parameters
    ----------
    run
        A recorded run, see :func:`fusiongate.timing.recorded.read_run`.
    """
    arms = list(dict.fromkeys(row.arm for row in run.rows.values()))
    cases: dict[str, dict[str, RecordedRow]] = defaultdict(dict)
    for row in run.rows.values():
        cases[row.case][row.arm] = row
    rows = [
        (
            case,
            *(f"{by_arm[arm].median_s.value * 1e6:.2f}" if arm in by_arm else "–" for arm in arms),
            *_of_kernel(by_arm),
        )
        for case, by_arm in cases.items()
    ]
    return (
        templates(html=False)
        .get_template("timings.md.j2")
        .render(
            environments=[Environment.from_json(machine["environment"]).summary() for machine in run.machines],
            sources=sorted({row.sources[:12] for row in run.rows.values() if row.sources}),
            arms=arms,
            rows=rows,
        )
    )


def _time(row: RecordedRow | None) -> str:
    return "–" if row is None else f"{row.median_s.value * 1e6:.2f}"


def _of_kernel(rows: Mapping[str, RecordedRow]) -> tuple[str, str]:
    kernel = rows.get(_KERNEL)
    if kernel is None:
        return "–", "–"
    share = "–" if kernel.share is None else f"{kernel.share:.1%}"
    if kernel.ratio is None:
        return share, "–"
    ends = f"{kernel.ratio.low:.4f} to {kernel.ratio.high:.4f}"
    return share, f"{kernel.ratio.value:.4f} of {kernel.reference} ({ends})"
