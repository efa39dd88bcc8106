"""The summary says what came of every cell, in whole lines."""

from __future__ import annotations

from fusiongate.plugin.summary import outcome_table, reasons

from .observing import cell, prepare
from .projects import Project

RED = cell(id="junk", outcome="red", reason="bits differ", message="bits differ", launches=0)
CELLS = [
    cell(id="a"),
    cell(id="b"),
    cell(id="c", outcome="reference", reason="per-token", launches=0, must_fuse=False, expected="reference"),
    cell(id="d", outcome="refused", reason="refused", launches=0),
    cell(id="e", outcome="raises", reason="raises", launches=0),
    *(cell(id=f"n{n}", outcome="not run", reason="needs a second GPU", launches=0, expected=None) for n in range(6)),
    RED,
    cell(subject="gelu", not_compared="no table kept/cpu/paths/gelu.json"),
]


def test_the_summary_has_table_reasons_what_is_missing_environment_and_ledger(project: Project) -> None:
    bodies = {f"n{n}": f"observe(**{each})" for n, each in enumerate(CELLS)}
    prepare(project, **bodies)
    lines = Project.summary(project.run("--fusiongate-device=host"))
    environment, ledger = lines[-2:]
    assert lines[:-2] == [
        "subject   fused  reference  refused  raises  not run  red",
        "gelu          1          0        0       0        0    0",
        "modulate      2          1        1       1        6    1",
        "total         3          1        1       1        6    1",
        "",
        "reasons",
        "  fused      verified   3",
        "  reference  per-token  1",
        "  refused    refused    1",
        "  raises     raises     1",
        "",
        "not run",
        "  needs a second GPU (6): modulate[n0], modulate[n1], modulate[n2], modulate[n3], and 2 more",
        "",
        "not compared",
        "  no table kept/cpu/paths/gelu.json (1): gelu[base]",
        "",
    ]
    assert environment.startswith("environment: cpu-")
    assert ", torch " in environment
    assert ledger == f"ledger: .fusiongate/{(project.path / '.fusiongate/latest.jsonl').readlink()} (14 rows)"


def test_a_verbose_run_names_every_cell_that_was_not_run(project: Project) -> None:
    prepare(project, **{f"n{n}": f"observe(**{each})" for n, each in enumerate(CELLS) if each["outcome"] == "not run"})
    assert (
        "  needs a second GPU (6): modulate[n0], modulate[n1], modulate[n2], modulate[n3], modulate[n4], modulate[n5]"
        in Project.summary(project.run("-v"))
    )


def test_one_subject_has_no_totals() -> None:
    assert [row[0] for row in outcome_table([cell(), cell(id="b")])] == ["subject", "modulate"]


def test_cells_that_their_test_never_checked_have_a_column_of_their_own() -> None:
    assert outcome_table([cell()])[0][-1] == "red"
    assert outcome_table([cell(), cell(id="b", outcome="unchecked")]) == [
        ("subject", "fused", "reference", "refused", "raises", "not run", "red", "unchecked"),
        ("modulate", "1", "0", "0", "0", "0", "0", "1"),
    ]


def test_reasons_stand_in_the_order_of_the_table_the_most_frequent_first() -> None:
    cells = [
        cell(outcome="reference", reason="empty"),
        cell(outcome="reference", reason="stride"),
        cell(outcome="reference", reason="stride"),
        cell(),
        RED,
    ]
    assert list(reasons(cells).items()) == [
        (("fused", "verified"), 1),
        (("reference", "stride"), 2),
        (("reference", "empty"), 1),
    ]
