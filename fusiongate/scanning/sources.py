"""From classes and functions to the syntax trees that they were compiled from."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["FunctionNode", "FunctionSource", "NoSource", "functions_of", "innermost", "original_code", "source_of"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class NoSource(Exception):
    """The function's syntax tree cannot be had, or is not the one that runs."""


@dataclass(frozen=True, slots=True, eq=False)
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


original_code: dict[FunctionType, CodeType] = {}
"""The own code of each function that runs with gates in it now."""


def innermost(function: object) -> FunctionType | None:
    """The function that decorators have wrapped; ``None`` for anything that was not written in Python."""
    seen = inspect.unwrap(function) if callable(function) else None
    return seen if isinstance(seen, FunctionType) else None


def functions_of(cls: type) -> Iterator[tuple[str, FunctionType, str | None]]:
    """The functions that a class computes with, in the order of definition; inherited ones come after its own.

    Yields
    ------
    The attribute that each is reached by, the function, and why no gate can be put into it.
    """
    overridden: dict[str, bool] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object) or base.__module__.partition(".")[0] == "torch":
            continue
        for name, attribute in vars(base).items():
            # Constructors and the like compute nothing that is ever repeated.
            if name.startswith("__") and name != "__call__":
                continue
            plain, obstacle = attribute, None
            if isinstance(attribute, staticmethod | classmethod):
                plain, obstacle = attribute.__func__, "it is no method of the instance: make it one"
            function = _within(plain, base)
            # An overridden function that nobody calls is no part of the class.
            if function is not None and overridden.get(name, True):
                yield name, function, obstacle
            overridden[name] = overridden.get(name, True) and function is not None and _hands_over(function, cls)


def _within(attribute: Any, cls: type) -> FunctionType | None:
    """The function that an attribute of a class runs."""
    found = innermost(attribute.fget if isinstance(attribute, property) else attribute)
    if found is not None and not hasattr(attribute, "__wrapped__"):
        for cell in found.__closure__ or ():
            # A decorator without functools.wraps keeps the method in its closure.
            with contextlib.suppress(ValueError):  # an empty cell
                held = innermost(cell.cell_contents)
                if held is not None and held.__qualname__.startswith(f"{cls.__qualname__}."):
                    return held
    return found


def _hands_over(function: FunctionType, cls: type) -> bool:
    """Whether a method calls the one that it overrides, by super() or by a class's name."""
    code = original_code.get(function, function.__code__)
    named = {*code.co_names, *code.co_freevars}
    return "super" in named or any(base.__name__ in named for base in cls.__mro__[1:])


def source_of(function: FunctionType) -> FunctionSource:
    """Find the syntax tree of a function.

    Raises
    ------
    NoSource
        There is no source, or it is not what runs.
    """
    code = original_code.get(function, function.__code__)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise NoSource(f"its source {code.co_filename} cannot be read; define it in a file")
    try:
        tree, codes = _parsed(code.co_filename, "".join(lines), code.co_flags & _FUTURE_FLAGS)
    except (SyntaxError, ValueError) as error:
        raise NoSource(f"its source {code.co_filename} is no Python: {error}") from error
    # Decorators come before the line that says `def`, and a code object begins with the first of them.
    candidates = codes.get((code.co_name, code.co_firstlineno), [])
    if len(candidates) != 1 or candidates[0] != code:
        raise NoSource(
            f"{code.co_filename} compiles to other code than runs: it has changed since it was imported, or something "
            f"rewrote it, as pytest rewrites the asserts of test files; import it again, or from another file"
        )
    for node, class_name in _functions(tree, None):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (node.name, first) == (code.co_name, code.co_firstlineno):
            return FunctionSource(function, node, Path(code.co_filename), class_name)
    raise NoSource(f"line {code.co_firstlineno} of {code.co_filename} defines no function {code.co_name}; use `def`")


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


def _functions(node: ast.AST, class_name: str | None) -> Iterator[tuple[FunctionNode, str | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, class_name
            yield from _functions(child, class_name)
        else:
            yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else class_name)
