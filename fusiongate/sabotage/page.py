"""The page about saboteurs, from the registry: ``python -m fusiongate.sabotage.page docs/sabotage.md`` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from fusiongate.errors import UsageError
from fusiongate.io import write_text

from .registry import SABOTEURS
from .saboteurs import Detector
from .tables import markdown

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
    detectors = "\n".join(f"- **{name}**: {what}." for name, what in _DETECTORS.items())
    return f"""<!-- Made by `python -m fusiongate.sabotage.page docs/sabotage.md`; a test holds it to the registry. -->

# Saboteurs

A regression suite is worth what it catches. A saboteur is a kernel that is wrong on purpose; each declares who has to
catch it, and `nox -s sabotage` shows that all of them do: on the host builds, or on a GPU where there is one. The last
line reads `caught N/N`. What this machine cannot run is listed as *not run*, by name. The same run checks the other
side: the right kernels pass in the same cells.

Compiled saboteurs are variants of the shipped sources (`kernels/common/faults.cuh`), one fault a build. Generic ones
wrap the kernel of any fusion, so they work on yours:

```python
def test_the_gate_refuses_wrong_kernels(saboteur):
    saboteur.check(my_fusion, *arguments)
```

The test runs once for each generic saboteur. One that gives these arguments' right result is skipped as *not run*;
`@pytest.mark.parametrize("saboteur", ["nan-over-the-row"], indirect=True)` chooses some, and
`saboteur.apply(my_fusion)` gives the spoilt fusion itself.

## Who catches them

{detectors}

## All of them

{markdown(SABOTEURS)}
"""


def _write(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("expected one argument, the file to write: docs/sabotage.md")
    write_text(Path(arguments[0]), page())


if __name__ == "__main__":
    try:
        _write(sys.argv[1:])
    except (UsageError, OSError) as error:
        sys.exit(f"fusiongate.sabotage.page: {error}")
