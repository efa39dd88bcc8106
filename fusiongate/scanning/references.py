"""A site's own expression as a function of the gate's operands."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .def_use import Definition
from .links import Chain, Operand
from .sources import FunctionSource

__all__ = ["Placement", "parameters", "reference_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A chain whose gate is to be called."""

    chain: Chain
    """The chain."""
    folds_norm: bool
    """Whether the norm in front of it goes into the gate as well."""

    @property
    def x(self) -> Operand:
        """The first operand of the gate: what is normalised, or what is modulated."""
        if self.folds_norm:
            assert self.chain.norm is not None
            return self.chain.norm.argument
        return self.chain.x

    @property
    def consumed(self) -> Mapping[ast.AST, Definition]:
        """The readings of names that go away, and what they read."""
        norm = self.chain.norm
        if (
            self.folds_norm
            and norm is not None
            and norm.home is not None
            and isinstance(self.chain.x.expression, ast.Name)
        ):
            return {**self.chain.consumed, self.chain.x.expression: norm.home}
        return self.chain.consumed


def reference_of(placement: Placement, source: FunctionSource) -> Callable[..., Any]:
    """The chain as a function of its operands, built from its own source.

    Returns
    -------
    ``(x, scale, shift)`` to the chain's value; where the norm is folded in, a function of the norm's replacement, to
    ``(x, scale, shift, eps, weight=None)`` to the value. The replacement is called as ``norm(x, weight)``.
    """
    chain = placement.chain
    assert chain.shift is not None
    body = _Inliner(placement).visit(chain.root)
    if placement.folds_norm:
        arguments = parameters(["x", "scale", "shift", "eps", "weight"])
        arguments.defaults = [ast.Constant(None)]
    else:
        arguments = parameters(["x", "scale", "shift"])
    made: ast.expr = ast.Lambda(args=arguments, body=body)
    if placement.folds_norm:
        made = ast.Lambda(args=parameters(["norm"]), body=made)
    tree = ast.fix_missing_locations(ast.Expression(ast.copy_location(made, chain.root)))
    function: Callable[..., Any] = eval(compile(tree, str(source.file), "eval"), source.function.__globals__)
    return function


def parameters(names: Sequence[str]) -> ast.arguments:
    """Plain parameters with these names."""
    return ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )


class _Inliner:
    """The chain's own expression, with its operands named and the assignments it goes through put in place."""

    def __init__(self, placement: Placement) -> None:
        chain = placement.chain
        assert chain.shift is not None
        self.names: dict[ast.AST, str] = {
            placement.x.expression: "x",
            chain.scale.expression: "scale",
            chain.shift.expression: "shift",
        }
        if chain.like is not None:
            self.names[chain.like] = "x"
        self.consumed = placement.consumed
        self.views = frozenset(chain.scale.views)
        self.norm = chain.norm.call if placement.folds_norm and chain.norm is not None else None

    def visit(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, ast.expr):
            if node in self.names:
                return ast.copy_location(ast.Name(self.names[node], ast.Load()), node)
            if self.norm is not None and node is self.norm:
                arguments: list[ast.expr] = [ast.Name("x", ast.Load()), ast.Name("weight", ast.Load())]
                return ast.copy_location(ast.Call(ast.Name("norm", ast.Load()), arguments, []), node)
            if node in self.consumed:
                return self.visit(self.consumed[node].value)
            if node in self.views:
                # The operand comes in its final shape: the view has been taken of it already.
                return self.visit(node.value if isinstance(node, ast.Subscript) else _receiver(node))
        values = {
            name: [self.visit(child) for child in value] if isinstance(value, list) else self.visit(value)
            for name, value in ast.iter_fields(node)
        }
        copied = type(node)(**values)
        return ast.copy_location(copied, node) if hasattr(node, "lineno") else copied


def _receiver(call: ast.AST) -> ast.expr:
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    return call.func.value
