"""The adaLN chain ``a * (1 + b) + c`` in a syntax tree, however it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from .def_use import Definition, Flow, FunctionNode, analyse
from .links import Chain, NormCall, Operand
from .patterns import VIEWS, is_norm_call, takes_whole_dimensions, without_cast
from .writes import own_parts, writes

__all__ = ["Findings", "find_chains"]

_SCALE_ONLY = "a scale without a shift: there is no kernel for it"


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """``1 + b``, possibly behind a name and under views."""

    operand: Operand
    consumed: Mapping[ast.AST, Definition]


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """``a * (1 + b)``, possibly behind a name."""

    x: Operand
    sum: _Sum
    consumed: Mapping[ast.AST, Definition] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """What was found in a function."""

    chains: tuple[Chain, ...]
    """Its chains, in the order of the source."""
    flow: Flow
    """Its reaching definitions."""


def find_chains(function: FunctionNode) -> Findings:
    """Find every chain of a function.

    A chain in a function that is defined inside it is listed too, with its reason.
    """
    finder = _Finder(function)
    chains = sorted(finder.chains(), key=lambda chain: (chain.root.lineno, chain.root.col_offset))
    return Findings(tuple(chains), finder.flow)


class _Finder:
    def __init__(self, function: FunctionNode) -> None:
        self.function = function
        self.flow: Flow = analyse(function)
        self.parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self.taken: set[ast.AST] = set()

    def chains(self) -> Iterator[Chain]:
        candidates = list(ast.walk(self.function))
        for matcher in (self.cast_chain, self.plain_chain, self.chain_in_place, self.scale_alone):
            for node in candidates:
                if node not in self.taken and (chain := matcher(node)) is not None:
                    self.taken.update(self.covered(chain))
                    yield self.checked(chain)

    def covered(self, chain: Chain) -> Iterator[ast.AST]:
        """The nodes that belong to the chain itself: from its root down to its operands."""
        ends = {operand.expression for operand in (chain.x, chain.scale, chain.shift) if operand is not None}
        heads: list[ast.AST] = [chain.root, *(d.value for d in chain.consumed.values() if d.value is not None)]
        while heads:
            node = heads.pop()
            if node not in ends:
                yield node
                heads += ast.iter_child_nodes(node)

    def checked(self, chain: Chain) -> Chain:
        if chain.reason is not None:
            return chain
        node: ast.AST = chain.root
        while node is not self.function:
            node = self.parents[node]
            if isinstance(node, ast.Lambda) or (isinstance(node, FunctionNode) and node is not self.function):
                return replace(chain, reason="it stands in a function inside the function")
        for definition in chain.consumed.values():
            if (written := self.written_between(definition, chain.root)) is not None:
                return replace(chain, reason=written)
        return chain

    # `(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)`

    def cast_chain(self, node: ast.AST) -> Chain | None:
        match node:
            case ast.Call(
                func=ast.Attribute(value=inner, attr="to"), args=[ast.Attribute(value=like, attr="dtype")], keywords=[]
            ):
                pass
            case ast.Call(func=ast.Attribute(value=inner, attr="type_as"), args=[like], keywords=[]):
                pass
            case _:
                return None
        chain = self.plain_chain(inner)
        if chain is None or chain.shift is None or chain.reason is not None:
            return None
        x = _uncast(chain.x)
        if x is None or x.home is not None or not self.same_value(x.expression, like):
            return None
        scale, shift = _uncast(chain.scale) or chain.scale, _uncast(chain.shift) or chain.shift
        return replace(
            chain,
            root=node,
            kind="modulate_fp32",
            x=x,
            scale=scale,
            shift=shift,
            norm=self.norm(x, like),
            like=like,
        )

    def same_value(self, one: ast.expr, other: ast.expr) -> bool:
        if ast.dump(one) != ast.dump(other):
            return False
        pairs = zip(ast.walk(one), ast.walk(other), strict=True)
        return all(
            self.flow.reaching.get(a) == self.flow.reaching.get(b)
            for a, b in pairs
            if isinstance(a, ast.Name) and isinstance(b, ast.Name)
        )

    def plain_chain(self, node: ast.AST) -> Chain | None:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pass
            case _:
                return None
        for product_node, shift_node in ((left, right), (right, left)):
            product = self.product(product_node)
            if product is None or isinstance(shift_node, ast.Constant):
                continue
            return Chain(
                root=node,
                kind="modulate",
                x=product.x,
                scale=product.sum.operand,
                shift=Operand(shift_node, None),
                norm=self.norm(product.x),
                reason=product.reason,
                consumed={**product.consumed, **product.sum.consumed},
            )
        return None

    def product(self, node: ast.expr) -> _Product | None:
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                for factor, sum_node in ((left, right), (right, left)):
                    found = self.one_plus(sum_node)
                    if found is not None and not isinstance(factor, ast.Constant):
                        return _Product(Operand(factor, None), found)
            case ast.Name() if (definition := self.flow.definition(node)) is not None:
                assert definition.value is not None
                inner = self.product(definition.value)
                if inner is None:
                    return None
                others = [n for n in self.flow.readers[definition] if n is not node]
                reason = inner.reason
                if others:
                    lines = ", ".join(sorted({str(getattr(n, "lineno", "?")) for n in others}))
                    reason = f"its product is read elsewhere too (line {lines})"
                x, operand = _at_home(inner.x, definition), _at_home(inner.sum.operand, definition)
                return _Product(
                    x=x,
                    sum=replace(inner.sum, operand=operand),
                    consumed={**inner.consumed, node: definition},
                    reason=reason,
                )
        return None

    def one_plus(self, node: ast.expr) -> _Sum | None:
        match node:
            case (
                ast.BinOp(left=ast.Constant(value=one), op=ast.Add(), right=operand)
                | ast.BinOp(left=operand, op=ast.Add(), right=ast.Constant(value=one))
            ) if one == 1 and not isinstance(one, bool) and not isinstance(operand, ast.Constant):
                return _Sum(Operand(operand, None), {})
            case ast.Subscript(value=inner, slice=index) if takes_whole_dimensions(index):
                pass
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in VIEWS:
                pass
            case ast.Name() if (definition := self.flow.definition(node)) is not None:
                assert definition.value is not None
                found = self.one_plus(definition.value)
                if found is None:
                    return None
                at_home = _at_home(found.operand, definition)
                return replace(found, operand=at_home, consumed={**found.consumed, node: definition})
            case _:
                return None
        found = self.one_plus(inner)
        if found is None:
            return None
        return replace(found, operand=replace(found.operand, views=(*found.operand.views, node)))

    def chain_in_place(self, node: ast.AST) -> Chain | None:
        """``x *= 1 + scale`` and then ``x += shift``."""
        match node:
            case ast.AugAssign(target=ast.Name() as target, op=ast.Add(), value=shift):
                pass
            case _:
                return None
        reaching = self.flow.reaching.get(target, frozenset())
        statement = next(iter(reaching)).statement if len(reaching) == 1 else None
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Mult):
            return None
        found = self.one_plus(statement.value)
        if found is None:
            return None
        return Chain(
            root=ast.copy_location(ast.BinOp(left=target, op=ast.Add(), right=shift), node),
            kind="modulate",
            x=Operand(target, None),
            scale=found.operand,
            shift=Operand(shift, None),
            norm=None,
            reason="it writes in place, and a fused kernel returns a new tensor",
        )

    def scale_alone(self, node: ast.AST) -> Chain | None:
        if not isinstance(node, ast.BinOp):
            return None
        product = self.product(node)
        norm = self.norm(product.x) if product is not None else None
        # Without a norm in front it could be anything: a gate, a gain, a weight.
        if product is None or norm is None:
            return None
        return Chain(
            root=node,
            kind="scale",
            x=product.x,
            scale=product.sum.operand,
            shift=None,
            norm=norm,
            reason=_SCALE_ONLY,
        )

    def norm(self, x: Operand, like: ast.expr | None = None) -> NormCall | None:
        """The norm call that gives ``x``; in ``like`` the chain reads it a second time."""
        if is_norm_call(x.expression):
            argument = _argument(x.expression, x.home)
            obstacle = None if argument is not None else "the norm is called with more than one argument"
            return NormCall(x.expression, argument or x, x.home, obstacle)
        if not isinstance(x.expression, ast.Name):
            return None
        definition = self.flow.definition(x.expression)
        if definition is None or not is_norm_call(definition.value):
            return None
        others = [n for n in self.flow.readers[definition] if n is not x.expression and n is not like]
        argument = _argument(definition.value, definition)
        obstacle = None
        if argument is None:
            obstacle = "the norm is called with more than one argument"
        elif others:
            lines = ", ".join(sorted({str(getattr(n, "lineno", "?")) for n in others}))
            obstacle = f"the norm's result is read elsewhere too (line {lines})"
        else:
            obstacle = self.written_between(definition, x.expression)
        return NormCall(definition.value, argument or x, definition, obstacle)

    def written_between(self, definition: Definition, reader: ast.AST) -> str | None:
        """What may write to memory between an assignment and a reading, so that the two cannot be drawn together."""
        assert definition.statement is not None
        node = reader
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        first, last = self.flow.order[definition.statement], self.flow.order.get(node, 0)
        operands = {n.id for n in ast.walk(definition.statement) if isinstance(n, ast.Name)} - {"self"}
        for statement, position in self.flow.order.items():
            if not first < position < last:
                continue
            for part in own_parts(statement):
                if writes(part, operands):
                    return f"line {part.lineno} may write to its operands"
        return None


def _at_home(operand: Operand, home: Definition) -> Operand:
    return operand if operand.home is not None else replace(operand, home=home)


def _argument(call: ast.Call, home: Definition | None) -> Operand | None:
    if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        return None
    return Operand(call.args[0], home)


def _uncast(operand: Operand) -> Operand | None:
    inner = without_cast(operand.expression)
    return None if inner is None else replace(operand, expression=inner)
