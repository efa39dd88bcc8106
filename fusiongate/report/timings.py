"""A recorded run as a table: for each shape the times of all arms, the bandwidth, and the ratio with its interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from fusiongate.platforms import Environment
from fusiongate.timing.recorded import RecordedRow, Run

__all__ = ["markdown"]

_KERNEL = "kernel"


def markdown(run: Run) -> Iterator[str]:
    """The lines of the table: one row a case, one column an arm, in the order of the run; times in µs.

    Parameters
    ----------
    run
        A recorded run, see :func:`fusiongate.timing.recorded.read_run`.
    """
    for machine in run.machines:
        yield f"Measured on {Environment.from_json(machine['environment']).summary()}."
    sources = sorted({row.sources[:12] for row in run.rows.values() if row.sources})
    if sources:
        yield f"Kernel sources: {', '.join(sources)}."
    yield ""
    arms = list(dict.fromkeys(row.arm for row in run.rows.values()))
    yield f"| case | {' | '.join(f'{arm} µs' for arm in arms)} | of the copy's bandwidth | kernel to its reference |"
    yield f"| --- |{' ---: |' * (len(arms) + 1)} --- |"
    cases: dict[str, dict[str, RecordedRow]] = defaultdict(dict)
    for row in run.rows.values():
        cases[row.case][row.arm] = row
    for case, rows in cases.items():
        times = (f"{rows[arm].median_s.value * 1e6:.2f}" if arm in rows else "–" for arm in arms)
        yield f"| `{case}` | {' | '.join(times)} | {' | '.join(_of_kernel(rows))} |"


def _of_kernel(rows: Mapping[str, RecordedRow]) -> tuple[str, str]:
    kernel = rows.get(_KERNEL)
    if kernel is None:
        return "–", "–"
    share = "–" if kernel.share is None else f"{kernel.share:.1%}"
    if kernel.ratio is None:
        return share, "–"
    ends = f"{kernel.ratio.low:.4f} to {kernel.ratio.high:.4f}"
    return share, f"{kernel.ratio.value:.4f} of {kernel.reference} ({ends})"
