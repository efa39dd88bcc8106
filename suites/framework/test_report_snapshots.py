"""The page's part about presets."""

from __future__ import annotations

from pathlib import Path

from .reported import cell, digest, told, write_ledger

CAPTION = "Presets: every step’s md5s, held against the snapshot"
CALLS = "4 × fused (verified), 2 × reference (first-sight)"


def test_a_preset_shows_its_verdict_and_its_last_md5(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", digest("wan", "aa", outcome="red", reference="bb"), digest("ltx2", "cc"))

    headings, *rows = told([path]).tables[CAPTION]

    assert ["preset", "environment", "verdict", "with kernels and without", "steps", "calls"] == headings[:-1]
    assert [
        ["ltx2 (tiny, seed 0)", "1", "same", "same md5s", "2", CALLS, "cc"],
        ["wan (tiny, seed 0)", "1", "red", "md5s differ", "2", CALLS, "aa"],
    ] == rows


def test_environments_that_share_their_md5s_are_named(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    for run, (device, md5) in enumerate([("H100", "aa"), ("H200", "aa"), ("B200", "bb")]):
        write_ledger(path, digest("ltx2", md5), run=str(run), device_name=device)

    rows = told([path]).tables[CAPTION]

    assert ["same md5s at every step as", "environment 2", "environment 1", "none"] == [row[-1] for row in rows]


def test_an_md5_that_differs_before_the_end_is_not_shared(tmp_path: Path) -> None:
    """The outputs agree, a step before them does not."""
    path, (kind, name, payload) = tmp_path / "l.jsonl", digest()
    write_ledger(path, (kind, name, payload), run="1")
    other = {**payload, "fused": {**payload["fused"], "step 0": {"x": "01 bfloat16 2×8"}}}
    write_ledger(path, (kind, name, other), run="2", device_name="B200")

    assert ["none", "none"] == [row[-1] for row in told([path]).tables[CAPTION][1:]]


def test_a_preset_without_md5_says_why(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", digest(outcome="nondeterministic", story="aten::index_add differs"))
    assert "ltx2 in environment 1 has no md5: aten::index_add differs" in told([path]).texts["p"]


def test_no_preset_is_said(tmp_path: Path) -> None:
    page = told([write_ledger(tmp_path / "l.jsonl", cell())])
    assert "No preset was run." in page.texts["p"]
    assert CAPTION not in page.tables
