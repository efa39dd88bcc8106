"""What may stand between a chain's operations: the published list of pure expressions, and the proof by it.

An expression is pure if evaluating it writes to nothing and if nobody can tell when the arithmetic around it runs. The
list is of spellings, and a spelling is as good as the values in it: ``t.unsqueeze(1)`` is pure for a tensor, and may be
anything for somebody's object. So each proof also names the values that have to be *plain* when the expression is
reached; a rewired function looks at them there, every time, and runs as it was written where one is not.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ATTRIBUTES",
    "CONSTANT_FUNCTIONS",
    "FUNCTIONS",
    "METHODS",
    "NODES",
    "PLAIN",
    "STATEMENTS",
    "Obstacle",
    "Scope",
    "Value",
    "binds_names",
    "is_fixed",
    "is_listed",
    "is_plain",
    "modules_of",
    "text",
    "values_of",
]

NODES = {
    "constants": "`1`, `None`, `...`",
    "names": "`scale`",
    "attributes of the method's own instance": "`self.scale_shift_table`",
    "attributes that every tensor has": "`x.dtype`, see below",
    "subscripts": "`table[None]`, `temb[:, 0]`",
    "operators and comparisons": "`a + b`, `-a`, `a is None`",
    "tuples and lists": "`(a, b)`",
    "calls of a plain value's methods": "`scale.unsqueeze(1)`, see below",
    "calls of functions": "`torch.chunk(temb, 6)`, see below",
    "calls of functions, methods and modules that are proven": "`self.norm(x)`, whose body is made of this list only",
}
"""The kinds of expression, each with an example."""

STATEMENTS = {
    "assignments to names": "`shift, scale = temb.chunk(2, dim=-1)`",
    "an `if` around the rest of the chain": "`if self.modulated:`",
    "docstrings and `pass`": "",
}
"""The kinds of statement that may stand between a chain's definitions and its last operation."""

PLAIN = (
    *(Tensor, nn.Parameter, int, float, complex, bool, str, bytes, type(None), type(...), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""The types of plain values, none of their subclasses; tuples, lists and dicts of them are plain too."""

ATTRIBUTES = frozenset(
    {"T", "device", "dtype", "is_cuda", "itemsize", "layout", "mT", "nbytes", "ndim", "requires_grad", "shape"}
)
"""Attributes of tensors that read, and do nothing else."""

METHODS = frozenset(
    # views
    {"broadcast_to", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "index_select", "movedim"}
    | {"narrow", "permute", "repeat_interleave", "reshape", "select", "split", "squeeze", "swapaxes", "t"}
    | {"tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"}
    # copies
    | {"bfloat16", "clone", "contiguous", "double", "float", "gather", "half", "repeat", "tile", "to", "type_as"}
    # arithmetic
    | {"abs", "add", "clamp", "div", "exp", "mean", "mul", "neg", "pow", "rsqrt", "sigmoid", "sqrt", "square"}
    | {"sub", "sum", "tanh", "var"}
    # what a tensor tells about itself
    | {"dim", "is_contiguous", "is_floating_point", "numel", "size", "stride"}
)
"""Methods of tensors without an underscore; no other plain value has one of these names that writes."""

FUNCTIONS = (
    *("torch.broadcast_to", "torch.cat", "torch.chunk", "torch.split", "torch.squeeze", "torch.stack"),
    *("torch.tensor_split", "torch.unbind", "torch.unsqueeze", "torch.where"),
    *("torch.add", "torch.mean", "torch.mul", "torch.pow", "torch.rsqrt", "torch.sqrt", "torch.square", "torch.sub"),
    *("torch.nn.functional.layer_norm", "torch.nn.functional.linear", "torch.nn.functional.rms_norm", "torch.rms_norm"),
    *("math.sqrt", "builtins.float", "builtins.int", "builtins.len", "builtins.isinstance"),
)
"""Functions, called without `out=`; none of them has an `inplace`."""

CONSTANT_FUNCTIONS = frozenset({"diffusers.utils.import_utils.is_torch_npu_available"})
"""Functions that answer the same for as long as a process lives: a branch that they close is not looked at."""

_MODULES = {"torch": torch, "torch.nn.functional": nn.functional, "math": math, "builtins": builtins}
_KNOWN = {
    id(getattr(_MODULES[name.rpartition(".")[0]], name.rpartition(".")[2])): name for name in FUNCTIONS
}  # by identity: what is looked up may not even be hashable
_PLAIN = frozenset(PLAIN)
_FIXED = _PLAIN - {Tensor, nn.Parameter}
_WRITING_KEYWORDS = frozenset({"out", "inplace"})


class Obstacle(Exception):
    """Something is not on the list."""

    def __init__(self, node: ast.AST, what: str) -> None:
        super().__init__(what)
        self.node = node
        self.what = what

    def __str__(self) -> str:
        line = getattr(self.node, "lineno", None)
        return self.what if line is None else f"line {line}: {self.what}"


@dataclass(frozen=True, slots=True)
class Scope:
    """What the names in a function stand for, as far as its text tells."""

    local: frozenset[str]
    """The names that it binds itself, parameters among them."""
    owner: str | None
    """The parameter that is its instance, such as ``self``; ``None`` where there is none, or it is bound again."""
    modules: frozenset[str]
    """Global names of the modules whose functions are listed."""
    whole: bool = False
    """Whether the whole function is being proven, so that all that its own names can hold is plain."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a proof goes by."""

    node: ast.expr
    """Where it is read: a name, or an attribute of the instance or of a module."""
    called: bool = False
    """Whether it is called, and has to be proven; otherwise it has to be plain."""


def text(node: ast.AST) -> str:
    """The beginning of a node's source, for a message."""
    line = ast.unparse(node).partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:57]}..."


