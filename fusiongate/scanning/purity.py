"""What may stand between a chain's operations: the published list of pure expressions, and the proof by it.

An expression is pure if evaluating it writes to nothing and if nobody can tell when the arithmetic around it runs. The
list is of spellings, and a spelling is as good as the values in it: ``t.unsqueeze(1)`` is pure for a tensor, and may be
anything for somebody's object. So each proof also names the values that have to be *plain* when the expression is
reached; a rewired function looks at them there, every time, and runs as it was written where one is not.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .sources import FunctionNode, NoSource, innermost, source_of

__all__ = [
    "ATTRIBUTES",
    "CONSTANT_FUNCTIONS",
    "FUNCTIONS",
    "METHODS",
    "NODES",
    "PLAIN",
    "STATEMENTS",
    "Obstacle",
    "Proof",
    "Scope",
    "Value",
    "binds_names",
    "is_fixed",
    "is_plain",
    "is_proven",
    "modules_of",
    "obstacle_of_call",
    "proof_of",
    "text",
    "unreadable",
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


def is_proven(value: object) -> bool:
    """Whether calling a value is pure: it is listed, or its body is proven to be made of what is listed."""
    if id(value) in _KNOWN:
        return True
    owner: object = None
    if isinstance(value, MethodType):
        owner, value = value.__self__, value.__func__
    if isinstance(value, FunctionType):
        proof = proof_of(value, method=owner is not None)
        return isinstance(proof, Proof) and proof.holds(owner)
    return isinstance(value, nn.Module) and obstacle_of_call(value) is None


def obstacle_of_call(module: nn.Module) -> str | None:
    """Why calling a module may do something else than its class's own forward, which is proven; ``None`` if not."""
    kind, own = type(module), vars(module)
    if kind.__call__ is not nn.Module.__call__ or "forward" in own or own.get("_compiled_call_impl") is not None:
        return "wrapped"
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    ):
        return "hooks"
    forward = kind.forward
    proof = proof_of(forward, method=True) if isinstance(forward, FunctionType) else None
    return None if isinstance(proof, Proof) and proof.holds(module) else "unproven"


def unreadable(kind: type, names: frozenset[str]) -> str | None:
    """Which of the attributes an instance may compute when they are read; ``None`` if none of them."""
    # A class is no Hashable to the type checker, for the sake of its instances.
    found: str | None = cast(Any, _unreadable)(kind, names)
    return found


@functools.lru_cache(maxsize=4096)
def _unreadable(kind: type, names: frozenset[str]) -> str | None:
    if getattr(kind, "__getattribute__") is not object.__getattribute__:  # noqa: B009  # the checker knows another type of it
        return f"{kind.__name__} computes its attributes in __getattribute__"
    for name in sorted(names):
        found = inspect.getattr_static(kind, name, None)
        if hasattr(type(found), "__get__") and not isinstance(found, FunctionType | staticmethod):
            return f"{kind.__name__}.{name} is computed when it is read"
        if found is None and getattr(kind, "__getattr__", None) not in (None, nn.Module.__getattr__):
            return f"{kind.__name__}.{name} is looked up by a __getattr__ of its own"
    return None


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Proof:
    """A function whose body is pure, as long as a few things stay as they are."""

    function: FunctionType
    """The function."""
    code: object
    """Its code when it was proven."""
    reads: frozenset[str]
    """The attributes of its instance whose values it computes with."""
    calls: frozenset[str]
    """The attributes of its instance that it calls."""
    globals: tuple[tuple[str, str | None, object], ...]
    """The values of global names, and of their attributes, that it goes by."""

    def holds(self, owner: object) -> bool:
        """Whether it is proven for this instance, as that is now."""
        for name, attribute, known in self.globals:
            found = self.function.__globals__.get(name, _ABSENT)
            if attribute is not None:
                found = getattr(found, attribute, _ABSENT)
            if found is not known:
                return False
        if owner is None:
            return not self.reads and not self.calls
        if unreadable(type(owner), self.reads | self.calls) is not None:
            return False
        try:
            return all(is_plain(getattr(owner, name)) for name in self.reads) and all(
                is_proven(getattr(owner, name)) for name in self.calls
            )
        except (AttributeError, RecursionError):
            return False


