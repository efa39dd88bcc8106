"""The functions that a class computes with, their chains, and the module-level functions that they call."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from .chains import Findings, find_chains
from .links import Chain
from .sources import FunctionSource, NoSource, innermost, source_of

__all__ = ["Body", "bodies_of", "body_of"]

_DEPTH = 3
"""How many calls of module-level functions are followed."""


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One function with at least one chain, in itself or in a module-level function that it calls."""

    name: str
    """The attribute of the class that it is reached by, or its own name."""
    source: FunctionSource
    """The function and its tree."""
    findings: Findings
    """Its chains."""
    helpers: dict[str, Body]
    """The functions with chains that it calls, by the global names it calls them by."""
    obstacle: str | None
    """Why no gate can be put into it, ``None`` where one can."""

    def chains(self) -> Iterator[tuple[Body, Chain]]:
        """The chains of the function, then those of its helpers, each with the function it stands in."""
        for chain in self.findings.chains:
            yield self, chain
        for helper in self.helpers.values():
            yield from helper.chains()

    @property
    def where(self) -> str:
        """The function's qualified name."""
        return self.source.function.__qualname__


def bodies_of(cls: type) -> list[Body]:
    """The functions of a class that hold chains, in the order of definition; an inherited one comes after its own."""
    found: list[Body] = []
    overridden: dict[str, bool] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object) or base.__module__.partition(".")[0] == "torch":
            continue
        for name, attribute in vars(base).items():
            # Constructors and the like compute nothing that is ever repeated.
            if name.startswith("__") and name != "__call__":
                continue
            obstacle, plain = None, attribute
            if isinstance(attribute, staticmethod | classmethod):
                obstacle, plain = "it is no method of the instance", attribute.__func__
            function = innermost(plain)
            if name in overridden:
                obstacle = f"{base.__name__}.{name} is overridden, and only called through super()"
            body = body_of(function, name, obstacle) if function is not None else None
            # An overridden function that nobody calls is no part of the class.
            if body is not None and overridden.get(name, True):
                found.append(body)
            overridden[name] = overridden.get(name, True) and function is not None and _calls_super(function, name)
    return found


def _calls_super(function: FunctionType, name: str) -> bool:
    """Whether a method hands over to the one that it overrides; where its source is hidden, it may."""
    try:
        source, _ = _analysed(function)
    except NoSource:
        return True
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(source.node)
    )


def body_of(function: FunctionType, name: str, obstacle: str | None = None, depth: int = _DEPTH) -> Body | None:
    """A function with its chains and those of its helpers; ``None`` where there are none or no source."""
    try:
        source, findings = _analysed(function)
    except NoSource:
        return None
    helpers: dict[str, Body] = {}
    if depth > 0:
        for called in _called_globals(source, findings):
            value = function.__globals__.get(called)
            if isinstance(value, FunctionType) and value is not function and not value.__module__.startswith("torch."):
                inner = innermost(value)
                helper = body_of(inner, called, _decorated(value, inner), depth - 1) if inner is not None else None
                if helper is not None:
                    helpers[called] = helper
    if not findings.chains and not helpers:
        return None
    return Body(name, source, findings, helpers, obstacle)


def _decorated(value: FunctionType, inner: FunctionType | None) -> str | None:
    return None if value is inner else "it is a decorated function outside of the class"


@functools.lru_cache(maxsize=4096)
def _analysed(function: FunctionType) -> tuple[FunctionSource, Findings]:
    source = source_of(function)
    return source, find_chains(source.node)


def _called_globals(source: FunctionSource, findings: Findings) -> list[str]:
    """The global names that a function calls."""
    names = {
        node.func.id for node in ast.walk(source.node) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return sorted(names - findings.flow.local)
