"""A function with calls of gates in the place of its chains, compiled in the surroundings of the original."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from .def_use import Flow
from .links import Operand
from .references import Placement, parameters
from .sources import FunctionSource

__all__ = ["Rewritten", "is_rewritten", "rewrite", "with_inner"]

_SITE = "_fusiongate_site_{}"
_HELPER = "_fusiongate_helper_{}"
_HELD = "_fusiongate_held_{}_{}"

_FACTORY = "_fusiongate_factory"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A function's code with gates in it, to be made into any number of functions."""

    original: FunctionType
    """The function that it was made from."""
    code: CodeType
    """The code; its free variables are the original's, the sites' and the helpers'."""

    def function(
        self, sites: Sequence[Callable[..., Any]], helpers: Mapping[str, Callable[..., Any]]
    ) -> tuple[FunctionType, list[CellType]]:
        """A function of its own around the code, and the cells that it finds its sites in.

        Parameters
        ----------
        sites
            The gate of each placement, in the order in which they were given.
        helpers
            What stands for the module-level functions that were to be replaced, by their names.
        """
        original = self.original
        cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
        at_sites = [CellType(site) for site in sites]
        cells |= {_SITE.format(number): cell for number, cell in enumerate(at_sites)}
        cells |= {_HELPER.format(name): CellType(helper) for name, helper in helpers.items()}
        closure = tuple(cells[name] for name in self.code.co_freevars)
        made = FunctionType(self.code, original.__globals__, original.__name__, original.__defaults__, closure)
        made.__kwdefaults__ = original.__kwdefaults__
        made.__qualname__ = original.__qualname__
        made.__module__ = original.__module__
        made.__doc__ = original.__doc__
        made.__annotations__ = original.__annotations__
        made.__dict__.update(original.__dict__)
        return made, at_sites


def rewrite(source: FunctionSource, flow: Flow, placements: Sequence[Placement], helpers: Iterable[str]) -> Rewritten:
    """Put gates in the place of chains.

    Parameters
    ----------
    source, flow
        The function, and its reaching definitions.
    placements
        The chains, which must be chains of this very tree.
    helpers
        Names of module-level functions whose calls are to go to a replacement.
    """
    copier = _Copier(placements, frozenset(helpers), flow)
    node = copier.function(source.node)
    original = source.function.__code__
    free = [*original.co_freevars, *map(_SITE.format, range(len(placements))), *map(_HELPER.format, copier.helpers)]
    body: list[ast.stmt] = [node]
    if source.class_name is not None:
        # Inside a class of the same name, private names are spelled as they were.
        body = [ast.ClassDef(name=source.class_name, bases=[], keywords=[], body=body, decorator_list=[])]
        _set(body[0], "type_params", [])
    factory = ast.FunctionDef(name=_FACTORY, args=parameters(free), body=body, decorator_list=[])
    _set(factory, "type_params", [])
    module = ast.fix_missing_locations(ast.Module(body=[ast.copy_location(factory, source.node)], type_ignores=[]))
    code = compile(module, original.co_filename, "exec", flags=original.co_flags & _FUTURE, dont_inherit=True)
    return Rewritten(source.function, _code_of(code, original.co_name))


def is_rewritten(function: object) -> bool:
    """Whether a function, decorated or not, is one with gates in it."""
    inner = inspect.unwrap(function) if callable(function) else None
    names = inner.__code__.co_freevars if isinstance(inner, FunctionType) else ()
    return any(name.startswith((_SITE.partition("{")[0], _HELPER.partition("{")[0])) for name in names)


def with_inner(outer: Any, inner: FunctionType, replacement: FunctionType) -> FunctionType | None:
    """A decorated function around another inner one; ``None`` where the decorator does not hold it in a closure.

    Nothing is decorated again: the wrapper is copied with another cell.
    """
    if outer is inner:
        return replacement
    if not isinstance(outer, FunctionType) or outer.__closure__ is None:
        return None
    cells = []
    found = False
    for cell in outer.__closure__:
        try:
            held = cell.cell_contents
        except ValueError:
            held = None
        wrapped = None
        if callable(held) and not isinstance(held, type) and inspect.unwrap(held) is inner:
            wrapped = with_inner(held, inner, replacement)
        found = found or wrapped is not None
        cells.append(cell if wrapped is None else CellType(wrapped))
    if not found:
        return None
    copied = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    copied.__kwdefaults__ = outer.__kwdefaults__
    copied.__qualname__ = outer.__qualname__
    copied.__dict__.update(outer.__dict__)
    vars(copied)["__wrapped__"] = replacement
    return copied


_FUTURE = __future__.annotations.compiler_flag


