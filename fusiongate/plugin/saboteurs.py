"""The fixture ``saboteur``: a test runs once for each kernel that is wrong on purpose, and a table ends the run.

What a test notes of a saboteur and a detector rides on its report, so that the table is whole under pytest-xdist too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

from fusiongate.errors import UsageError

from .device import select

if TYPE_CHECKING:
    from fusiongate.gate.fusion import Fusion
    from fusiongate.sabotage import Detector, Saboteur

__all__ = ["PlantedSaboteur", "saboteur"]

_FIXTURE: Final = "saboteur"
_PROPERTY: Final = "fusiongate.sabotage"
_OUTCOMES: Final = pytest.StashKey[dict[tuple[str, str], str]]()
_FILES: Final = pytest.StashKey[dict[str, bool]]()
"""Whether a test file noted anything."""


class PlantedSaboteur:
    """One saboteur, for one test.

    Parameters
    ----------
    saboteur
        The saboteur.
    item
        The test.
    """

    def __init__(self, saboteur: Saboteur, item: pytest.Item) -> None:
        self.saboteur = saboteur
        self._item = item

    def __repr__(self) -> str:
        return f"<saboteur {self.name}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self.saboteur.name

    def apply(self, op: Fusion) -> Fusion:
        """A fusion like the given one, with this saboteur for a kernel and a gate of its own."""
        return self.saboteur.apply(op)

    def check(self, op: Fusion, *args: Any) -> None:
        """Assert that first sight refuses this saboteur in ``op``'s place, and that the caller gets the reference's.

        A saboteur that gives these arguments' right result has nothing to be caught with: the test is skipped, as *not
        run*. So is one that shows later than on first sight.
        """
        __tracebackhide__ = True
        from fusiongate.diagnosis.hints import compare
        from fusiongate.gate.global_state import kept_settings
        from fusiongate.sabotage import Detector

        if Detector.FIRST_SIGHT not in self.saboteur.detectors:
            pytest.skip(f"not run: {self.name}: first sight cannot see it ({self.saboteur.story})")
        spoilt = self.apply(op)
        try:
            verdict = spoilt.verify(*args)
        except UsageError as error:
            pytest.skip(f"not run: {self.name}: {error}")
        result = spoilt(*args)
        if verdict.ok:
            with kept_settings():
                harmless = compare(self.apply(op).fused(*args), op.reference(*args), op.contract)
            if harmless.ok:
                pytest.skip(f"not run: {self.name}: these arguments give it nothing to get wrong")
            pytest.fail(f"{self.name} was verified: {self.saboteur.story}\n{harmless}", pytrace=False)
        if not compare(result, op.reference(*args)).ok:
            pytest.fail(f"{self.name} was refused, and its result was returned all the same", pytrace=False)

    def note(self, detector: Detector, outcome: str) -> None:
        """Put what came of a detector into the run's table."""
        note = json.dumps([self.name, str(detector), str(outcome)])
        self._item.user_properties.append((_PROPERTY, note))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``saboteur`` once for each generic one, unless it names its own."""
    marked = any(_FIXTURE in str(marker.args[:1]) for marker in metafunc.definition.iter_markers("parametrize"))
    if _FIXTURE not in metafunc.fixturenames or marked:
        return
    from fusiongate.sabotage import GENERIC

    metafunc.parametrize(_FIXTURE, [one.name for one in GENERIC], indirect=True)


@pytest.fixture
def saboteur(request: pytest.FixtureRequest) -> PlantedSaboteur:
    """A kernel that is wrong on purpose: ``apply(op)`` plants it, ``check(op, *args)`` asserts that it is refused.

    The test runs once for each generic saboteur, or for those that it names itself:
    ``@pytest.mark.parametrize("saboteur", ["nan-over-the-row"], indirect=True)``.
    """
    from fusiongate.sabotage import saboteur as named

    if not hasattr(request, "param"):
        pytest.fail("saboteur has no name here: ask for it in a test, not in another fixture", pytrace=False)
    try:
        chosen = named(request.param)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
    selected = select(request.config)
    if missing := chosen.missing(_gpus() if selected.kind == "cuda" else 0):
        planted = PlantedSaboteur(chosen, request.node)
        for detector in chosen.detectors:
            planted.note(detector, "not run")
        pytest.skip(f"not run: {chosen.name} {missing}")
    return PlantedSaboteur(chosen, request.node)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the table."""
    config.stash[_OUTCOMES] = {}
    config.stash[_FILES] = {}
    config.pluginmanager.register(_Table(config), "fusiongate-sabotage")


class _Table:
    """Collects what the reports bring."""

    def __init__(self, config: pytest.Config) -> None:
        self._outcomes = config.stash[_OUTCOMES]
        self._files = config.stash[_FILES]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            return
        notes = [json.loads(str(value)) for name, value in report.user_properties if name == _PROPERTY]
        for name, detector, outcome in notes:
            self._outcomes[name, detector] = outcome
        file = report.location[0]
        self._files[file] = bool(notes) or self._files.get(file, False)


def _summarised(config: pytest.Config) -> tuple[list[str], str] | None:
    """The table's lines and the last line; None where nothing was noted."""
    outcomes = config.stash.get(_OUTCOMES, {})
    # A project that only checks its gate notes nothing, and what this machine lacks makes no table.
    if all(outcome == "not run" for outcome in outcomes.values()):
        return None
    from fusiongate.sabotage import SABOTEURS, Detector, Outcome, summary, table

    typed: Mapping[tuple[str, Detector], Outcome] = {
        (name, Detector(detector)): Outcome(outcome) for (name, detector), outcome in outcomes.items()
    }
    noted = [one for one in SABOTEURS if any(name == one.name for name, _ in typed)]
    not_run, caught, ran = summary(noted, typed)
    lines = list(table(noted, typed))
    lines += [f"not run: {name}: {reason}" for name, reason in not_run.items()]
    return lines, f"caught {caught}/{ran}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table saboteur × detector."""
    found = _summarised(config)
    if found is None:
        return
    lines, last = found
    terminalreporter.section("sabotage")
    for line in [*lines, last]:
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close with the line that counts, unless other files were run too."""
    found = _summarised(config)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if found is not None and reporter is not None and all(config.stash[_FILES].values()):
        reporter.write_line(found[1])
