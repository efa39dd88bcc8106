"""Scanning: the sites of a model, a class or a Python module, without running anything."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, overload

from torch import nn

from fusiongate.errors import UsageError
from fusiongate.io import counted

from .bodies import Body, bodies_of, body_of
from .chains import Chain, path_of
from .norms import FoldableNorm, recognise
from .patterns import KINDS
from .proofs import unreadable
from .sources import NoSource

__all__ = ["FoundSite", "Scan", "describe", "norm_in", "scan"]


@dataclass(frozen=True, slots=True)
class FoundSite:
    """One chain in somebody's source."""

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
    unsearched: tuple[str, ...] = ()
    """The functions that could not be searched, each with the reason."""

    @overload
    def __getitem__(self, index: int) -> FoundSite: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FoundSite]: ...
    def __getitem__(self, index: int | slice) -> FoundSite | Sequence[FoundSite]:
        """The site at an index."""
        return self.sites[index]

    def to_json(self) -> str:
        """The sites as a JSON array of objects."""
        return json.dumps([{**asdict(s), "file": str(s.file)} for s in self.sites], indent=2)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        mountable = sum(site.reason is None for site in self.sites)
        lines = [f"{counted(len(self.sites), 'site')}; a gate can stand at {mountable}"]
        return "\n".join([*lines, *map(str, self.sites), *self.unsearched])


def scan(obj: nn.Module | type | ModuleType | Callable[..., Any]) -> Scan:
    """Find the chains that kernels repeat in somebody else's source.

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
    found: dict[FoundSite, tuple[str, ...]] = {}
    unsearched: dict[str, None] = {}
    for site in _sites(obj):
        if isinstance(site, str):
            unsearched[site] = None
        else:
            alone = replace(site, modules=())
            found[alone] = (*found.get(alone, ()), *site.modules)
    sites = sorted(found, key=lambda site: (str(site.file), site.line))
    return Scan(tuple(replace(site, modules=found[site]) for site in sites), tuple(unsearched))


def _sites(obj: object) -> Iterator[FoundSite | str]:
    if isinstance(obj, nn.Module):
        for path, module in obj.named_modules():
            yield from _sites_of_class(type(module), module, path)
    elif isinstance(obj, type):
        yield from _sites_of_class(obj)
    elif isinstance(obj, ModuleType):
        for value in vars(obj).values():
            if isinstance(value, type | FunctionType) and value.__module__ == obj.__name__:
                yield from _sites(value)
    elif isinstance(obj, FunctionType):
        try:
            body = body_of(obj, method=False)
        except NoSource as error:
            yield f"{obj.__qualname__} was not searched: {error}"
        else:
            for holder, chain, reason in () if body is None else body.all_chains():
                yield describe(holder, chain, reason)
    else:
        raise UsageError(f"scan({obj!r}): expected an nn.Module, a class, a function or a Python module")


def _sites_of_class(cls: type, module: nn.Module | None = None, path: str = "") -> Iterator[FoundSite | str]:
    for body in bodies_of(cls):
        if isinstance(body, str):
            yield body
        else:
            for holder, chain, reason in body.all_chains():
                yield describe(holder, chain, reason, module, path)


def describe(
    holder: Body, chain: Chain, reason: str | None, module: nn.Module | None = None, path: str = ""
) -> FoundSite:
    """A chain as it is reported; ``module`` is the one that runs it, ``path`` its place in the model."""
    kind, note = chain.kind, None
    if module is not None:
        reason = reason or unreadable(type(module), chain.form.reads if chain.form is not None else frozenset())
    if chain.norm is not None:
        known = norm_in(holder, module, chain)
        if isinstance(known, str):
            note = known
        elif reason is None:
            kind = f"{known.family}_{chain.kind}"
    return FoundSite(
        file=holder.source.file,
        line=chain.root.lineno,
        function=holder.source.function.__qualname__,
        expression=ast.unparse(chain.root),
        kind=kind,
        norm=chain.norm.text if chain.norm is not None else None,
        norm_note=note,
        reason=reason,
        modules=() if module is None else (path or type(module).__name__,),
    )


def norm_in(holder: Body, module: nn.Module | None, chain: Chain) -> FoldableNorm | str:
    """The norm that a module's chain can take in, or why it cannot."""
    norm = chain.norm
    assert norm is not None
    if not any(kind.endswith(f"norm_{chain.kind}") for kind in KINDS):
        return f"no kernel folds a norm into {chain.kind}"
    if norm.form is None:
        return norm.reason or "no gate can stand there"
    if module is None:
        return "which norm it is, only a model can tell"
    arguments = holder.source.node.args
    path = path_of(norm.call.func, next(a.arg for a in (*arguments.posonlyargs, *arguments.args)))
    found: object = module
    for name in path or ():
        found = getattr(found, name, None)
    known = unreadable(type(module), norm.form.reads) or recognise(found)
    if isinstance(known, FoldableNorm) and f"{known.family}_{chain.kind}" not in KINDS:
        return f"no kernel folds a {known.family} into {chain.kind}"
    return known
