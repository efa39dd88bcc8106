"""The functions that a class computes with, their chains, and the module-level functions that they call."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType

from .chains import Chain, find_chains
from .codegen import code_of
from .purity import modules_of
from .sources import FunctionSource, NoSource, functions_of, innermost, source_of

__all__ = ["Body", "bodies_of", "body_of"]

_DEPTH = 3
"""How many calls of module-level functions are followed."""


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One function with at least one chain, in itself or in a module-level function that it calls."""

    source: FunctionSource
    """The function and its tree."""
    chains: tuple[Chain, ...]
    """Its chains."""
    helpers: Mapping[str, Body]
    """The functions with chains that it calls, by the global names it calls them by."""
    number: int | None
    """Its own number; ``None`` where it is no method."""
    code: CodeType
    """The function with gates in it."""
    obstacle: str | None = None
    """Why no gate can be put into it, ``None`` where one can."""

    def all_chains(self) -> Iterator[tuple[Body, Chain, str | None]]:
        """Its chains, then those of its helpers, each with the function it stands in and what is in the way there."""
        for chain in self.chains:
            yield self, chain, chain.reason or self.obstacle
        for helper in self.helpers.values():
            for body, chain, reason in helper.all_chains():
                yield body, chain, reason or self.obstacle


def bodies_of(cls: type) -> Iterator[Body | str]:
    """The functions of a class that hold chains; or, of one that cannot be searched, why not."""
    for _, function, obstacle in functions_of(cls):
        try:
            body = body_of(function, method=obstacle is None)
        except NoSource as error:
            yield f"{function.__qualname__} was not searched: {error}"
            continue
        if body is not None:
            yield body if obstacle is None else replace(body, obstacle=obstacle)


_numbers = iter(range(1 << 62))


@functools.lru_cache(maxsize=4096)
def body_of(function: FunctionType, *, method: bool, depth: int = _DEPTH) -> Body | None:
    """A function with its chains and those of its helpers; ``None`` where there are none.

    Raises
    ------
    NoSource
        Its source cannot be had.
    """
    source = source_of(function)
    arguments = source.node.args
    first = next((argument.arg for argument in (*arguments.posonlyargs, *arguments.args)), None)
    chains = find_chains(source.node, first if method else None, modules_of(function.__globals__))
    helpers = dict(_helpers(function, source, depth)) if depth else {}
    if not chains and not helpers:
        return None
    number = next(_numbers) if method and first is not None else None
    mountable = {place: chain for place, chain in enumerate(chains) if chain.reason is None}
    code, obstacle = function.__code__, None
    try:
        code = code_of(source, mountable, frozenset(helpers), number)
    except SyntaxError as error:
        obstacle = f"it cannot be written with gates in it: {error}"
    if method and first is None:
        obstacle = "it names no parameter for its instance; write `def forward(self, …)`"
    return Body(source, chains, helpers, number, code, obstacle)


def _helpers(function: FunctionType, source: FunctionSource, depth: int) -> Iterator[tuple[str, Body]]:
    """The module-level functions with chains that a function calls."""
    code = function.__code__
    called = {
        node.func.id for node in ast.walk(source.node) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in sorted(called - {*code.co_varnames, *code.co_cellvars, *code.co_freevars}):
        value = function.__globals__.get(name)
        if not isinstance(value, FunctionType) or value is function or value.__module__.startswith("torch."):
            continue
        inner = innermost(value)
        try:
            body = body_of(inner, method=False, depth=depth - 1) if inner is not None else None
        except NoSource:
            continue
        if body is not None:
            decorated = None if value is inner else "it is a decorated function outside of the class; call it plainly"
            yield name, replace(body, obstacle=decorated or body.obstacle)
