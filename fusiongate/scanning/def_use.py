"""Where a name's value comes from and who else may read it: definitions and uses in one block of a function.

A chain may be put together out of statements only where each of its names has one definition in the same block, and no
other reader. The analysis errs towards more readers, never towards fewer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .sources import FunctionNode

__all__ = ["Definition", "Region", "Uses"]

_LOOKING_EVERYWHERE = frozenset({"dir", "eval", "exec", "locals", "vars"})
_EXCEPTIONS_END_HERE = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """A statement that gives one expression's value to one name."""

    name: str
    """The name."""
    statement: ast.stmt
    """The statement."""
    value: ast.expr
    """The expression."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """What runs from a chain's first definition to the statement that it ends in."""

    statements: tuple[ast.stmt, ...]
    """The statements from the first definition to the last before the reader, in order."""
    branch: ast.If | None
    """The ``if`` in whose body the reader stands, where it does not stand in the first definition's block itself."""
    reader: ast.stmt
    """The statement that the chain ends in."""


class Uses:
    """The statements of one function, and what they do with its names."""

    def __init__(self, function: FunctionNode) -> None:
        self.function = function
        self.parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self.blocks: dict[ast.stmt, Sequence[ast.stmt]] = {}
        for node in ast.walk(function):
            for _, block in ast.iter_fields(node):
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    self.blocks.update(dict.fromkeys(block, block))
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        self.looks_everywhere = any(node.id in _LOOKING_EVERYWHERE for node in names)
        self.shared = set(_shared(function))
        self.local = frozenset({a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}) | {
            name for node in ast.walk(function) for name in _bound(node)
        }

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement that a node stands in."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def holders(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, up to the function."""
        while node is not self.function:
            node = self.parents[node]
            yield node

    def exceptions_end(self, node: ast.AST) -> ast.stmt | None:
        """The ``try`` or ``with`` around a node, in which an exception may end."""
        return next((holder for holder in self.holders(node) if isinstance(holder, _EXCEPTIONS_END_HERE)), None)

    def definition(self, name: ast.Name) -> Definition | None:
        """The assignment that a reading goes back to, if that is one in the same block or before the ``if`` around."""
        statement = self.statement_of(name)
        branched = False
        while True:
            block = self.blocks[statement]
            for earlier in reversed(block[: block.index(statement)]):
                binders = [node for node in ast.walk(earlier) if name.id in _bound(node)]
                if binders:
                    match earlier:
                        case (
                            ast.Assign(targets=[ast.Name(id=name.id) as target], value=value)
                            | ast.AnnAssign(target=ast.Name(id=name.id) as target, value=ast.expr() as value)
                        ) if binders == [target]:
                            return Definition(name.id, earlier, value)
                    return None
            holder = self.parents[statement]
            if branched or not isinstance(holder, ast.If) or block is not holder.body:
                return None
            statement, branched = holder, True

    def region(self, definitions: Sequence[Definition], reader: ast.stmt) -> Region | None:
        """What runs from the first definition to a reader; ``None`` if not in one block and one ``if``."""
        block = self.blocks[definitions[0].statement]
        inner: Sequence[ast.stmt] = self.blocks[reader]
        branch, end = None, reader
        if inner is not block:
            holder = self.parents[reader]
            if not isinstance(holder, ast.If) or inner is not holder.body or self.blocks[holder] is not block:
                return None
            branch, end = holder, holder
        run = list(block[block.index(definitions[0].statement) : block.index(end)])
        if branch is not None:
            run += inner[: inner.index(reader)]
        if not all(definition.statement in run for definition in definitions):
            return None
        return Region(tuple(run), branch, reader)

    def other_reader(self, definition: Definition, own: Sequence[ast.AST]) -> ast.AST | None:
        """Whoever may read a definition's value apart from a chain's own nodes, the first of which reads it."""
        if self.looks_everywhere or definition.name in self.shared:
            return self.function
        reader = self.statement_of(own[0])
        region = self.region([definition], reader)
        assert region is not None
        parts: list[ast.AST] = [*region.statements[1:], reader]
        if region.branch is not None:
            parts.append(region.branch.test)
        for part in parts:
            for node in ast.walk(part):
                if _reads(node, definition.name) and node not in own:
                    return node
        return self.read_later(reader, definition.name)

    def read_later(self, statement: ast.stmt, name: str) -> ast.AST | None:
        """Whoever may read, once a statement is over, the value that a name had before it."""
        if isinstance(statement, ast.Return) or _replaces(statement, name):
            return None
        while True:
            block = self.blocks[statement]
            position = block.index(statement)
            found, over = _first_reader(block[position + 1 :], name)
            if over:
                return found
            holder = self.parents[statement]
            if isinstance(holder, ast.For | ast.AsyncFor | ast.While):
                again = [*([holder.test] if isinstance(holder, ast.While) else []), *block[: position + 1]]
                found, _ = _first_reader(again, name)
                found = found or _first_reader(holder.orelse, name)[0]
                if found is not None:
                    return found
            if holder is self.function:
                return None
            statement = self.statement_of(holder)


def _first_reader(nodes: Sequence[ast.AST], name: str) -> tuple[ast.AST | None, bool]:
    """Who reads a name first in a row of statements; and whether nothing after them can read its old value."""
    jumps = False
    for node in nodes:
        for inner in ast.walk(node):
            if _reads(inner, name):
                return inner, True
            jumps = jumps or isinstance(inner, ast.Break | ast.Continue)
        # A jump out of the row leads past whatever replaces the value in it.
        if not jumps and (isinstance(node, ast.Return | ast.Raise) or _replaces(node, name)):
            return None, True
    return None, False


def _reads(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)) or (
        isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name
    )


def _replaces(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=other)]):
            return name == other
    return False


def _bound(node: ast.AST) -> set[str]:
    """The names that a node binds or unbinds by itself."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return {name}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.alias(name=name, asname=other):
            return {(other or name).partition(".")[0]}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.MatchMapping(rest=str(name)):
            return {name}
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return set(names)
    return set()


def _shared(function: FunctionNode) -> Iterator[str]:
    """The names that somebody else than the function's own statements may read or bind."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif node is not function and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.GeneratorExp
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name):
                    yield inner.id
