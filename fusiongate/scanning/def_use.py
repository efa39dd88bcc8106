"""Which assignments reach which uses of a local name: reaching definitions over a function's syntax tree.

A chain that is split over statements may be put together again only where each name it goes through has one definition
there, and no other reader. The analysis errs towards more definitions and more readers, never towards fewer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Definition", "Flow", "FunctionNode", "analyse"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_Environment = dict[str, frozenset["Definition"]]


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One place where a local name gets a value."""

    name: str
    """The name."""
    statement: ast.stmt | None
    """The statement that assigns it; ``None`` for a parameter."""
    value: ast.expr | None
    """The expression whose value it is, where the statement assigns one expression to this one name."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The reaching definitions of a function."""

    reaching: dict[ast.Name, frozenset[Definition]]
    """The definitions that may have given a name its value, by the node that reads it; other nodes have none."""
    readers: dict[Definition, frozenset[ast.AST]]
    """The nodes that may read the value that a definition gave."""
    order: dict[ast.stmt, int]
    """The position of each statement of the function, in the order of the source."""
    unstable: frozenset[str]
    """Names that something else than the function's own statements may read or assign."""
    local: frozenset[str]
    """Every name that the function assigns."""

    def definition(self, name: ast.Name) -> Definition | None:
        """The only definition that reaches a reader, where its value is one expression."""
        found = self.reaching.get(name, frozenset())
        if len(found) != 1 or name.id in self.unstable:
            return None
        (only,) = found
        return only if only.value is not None else None


def analyse(function: FunctionNode) -> Flow:
    """Find the definitions that reach each reading of a local name in a function."""
    walker = _Walker()
    walker.function(function)
    readers: dict[Definition, set[ast.AST]] = {}
    for node, definitions in walker.reads.items():
        for definition in definitions:
            readers.setdefault(definition, set()).add(node)
    return Flow(
        reaching={node: frozenset(found) for node, found in walker.reads.items() if isinstance(node, ast.Name)},
        readers={definition: frozenset(nodes) for definition, nodes in readers.items()},
        order=walker.order,
        unstable=frozenset(walker.unstable),
        local=frozenset(name for _, name in walker.known),
    )


def _join(*environments: _Environment | None) -> _Environment | None:
    reachable = [environment for environment in environments if environment is not None]
    if not reachable:
        return None
    names = {name for environment in reachable for name in environment}
    return {name: frozenset().union(*(e.get(name, frozenset()) for e in reachable)) for name in names}


@dataclass(slots=True)
class _Loop:
    """Where the jumps out of a loop's body lead."""

    breaks: list[_Environment] = field(default_factory=list)
    continues: list[_Environment] = field(default_factory=list)


