"""A run is judged as a whole: kernels that had to launch, and tests that had to report."""

from __future__ import annotations

from typing import Any

from fusiongate.plugin.session_checks import ended, shortened, unheld, unlaunched, unreported

from .observing import cell


def test_a_run_with_launches_is_in_order() -> None:
    assert unlaunched([cell(), cell(id="b", outcome="reference", launches=0, must_fuse=False, expected="reference")],
                      require_fused=True) == []  # fmt: skip


def test_a_run_that_was_not_to_launch_is_in_order() -> None:
    """Only cells whose reference path is the expected one, or that this machine cannot run."""
    quiet = [
        cell(outcome="reference", launches=0, must_fuse=False, expected="reference"),
        cell(id="b", outcome="not run", launches=0, expected=None),
    ]
    assert unlaunched(quiet, require_fused=False) == []


def test_no_launch_at_all_is_a_complaint_that_names_the_cells() -> None:
    """A must-fuse cell counts even where a declines has it take the reference."""
    idle = [
        cell(id="a", launches=0),
        cell(id="b", outcome="red", launches=0, expected="reference"),
        cell(id="c", outcome="reference", launches=0, must_fuse=False, expected="reference"),
    ]
    assert unlaunched(idle, require_fused=False) == [
        (
            "no kernel was launched, and 2 cells had to launch one: modulate[a], modulate[b]; "
            "is FUSIONGATE_DISABLE set, or a declines too strict?"
        )
    ]


def test_requiring_fused_paths_names_each_must_fuse_cell_without_a_launch() -> None:
    """One that was not run is among them: whoever requires fused paths has the machine for it."""
    cells = [cell(id="a"), cell(id="b", launches=0), cell(id="c", outcome="not run", launches=0, expected=None)]
    assert unlaunched(cells, require_fused=False) == []
    assert unlaunched(cells, require_fused=True) == [
        "--fusiongate-require-fused: 2 cells must fuse and launched nothing: modulate[b], modulate[c]"
    ]


def test_tests_that_never_reported_are_named() -> None:
    assert unreported({"a", "b"}, {"a", "b"}) == []
    assert unreported({"a", "b", "c"}, {"a"}) == [
        "2 tests were collected and never reported, so nothing is known of them: b, c"
    ]


def test_long_lists_are_shortened_and_counted() -> None:
    assert shortened(["b", "a"], 2) == "a, b"
    assert shortened(["b", "c", "a"], 2) == "a, b, and 1 more"


def test_what_was_recorded_for_want_of_something_to_compare_with_is_a_complaint() -> None:
    table = {"file": "kept/cpu/paths/toy.json"}
    cells: list[dict[str, Any]] = [
        {"not_compared": "no table", "table": table},
        {"not_compared": "no table"},
        {"table": table},
    ]
    assert unheld(cells, ["kept/one.json"]) == [
        (
            "--fusiongate-missing=record: 1 cell had no committed path; candidates are in kept/cpu/paths/toy.json: "
            "review and commit them"
        ),
        (
            "--fusiongate-missing=record: 1 preset had no committed digests; candidates are in kept/one.json: "
            "review and commit them"
        ),
    ]
    assert unheld(cells[1:], []) == []


def test_each_cause_that_ended_a_process_is_told_and_what_was_not_run_is_counted() -> None:
    assert ended(["cuda:0 is gone", "cuda:1 is gone"], []) == [
        "cuda:0 is gone: its process ran no further test",
        "cuda:1 is gone: its process ran no further test",
    ]
    assert ended(["cuda:0 is gone"], ["a", "b"])[1].startswith("2 tests were not run because of that")
    assert ended(["cuda:0 is gone"], ["a"])[1].startswith("1 test was not run because of that")
