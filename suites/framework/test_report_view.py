"""The page's parts about the matrix, the presets and what changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .reported import cell, digest, told, write_ledger

LABEL = "environment 1 (NVIDIA H200, torch 2.11.0+cu130)"
CAPTION = "Presets: every step’s md5s, held against the snapshot"
CALLS = "4 × fused (verified), 2 × reference (first-sight)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_subjects_and_outcomes_are_counted(path: Path) -> None:
    write_ledger(
        path,
        cell("a"),
        cell("b", outcome="reference", reason="stride"),
        cell("a", "rms_norm", outcome="red", message="boom"),
    )

    page = told([path])

    assert [
        ["subject", "fused", "reference", "refused", "raises", "not run", "red"],
        ["modulate", "1", "1", "0", "0", "0", "0"],
        ["rms_norm", "0", "0", "0", "0", "0", "1"],
        ["total", "1", "1", "0", "0", "0", "1"],
    ] == page.tables[f"Cells by subject and outcome, {LABEL}"]
    assert [["outcome", "cells", "reason"], ["fused", "1", "verified"], ["reference", "1", "stride"]] == page.tables[
        f"Reasons, {LABEL}"
    ]


def test_a_single_subject_has_no_totals(path: Path) -> None:
    page = told([write_ledger(path, cell())])
    assert ["subject", "modulate"] == [row[0] for row in page.tables[f"Cells by subject and outcome, {LABEL}"]]


def test_each_value_of_an_axis_says_in_how_many_cells_the_gate_is_live(path: Path) -> None:
    write_ledger(
        path,
        cell("a", dtype="bf16"),
        cell("b", dtype="fp64", outcome="reference", reason="dtype"),
        cell("c", dtype="bf16", outcome="not run", reason="needs a second GPU"),
        cell("d", dtype="bf16", layout="per-token", outcome="red", message="m"),
        cell("a", "gate_it", dtype="bf16"),
    )

    assert [
        ["axis", "gate_it", "modulate"],
        ["layout"],
        ["row-broadcast", "1 of 1", "1 of 2"],
        ["per-token", "–", "0 of 1, 1 red"],
        ["dtype"],
        ["bf16", "1 of 1", "1 of 2, 1 red"],
        ["fp64", "–", "0 of 1"],
    ] == told([path]).tables[f"Fused cells of those that ran, by axis and subject, {LABEL}"]


def test_red_cells_and_presets_tell_their_whole_story(path: Path) -> None:
    write_ledger(
        path,
        cell("a", outcome="red", reason="bits differ", message="bits differ\n  first at 3"),
        cell("b", outcome="unchecked", reason="the test did not call fusion_case.check()"),
        digest(outcome="red", story="kernel changed\n  at step 1"),
        run="r",
    )

    page = told([path])

    where = "in environment 1, run r"
    assert [f"modulate[a] {where}", f"preset ltx2 (tiny) {where}", f"modulate[b] {where}"] == page.texts["h3"][:3]
    assert [
        "bits differ\n  first at 3",
        "kernel changed\n  at step 1",
        "unchecked: the test did not call fusion_case.check()",
    ] == page.texts["pre"]
    assert "1 of 2 cells red, 0 not run, 1 unchecked, 1 of 1 presets red; 1 environment" in page.texts["p"]


def test_red_cells_of_one_cause_are_told_once(path: Path) -> None:
    message = "modulate[{}]\n  happened: 1 × reference\n  expected: 1 × fused\n  hint: `silu(x)` is not rounded"
    names = [f"cell-{number}" for number in range(5)]
    others = [cell("z", outcome="red", message="modulate[z]\n  happened: it returned\n  expected: it raises")]
    write_ledger(path, *others, *(cell(name, outcome="red", message=message.format(name)) for name in names), run="r")

    page = told([path])

    where = "in environment 1, run r"
    assert [f"5 × `silu(x)` is not rounded: modulate[cell-0] {where}", f"modulate[z] {where}"] == page.texts["h3"][:2]
    assert 2 == len(page.texts["pre"])
    assert {f"modulate[{name}] {where}" for name in names[1:]} <= set(page.texts["li"])


def test_what_came_out_otherwise_than_in_the_run_before_is_listed(path: Path) -> None:
    write_ledger(path, cell("a"), cell("b"), cell("gone"), digest(), run="1")
    write_ledger(path, cell("a", outcome="red", message="m"), cell("b"), cell("new"), digest(outcome="red"), run="2")

    caption = "Cells and presets whose outcome changed between the last two runs of an environment"
    where = f"{LABEL}, runs 1 and 2"
    assert [
        ["what", "before", "now", "where"],
        ["modulate[a]", "fused", "red", where],
        ["preset ltx2 (tiny)", "same", "red", where],
    ] == told([path]).tables[caption]


def test_two_runs_alike_and_a_single_run_have_no_changes(path: Path) -> None:
    write_ledger(path, cell(), run="1")
    assert "One run in each environment: there is nothing to hold it against." in told([path]).texts["p"]
    write_ledger(path, cell(), run="2")
    assert "No cell and no preset came out otherwise than in the run before." in told([path]).texts["p"]


def test_a_run_that_launched_nothing_needs_attention(path: Path) -> None:
    page = told([write_ledger(path, cell(must_fuse=True, launches=0, outcome="reference", reason="disabled"), run="r")])

    assert "Run r" == page.texts["h3"][0]
    assert "no kernel was launched, and 1 cell had to launch one: modulate[bf16]" in page.texts["pre"][0]


def test_nothing_red_is_said(path: Path) -> None:
    page = told([write_ledger(path, cell())])
    assert "Nothing that was run is red." in page.texts["p"]
    assert "pre" not in page.texts


def test_everything_that_was_not_run_is_named(path: Path) -> None:
    names = [f"cell-{number:02}" for number in range(30)]
    write_ledger(
        path,
        *(cell(name, outcome="not run", reason="needs a second GPU") for name in names),
        cell("x", not_compared="no path table"),
        digest(outcome="not run", story="no snapshot"),
    )

    page = told([path])

    lists = [items for items in page.texts["ul"] if "cell-00" in items]
    assert [f"modulate[{name}]" for name in names] == lists[0].split()
    assert [
        f"Not run: needs a second GPU (30 in {LABEL})",
        f"Not run: no snapshot (1 in {LABEL})",
        f"Not compared: no path table (1 in {LABEL})",
    ] == [title for title in page.texts["h3"] if title.startswith("Not ")]
    assert {"modulate[x]", "preset ltx2 (tiny)"} <= set(page.texts["li"])


def test_a_preset_shows_its_verdict_and_its_last_md5(path: Path) -> None:
    write_ledger(path, digest("wan", "aa", outcome="red", reference="bb"), digest("ltx2", "cc"))

    headings, *rows = told([path]).tables[CAPTION]

    assert ["preset", "environment", "verdict", "with kernels and without", "steps", "calls"] == headings[:-1]
    assert [
        ["ltx2 (tiny, seed 0)", "1", "same", "same md5s", "2", CALLS, "cc"],
        ["wan (tiny, seed 0)", "1", "red", "md5s differ", "2", CALLS, "aa"],
    ] == rows


def test_environments_that_share_their_md5s_are_named(path: Path) -> None:
    for run, (device, md5) in enumerate([("H100", "aa"), ("H200", "aa"), ("B200", "bb")]):
        write_ledger(path, digest("ltx2", md5), run=str(run), device_name=device)

    rows = told([path]).tables[CAPTION]

    assert ["same md5s at every step as", "environment 2", "environment 1", "none"] == [row[-2] for row in rows]
    parted = "environment 1 at output, x; environment 2 at output, x"
    assert ["parts from", "environment 3 at output, x", "environment 3 at output, x", parted] == [
        row[-1] for row in rows
    ]


def test_an_md5_that_differs_before_the_end_is_not_shared(path: Path) -> None:
    """The outputs agree, a step before them does not."""
    kind, name, payload = digest()
    write_ledger(path, (kind, name, payload), run="1")
    other = {**payload, "fused": {**payload["fused"], "step 0": {"x": "01 bfloat16 2×8"}}}
    write_ledger(path, (kind, name, other), run="2", device_name="B200")

    assert [["none", "environment 2 at step 0, x"], ["none", "environment 1 at step 0, x"]] == [
        row[-2:] for row in told([path]).tables[CAPTION][1:]
    ]


def test_a_preset_without_md5_says_why(path: Path) -> None:
    write_ledger(path, digest(outcome="nondeterministic", story="aten::index_add differs"))
    assert "ltx2 in environment 1 has no md5: aten::index_add differs" in told([path]).texts["p"]


def test_no_preset_is_said(path: Path) -> None:
    page = told([write_ledger(path, cell())])
    assert "No preset was run." in page.texts["p"]
    assert CAPTION not in page.tables