class _Walker:
    """One walk over a function; an environment is ``None`` where control cannot arrive."""

    def __init__(self) -> None:
        self.reads: dict[ast.AST, set[Definition]] = {}
        self.order: dict[ast.stmt, int] = {}
        self.unstable: set[str] = set()
        self.known: dict[tuple[ast.AST | None, str], Definition] = {}
        self.loops: list[_Loop] = []

    def function(self, function: FunctionNode) -> None:
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        environment: _Environment = {}
        for parameter in parameters:
            self.define(environment, parameter.arg, None, None, parameter)
        self.block(function.body, environment)

    def define(
        self,
        environment: _Environment,
        name: str,
        statement: ast.stmt | None,
        value: ast.expr | None = None,
        place: ast.AST | None = None,
    ) -> Definition:
        # A loop's body is walked several times, and means the same definitions each time.
        key = (place or statement, name)
        definition = self.known.setdefault(key, Definition(name, statement, value))
        environment[name] = frozenset({definition})
        return definition

    def read(self, node: ast.AST, name: str, environment: _Environment) -> None:
        self.reads.setdefault(node, set()).update(environment.get(name, ()))

    def block(self, statements: Sequence[ast.stmt], environment: _Environment | None) -> _Environment | None:
        for statement in statements:
            self.order.setdefault(statement, len(self.order))
            if environment is None:
                continue
            environment = self.statement(statement, dict(environment))
        return environment

    def statement(self, statement: ast.stmt, environment: _Environment) -> _Environment | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.expression(value, environment)
                self.define(environment, name, statement, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.expression(value, environment)
                self.define(environment, name, statement, value)
            case ast.AnnAssign(target=ast.Name(), value=None):
                pass
            case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
                self.expression(value, environment)
                self.read(target, name, environment)
                self.define(environment, name, statement)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self.loop(statement, environment)
            case ast.If(test=test, body=body, orelse=orelse):
                self.expression(test, environment)
                return _join(self.block(body, environment), self.block(orelse, environment))
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self.expression(item.context_expr, environment)
                    if item.optional_vars is not None:
                        self.target(item.optional_vars, statement, environment)
                # A context manager may swallow an exception, and control then arrives from anywhere inside.
                before = dict(environment)
                return _join(self.block(body, environment), self.anywhere_inside(body, before))
            case ast.Try() | ast.TryStar():
                return self.attempt(statement, environment)
            case ast.Match():
                return self.match(statement, environment)
            case ast.Break() | ast.Continue():
                if self.loops:
                    jumps = self.loops[-1].breaks if isinstance(statement, ast.Break) else self.loops[-1].continues
                    jumps.append(environment)
                return None
            case ast.Return() | ast.Raise():
                self.children(statement, environment)
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.nested_scope(statement)
                self.define(environment, name, statement)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.unstable.update(names)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    self.define(environment, (alias.asname or alias.name).partition(".")[0], statement, place=alias)
            case _:
                self.children(statement, environment)
        return environment

    def match(self, statement: ast.Match, environment: _Environment) -> _Environment | None:
        self.expression(statement.subject, environment)
        ends: list[_Environment | None] = []
        for case in statement.cases:
            inside = dict(environment)
            for node in ast.walk(case.pattern):
                captured = getattr(node, "name", None) or getattr(node, "rest", None)
                if isinstance(captured, str):
                    self.define(inside, captured, statement, place=node)
            if case.guard is not None:
                self.expression(case.guard, inside)
            ends.append(self.block(case.body, inside))
            # A case may bind its names and fail nevertheless.
            environment = _join(environment, inside) or environment
        return _join(environment, *ends)

    def children(self, statement: ast.stmt, environment: _Environment) -> None:
        """Statements that assign to anything but one name, or to nothing: what they read, then what they store."""
        targets: list[ast.expr] = []
        for name, value in ast.iter_fields(statement):
            nodes = value if isinstance(value, list) else [value]
            for node in nodes:
                if isinstance(node, ast.expr):
                    if name in {"targets", "target"}:
                        targets.append(node)
                    else:
                        self.expression(node, environment)
        for target in targets:
            self.target(target, statement, environment)

    def target(self, target: ast.expr, statement: ast.stmt, environment: _Environment) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load | ast.Del):
                self.read(node, node.id, environment)
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.define(environment, node.id, statement, place=node)

    def loop(self, statement: ast.For | ast.AsyncFor | ast.While, environment: _Environment) -> _Environment | None:
        if not isinstance(statement, ast.While):
            self.expression(statement.iter, environment)
        start: _Environment | None = environment
        while True:
            loop = _Loop()
            self.loops.append(loop)
            inside = dict(start or {})
            if isinstance(statement, ast.While):
                self.expression(statement.test, inside)
                left = inside
            else:
                left = dict(inside)
                self.target(statement.target, statement, inside)
            end = self.block(statement.body, inside)
            self.loops.pop()
            again = _join(start, end, *loop.continues)
            if again == start:
                break
            start = again
        return _join(self.block(statement.orelse, left), *loop.breaks)

    def attempt(self, statement: ast.Try | ast.TryStar, environment: _Environment) -> _Environment | None:
        before = dict(environment)
        jumps = [] if not self.loops else [self.loops[-1].breaks, self.loops[-1].continues]
        earlier = [len(environments) for environments in jumps]
        end = self.block(statement.body, environment)
        failed = self.anywhere_inside(statement.body, before)
        ends = [self.block(statement.orelse, end)]
        for handler in statement.handlers:
            inside = dict(failed)
            if handler.type is not None:
                self.expression(handler.type, inside)
            if handler.name is not None:
                self.define(inside, handler.name, statement, place=handler)
            ends.append(self.block(handler.body, inside))
        if not statement.finalbody:
            return _join(*ends)
        # The last block also runs on the way out of any of the others.
        others = [*statement.body, *statement.orelse, *(s for handler in statement.handlers for s in handler.body)]
        arrives = any(end is not None for end in ends)
        final = self.block(statement.finalbody, _join(self.anywhere_inside(others, failed), *ends))
        for environments, number in zip(jumps, earlier, strict=True):
            environments[number:] = [self.anywhere_inside(statement.finalbody, e) for e in environments[number:]]
        return final if arrives else None

    def anywhere_inside(self, statements: Iterable[ast.stmt], before: _Environment) -> _Environment:
        """The environment after a jump out of any place in statements that were walked already."""
        inside = {node for statement in statements for node in ast.walk(statement)}
        found = dict(before)
        for (place, name), definition in self.known.items():
            if place in inside:
                found[name] = found.get(name, frozenset()) | {definition}
        return found

    def expression(self, expression: ast.expr, environment: _Environment) -> None:
        match expression:
            case ast.Name(id=name):
                if name in {"locals", "eval", "exec", "vars"} and name not in environment:
                    self.unstable.update(environment)
                self.read(expression, name, environment)
            case ast.Lambda():
                self.nested_scope(expression)
            case ast.NamedExpr(target=target, value=value):
                self.expression(value, environment)
                # It may stand where it is not always evaluated.
                before = environment.get(target.id, frozenset())
                definition = self.define(environment, target.id, None, place=target)
                environment[target.id] = before | {definition}
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inside = dict(environment)
                for generator in expression.generators:
                    self.expression(generator.iter, inside)
                    for node in ast.walk(generator.target):
                        if isinstance(node, ast.Name):
                            inside.pop(node.id, None)
                    for condition in generator.ifs:
                        self.expression(condition, inside)
                parts = [expression.key, expression.value] if isinstance(expression, ast.DictComp) else [expression.elt]
                for part in parts:
                    self.expression(part, inside)
                # What it assigns with := is the function's own name.
                self.unstable.update(n.target.id for n in ast.walk(expression) if isinstance(n, ast.NamedExpr))
                if isinstance(expression, ast.GeneratorExp):
                    # Its body runs whenever somebody asks for the next element.
                    self.unstable.update(_names(expression))
            case _:
                for child in ast.iter_child_nodes(expression):
                    self.inner(child, environment)

    def inner(self, node: ast.AST, environment: _Environment) -> None:
        if isinstance(node, ast.expr):
            self.expression(node, environment)
        else:
            for child in ast.iter_child_nodes(node):
                self.inner(child, environment)

    def nested_scope(self, scope: ast.AST) -> None:
        """A function inside the function reads, and may assign, whenever it is called."""
        self.unstable.update(_names(scope))


def _names(scope: ast.AST) -> Iterator[str]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            yield node.id
