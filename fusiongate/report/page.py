"""The report: one static page over runs and machines, which needs no network, no script and no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fusiongate._telling import counted
from fusiongate.platforms import Environment
from fusiongate.plugin.summary import OUTCOMES

from .evidence import UNCHECKED, VERDICTS, Evidence, Observed
from .markup import Html, element, joined, plain, table
from .matrices import absences, attention, live, outcomes, reddened
from .snapshots import presets
from .speedups import timings
from .style import STYLE

__all__ = ["MARK", "page"]

MARK = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="fusiongate report">\n'
)
"""How every report begins; a file that does not is somebody else's."""

# With this the page could not load anything, even if a name in a ledger were to slip through as markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(evidence: Evidence) -> str:
    """The page's text."""
    parts = (
        ("attention", "What needs attention", attention(evidence)),
        ("environments", "Environments", _environments(evidence)),
        ("runs", "Runs", _runs(evidence)),
        ("cells", "Cells", outcomes(evidence)),
        ("live", "Where each gate is live", live(evidence)),
        ("absences", "Not run, not compared", absences(evidence)),
        ("presets", "Presets", presets(evidence)),
        ("timings", "Timings", timings(evidence)),
    )
    sections = [(anchor, title, list(content)) for anchor, title, content in parts]
    links = (element("li", element("a", title, href=f"#{anchor}")) for anchor, title, _ in sections)
    head = (
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"fusiongate report: {_verdict(evidence)}"),
        element("style", Html(STYLE)),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", "fusiongate report"),
            element("p", _verdict(evidence), class_="verdict"),
            element("nav", element("ul", *links), aria_label="Parts of the page"),
        ),
        element("main", *(_section(anchor, title, content) for anchor, title, content in sections)),
    )
    return f"{MARK}{joined(head)}\n{body}\n</html>\n"


def _section(anchor: str, title: str, content: Iterable[Html]) -> Html:
    told = list(content) or [element("p", "Nothing to tell.")]
    return Html(f'\n<section id="{plain(anchor)}">\n{element("h2", title)}\n{joined(told, Html(chr(10)))}\n</section>')


def _verdict(evidence: Evidence) -> str:
    cells, digests = _counted(evidence.cells), _counted(evidence.digests)
    told = [f"{cells['red']} of {cells.total()} cells red, {cells['not run']} not run"]
    told += [f"{cells[UNCHECKED]} unchecked"] if cells[UNCHECKED] else []
    told += [f"{digests['red']} of {digests.total()} presets red"] if digests else []
    return ", ".join(told) + f"; {counted(len(evidence.environments), 'environment')}"


def _counted(observed: Iterable[Observed]) -> Counter[str]:
    return Counter(one.payload["outcome"] for one in observed)


def _environments(evidence: Evidence) -> Iterator[Html]:
    columns = [_fields(environment) for environment in evidence.environments]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "none") for column in columns)] for name in names]
    headings = ["setting", *(f"environment {number}" for number in range(1, len(columns) + 1))]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    alike = [row for row in rows if len(set(row[1:])) == 1]
    groups = [group for group in (differing, alike) if group]
    caption = "What may move bits" + ("; what differs stands first" if differing and alike else "")
    yield table(caption, headings, groups)


def _fields(environment: Environment) -> dict[str, str]:
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


def _runs(evidence: Evidence) -> Iterator[Html]:
    headings = ("run", *OUTCOMES, UNCHECKED, "timings", "presets", "environments")
    rows = []
    for run in evidence.runs:
        cells, digests = _counted(run.cells.values()), _counted(run.digests.values())
        verdicts = ", ".join(f"{digests[verdict]} {verdict}" for verdict in VERDICTS if digests[verdict])
        counts = [str(cells[outcome]) for outcome in (*OUTCOMES, UNCHECKED)]
        environments = ", ".join(map(str, run.environments))
        row = [run.id, *counts, str(len(run.timings)), verdicts or "none", environments]
        rows.append(reddened(row, headings.index("red")))
    yield table("Runs in the order of their start, with their cells by outcome", headings, [rows], numbers=8)
    if len(evidence.runs) > 1:
        yield element("p", "Below, what several runs saw in one environment counts as the last of them saw it.")
    yield element("h3", "Made from")
    yield element("ul", *(element("li", path) for path in evidence.files), class_="names")
