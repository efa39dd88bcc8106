"""The report's contents: the text that its template shows, in the order in which one decides from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fusiongate.io import counted
from fusiongate.platforms import Environment
from fusiongate.plugin.causes import causes
from fusiongate.plugin.session_checks import cell_name, unlaunched
from fusiongate.plugin.summary import OUTCOMES, not_compared, not_run, outcome_table, reasons

from .evidence import UNCHECKED, VERDICTS, Evidence, LedgerRun, Observed
from .speedups import slower, timing_view
from .text import marked

__all__ = ["contents"]

PARTS: Final = (
    ("attention", "What needs attention"),
    ("changes", "What changed"),
    ("cells", "Cells"),
    ("live", "Where each gate is live"),
    ("timings", "Timings"),
    ("presets", "Presets"),
    ("absences", "Not run, not compared"),
    ("runs", "Runs"),
    ("environments", "Environments"),
)

_AXES: Final = ("layout", "dtype", "size", "device", "mode", "data", "lifecycle")

Payload = Mapping[str, Any]
Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a reader has to decide about."""

    title: str
    """What it is, in a line."""
    story: str
    """What is known of it."""
    others: Sequence[str] = ()
    """What else has the same cause, by name."""


def contents(evidence: Evidence) -> dict[str, Any]:
    """Everything that the template reads, by the name that it has there."""
    cells = _by_environment(evidence.cells)
    return {
        "parts": PARTS,
        "verdict": _verdict(evidence),
        "findings": list(_findings(evidence)),
        "changes": _changes(evidence),
        "outcomes": [_outcomes(evidence.label(number), seen) for number, seen in cells.items()],
        "live": [_live(evidence.label(number), seen) for number, seen in cells.items()],
        **timing_view(evidence),
        "presets": _presets(evidence),
        "absences": list(_absences(evidence)),
        "runs": _runs(evidence.runs),
        "files": evidence.files,
        "environments": _environments(evidence.environments),
    }


def _by_environment(observed: Iterable[Observed]) -> dict[int, list[Payload]]:
    groups: dict[int, list[Payload]] = defaultdict(list)
    for one in observed:
        groups[one.environment].append(one.payload)
    return dict(sorted(groups.items()))


def _counted(observed: Iterable[Observed]) -> Counter[str]:
    return Counter(one.payload["outcome"] for one in observed)


def _verdict(evidence: Evidence) -> str:
    cells, digests = _counted(evidence.cells), _counted(evidence.digests)
    told = [f"{cells['red']} of {cells.total()} cells red, {cells['not run']} not run"] if cells else []
    told += [f"{cells[UNCHECKED]} unchecked"] if cells[UNCHECKED] else []
    told += [f"{digests['red']} of {digests.total()} presets red"] if digests else []
    if evidence.timed:
        timed, slow = slower(evidence)
        told.append(f"{len(slow)} of {counted(timed, 'timed kernel')} slower than the reference")
    return f"{', '.join(told) or 'nothing was seen'}; {counted(len(evidence.environments), 'environment')}"


# What needs attention -----------------------------------------------------------------------------------------------


def _findings(evidence: Evidence) -> Iterator[Finding]:
    """Whatever makes a run doubtful, then each cause of red cells and presets once, then what is slower."""
    for torn in evidence.torn:
        yield Finding("The ledger is cut short", torn)
    for run in evidence.runs:
        for complaint in unlaunched([cell.payload for cell in run.cells.values()], require_fused=False):
            yield Finding(f"Run {run.id}", complaint)
    yield from _red(evidence.cells, "message")
    yield from _red(evidence.digests, "story")
    for one in evidence.cells:
        if one.payload["outcome"] == UNCHECKED:
            yield Finding(_where(one.payload, one), f"unchecked: {one.payload['reason']}")
    for title, story in slower(evidence)[1]:
        yield Finding(title, story)


def _red(observed: Iterable[Observed], field: str) -> Iterator[Finding]:
    named = [{**one.payload, "where": _where(one.payload, one)} for one in observed if one.payload["outcome"] == "red"]

    def message(payload: Payload) -> str:
        return str(payload.get(field) or payload.get("reason") or "red")

    for cause in causes(named, message):
        title = f"{cause}: {cause.first['where']}" if cause.others else cause.first["where"]
        yield Finding(title, message(cause.first), [other["where"] for other in cause.others])


