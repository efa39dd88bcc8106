"""A table of a package's models: their sites, where a kernel would be mounted, and what is in the way elsewhere.

Also the list by which sites are proven, as a page: ``python -m fusiongate.report.scans docs/pure-expressions.md``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from fusiongate.comparison.contracts import Exact
from fusiongate.io import counted, one_line
from fusiongate.kernels import FUSIONS
from fusiongate.scanning import Scan, scan
from fusiongate.scanning.patterns import KINDS
from fusiongate.scanning.purity import ATTRIBUTES, FUNCTIONS, METHODS, NODES, PLAIN, STATEMENTS

from .text import write_page

__all__ = ["ScannedModel", "page", "scan_package", "table"]

_SHIPPED = frozenset(op.name for op in FUSIONS if isinstance(op.contract, Exact))
_UNBUILT = "not built: its constructor has to be given arguments"


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """One class of models."""

    name: str
    """The class."""
    sites: int
    """The chains in it, those of a layer as often as it has that layer."""
    mounted: int
    """Those at which an exact kernel would be mounted."""
    saved: int
    """The kernel launches that they save in one forward, if each is reached once."""
    obstacles: Mapping[str, tuple[str, ...]]
    """What is in the way of the others, each with the places: file and line."""
    note: str | None = None
    """What the figures do not cover."""


def scan_package(package: ModuleType) -> Iterator[ScannedModel | str]:
    """Scan every model of a package, and say of each module that cannot be imported why.

    A class whose constructor needs no argument is built, with its own default configuration and without memory for its
    weights, so that layers are counted and norms are known. Of the others the classes' own sources are scanned, unless
    a model that was built has them.
    """
    kinds: dict[type[nn.Module], None] = {}
    for name in [package.__name__, *_modules(package)]:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:
            # Importing runs what somebody else wrote, and that may end in any way.
            yield f"{name}: it cannot be imported: {one_line(f'{type(error).__name__}: {error}')}"
            continue
        found = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module))
        kinds.update(dict.fromkeys(kind for kind in found if kind.__module__ == name))
    seen: set[tuple[str, int]] = set()
    unbuilt: list[type[nn.Module]] = []
    for kind in kinds:
        model = _built(kind)
        if model is None:
            unbuilt.append(kind)
            continue
        row, places = _row(kind.__name__, scan(model), None)
        seen |= places
        if row.sites:
            yield row
    for kind in unbuilt:
        row, places = _row(kind.__name__, scan(kind), _UNBUILT)
        if places - seen:
            seen |= places
            yield row


def _modules(package: ModuleType) -> list[str]:
    paths = getattr(package, "__path__", None)
    if paths is None:
        return []
    return [module.name for module in pkgutil.walk_packages(paths, f"{package.__name__}.", onerror=lambda _: None)]


def _built(kind: type[nn.Module]) -> nn.Module | None:
    parameters = inspect.signature(kind).parameters.values()
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    try:
        with torch.device("meta"):
            return kind()
    except Exception:  # whatever a constructor that needs arguments all the same says
        return None


def _row(name: str, found: Scan, note: str | None) -> tuple[ScannedModel, set[tuple[str, int]]]:
    sites = mounted = saved = 0
    obstacles: dict[str, dict[str, None]] = defaultdict(dict)
    for site in found:
        layers = max(1, len(site.modules))
        sites += layers
        kind = site.kind if site.kind in _SHIPPED else site.kind.rpartition("norm_")[2]
        reason = site.reason
        if reason is None and kind not in _SHIPPED:
            reason = f"no kernel of the kind {kind} is shipped"
        if reason is None:
            mounted += layers
            saved += layers * (KINDS[kind] - 1)
        else:
            obstacles[re.sub(r"^line \d+: ", "", reason)][f"{site.file.name}:{site.line}"] = None
    told = {reason: tuple(places) for reason, places in obstacles.items()}
    return ScannedModel(name, sites, mounted, saved, told, note), {(str(s.file), s.line) for s in found}


def table(models: Sequence[ScannedModel]) -> Iterator[str]:
    """The lines of a table of models, beneath each what is in the way."""
    width = max(len(model.name) for model in models)
    yield f"{'model':{width}}  {'sites':>6}  {'mounted':>7}  launches saved"
    for model in models:
        yield f"{model.name:{width}}  {model.sites:6}  {model.mounted:7}  {model.saved:14}"
        for reason, places in model.obstacles.items():
            yield f"    {reason}: {', '.join(places)}"
        if model.note is not None:
            yield f"    {model.note}"
    sites, mounted, saved = (sum(getattr(m, name) for m in models) for name in ("sites", "mounted", "saved"))
    yield f"{counted(len(models), 'model'):{width}}  {sites:6}  {mounted:7}  {saved:14}"


def page() -> str:
    """The published list of pure expressions, in Markdown."""

    def listed(names: Iterable[str]) -> str:
        return textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)), 118, break_long_words=False)

    def examples(several: Mapping[str, str]) -> str:
        return "\n".join(f"- {what}" + (f": {example}" if example else "") for what, example in several.items())

    types = [kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}" for kind in PLAIN]
    sections = {
        "Expressions": examples(NODES),
        "Statements between a chain's definitions": examples(STATEMENTS),
        "Types of plain values": f"{listed(types)};\ntuples, lists and dicts of them, and none of their subclasses.",
        "Attributes": listed(ATTRIBUTES),
        "Methods": listed(METHODS),
        "Functions": f"{listed(FUNCTIONS)};\ncalled without `out=` and `inplace=`.",
    }
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    return f"{_INTRODUCTION}\n{body}\n"


_INTRODUCTION = """# Pure expressions

<!-- Written by `python -m fusiongate.report.scans docs/pure-expressions.md`. -->

[Rewiring](rewire.md) moves the arithmetic of a chain to its last operation. Between its first operand and that may
stand what is on this list, and nothing else: evaluating it writes to nothing, and nobody can tell when the arithmetic
around it runs. A spelling is as good as the values in it: a rewired function looks at them at every call, and runs as
it was written where one is not plain, or where a function, a method or a layer is not proven by the same list.
"""

if __name__ == "__main__":
    sys.exit(write_page(page, "fusiongate.report.scans", "docs/pure-expressions.md"))
