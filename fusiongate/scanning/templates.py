"""Syntax trees from templates: source with names in capitals, in the place of which a program's own nodes are put."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["copied", "expression", "filled", "name_of", "parameters", "without_type_params"]


def filled(template: str, **parts: Any) -> list[ast.stmt]:
    """Statements from their source; a part is a name, a node, or several in the place of one argument or statement."""
    return [_Filler(parts).visit(statement) for statement in ast.parse(template).body]


def expression(template: str, **parts: Any) -> Any:
    """An expression from its source."""
    (statement,) = filled(f"({template})", **parts)
    assert isinstance(statement, ast.Expr)
    return statement.value


class _Filler(ast.NodeTransformer):
    """Puts expressions, statements and names in the place of a template's names in capitals."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> Any:
        part = self.parts.get(node.id, node.id)
        return ast.Name(part, node.ctx) if isinstance(part, str) else part

    def visit_Expr(self, node: ast.Expr) -> Any:
        part = self.parts.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return part if isinstance(part, list) else self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for place in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            # The template's own lines are nobody's.
            vars(node).pop(place, None)
        return super().generic_visit(node)


def name_of(name: str) -> ast.expr:
    """A reading of a name."""
    return ast.Name(name, ast.Load())


def copied(node: Any, block: Callable[[list[Any]], list[Any]], copy: Callable[[Any], Any]) -> Any:
    """A node of the same kind with other children."""
    values = {}
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            statements = bool(value) and isinstance(value[0], ast.stmt)
            values[name] = block(value) if statements else [copy(child) for child in value]
        else:
            values[name] = copy(value)
    made = type(node)(**values)
    return ast.copy_location(made, node) if hasattr(node, "lineno") else made


def without_type_params(node: Any) -> Any:
    """A definition's node that has the fields of this Python."""
    # Python 3.12 gave definitions type parameters; older ones have no such field.
    if "type_params" in node._fields:
        node.type_params = []
    return node


def parameters(names: Sequence[str]) -> ast.arguments:
    """Plain parameters with these names."""
    return ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
