"""What may write to memory that another statement still has to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["own_parts", "writes"]


def own_parts(statement: ast.stmt) -> Iterator[ast.stmt | ast.expr]:
    """A statement without the statements inside it, which have positions of their own."""
    yield statement
    heads = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while heads:
        node = heads.pop()
        if isinstance(node, ast.expr):
            yield node
        heads += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def writes(node: ast.stmt | ast.expr, operands: set[str]) -> bool:
    """Whether a statement's part may write to memory that the named operands share: when in doubt, yes."""
    match node:
        case ast.AugAssign():
            return True
        case ast.Assign(targets=targets):
            return any(isinstance(part, ast.Subscript) for target in targets for part in ast.walk(target))
        case ast.Call(func=function, args=args, keywords=keywords):
            if isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__"):
                return True
            given = [*args, *(keyword.value for keyword in keywords)]
            if any(keyword.arg == "out" for keyword in keywords):
                return True
            return any(isinstance(argument, ast.Name) and argument.id in operands for argument in given)
    return False
