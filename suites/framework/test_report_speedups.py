"""The page's part about time."""

from __future__ import annotations

from pathlib import Path

from .recorded_runs import row, write_run
from .reported import cell, timing, told, write_ledger

HEADINGS = ["arm", "time", "of the copy’s bandwidth", "speed-up", "ratio", "0 to 1.05"]


def test_each_arm_has_its_time_and_its_ratio_with_the_interval(tmp_path: Path) -> None:
    path = write_ledger(
        tmp_path / "l.jsonl",
        timing(arm="eager", ratio=None, median_s={"value": 3e-3, "low": 2.9e-3, "high": 3.1e-3}),
        timing(share_of_copy_bandwidth=0.97),
        timing(arm="copy", ratio={"value": 0.25, "low": 0.0, "high": None}),
    )

    assert [
        HEADINGS,
        ["2x8-bfloat16"],
        ["eager", "3.00 ms (2.90 to 3.10)", "–", "–", "the reference", ""],
        ["kernel", "60.00 µs (59.00 to 61.00)", "97.0%", "5.00× (4.76 to 5.26)", "0.2000 (0.1900 to 0.2100)", ""],
        ["copy", "60.00 µs (59.00 to 61.00)", "–", "4.00× (0.00 to unknown)", "0.2500 (0.0000 to unknown)", ""],
    ] == told([path]).tables["Timings of modulate"]


def test_seconds_are_told_as_seconds(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", timing(median_s={"value": 2.5, "low": 2.25, "high": None}))
    assert "2.50 s (2.25 to unknown)" == told([path]).tables["Timings of modulate"][2][1]


def test_a_reference_that_has_no_row_is_named(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", timing())
    assert "0.2000 of eager (0.1900 to 0.2100)" == told([path]).tables["Timings of modulate"][2][4]


def test_one_case_stands_together_over_several_runs_and_devices(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", cell())
    runs = [
        write_run(tmp_path / f"{device}.json", row("modulate[2x8-bfloat16]"), device_name=device)
        for device in ("H200", "B200")
    ]

    rows = told([path], runs).tables["Timings of modulate"]

    assert [
        "2x8-bfloat16: H200.json, environment 2 (H200, torch 2.11.0+cu130)",
        "2x8-bfloat16: B200.json, environment 3 (B200, torch 2.11.0+cu130)",
    ] == [one[0] for one in rows if len(one) == 1]


def test_the_sources_of_a_recorded_run_are_told(tmp_path: Path) -> None:
    recorded = row()
    recorded["extra_info"]["sources"] = "b62d27e882cd01"
    path = write_ledger(tmp_path / "l.jsonl", cell())

    page = told([path], [write_run(tmp_path / "run.json", recorded, device_name="H200")])

    assert "run.json: 1 row, environment 2 (H200, torch 2.11.0+cu130), kernel sources b62d27e882cd" in page.texts["p"]


def test_no_timing_is_said(tmp_path: Path) -> None:
    assert "No timing was recorded." in told([write_ledger(tmp_path / "l.jsonl", cell())]).texts["p"]


def test_several_devices_stand_side_by_side_and_a_slower_kernel_is_told_first(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l.jsonl", timing(), run="1", device_name="H200")
    slow = timing(ratio={"value": 1.5, "low": 1.4, "high": 1.6})
    write_ledger(path, slow, run="2", device_name="B200")

    page = told([path])

    labels = ["environment 1 (H200, torch 2.11.0+cu130)", "environment 2 (B200, torch 2.11.0+cu130)"]
    assert [
        ["kernel", *labels],
        ["modulate[2x8-bfloat16]", "5.00× (4.76 to 5.26)", "0.67× (0.62 to 0.71)"],
    ] == page.tables["Speed-up of each kernel over its reference, by environment"]
    assert f"modulate[2x8-bfloat16] is slower than its reference: 2, {labels[1]}" == page.texts["h3"][0]
    assert "1.5000 (1.4000 to 1.6000) of eager" == page.texts["pre"][0]
    assert "1 of 2 timed kernels slower than the reference; 2 environments" in page.texts["p"]
