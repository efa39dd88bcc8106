"""A run is judged as a whole: kernels that had to launch, and tests that had to report."""

from __future__ import annotations

from fusiongate.plugin.judgement import shortened, unlaunched, unreported

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