_proofs: dict[tuple[FunctionType, bool], Proof | Obstacle] = {}


def proof_of(function: FunctionType, *, method: bool) -> Proof | Obstacle:
    """Prove a function's body to be pure, or tell what in it is not on the list."""
    key = (function, method)
    known = _proofs.get(key)
    if known is None or (isinstance(known, Proof) and known.code is not function.__code__):
        # Until it is proven; a function that calls itself never is.
        _proofs[key] = Obstacle(ast.Pass(), f"{function.__qualname__} calls itself")
        known = _proofs[key] = _prove(function, method)
    return known


def _prove(function: FunctionType, method: bool) -> Proof | Obstacle:
    if innermost(function) is not function:
        return Obstacle(ast.Pass(), f"{function.__qualname__} is decorated")
    try:
        source = source_of(function)
    except NoSource as error:
        return Obstacle(ast.Pass(), f"{function.__qualname__}: {error}")
    try:
        prover = _Prover(function, source.node, method)
        prover.block(source.node.body)
    except Obstacle as obstacle:
        where = f"{source.file.name}:{getattr(obstacle.node, 'lineno', source.node.lineno)}"
        return Obstacle(ast.Pass(), f"{function.__qualname__} ({where}): {obstacle.what}")
    reads, calls = frozenset(prover.reads), frozenset(prover.calls)
    return Proof(function, function.__code__, reads, calls, tuple((*key, v) for key, v in prover.globals.items()))


class _Prover:
    """Walks the statements of one function."""

    def __init__(self, function: FunctionType, node: FunctionNode, method: bool) -> None:
        code = function.__code__
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if isinstance(node, ast.AsyncFunctionDef) or code.co_freevars or code.co_cellvars:
            raise Obstacle(node, "it is more than a function of its arguments")
        if not is_fixed(defaults):
            raise Obstacle(node, "it has a default that may change")
        names = code.co_varnames
        self.namespace: Mapping[str, Any] = function.__globals__
        owner = names[0] if method and names else None
        self.scope = Scope(frozenset(names), owner, modules_of(self.namespace), whole=True)
        self.reads: set[str] = set()
        self.calls: set[str] = set()
        self.globals: dict[tuple[str, str | None], object] = {}

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Return(value=None):
                    pass
                case (
                    ast.Return(value=ast.expr() as value) | ast.AnnAssign(target=ast.Name(), value=ast.expr() as value)
                ):
                    self.expression(value)
                case ast.Assign(targets=targets, value=value) if all(map(binds_names, targets)):
                    self.expression(value)
                case ast.If(test=test, body=body, orelse=orelse):
                    closed = self.constant(test)
                    if closed is None:
                        self.expression(test)
                    for branch, runs in ((body, True), (orelse, False)):
                        if closed in (None, runs):
                            self.block(branch)
                case _:
                    raise Obstacle(statement, f"`{text(statement)}` is not on the list")

    def constant(self, test: ast.expr) -> bool | None:
        """What a test gives for as long as the process lives; ``None`` if that is not known."""
        match test:
            case ast.BoolOp(op=ast.And(), values=[first, *_]):
                return False if self.constant(first) is False else None
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name not in self.scope.local:
                found = self.namespace.get(name)
                if isinstance(found, FunctionType) and f"{found.__module__}.{found.__name__}" in CONSTANT_FUNCTIONS:
                    self.globals[name, None] = found
                    return bool(found())
        return None

    def expression(self, node: ast.expr) -> None:
        for value in values_of(node, self.scope):
            match value.node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.scope.owner:
                    (self.calls if value.called else self.reads).add(attribute)
                case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                    found = getattr(self.namespace[name], attribute, _ABSENT)
                    self.go_by(value, found, name, attribute)
                    self.globals[name, None] = self.namespace[name]
                case ast.Name(id=name):
                    found = self.namespace.get(name, _ABSENT)
                    self.go_by(value, getattr(builtins, name, _ABSENT) if found is _ABSENT else found, name, None)
                    self.globals[name, None] = found

    def go_by(self, value: Value, found: object, name: str, attribute: str | None) -> None:
        if not (is_proven(found) if value.called else is_fixed(found)):
            raise Obstacle(value.node, f"`{text(value.node)}` is not on the list of pure expressions")
        self.globals[name, attribute] = found


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
