"""The pieces of an adaLN chain that can be told by their spelling alone."""

from __future__ import annotations

import ast
from typing import TypeGuard

__all__ = ["VIEWS", "is_norm_call", "takes_whole_dimensions", "without_cast"]

VIEWS = frozenset(
    {"expand", "expand_as", "flatten", "movedim", "permute", "reshape", "squeeze", "transpose", "unflatten"}
    | {"unsqueeze", "view", "view_as"}
)
"""Methods that only rearrange: taking them before or after ``1 +`` gives the same values."""

_NORM_FUNCTIONS = frozenset({"group_norm", "layer_norm", "rms_norm", "instance_norm", "batch_norm"})


def is_norm_call(node: ast.expr | None) -> TypeGuard[ast.Call]:
    """Whether an expression calls something that its name says to be a norm."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    match node.func:
        case ast.Attribute(attr=name):
            pass
        case ast.Name(id=name):
            pass
        case _:
            return False
    name = name.lower()
    if isinstance(node.func, ast.Name) or name in _NORM_FUNCTIONS:
        return name in _NORM_FUNCTIONS
    return "norm" in name or name == "ln" or name.startswith("ln_") or name.endswith("_ln")


def takes_whole_dimensions(index: ast.expr) -> bool:
    """Whether an index only adds dimensions or takes whole ones, so that it is a view of any tensor."""
    match index:
        case ast.Tuple(elts=elements):
            return all(map(takes_whole_dimensions, elements))
        case ast.Constant(value=value):
            return value is None or value is ...
        case ast.Slice(lower=None, upper=None, step=None):
            return True
    return False


def without_cast(expression: ast.expr) -> ast.expr | None:
    """What an expression casts to fp32; ``None`` where it casts nothing."""
    match expression:
        case ast.Call(func=ast.Attribute(value=inner, attr="float"), args=[], keywords=[]):
            return inner
        case (
            ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[ast.Attribute(attr="float32")], keywords=[])
            | ast.Call(
                func=ast.Attribute(value=inner, attr="to"),
                args=[],
                keywords=[ast.keyword(arg="dtype", value=ast.Attribute(attr="float32"))],
            )
        ):
            return inner
    return None
