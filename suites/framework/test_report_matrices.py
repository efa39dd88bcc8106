"""The page's parts about the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from .reported import cell, digest, told, write_ledger

LABEL = "environment 1 (NVIDIA H200, torch 2.11.0+cu130)"


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


def test_each_layout_says_in_how_many_cells_the_gate_is_live(path: Path) -> None:
    write_ledger(
        path,
        cell("a"),
        cell("b", outcome="reference", reason="dtype"),
        cell("c", outcome="not run", reason="needs a second GPU"),
        cell("d", layout="per-token", outcome="reference", reason="per-token"),
        cell("a", "gate_it"),
    )

    assert [
        ["layout", "gate_it", "modulate"],
        ["row-broadcast", "1 of 1", "1 of 2"],
        ["per-token", "–", "0 of 1"],
    ] == told([path]).tables[f"Fused cells of those that ran, by layout and subject, {LABEL}"]


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
    assert [f"modulate[a] {where}", f"modulate[b] {where}", f"preset ltx2 (tiny) {where}"] == page.texts["h3"][:3]
    assert [
        "bits differ\n  first at 3",
        "unchecked: the test did not call fusion_case.check()",
        "kernel changed\n  at step 1",
    ] == page.texts["pre"]
    assert "1 of 2 cells red, 0 not run, 1 unchecked, 1 of 1 presets red; 1 environment" in page.texts["p"]


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
