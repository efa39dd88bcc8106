"""The page of every public name, fixture, mark, option and matrix value, from the code that has them.

``python -m fusiongate.report.reference docs/reference.md`` writes it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fusiongate
from fusiongate.matrix.data import DATA
from fusiongate.matrix.devices import DEVICES
from fusiongate.matrix.inputs import ADALN_SIZES, DTYPES, Inputs, Size
from fusiongate.matrix.layouts import layouts_for
from fusiongate.matrix.lifecycles import LIFECYCLES
from fusiongate.matrix.modes import MODES
from fusiongate.plugin import benchmark, cells, device, kernels, options, saboteurs, snapshots
from fusiongate.subjects import ADALN

from .text import templates, write_page

__all__ = ["page"]

_PLUGINS = (cells, device, kernels, snapshots, benchmark, saboteurs)

MARKS = {
    "fusion_matrix": {
        "subject": "a `fusiongate.Fusion` or a `fusiongate.Subject`",
        "inputs": 'argument names, in positional order, to symbolic shapes such as `"B S D"`; to '
        "`fusiongate.operand(…)`, with a dtype, a range, a layout or a value of its own, or `None` in its place; or to "
        "live values: numbers, bools, `None`, and tensors, of which each call gets a copy. Or "
        "`f(size, dtype, device, generator) -> args`, which makes all arguments, on that device and by that generator. "
        "Default: `fusiongate.ADALN`",
        "sizes": "the extents of the symbols; the one with the fewest elements is the base. Default: those of adaLN",
        "must_fuse": "layouts, or beginnings of their names, that have to launch. Default: `row-broadcast` and "
        "`strided-unbind`, or the base where there are no rows",
        "may_decline": "layouts, dtypes and sizes that are documented to be declined although `must_fuse` covers them, "
        "each with its reason",
        "only": "the dtypes, sizes and layouts that the kernel is for: on an axis of which one is named, `must_fuse` "
        "covers those alone, and the first dtype named is the base; elsewhere `declines` decides",
        "pairs": "whether axes are crossed too; `False` leaves each axis alone",
        "checked": "whether a test that never calls `fusion_case.check()` is red, which is the default; `False` where "
        "its own assertions are meant",
    },
    "preset": {"preset": "the preset that the fixture `md5_snapshot` of this test is about"},
}
"""Each mark with its arguments."""

VARIABLES = {
    "FUSIONGATE_DISABLE": "switches all kernels off, for whatever is not empty or 0",
    "FUSIONGATE_CACHE_DIR": "where built kernels are kept, writable by you alone; default: the user's cache folder",
    "FUSIONGATE_TORCH": "what this repository's nox sessions install as torch: a requirement, then options of pip",
}
"""Each environment variable that is read."""


def page() -> str:
    """The page's text."""
    return (
        templates(html=False)
        .get_template("reference.md.j2")
        .render(
            names=[name for name in fusiongate.__all__ if name != "kernels"],  # those are the contracts' page
            fixtures=list(_fixtures()),
            marks=MARKS,
            options=[(name, kind, metavar, text) for name, kind, metavar, text in options.SETTINGS],
            layouts=[layout.name for layout in layouts_for(Inputs.of(ADALN))],
            dtypes=[(plan.name, _dtypes(plan)) for plan in DTYPES.values()],
            sizes=[Size.of(extents).name for extents in ADALN_SIZES],
            devices=list(DEVICES),
            modes=[(mode.name, mode.forced.reason if mode.forced else None, mode.needs_gpu) for mode in MODES.values()],
            data=[(kind.name, _first_line(kind.draw)) for kind in DATA.values()],
            lifecycles=[(one.name, *map(str, (*one.first, *one.later))) for one in LIFECYCLES.values()],
            variables=VARIABLES,
        )
    )


def _fixtures() -> Iterator[tuple[str, str]]:
    for module in _PLUGINS:
        for name, value in sorted(vars(module).items()):
            if type(value).__name__ == "FixtureFunctionDefinition":
                yield value.name or name, _first_line(inspect.unwrap(value._get_wrapped_function()))


def _dtypes(plan: Any) -> str:
    rows = f"; rows {plan.rows}" if plan.rows else ""
    last = f"; the last operand {plan.last}" if plan.last else ""
    return f"{plan.main}{rows}{last}".replace("torch.", "")


def _first_line(documented: Callable[..., Any]) -> str:
    return (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


if __name__ == "__main__":
    sys.exit(write_page(page, "fusiongate.report.reference", "docs/reference.md"))
