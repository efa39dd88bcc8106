"""Functions and modules that are proven to be pure: their bodies are made of what is listed, and stay what they are."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn
from torch.nn.modules import module as torch_module

from .purity import (
    CONSTANT_FUNCTIONS,
    Obstacle,
    Scope,
    binds_names,
    is_fixed,
    is_listed,
    is_plain,
    modules_of,
    text,
    values_of,
)
from .sources import FunctionNode, NoSource, innermost, source_of

__all__ = ["Proof", "is_proven", "obstacle_of_call", "proof_of", "unreadable"]


def is_proven(value: object) -> bool:
    """Whether calling a value is pure: it is listed, or its body is proven to be made of what is listed."""
    if is_listed(value):
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
    globals: tuple[tuple[ast.expr, object], ...]
    """Global names, attributes of modules among them, and the values that it goes by."""

    def holds(self, owner: object) -> bool:
        """Whether it is proven for this instance, as that is now."""
        if any(_looked_up(node, self.function) is not known for node, known in self.globals):
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


def _looked_up(node: ast.expr, function: FunctionType) -> object:
    """The value of a global name, or of a module's attribute."""
    if isinstance(node, ast.Attribute):
        return getattr(_looked_up(node.value, function), node.attr, _ABSENT)
    assert isinstance(node, ast.Name)
    return function.__globals__.get(node.id, getattr(builtins, node.id, _ABSENT))


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
    known = tuple(prover.globals.values())
    return Proof(function, function.__code__, frozenset(prover.reads), frozenset(prover.calls), known)


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
        self.function = function
        owner = names[0] if method and names else None
        self.scope = Scope(frozenset(names), owner, modules_of(function.__globals__), whole=True)
        self.reads: set[str] = set()
        self.calls: set[str] = set()
        self.globals: dict[str, tuple[ast.expr, object]] = {}

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
            case ast.Call(func=ast.Name(id=name) as called, args=[], keywords=[]) if name not in self.scope.local:
                found = _looked_up(called, self.function)
                if isinstance(found, FunctionType) and f"{found.__module__}.{found.__name__}" in CONSTANT_FUNCTIONS:
                    self.globals[name] = called, found
                    return bool(found())
        return None

    def expression(self, node: ast.expr) -> None:
        for value in values_of(node, self.scope):
            match value.node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.scope.owner:
                    (self.calls if value.called else self.reads).add(attribute)
                case _:
                    found = _looked_up(value.node, self.function)
                    if not (is_proven(found) if value.called else is_fixed(found)):
                        raise Obstacle(value.node, f"`{text(value.node)}` is not on the list of pure expressions")
                    self.globals[text(value.node)] = value.node, found
