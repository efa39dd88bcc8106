"""The patterns that kernels repeat, read off a function's syntax tree.

A pattern is one entry of ``PATTERNS``: it reads an expression and names the kind of the site and its operands. Where
each of these is evaluated, what may stand in between, and how a norm in front is taken in is the same for all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from .def_use import Definition, Uses

__all__ = ["KINDS", "PATTERNS", "Operand", "Pattern", "Patterns"]

KINDS = {
    "modulate": 3,
    "modulate_fp32": 7,
    "scale": 2,
    "gated_residual": 2,
    "rms_norm_modulate": 4,
    "rms_norm_scale": 3,
    "composite_rms_norm_modulate": 10,
    "composite_rms_norm_scale": 9,
    "layer_norm_modulate": 4,
    "layer_norm_scale": 3,
}
"""What a site can ask for, with the kernels that eager launches there; an op is told by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of a chain, as the kernel is to get it."""

    expression: ast.expr
    """The expression that computes it."""
    views: tuple[ast.expr, ...] = ()
    """Indexing and view calls that the source applies to the sum ``1 + b``, from the inside out."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A pattern, or a part of one, where it is found."""

    root: ast.expr
    """The expression that it is the value of."""
    kind: str
    """One of ``KINDS``."""
    operands: Mapping[str, Operand]
    """Its operands by their names, in the kernel's order."""
    links: Mapping[ast.Name, Definition] = field(default_factory=dict)
    """The readings of names that it goes through, and what each of them reads."""
    like: ast.expr | None = None
    """A second place where ``x`` stands: in the cast of the result to its dtype."""
    reason: str | None = None
    """Why no gate can stand here; ``None`` where one can."""


_MOVABLE = frozenset({"squeeze", "unsqueeze"})
_VIEWS = _MOVABLE | {"expand", "expand_as", "flatten", "movedim", "permute", "reshape", "transpose", "unflatten"}
_VIEWS |= {"view", "view_as"}
_NORM_FUNCTIONS = frozenset({"group_norm", "layer_norm", "rms_norm", "instance_norm", "batch_norm"})
_GATE = re.compile(r"gate|\bg(\d|_\w+)?\b", re.IGNORECASE)


