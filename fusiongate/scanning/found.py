"""Scanning: the adaLN sites of a model, a class or a Python module, without running anything."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, overload

from torch import nn

from fusiongate.errors import UsageError
from fusiongate.io import counted

from .bodies import Body, bodies_of, body_of
from .links import Chain
from .norms import FoldableNorm, recognise

__all__ = ["FoundSite", "Scan", "norm_in", "scan"]


@dataclass(frozen=True, slots=True)
class FoundSite:
    """One adaLN chain in somebody's source."""

    file: Path
    """The source file."""
    line: int
    """The line on which the chain's last operation begins."""
    function: str
    """The qualified name of the function that it stands in."""
    expression: str
    """The chain as the source has it, on one line."""
    kind: str
    """The kernel that fits, as ``rewired`` lists them; or ``scale``, for which there is none."""
    norm: str | None
    """The norm whose result is modulated, as the source calls it: ``self.norm1``; ``None`` without one."""
    norm_note: str | None
    """Why the norm is not folded in; ``None`` where it is, or where there is none."""
    reason: str | None
    """Why no gate can stand here; ``None`` where one can."""
    modules: tuple[str, ...]
    """The modules of the scanned model that run it, by their paths; empty when no model was scanned."""

    def __str__(self) -> str:
        lines = [f"{self.file.name}:{self.line}  {self.function}  {self.kind}"]
        lines.append(f"    {self.expression}")
        if self.norm is not None:
            lines.append(f"    after {self.norm}" + (f", not folded in: {self.norm_note}" if self.norm_note else ""))
        if self.modules:
            more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
            lines.append(f"    in {self.modules[0]}{more}")
        if self.reason is not None:
            lines.append(f"    cannot be mounted: {self.reason}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Scan(Sequence[FoundSite]):
    """What a scan found, in the order of files and lines."""

    sites: tuple[FoundSite, ...]
    """The sites."""

    @overload
    def __getitem__(self, index: int) -> FoundSite: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FoundSite]: ...
    def __getitem__(self, index: int | slice) -> FoundSite | Sequence[FoundSite]:
        """The site at an index."""
        return self.sites[index]

    def to_json(self) -> str:
        """The sites as a JSON array of objects."""
        return json.dumps([_to_json(site) for site in self.sites], indent=2, ensure_ascii=False)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        mountable = sum(site.reason is None for site in self.sites)
        lines = [f"{counted(len(self.sites), 'site')}; a gate can stand at {mountable}"]
        return "\n".join([*lines, *map(str, self.sites)])


def _to_json(site: FoundSite) -> dict[str, Any]:
    fields = {name: getattr(site, name) for name in FoundSite.__slots__}
    return {**fields, "file": str(site.file), "modules": list(site.modules)}


def scan(obj: nn.Module | type | ModuleType | Callable[..., Any]) -> Scan:
    """Find the adaLN chains ``a * (1 + b) + c`` in somebody else's source.

    Parameters
    ----------
    obj
        A model: the classes of all its modules are searched, shared layers among them, and norms are told by what they
        are. A class, a function or a Python module: what is defined in it; norms are told by their names.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    found: dict[tuple[Any, ...], FoundSite] = {}
    for site in _sites(obj):
        key = (site.file, site.line, site.expression, site.kind, site.norm_note, site.reason)
        known = found.get(key)
        modules = (*(known.modules if known else ()), *site.modules)
        found[key] = _with_modules(site, modules)
    return Scan(tuple(sorted(found.values(), key=lambda site: (str(site.file), site.line))))


def _with_modules(site: FoundSite, modules: tuple[str, ...]) -> FoundSite:
    fields = {name: getattr(site, name) for name in FoundSite.__slots__}
    return FoundSite(**{**fields, "modules": modules})


def _sites(obj: object) -> Iterator[FoundSite]:
    if isinstance(obj, nn.Module):
        for path, module in obj.named_modules():
            for body in bodies_of(type(module)):
                for holder, chain in body.chains():
                    yield describe(body, holder, chain, module, path)
    elif isinstance(obj, type):
        for body in bodies_of(obj):
            yield from (describe(body, holder, chain) for holder, chain in body.chains())
    elif isinstance(obj, ModuleType):
        for value in vars(obj).values():
            if isinstance(value, type | FunctionType) and value.__module__ == obj.__name__:
                yield from _sites(value)
    elif isinstance(obj, FunctionType):
        own = body_of(obj, obj.__name__)
        if own is not None:
            yield from (describe(own, holder, chain) for holder, chain in own.chains())
    else:
        raise UsageError(f"scan({obj!r}): expected an nn.Module, a class, a function or a Python module")


def describe(body: Body, holder: Body, chain: Chain, module: nn.Module | None = None, path: str = "") -> FoundSite:
    """A chain as it is reported; ``module`` is the one that runs it, ``path`` its place in the model."""
    norm, kind = chain.norm, chain.kind
    note = norm.obstacle if norm is not None else None
    if norm is not None and chain.kind == "modulate" and chain.reason is None:
        known = norm_in(module, chain)
        if isinstance(known, FoldableNorm):
            kind = known.kind
        else:
            note = known
    elif norm is not None and chain.kind != "modulate":
        note = f"no kernel folds a norm into {chain.kind}"
    return FoundSite(
        file=holder.source.file,
        line=chain.line,
        function=holder.where,
        expression=ast.unparse(chain.root),
        kind=kind,
        norm=norm.text if norm is not None else None,
        norm_note=note,
        reason=chain.reason or holder.obstacle or body.obstacle,
        modules=() if module is None else (path or type(module).__name__,),
    )


def norm_in(module: nn.Module | None, chain: Chain) -> FoldableNorm | str:
    """The norm that a module's chain can take in, or why it cannot."""
    norm = chain.norm
    assert norm is not None
    if norm.obstacle is not None:
        return norm.obstacle
    if norm.path is None:
        return "it is a function, which may be called with anything"
    if module is None:
        return "which norm it is, only a model can tell"
    found: Any = module
    for name in norm.path:
        found = getattr(found, name, None)
    if not isinstance(found, nn.Module):
        return f"{norm.text} is no module"
    return recognise(found)