def _set(node: ast.AST, field: str, value: Any) -> None:
    # Python 3.12 gave definitions type parameters; older ones have no such field.
    if field in node._fields:
        setattr(node, field, value)


def _code_of(code: CodeType, name: str) -> CodeType:
    """The function's own code, inside the module's, the factory's and perhaps the class's."""
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for constant in inside:
        if constant.co_name == name and code.co_name != "<module>":
            return constant
    for constant in inside:
        return _code_of(constant, name)
    raise AssertionError(f"the factory holds no function {name}")


class _Copier:
    """Copies a tree, with calls in the place of chains and with operands kept where their assignments stood."""

    def __init__(self, placements: Sequence[Placement], helpers: frozenset[str], flow: Flow) -> None:
        self.roots = {placement.chain.root: (number, placement) for number, placement in enumerate(placements)}
        self.helpers = sorted(helpers - flow.local)
        self.held: dict[ast.expr, str] = {}
        self.at: dict[ast.stmt, list[ast.expr]] = {}
        self.dropped: set[ast.stmt] = set()
        consumed = {node: definition for placement in placements for node, definition in placement.consumed.items()}
        number = 0
        for placement in placements:
            for operand in (placement.x, placement.chain.scale):
                home = operand.home
                if home is None or home.statement is None or operand.expression in self.held:
                    continue
                self.held[operand.expression] = _HELD.format(number, home.name)
                self.at.setdefault(home.statement, []).append(operand.expression)
                number += 1
        for definition in consumed.values():
            if definition.statement is not None and flow.readers[definition] <= consumed.keys():
                self.dropped.add(definition.statement)

    def function(self, node: Any) -> Any:
        body = self.block(node.body)
        copied = type(node)(name=node.name, args=_bare(node.args), body=body, decorator_list=[], returns=None)
        _set(copied, "type_params", [])
        return ast.copy_location(copied, node)

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in statements:
            for expression in self.at.get(statement, ()):
                target = ast.Name(self.held[expression], ast.Store())
                made.append(ast.copy_location(ast.Assign(targets=[target], value=self.fields(expression)), statement))
            if statement not in self.dropped:
                made.append(self.fields(statement))
        return made or [ast.copy_location(ast.Pass(), statements[0])]

    def fields(self, node: Any) -> Any:
        """A node with its children copied, and itself not replaced."""
        values = {}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                statements = bool(value) and isinstance(value[0], ast.stmt)
                values[name] = self.block(value) if statements else [self.copy(child) for child in value]
            else:
                values[name] = self.copy(value)
        copied = type(node)(**values)
        return ast.copy_location(copied, node) if hasattr(node, "lineno") else copied

    def copy(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, ast.expr) and node in self.held:
            return ast.copy_location(ast.Name(self.held[node], ast.Load()), node)
        if isinstance(node, ast.expr) and node in self.roots:
            return self.call(*self.roots[node])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.helpers:
            return ast.copy_location(ast.Name(_HELPER.format(node.id), ast.Load()), node)
        return self.fields(node)

    def call(self, number: int, placement: Placement) -> ast.expr:
        chain = placement.chain
        assert chain.shift is not None
        arguments = [self.operand(operand) for operand in (placement.x, chain.scale, chain.shift)]
        made = ast.Call(func=ast.Name(_SITE.format(number), ast.Load()), args=arguments, keywords=[])
        return ast.copy_location(made, chain.root)

    def operand(self, operand: Operand) -> ast.expr:
        made: ast.expr = self.copy(operand.expression)
        for view in operand.views:
            match view:
                case ast.Subscript(slice=index):
                    made = ast.Subscript(value=made, slice=self.copy(index), ctx=ast.Load())
                case ast.Call(func=ast.Attribute(attr=method), args=args, keywords=keywords):
                    function = ast.Attribute(value=made, attr=method, ctx=ast.Load())
                    made = ast.Call(
                        func=function, args=[self.copy(a) for a in args], keywords=[self.copy(k) for k in keywords]
                    )
            made = ast.copy_location(made, view)
        return made


def _bare(arguments: ast.arguments) -> ast.arguments:
    """The parameters without annotations and defaults, which the original function has evaluated already."""

    def bare(argument: ast.arg | None) -> ast.arg | None:
        return None if argument is None else ast.arg(arg=argument.arg)

    return ast.arguments(
        posonlyargs=[ast.arg(arg=a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(arg=a.arg) for a in arguments.args],
        vararg=bare(arguments.vararg),
        kwonlyargs=[ast.arg(arg=a.arg) for a in arguments.kwonlyargs],
        kw_defaults=[None] * len(arguments.kwonlyargs),
        kwarg=bare(arguments.kwarg),
        defaults=[],
    )