class Patterns:
    """The patterns, over the statements of one function."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses

    def modulate_fp32(self, node: ast.AST) -> Pattern | None:
        """Find `(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)`."""
        match node:
            case ast.Call(
                func=ast.Attribute(value=inner, attr="to"), args=[ast.Attribute(value=like, attr="dtype")], keywords=[]
            ):
                pass
            case ast.Call(func=ast.Attribute(value=inner, attr="type_as"), args=[like], keywords=[]):
                pass
            case _:
                return None
        found = self.modulate(inner)
        if found is None or found.links:
            return None
        bare = {role: _uncast(operand) for role, operand in found.operands.items()}
        x = bare["x"]
        if x is None or ast.dump(x.expression) != ast.dump(like) or not isinstance(like, ast.Name):
            return None
        operands = {role: bare[role] or operand for role, operand in found.operands.items()}
        return replace(found, root=node, kind="modulate_fp32", operands=operands, like=like)

    def modulate(self, node: ast.AST) -> Pattern | None:
        """Find `x * (1 + scale) + shift`."""
        for left, shift in _sides(node, ast.Add):
            product = self.product(left)
            if product is not None and not isinstance(shift, ast.Constant):
                return _extended(product, node, "modulate", {**product.operands, "shift": Operand(shift)})
        return None

    def in_place(self, node: ast.AST) -> Pattern | None:
        """Find `x *= 1 + scale` and then `x += shift`."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=shift):
                block = self.uses.blocks[node]
                before = block[block.index(node) - 1] if block.index(node) else None
            case _:
                return None
        match before:
            case ast.AugAssign(target=ast.Name(id=other) as x, op=ast.Mult(), value=value) if other == name:
                found = self.one_plus(value)
            case _:
                return None
        if found is None:
            return None
        root = ast.copy_location(ast.BinOp(left=x, op=ast.Add(), right=shift), node)
        operands = {"x": Operand(x), **found.operands, "shift": Operand(shift)}
        what = "it writes in place, and a kernel returns a new tensor"
        return Pattern(root, "modulate", operands, reason=f"line {node.lineno}: {what}; write `{name} = {name} * …`")

    def scale(self, node: ast.AST) -> Pattern | None:
        """Find `norm(x) * (1 + scale)`."""
        found = self.product(node) if isinstance(node, ast.BinOp) else None
        # Without a norm in front it could be anything: a gate, a gain, a weight.
        return None if found is None or self.norm_call(found.operands["x"].expression) is None else found

    def gated_residual(self, node: ast.AST) -> Pattern | None:
        """Find `residual + update * gate`."""
        for residual, right in _sides(node, ast.Add):
            product = self.gated(right) if isinstance(residual, ast.Name) else None
            if product is not None:
                operands = {"residual": Operand(residual), **product.operands}
                return _extended(product, node, "gated_residual", operands)
        return None

    def gated(self, node: ast.expr) -> Pattern | None:
        """Find `update * gate`, in either order."""
        for update, gate in _sides(node, ast.Mult):
            # Which product is a gate's, only its name can tell.
            if _GATE.search(ast.unparse(gate)) and not _GATE.search(ast.unparse(update)):
                return Pattern(node, "gated_residual", {"update": Operand(update), "gate": Operand(gate)})
        return self.behind(node, self.gated)

    def product(self, node: ast.expr) -> Pattern | None:
        """Find `x * (1 + scale)`, in either order."""
        for factor, sum_node in _sides(node, ast.Mult):
            found = self.one_plus(sum_node)
            if found is not None and not isinstance(factor, ast.Constant):
                return _extended(found, node, "scale", {"x": Operand(factor), **found.operands})
        return self.behind(node, self.product)

    def one_plus(self, node: ast.expr) -> Pattern | None:
        """Find `1 + scale`, perhaps viewed."""
        match node:
            case (
                ast.BinOp(left=ast.Constant(value=one), op=ast.Add(), right=operand)
                | ast.BinOp(left=operand, op=ast.Add(), right=ast.Constant(value=one))
            ) if one == 1 and not isinstance(one, bool) and not isinstance(operand, ast.Constant):
                return Pattern(node, "scale", {"scale": Operand(operand)})
            case ast.Subscript(value=inner, slice=index) if _takes_whole_dimensions(index):
                movable = True
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _VIEWS:
                movable = method in _MOVABLE
            case _:
                return self.behind(node, self.one_plus)
        found = self.one_plus(inner)
        if found is None or found.links:
            return None
        scale = found.operands["scale"]
        reason = found.reason
        if not movable:
            reason = f"line {node.lineno}: the sum is viewed by another shape; view the scale instead of the sum"
        return Pattern(node, "scale", {"scale": replace(scale, views=(*scale.views, node))}, reason=reason)

    def norm_call(self, node: ast.expr) -> tuple[ast.Call, Definition | None] | None:
        """The norm that gives an expression's value, and the assignment that it stands in."""
        if _is_norm(node):
            return node, None
        definition = self.uses.definition(node) if isinstance(node, ast.Name) else None
        return (definition.value, definition) if definition is not None and _is_norm(definition.value) else None

    def behind(self, node: ast.expr, pattern: Callable[[ast.expr], Pattern | None]) -> Pattern | None:
        """What a pattern finds in the assignment behind a name."""
        definition = self.uses.definition(node) if isinstance(node, ast.Name) else None
        found = pattern(definition.value) if definition is not None else None
        if not isinstance(node, ast.Name) or definition is None or found is None:
            return None
        return replace(found, links={**found.links, node: definition})


PATTERNS: tuple[Callable[[Patterns, ast.AST], Pattern | None], ...] = (
    *(Patterns.modulate_fp32, Patterns.modulate, Patterns.in_place, Patterns.scale, Patterns.gated_residual),
)
"""Every pattern, the wider ones first: what one has found is not looked at by the next."""


def _sides(node: ast.AST, op: type[ast.operator]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both ways to read a sum or a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, op):
        yield node.left, node.right
        yield node.right, node.left


def _extended(part: Pattern, root: ast.AST, kind: str, operands: Mapping[str, Operand]) -> Pattern:
    assert isinstance(root, ast.expr)
    return replace(part, root=root, kind=kind, operands=operands)


def _is_norm(node: ast.expr | None) -> TypeGuard[ast.Call]:
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


def _takes_whole_dimensions(index: ast.expr) -> bool:
    """Whether an index only adds dimensions or takes whole ones, so that it is a view of any tensor."""
    match index:
        case ast.Tuple(elts=elements):
            return all(map(_takes_whole_dimensions, elements))
        case ast.Constant(value=value):
            return value is None or value is ...
        case ast.Slice(lower=None, upper=None, step=None):
            return True
    return False


def _uncast(operand: Operand) -> Operand | None:
    """An operand without its cast to fp32; ``None`` where it is not cast."""
    match operand.expression:
        case ast.Call(func=ast.Attribute(value=inner, attr="float"), args=[], keywords=[]):
            return replace(operand, expression=inner)
        case (
            ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[dtype], keywords=[])
            | ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[], keywords=[ast.keyword("dtype", dtype)])
        ) if ast.dump(dtype) == _FLOAT32:
            return replace(operand, expression=inner)
    return None


_FLOAT32 = ast.dump(ast.parse("torch.float32", mode="eval").body)
