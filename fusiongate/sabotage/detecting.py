"""Detectors: each looks at one saboteur and gives back what it says of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusiongate import certificates
from fusiongate.comparison.digests import md5
from fusiongate.errors import TimingError
from fusiongate.gate.device_state import wait_for
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.global_state import kept_settings
from fusiongate.gate.policies import Every, Policy
from fusiongate.gate.states import State
from fusiongate.kernels import FUSIONS
from fusiongate.matrix import ADALN, Cell, CellFailure, Matrix, PreparedCell, Selected
from fusiongate.timing.intervals import Outcome
from fusiongate.timing.measuring import measure
from fusiongate.timing.pairing import Settings
from fusiongate.timing.stopwatches import Arm

from .saboteurs import Detector, Saboteur

__all__ = ["Catch", "Stage", "caught", "looked_at"]

_STEPS = 64
"""Calls that a recheck and a snapshot follow: past the launch from which the late saboteurs are wrong."""
_SAMPLED = 16
"""Values of x in a sampled certificate, each against all values of the other operand."""
_SAMPLED_ROWS = 1 << 15
_CHILD_TIMEOUT_S = 180.0


_CHILD = """
import sys
import torch
from fusiongate.sabotage import Stage, saboteur
stage = Stage.of(saboteur(sys.argv[1]), torch.device(sys.argv[2]))
stage.fusion()(*stage.arguments())
"""


@dataclass(frozen=True, slots=True)
class Catch:
    """What a detector said of a saboteur."""

    caught: bool
    """Whether it was refused, with the words that it declares."""
    story: str
    """What the detector said."""

    def __bool__(self) -> bool:
        return self.caught


class Stage:
    """A saboteur in the kernel on which it is shown, and the cell in which it shows.

    Parameters
    ----------
    saboteur
        The saboteur; None for the right kernel in its place.
    kernel
        The name of a shipped kernel.
    cell
        The id of a cell of its matrix.
    device
        Where it runs: the CPU takes the host build.
    """

    SIZES = ({"B": 2, "S": 33, "D": 512}, {"B": 2, "S": 131, "D": 132})
    """Whole vectors and odd tails, in both directions."""

    def __init__(self, saboteur: Saboteur | None, kernel: str, cell: str, device: torch.device) -> None:
        self.kernel = kernel
        self.device = device
        fusion = next(fusion for fusion in FUSIONS if fusion.name == kernel)
        if device.type == "cpu":
            assert fusion.host is not None
            fusion = fusion.host
        self._selected = Selected("host") if device.type == "cpu" else Selected("cuda", device.index or 0)
        self._right = fusion
        self.saboteur = saboteur
        self._inputs = dict(ADALN) if kernel.startswith("modulate") else {**ADALN, "eps": 1e-6}
        self.matrix = Matrix(self.fusion(), inputs=self._inputs, sizes=self.SIZES)
        self.cell: Cell = {one.id: one for one in self.matrix.cells()}[cell]

    @classmethod
    def of(cls, saboteur: Saboteur, device: torch.device) -> Stage:
        """The stage that a saboteur asks for."""
        return cls(saboteur, saboteur.kernel, saboteur.cell, device)

    def fusion(self) -> Fusion:
        """The spoilt fusion, with a launcher that has never run."""
        return self._right if self.saboteur is None else self.saboteur.apply(self._right)

    def prepared(self) -> PreparedCell:
        """The cell on a spoilt fusion, ready to be checked."""
        return Matrix(self.fusion(), inputs=self._inputs, sizes=self.SIZES).prepare(self.cell, self._selected)

    def arguments(self) -> tuple[Any, ...]:
        """The operands of the cell's first call."""
        return self.matrix.prepare(self.cell, self._selected).args


def caught(saboteur: Saboteur, detector: Detector, device: torch.device) -> Catch:
    """Let a detector look at a saboteur.

    Parameters
    ----------
    saboteur
        One whose needs this machine meets.
    detector
        One that it declares, or another: then what it says is not held against any words.
    device
        Where the kernels run.
    """
    found, story = looked_at(Stage.of(saboteur, device), detector)
    words = saboteur.detectors.get(detector, "")
    if found and words not in story:
        return Catch(False, f"refused, but without the words {words!r}: {story}")
    return Catch(found, story)


