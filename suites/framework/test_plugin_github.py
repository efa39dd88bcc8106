"""In a GitHub Actions job, failures are annotated where they stand and the job's page shows the table."""

from __future__ import annotations

from fusiongate.platforms import Environment
from fusiongate.plugin.github import annotation, step_summary

from .observing import cell, prepare
from .projects import Project

RED = cell(outcome="red", reason="bits differ", message="100% of bits differ:\nfirst at (0, 1)")
ENVIRONMENT = Environment(
    platform="cuda-sm_90",
    device_name="NVIDIA H200",
    torch="2.11.0+cu130",
    runtime="cuda 13.0",
    driver=None,
    python="3.12.3",
    threads=16,
    libraries={},
    switches={},
)


def test_an_annotation_is_escaped_as_github_asks() -> None:
    assert annotation("50%\r\ndone: a,b", file="a,b:c.py", line="3", title="50%") == (
        "::error file=a%2Cb%3Ac.py,line=3,title=50%25::50%25%0D%0Adone: a,b"
    )


def test_a_red_cell_is_annotated_at_its_test(project: Project) -> None:
    """With its path from the job's workspace, where the project may be a folder of it."""
    prepare(project, red=f"observe(**{RED}); assert False", plain="assert False")
    project.setenv("GITHUB_ACTIONS", "true")
    project.setenv("GITHUB_WORKSPACE", str(project.path.parent))
    result = project.run()
    assert [line for line in result.outlines if line.startswith("::")] == [
        (
            f"::error file={project.path.name}/test_cells.py,line=4,title=test_cells.py%3A%3Atest_red"
            "::100%25 of bits differ:%0Afirst at (0, 1)"
        )
    ]


def test_a_complaint_about_the_run_is_annotated(project: Project) -> None:
    prepare(project, idle=f"observe(**{cell(launches=0)})")
    project.setenv("GITHUB_ACTIONS", "true")
    (line,) = (line for line in project.run().outlines if line.startswith("::"))
    assert line.startswith("::error title=fusiongate::no kernel was launched, and 1 cell had to launch one: ")


def test_annotations_beyond_those_that_github_shows_are_counted(project: Project) -> None:
    reds = {f"red_{word}": {**RED, "message": f"{word}: it raised"} for word in "abcdefghijkl"}
    prepare(project, **{name: f"observe(**{red}); assert False" for name, red in reds.items()})
    project.setenv("GITHUB_ACTIONS", "true")
    annotations = [line for line in project.run().outlines if line.startswith("::")]
    assert len(annotations) == 10
    assert annotations[-1] == "::error title=fusiongate::3 more causes of failures stand in the log"


def test_failures_of_one_cause_are_one_annotation(project: Project) -> None:
    prepare(project, **{f"red{n}": f"observe(**{RED}); assert False" for n in range(12)})
    project.setenv("GITHUB_ACTIONS", "true")
    (line,) = (line for line in project.run().outlines if line.startswith("::"))
    assert "title=12 × test_cells.py" in line


def test_nothing_is_annotated_outside_of_a_job(project: Project) -> None:
    prepare(project, red=f"observe(**{RED}); assert False")
    assert not [line for line in project.run().outlines if line.startswith("::")]


def test_the_step_summary_is_appended_once_and_not_by_workers(project: Project) -> None:
    prepare(project, **{f"n{n}": f"observe(**{cell(id=f'c{n}')})" for n in range(4)})
    summary = project.write("summary.md", "before\n")
    project.setenv("GITHUB_ACTIONS", "true")
    project.setenv("GITHUB_STEP_SUMMARY", str(summary))
    project.run("-n", "2", "--fusiongate-device=host")
    text = summary.read_text()
    assert text.startswith("before\n## fusiongate\n")
    assert text.count("| modulate | 4 | 0 | 0 | 0 | 0 | 0 |") == 1


def test_the_step_summary_is_markdown_with_foreign_text_escaped() -> None:
    cells = [
        cell(subject="a|b<c>", reason="x*y*"),
        cell(id="far", outcome="not run", reason="needs a second GPU", expected=None),
    ]
    assert step_summary(cells, [ENVIRONMENT], ["no_kernel was launched"]).splitlines() == [
        "## fusiongate",
        "",
        "- **red**: no\\_kernel was launched",
        "",
        "| subject | fused | reference | refused | raises | not run | red |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| a\\|b&lt;c&gt; | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| modulate | 0 | 0 | 0 | 0 | 1 | 0 |",
        "| total | 1 | 0 | 0 | 0 | 1 | 0 |",
        "",
        "| outcome | reason | cells |",
        "| --- | --- | --- |",
        "| fused | x\\*y\\* | 1 |",
        "",
        "<details><summary>Not run: needs a second GPU (1)</summary>",
        "",
        "- modulate\\[far\\]",
        "",
        "</details>",
        "",
        "Environment: cuda-sm\\_90 \\(NVIDIA H200\\), torch 2.11.0\\+cu130",
        "",
    ]