def values_of(node: ast.expr, scope: Scope, *, used: bool = True) -> list[Value]:
    """The values that have to be plain or proven for an expression to be pure.

    Parameters
    ----------
    node
        The expression.
    scope
        What its names stand for.
    used
        Whether something is done with its value; what is only handed on may be anything.

    Raises
    ------
    Obstacle
        If it is not made of what is on the list.
    """
    match node:
        case ast.Constant():
            return []
        case ast.Name(id=name) if name == scope.owner:
            raise Obstacle(node, f"`{name}` itself is no plain value")
        case ast.Name(id=name):
            return [Value(node)] if used and not (scope.whole and name in scope.local) else []
        case ast.Attribute(value=ast.Name(id=name)) if name == scope.owner:
            return [Value(node)] if used or scope.whole else []
        case ast.Attribute(value=ast.Name(id=name)) if name in scope.modules - scope.local:
            return [Value(node)]
        case ast.Attribute(value=value, attr=attribute) if attribute in ATTRIBUTES:
            parts: Sequence[ast.expr | None] = [value]
        case ast.Subscript(value=value, slice=index):
            parts = [value, index]
        case ast.Slice(lower=lower, upper=upper, step=step):
            parts = [lower, upper, step]
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Compare(left=left, comparators=comparators) if scope.whole or len(comparators) == 1:
            parts = [left, *comparators]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [value for element in elements for value in values_of(element, scope, used=used)]
        # What is evaluated on one of two ways only may not be there on the other: in place, no value can be asked for.
        case ast.BoolOp(values=parts) if scope.whole:
            pass
        case ast.IfExp(test=test, body=body, orelse=orelse) if scope.whole:
            parts = [test, body, orelse]
        case ast.Call():
            return _values_of_call(node, scope)
        case _:
            raise Obstacle(node, f"`{text(node)}` is not on the list of pure expressions")
    return [value for part in parts if part is not None for value in values_of(part, scope)]


def _values_of_call(node: ast.Call, scope: Scope) -> list[Value]:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if any(isinstance(argument, ast.Starred) for argument in given) or any(
        keyword.arg is None or keyword.arg in _WRITING_KEYWORDS for keyword in node.keywords
    ):
        raise Obstacle(node, f"`{text(node)}` may write to its arguments")
    arguments = [value for argument in given for value in values_of(argument, scope)]
    match node.func:
        case ast.Name(id=name) if not (scope.whole and name in scope.local):
            return [Value(node.func, called=True), *arguments]
        case ast.Attribute(value=ast.Name(id=name)) if name == scope.owner or name in scope.modules - scope.local:
            return [Value(node.func, called=True), *arguments]
        case ast.Attribute(value=value, attr=method) if method in METHODS:
            return [*values_of(value, scope), *arguments]
    raise Obstacle(node, f"`{text(node)}` calls what is not on the list of pure expressions")


def is_plain(value: object) -> bool:
    """Whether a value is plain: nothing but data, of types that are what they seem."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))  # type: ignore[call-overload, attr-defined]
    return False


def is_fixed(value: object) -> bool:
    """Whether a value is plain and stays what it is."""
    kind = type(value)
    return all(map(is_fixed, value)) if kind is tuple else kind in _FIXED  # type: ignore[call-overload]


def is_listed(value: object) -> bool:
    """Whether a value is one of the listed functions."""
    return id(value) in _KNOWN


def modules_of(namespace: Mapping[str, Any]) -> frozenset[str]:
    """The global names of the modules whose functions are listed."""
    listed = tuple(_MODULES.values())
    return frozenset(name for name, value in namespace.items() if type(value) is ModuleType and value in listed)


def binds_names(target: ast.expr) -> bool:
    """Whether an assignment's target is a name, or names in a tuple."""
    match target:
        case ast.Name():
            return True
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return all(map(binds_names, elements))
    return False
