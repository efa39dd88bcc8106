"""Saboteurs: kernels that are wrong on purpose, and who has to catch each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from torch import Tensor

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.verification import first_sight_under_way

__all__ = [
    "LATE",
    "SEEN",
    "SOON",
    "Detector",
    "Launcher",
    "Saboteur",
    "Spoil",
    "afterwards",
    "corrupted",
    "declared",
    "generic",
    "later",
    "on_result",
]

Launcher = Callable[..., Any]
Spoil = Callable[[Fusion], Launcher]
"""Gives a wrong launcher in the place of a fusion's."""

SOON = 2
"""The second launch after first sight."""
LATE = 47
"""A launch after first sight that no cell of the matrix gets to."""


class Detector(StrEnum):
    """What can catch a wrong kernel."""

    FIRST_SIGHT = "first-sight"
    """The gate's first comparison refuses the signature."""
    WITNESS = "witness"
    """First sight refuses it because an intermediate differs, where the outputs agree."""
    RECHECK = "recheck"
    """The gate looks again after first sight, and refuses it then."""
    MATRIX = "matrix"
    """A cell of the matrix is red."""
    SNAPSHOT = "snapshot"
    """Over many steps the digests of the fused and of the reference arm differ."""
    TIMING = "timing"
    """A timing is invalid, or shows no gain."""
    CERTIFICATE = "certificate"
    """An exhaustive stage, or here a sample of it, has a counterexample."""
    CONTAINMENT = "containment"
    """What it leaves behind is undone, or ends no process but one that was made for it."""


SEEN = (Detector.FIRST_SIGHT, Detector.MATRIX)
"""Who catches what is wrong from the first launch on."""


@dataclass(frozen=True, slots=True)
class Saboteur:
    """One way for a kernel to be wrong."""

    name: str
    """Words joined by ``-``."""
    kind: Literal["compiled", "generic"]
    """``compiled``: a variant of the shipped sources. ``generic``: a wrapper around the kernel of any fusion."""
    story: str
    """What it does wrong."""
    spoil: Callable[[Fusion], Fusion]
    """Gives a fusion like the one that is handed in, with a wrong kernel and a gate of its own."""
    detectors: Mapping[Detector, str] = field(hash=False)
    """Who has to catch it, each with the words that have to stand in what it then says."""
    kernel: str = "modulate"
    """The shipped kernel on which it is shown."""
    cell: str = "base"
    """The cell of that kernel's matrix in which it shows."""
    gpus: int = 0
    """How many GPUs it takes to be wrong at all."""
    in_own_process: bool = False
    """Whether it leaves a process behind in which nothing more can run."""

    def apply(self, fusion: Fusion) -> Fusion:
        """A fusion like the given one, with a wrong kernel behind a gate of its own; its host build is as wrong.

        Parameters
        ----------
        fusion
            For a generic saboteur, any; for a compiled one, a kernel of fusiongate's or its host build.

        Raises
        ------
        UsageError
            A compiled saboteur got a fusion that is not built from fusiongate's sources.
        """
        host = None if fusion.host is None else self.apply(fusion.host)
        return Fusion.of(replace(self.spoil(fusion).spec, name=f"{fusion.name}+{self.name}", host=host))

    def missing(self, gpus: int) -> str | None:
        """What a machine with so many GPUs lacks for this saboteur; None if nothing."""
        if gpus >= self.gpus:
            return None
        return "needs a GPU" if self.gpus == 1 else f"needs {self.gpus} GPUs"


def corrupted(fusion: Fusion, launcher: Launcher, **changes: Any) -> Fusion:
    """The fusion with another launcher, and whatever else in its spec is to be another, behind a fresh gate."""
    return Fusion.of(replace(fusion.spec, fused=launcher, **changes))


def declared(words: str, *detectors: Detector, **others: str) -> dict[Detector, str]:
    """Declare detectors that all say the same words, and others by name that say words of their own.

    Raises
    ------
    UsageError
        A name is no detector's.
    """
    table = dict.fromkeys(detectors, words)
    for name, text in others.items():
        try:
            table[Detector[name.upper()]] = text
        except KeyError as error:
            raise UsageError(f"{name!r} is no detector: expected {', '.join(Detector)}") from error
    return table


def generic(
    name: str,
    story: str,
    spoil: Spoil,
    detectors: Mapping[Detector, str],
    *,
    kernel: str = "modulate",
    cell: str = "base",
    gpus: int = 0,
    in_own_process: bool = False,
) -> Saboteur:
    """A saboteur that puts another launcher into any fusion; parameters as the fields of `Saboteur`."""
    return Saboteur(
        name,
        "generic",
        story,
        lambda fusion: corrupted(fusion, spoil(fusion)),
        detectors,
        kernel=kernel,
        cell=cell,
        gpus=gpus,
        in_own_process=in_own_process,
    )


def on_result(change: Callable[[Tensor], Any]) -> Spoil:
    """A right result, and something else returned that is made of it."""
    return lambda fusion: lambda *args: change(fusion.fused(*args))


def afterwards(disturb: Callable[[tuple[Any, ...], Tensor], None]) -> Spoil:
    """A right result, and something done on the way out."""

    def spoil(fusion: Fusion) -> Launcher:
        def launch(*args: Any) -> Tensor:
            result: Tensor = fusion.fused(*args)
            disturb(args, result)
            return result

        return launch

    return spoil


def later(number: int, spoil: Spoil) -> Spoil:
    """Wrong from the launch with this number on, counted from 1 after first sight."""

    def from_then_on(fusion: Fusion) -> Launcher:
        wrong = spoil(fusion)
        launches = 0

        def launch(*args: Any) -> Any:
            nonlocal launches
            launches += not first_sight_under_way()
            return wrong(*args) if launches >= number else fusion.fused(*args)

        return launch

    return from_then_on