def _where(payload: Payload, one: Observed) -> str:
    return f"{_name(payload)} in environment {one.environment}, run {one.run}"


def _name(payload: Payload) -> str:
    return cell_name(payload) if "id" in payload else f"preset {payload['subject']} ({payload['size']})"


def _changes(evidence: Evidence) -> list[Row] | None:
    """What came out otherwise in an environment's last run than in the one before; None without two runs of one."""
    rows: list[Row] = []
    compared = False
    for number in range(1, len(evidence.environments) + 1):
        runs = [run for run in evidence.runs if number in run.environments and (run.cells or run.digests)]
        if len(runs) < 2:
            continue
        compared = True
        before, now = runs[-2:]
        for name, old, new in _differences(number, before, now):
            rows.append([name, old, new, f"{evidence.label(number)}, runs {before.id} and {now.id}"])
    return rows if compared else None


def _differences(number: int, before: LedgerRun, now: LedgerRun) -> Iterator[tuple[str, str, str]]:
    kinds: tuple[tuple[Mapping[Any, Observed], Mapping[Any, Observed]], ...] = (
        (before.cells, now.cells),
        (before.digests, now.digests),
    )
    for old, new in kinds:
        for key, one in new.items():
            if key[0] != number or key not in old:
                continue
            was, is_now = old[key].payload["outcome"], one.payload["outcome"]
            if was != is_now:
                yield _name(one.payload), was, marked("red", is_now) if is_now == "red" else is_now


# The matrix ---------------------------------------------------------------------------------------------------------


def _outcomes(label: str, cells: Sequence[Payload]) -> dict[str, Any]:
    """Subject × outcome, and the reasons."""
    headings, *counts = outcome_table(cells)
    rows = [_reddened(row, headings.index("red")) for row in counts]
    by_reason = reasons(cells)
    groups = [
        [(outcome, str(count), reason) for (outcome, reason), count in by_reason.items() if outcome == chosen]
        for chosen in dict.fromkeys(outcome for outcome, _ in by_reason)
    ]
    return {
        "label": label,
        "headings": headings,
        "groups": [rows[:-1], rows[-1:]] if len(rows) > 1 else [rows],
        "reasons": groups,
    }


def _reddened(row: Row, column: int) -> Row:
    """A row of counts, of which that of red cells stands out where there are any."""
    count = row[column]
    return row if count == "0" else [*row[:column], marked("red", count), *row[column + 1 :]]


def _live(label: str, cells: Sequence[Payload]) -> dict[str, Any]:
    """The value of each axis × subject: in how many of the cells that ran the kernel's result was taken."""
    ran: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for cell in cells:
        if cell["outcome"] not in ("not run", UNCHECKED):
            for axis in _AXES:
                if axis in cell:
                    ran[axis, str(cell[axis]), cell["subject"]].append(cell["outcome"])
    subjects = sorted({subject for _, _, subject in ran})
    axes = [axis for axis in _AXES if any(seen == axis for seen, _, _ in ran)]
    groups = [
        [
            [value, *(_share(ran.get((axis, value, subject), ())) for subject in subjects)]
            for value in dict.fromkeys(value for seen, value, _ in ran if seen == axis)
        ]
        for axis in axes
    ]
    return {"label": label, "headings": ["axis", *subjects], "groups": groups, "titles": axes}


def _share(outcomes: Sequence[str]) -> str:
    if not outcomes:
        return "–"
    fused, red = outcomes.count("fused"), outcomes.count("red")
    told = f"{fused} of {len(outcomes)}" + (f", {red} red" if red else "")
    if red:
        return marked("red-cell", told)
    return marked("all" if fused == len(outcomes) else "some", told) if fused else told


