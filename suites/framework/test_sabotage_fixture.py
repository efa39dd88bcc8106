"""The fixture ``saboteur`` in a project with an op of its own, the table at the end of the run, and bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact
from fusiongate.comparison.verdicts import Verdict
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.verification import FirstSight
from fusiongate.kernels import modulate
from fusiongate.report.sabotage import page
from fusiongate.sabotage import (
    COMPILED,
    GENERIC,
    SABOTEURS,
    Detector,
    Outcome,
    Saboteur,
    Stage,
    looked_at,
    saboteur,
    summary,
    table,
)
from fusiongate.sabotage.saboteurs import declared

from .projects import Project

CHECKOUT = Path(__file__).parents[2]

OPS = """
import torch
from fusiongate.gate.fusion import Fusion

def reference(residual, update, gate):
    return residual + update * gate

residual_gate = Fusion("residual_gate", reference=reference, fused=reference)

def operands():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 65, 256), (2, 65, 256), (2, 1, 256))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
"""

CHECKED = """
from ops import operands, residual_gate

def test_wrong_kernels_are_refused(saboteur):
    saboteur.check(residual_gate, *operands())
"""


def prepare(project: Project, tests: str) -> None:
    project.write("ops.py", OPS)
    project.write("test_ops.py", tests)


def test_generic_saboteurs_work_on_a_projects_own_fusion(project: Project) -> None:
    """Those that have nothing to get wrong on its operands, or show later, are not run, by name."""
    prepare(project, CHECKED)
    result = project.run("-rs", "--fusiongate-device=host")
    counts = result.parseoutcomes()
    assert set(counts) == {"passed", "skipped"}
    assert len(GENERIC) == sum(counts.values())
    assert counts["passed"] >= 20
    result.stdout.fnmatch_lines(["*not run: another-epsilon: these arguments give it nothing to get wrong*"])


def test_a_test_may_choose_its_saboteurs(project: Project) -> None:
    chosen = '@pytest.mark.parametrize("saboteur", ["last-bit-off", "tail-unwritten"], indirect=True)\ndef'
    prepare(project, "import pytest\n" + CHECKED.replace("def", chosen))
    project.run("--fusiongate-device=host").assert_outcomes(passed=2)


def test_a_saboteur_that_nobody_knows_is_one_line(project: Project) -> None:
    chosen = '@pytest.mark.parametrize("saboteur", ["nobody"], indirect=True)\ndef'
    prepare(project, "import pytest\n" + CHECKED.replace("def", chosen))
    result = project.run("--fusiongate-device=host")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["no saboteur is called 'nobody'; there are scale-unrounded, *"])


def test_a_gate_that_verifies_anything_fails_the_test(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    credulous = lambda self, expected: Verdict(True, "equal", Exact(), expected[0].numel())
    monkeypatch.setattr(FirstSight, "verdict", credulous)
    prepare(project, CHECKED)
    result = project.run("--fusiongate-device=host", "-k", "last-bit-off")
    result.assert_outcomes(failed=1, deselected=len(GENERIC) - 1)
    result.stdout.fnmatch_lines(["*last-bit-off was verified: the last bit of the last element is wrong*"])


NOTED = """
import pytest

@pytest.mark.parametrize("saboteur", ["last-bit-off", "another-stream"], indirect=True)
def test_noted(saboteur):
    for detector in saboteur.saboteur.detectors:
        saboteur.note(detector, {outcome!r})

def test_something_else():
    pass
"""


@pytest.mark.parametrize(
    "outcome, last, workers",
    [("caught", "caught 1/1", "0"), ("MISSED", "caught 0/1", "0"), ("caught", "caught 1/1", "2")],
)
def test_the_run_ends_with_the_table(project: Project, outcome: str, last: str, workers: str) -> None:
    project.write("test_noted.py", NOTED.format(outcome=outcome))
    result = project.run("--fusiongate-device=host", "-n", workers)
    lines = [line for line in result.outlines if line]
    assert last == lines[-1]
    assert any(line.split()[:3] == ["last-bit-off", "generic", outcome] for line in lines)
    assert "not run: another-stream: needs a GPU" in lines


def test_beside_other_tests_the_run_ends_as_ever(project: Project) -> None:
    project.write("test_noted.py", NOTED.format(outcome="caught"))
    project.write("test_other.py", "def test_other():\n    pass\n")
    lines = [line for line in project.run("--fusiongate-device=host").outlines if line]
    assert "caught 1/1" in lines
    assert "passed" in lines[-1]


@pytest.mark.parametrize("field", ["probe", "signature", "witness"])
def test_a_detector_looks_at_the_whole_fusion(field: str) -> None:
    """A fusion that a detector rebuilt by hand would be looked at without its probe, its signature or its witness."""
    asked: list[str] = []

    def noted(*args: Any) -> Any:
        asked.append(field)
        return {"probe": args, "signature": "any", "witness": args[0].sum(-1)}[field]

    def spoil(fusion: Fusion) -> Fusion:
        changed: dict[str, Any] = {field: (lambda *args: args[0].sum(-1), noted) if field == "witness" else noted}
        return Fusion.of(dataclasses.replace(fusion.spec, **changed))

    stage = Stage.of(Saboteur("notes", "generic", "it only notes", spoil, {}), torch.device("cpu"))
    assert not looked_at(stage, Detector.RECHECK)[0]
    assert asked


def test_what_is_declared_and_was_not_looked_at_counts_as_missed() -> None:
    one = saboteur("last-bit-off")
    assert ({}, 0, 1) == summary([one], {})
    assert ({}, 0, 1) == summary([one], {(one.name, Detector.MATRIX): Outcome.CAUGHT})
    assert ({}, 1, 1) == summary([one], dict.fromkeys(((one.name, d) for d in one.detectors), Outcome.CAUGHT))
    assert "MISSED" in list(table([one], {}))[-1]


def test_the_page_is_the_registrys() -> None:
    written = (CHECKOUT / "docs" / "sabotage.md").read_text(encoding="utf-8")
    assert page() == written, "run python -m fusiongate.report.sabotage docs/sabotage.md"


def test_every_saboteur_declares_somebody() -> None:
    assert [] == [one.name for one in SABOTEURS if not one.detectors]


def test_a_compiled_saboteur_needs_a_source_of_ours() -> None:
    foreign = Fusion("mine", reference=lambda x: x + 1, fused=lambda x: x + 1)
    with pytest.raises(UsageError, match=r"^mine is not built from fusiongate's sources.*: take a generic saboteur$"):
        COMPILED[0].apply(foreign)


def test_a_detector_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="'eyes' is no detector: expected first-sight"):
        declared("words", eyes="words")


def test_the_host_build_of_a_spoilt_kernel_is_as_wrong() -> None:
    spoilt = saboteur("last-bit-off").apply(modulate)
    assert spoilt.host is not None
    assert ("modulate+last-bit-off", "modulate.host+last-bit-off") == (spoilt.name, spoilt.host.name)


def test_the_fusion_that_is_spoilt_stays_as_it_was() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = Fusion("doubled", reference=doubled, fused=doubled)
    spoilt = saboteur("last-bit-off").apply(op)
    x = torch.ones(2, 4)
    assert not spoilt.verify(x).ok
    assert op.fused is doubled
    assert [] == op.gate.events


def test_a_saboteur_that_nothing_parametrises_is_one_line(project: Project) -> None:
    prepare(project, "def test_late(request):\n    request.getfixturevalue('saboteur')\n")
    result = project.run("--fusiongate-device=host")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["saboteur has no name here: ask for it in a test, not in another fixture"])
