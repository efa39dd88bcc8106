"""Observations ride on reports as text, and take their environment along once."""

from __future__ import annotations

import pytest

from .observing import cell, prepare
from .projects import Project


def test_the_environment_is_that_of_the_selected_device(project: Project) -> None:
    prepare(project, one=f"observe(**{cell()})")
    project.run("--fusiongate-device=host")
    (environment,) = project.ledger.environments.values()
    assert environment["platform"].startswith("cpu-")


def test_an_observation_in_another_environment_brings_it_along(project: Project) -> None:
    """As one that was made on a single thread."""
    prepare(
        project,
        """
import dataclasses
from fusiongate.platforms import environment
from fusiongate.plugin.rows import record

def test_two(request):
    here = environment("cpu")
    record(request.node, "digest", "first", {})
    record(request.node, "digest", "second", {}, dataclasses.replace(here, threads=here.threads + 1))
    record(request.node, "digest", "third", {})
""",
    )
    project.run("--fusiongate-device=host").assert_outcomes(passed=1)
    first, second, third = project.rows("digest")
    threads = {key: environment["threads"] for key, environment in project.ledger.environments.items()}
    assert first.environment == third.environment
    assert threads[second.environment] == threads[first.environment] + 1


@pytest.mark.parametrize("value", ["float('nan')", "object()"])
def test_what_json_has_no_form_for_fails_the_test_that_observed_it(project: Project, value: str) -> None:
    prepare(project, one=f"observe(subject='modulate', seconds={value})")
    project.run().assert_outcomes(failed=1)