def _absences(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Every cell and preset that was not run, and every cell whose path was not compared, by name."""
    cells, presets = _by_environment(evidence.cells), _by_environment(evidence.digests)
    for number in sorted({*cells, *presets}):
        missing: dict[str, list[str]] = defaultdict(list, not_run(cells.get(number, ())))
        for preset in presets.get(number, ()):
            if preset["outcome"] == "not run":
                missing[preset["story"] or "no reason is recorded"].append(_name(preset))
        for title, groups in (("Not run", missing), ("Not compared", not_compared(cells.get(number, ())))):
            for reason, names in groups.items():
                heading = f"{title}: {reason} ({len(names)} in {evidence.label(number)})"
                yield {"title": heading, "names": sorted(names)}


# Presets ------------------------------------------------------------------------------------------------------------

_PRESET_HEADINGS: Final = (
    "preset",
    "environment",
    "verdict",
    "with kernels and without",
    "steps",
    "calls",
    "md5 of the output, with kernels",
)


def _presets(evidence: Evidence) -> dict[str, Any]:
    """One row a preset and environment, those of one preset together; who shares the md5s, and where others part."""
    groups: dict[tuple[str, str, int], list[Observed]] = {}
    for one in sorted(evidence.digests, key=lambda one: one.environment):
        groups.setdefault((one.subject, one.payload["size"], one.payload["seed"]), []).append(one)
    several = any(len(group) > 1 for group in groups.values())
    stories = [
        f"{one.subject} in environment {one.environment} has no md5: {one.payload['story']}"
        for one in evidence.digests
        if one.payload["outcome"] == "nondeterministic" and one.payload["story"]
    ]
    return {
        "headings": [*_PRESET_HEADINGS, *(["same md5s at every step as", "parts from"] if several else [])],
        "rows": [[_preset(one, group, several) for one in group] for _, group in sorted(groups.items())],
        "stories": stories,
    }


def _preset(one: Observed, group: Sequence[Observed], several: bool) -> Row:
    payload = one.payload
    fused: Mapping[str, Mapping[str, str]] = payload["fused"]
    last = list(fused.values())[-1:]
    others = [other for other in group if other is not one]
    twins = [str(other.environment) for other in others if other.payload["fused"] == fused]
    partings = [_parting(fused, other) for other in others if other.payload["fused"] != fused]
    return [
        f"{one.subject} ({payload['size']}, seed {payload['seed']})",
        str(one.environment),
        marked("red", "red") if payload["outcome"] == "red" else payload["outcome"],
        "same md5s" if fused == payload["reference"] else "md5s differ",
        str(len(fused)),
        ", ".join(f"{count} × {path}" for path, count in payload["calls"].items()) or "none",
        ", ".join(text.partition(" ")[0] for step in last for text in step.values()) or "none",
        *([f"environment {', '.join(twins)}" if twins else "none", "; ".join(partings) or "none"] if several else []),
    ]


def _parting(fused: Mapping[str, Mapping[str, str]], other: Observed) -> str:
    """The first step and tensor at which another environment's digests differ."""
    theirs = other.payload["fused"]
    for step, tensors in fused.items():
        for name, text in tensors.items():
            if theirs.get(step, {}).get(name) != text:
                return f"environment {other.environment} at {step}, {name}"
    return f"environment {other.environment}, which has more steps"


# Runs and environments ----------------------------------------------------------------------------------------------


def _runs(runs: Sequence[LedgerRun]) -> dict[str, Any]:
    headings = ["run", *OUTCOMES, UNCHECKED, "timings", "presets", "environments"]
    rows = []
    for run in runs:
        cells, digests = _counted(run.cells.values()), _counted(run.digests.values())
        verdicts = ", ".join(f"{digests[verdict]} {verdict}" for verdict in VERDICTS if digests[verdict])
        counts = [str(cells[outcome]) for outcome in (*OUTCOMES, UNCHECKED)]
        environments = ", ".join(map(str, run.environments))
        row = [run.id, *counts, str(len(run.timings)), verdicts or "none", environments]
        rows.append(_reddened(row, headings.index("red")))
    return {"headings": headings, "rows": rows}


def _environments(environments: Sequence[Environment]) -> dict[str, Any]:
    columns = [_settings(environment) for environment in environments]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "none") for column in columns)] for name in names]
    return {
        "headings": ["setting", *(f"environment {number}" for number in range(1, len(columns) + 1))],
        "differing": [row for row in rows if len(set(row[1:])) > 1],
        "alike": [row for row in rows if len(set(row[1:])) == 1],
    }


def _settings(environment: Environment) -> dict[str, str]:
    return {
        "platform": environment.platform,
        "device": environment.device_name,
        "torch": environment.torch,
        "runtime": environment.runtime or "none",
        "driver": environment.driver or "none",
        "python": environment.python,
        "threads": str(environment.threads),
        **{f"library {name}": version for name, version in sorted(environment.libraries.items())},
        **{f"switch {name}": value for name, value in sorted(environment.switches.items())},
    }
