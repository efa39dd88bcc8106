"""From a function object to the syntax tree that it was compiled from."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from .def_use import FunctionNode

__all__ = ["FunctionSource", "NoSource", "innermost", "source_of"]


class NoSource(Exception):
    """The function's syntax tree cannot be had, or is not the one that runs."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function and its syntax tree."""

    function: FunctionType
    """The function, without its decorators."""
    node: FunctionNode
    """Its definition in the tree of the whole file, so that line numbers are the file's."""
    file: Path
    """The file."""
    class_name: str | None
    """The class in whose body it stands, which decides how private names are spelled."""


def innermost(function: object) -> FunctionType | None:
    """The function that decorators have wrapped; ``None`` for anything that was not written in Python."""
    seen = inspect.unwrap(function) if callable(function) else None
    return seen if isinstance(seen, FunctionType) else None


def source_of(function: FunctionType) -> FunctionSource:
    """Find the syntax tree of a function.

    Raises
    ------
    NoSource
        There is no source, or it has changed since it was imported.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise NoSource(f"its source {code.co_filename} cannot be read")
    try:
        tree, codes = _parsed(code.co_filename, "".join(lines), code.co_flags & _FUTURE_FLAGS)
    except (SyntaxError, ValueError) as error:
        raise NoSource(f"its source {code.co_filename} is no Python: {error}") from error
    # Decorators come before the line that says `def`, and a code object begins with the first of them.
    if not any(_same(code, other) for other in codes.get((code.co_name, code.co_firstlineno), ())):
        raise NoSource(f"{code.co_filename} has changed since it was imported")
    for node, class_name in _functions(tree, None):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (node.name, first) == (code.co_name, code.co_firstlineno):
            return FunctionSource(function, node, Path(code.co_filename), class_name)
    raise NoSource(f"line {code.co_firstlineno} of {code.co_filename} defines no function {code.co_name}")


_FUTURE_FLAGS = __future__.annotations.compiler_flag


@functools.lru_cache(maxsize=64)
def _parsed(filename: str, source: str, flags: int) -> tuple[ast.Module, dict[tuple[str, int], list[CodeType]]]:
    tree = ast.parse(source, filename)
    codes: dict[tuple[str, int], list[CodeType]] = {}
    for code in _codes(compile(source, filename, "exec", flags=flags, dont_inherit=True)):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    return tree, codes


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    # Names as well as instructions: an edit may change nothing but a name.
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames)


def _functions(node: ast.AST, class_name: str | None) -> Iterator[tuple[FunctionNode, str | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, class_name
            yield from _functions(child, class_name)
        else:
            yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else class_name)