def looked_at(stage: Stage, detector: Detector) -> tuple[bool, str]:
    """Whether a detector refuses what is on the stage, and what it says."""
    # What a detector does not look at is left behind, for the next one to stumble over.
    with kept_settings():
        return _DETECTORS[detector](stage)


def _first_sight(stage: Stage) -> tuple[bool, str]:
    fusion, args = stage.fusion(), stage.arguments()
    verdict = fusion.verify(*args)
    state = fusion.gate.state(fusion.gate.signatures[0])
    return not verdict.ok and state is State.REFUSED, str(verdict)


def _witness(stage: Stage) -> tuple[bool, str]:
    verdict = stage.fusion().verify(*stage.arguments())
    return verdict.reason == "witness", str(verdict)


def _recheck(stage: Stage) -> tuple[bool, str]:
    fusion = Fusion.of(replace(stage.fusion().spec, policy=Policy(recheck=Every(2))))
    args = stage.arguments()
    for _ in range(_STEPS):
        fusion(*args)
        # A recheck reports when the device is done; 64 calls may be under way before the first is.
        wait_for(stage.device)
        if fresh := [event for event in fusion.gate.events if event.kind == "refused"]:
            return True, str(fresh[0])
    return False, "\n".join(map(str, fusion.gate.events))


def _matrix(stage: Stage) -> tuple[bool, str]:
    try:
        result = stage.prepared().check()
    except CellFailure as failure:
        return True, str(failure)
    return False, f"{result.outcome} ({result.reason})"


def _snapshot(stage: Stage) -> tuple[bool, str]:
    """As a preset of many steps: the digests of both arms, step by step."""
    fusion, args = stage.fusion(), stage.arguments()
    for step in range(_STEPS):
        fused, reference = md5(fusion(*args)), md5(fusion.reference(*args))
        if fused != reference:
            return True, f"step {step} differs: fused {fused}, reference {reference}"
    return False, f"{_STEPS} steps are equal"


def _timing(stage: Stage) -> tuple[bool, str]:
    fusion, args = stage.fusion(), stage.arguments()
    fusion(*args)
    arms = (
        Arm("eager", fusion.reference),
        Arm("kernel", fusion, launches=lambda: fusion.launches, contract=fusion.contract),
    )
    try:
        measured = measure(arms, args, settings=Settings(seconds=0.2, precision=None, retries=0))
    except TimingError as error:
        return True, str(error)
    ratio = measured.ratios["kernel"]
    return ratio.outcome is not Outcome.FASTER, f"no faster than the eager chain: {ratio}"


def _certificate(stage: Stage) -> tuple[bool, str]:
    fusion = stage.fusion()
    # Without its gate: what is on trial is the kernel's arithmetic, for all operands.
    sample = _SAMPLED if stage.kernel.startswith("modulate") else _SAMPLED_ROWS
    found = certificates.counterexample(stage.kernel, fusion, stage.device, sample=sample)
    return found is not None, str(found)


def _containment(stage: Stage) -> tuple[bool, str]:
    if stage.saboteur is not None and stage.saboteur.in_own_process:
        return _contained_in_child(stage.saboteur, stage.device)
    device = torch.cuda.current_device()
    fusion, args = stage.fusion(), stage.arguments()
    for _ in range(3):
        fusion(*args)
    now = torch.cuda.current_device()
    return now == device, f"the current device was {device} and is {now} afterwards"


def _contained_in_child(saboteur: Saboteur, device: torch.device) -> tuple[bool, str]:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, saboteur.name, str(device)],
        capture_output=True,
        text=True,
        timeout=_CHILD_TIMEOUT_S,
        check=False,
    )
    return child.returncode == 1 and "PoisonedDevice" in child.stderr, child.stderr.strip()


_DETECTORS: dict[Detector, Callable[[Stage], tuple[bool, str]]] = {
    Detector.FIRST_SIGHT: _first_sight,
    Detector.WITNESS: _witness,
    Detector.RECHECK: _recheck,
    Detector.MATRIX: _matrix,
    Detector.SNAPSHOT: _snapshot,
    Detector.TIMING: _timing,
    Detector.CERTIFICATE: _certificate,
    Detector.CONTAINMENT: _containment,
}
