"""The page about saboteurs, from the registry: ``python -m fusiongate.report.sabotage docs/sabotage.md`` writes it."""

from __future__ import annotations

import sys

from fusiongate.sabotage.registry import SABOTEURS
from fusiongate.sabotage.saboteurs import Detector

from .text import templates, write_page

__all__ = ["page"]

_DETECTORS = {
    Detector.FIRST_SIGHT: "the gate compares the kernel on probes and on copies of the live operands, and refuses it",
    Detector.WITNESS: "first sight refuses it because an intermediate differs, where the outputs agree by luck",
    Detector.RECHECK: "a gate with `Policy(recheck=…)` looks again after first sight, and refuses it then",
    Detector.MATRIX: "a cell of the matrix is red",
    Detector.SNAPSHOT: "over many steps the digests of the fused and of the reference arm differ",
    Detector.TIMING: "the timing is invalid, or shows no gain",
    Detector.CERTIFICATE: "a stage of `fusiongate certify` has a counterexample",
    Detector.CONTAINMENT: "what it leaves behind is undone, or ends no process but one that was made for it",
}


def page() -> str:
    """The page's text."""
    template = templates(html=False).get_template("sabotage.md.j2")
    return template.render(detectors=_DETECTORS, saboteurs=SABOTEURS)


if __name__ == "__main__":
    sys.exit(write_page(page, "fusiongate.report.sabotage", "docs/sabotage.md"))
