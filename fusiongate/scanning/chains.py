"""Chains in a function's syntax tree: the patterns that kernels repeat, and what stands in a rewiring's way.

A pattern is one entry of ``PATTERNS``: it reads an expression and names the kernel and its operands. Where each of
these is evaluated, what may stand in between, and how a norm in front is taken in is the same for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from .def_use import Definition, Region, Uses
from .purity import Obstacle, Scope, Value, binds_names, text, values_of
from .sources import FunctionNode

__all__ = ["PATTERNS", "Chain", "Deferral", "NormCall", "Operand", "find_chains", "leaves_of", "path_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of a chain, as the kernel is to get it."""

    expression: ast.expr
    """The expression that computes it."""
    views: tuple[ast.expr, ...] = ()
    """Indexing and view calls that the source applies to the sum ``1 + b``, from the inside out."""


@dataclass(frozen=True, slots=True, eq=False)
class Deferral:
    """Definitions whose arithmetic is put off until the statement that the chain ends in."""

    definitions: tuple[Definition, ...]
    """The definitions, in order."""
    region: Region
    """What runs from the first of them to the end."""
    guards: Mapping[ast.stmt, Sequence[Value]]
    """What has to be plain or proven before each of these statements; of an ``if``, before its test."""


@dataclass(frozen=True, slots=True, eq=False)
class NormCall:
    """The norm whose result a chain modulates."""

    call: ast.Call
    """The call."""
    deferral: Deferral | None = None
    """The definition that keeps its result; ``None`` where the call stands in the chain itself."""
    guards: tuple[Value, ...] = ()
    """What has to be plain or proven at the chain's root, besides the norm and its argument."""
    reads: frozenset[str] = frozenset()
    """Attributes of the instance that are read from the norm to the root."""
    reason: str | None = None
    """Why it cannot be folded into the chain; ``None`` where it can."""

    @property
    def text(self) -> str:
        """The norm as the source calls it, without its argument: ``self.norm1``."""
        return ast.unparse(self.call.func)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One chain of a function."""

    root: ast.expr
    """The expression that it is the value of."""
    kind: str
    """The kernel, as ``rewired`` names it; or ``scale``, for which there is none."""
    operands: Mapping[str, Operand]
    """Its operands by their names, in the kernel's order."""
    links: Mapping[ast.Name, Definition] = field(default_factory=dict)
    """The readings of names that it goes through, and what each of them reads."""
    norm: NormCall | None = None
    """The norm that gives ``x``, if one does."""
    like: ast.expr | None = None
    """A second place where ``x`` stands: in the cast of the result to its dtype."""
    reason: str | None = None
    """Why no gate can stand here; ``None`` where one can."""
    leaves: tuple[ast.expr, ...] = ()
    """What its root evaluates, in order: operands, and what their views are taken by."""
    held: bool = False
    """Whether the first of them is kept, because evaluating it twice would not do."""
    guards: tuple[Value, ...] = ()
    """What has to be plain or proven at the root."""
    deferral: Deferral | None = None
    """The definitions that it goes through; ``None`` where it is one expression."""
    reads: frozenset[str] = frozenset()
    """Attributes of the instance that are read between its operations."""

    @property
    def line(self) -> int:
        """The line that the chain's last operation begins on."""
        return self.root.lineno


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of a chain: its operands so far, and how it was come by."""

    operands: Mapping[str, Operand]
    links: Mapping[ast.Name, Definition] = field(default_factory=dict)
    reason: str | None = None


_MOVABLE = frozenset({"squeeze", "unsqueeze"})
_VIEWS = _MOVABLE | {"expand", "expand_as", "flatten", "movedim", "permute", "reshape", "transpose", "unflatten"}
_VIEWS |= {"view", "view_as"}
_NORM_FUNCTIONS = frozenset({"group_norm", "layer_norm", "rms_norm", "instance_norm", "batch_norm"})


class _Patterns:
    """The patterns, over the statements of one function."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses

    # `(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)`
    def modulate_fp32(self, node: ast.AST) -> Chain | None:
        match node:
            case ast.Call(
                func=ast.Attribute(value=inner, attr="to"), args=[ast.Attribute(value=like, attr="dtype")], keywords=[]
            ):
                pass
            case ast.Call(func=ast.Attribute(value=inner, attr="type_as"), args=[like], keywords=[]):
                pass
            case _:
                return None
        chain = self.modulate(inner)
        if chain is None or chain.links:
            return None
        bare = {role: _uncast(operand) for role, operand in chain.operands.items()}
        x = bare["x"]
        if x is None or ast.dump(x.expression) != ast.dump(like) or not isinstance(like, ast.Name):
            return None
        operands = {role: bare[role] or operand for role, operand in chain.operands.items()}
        return replace(chain, root=node, kind="modulate_fp32", operands=operands, like=like)

    # `x * (1 + scale) + shift`
    def modulate(self, node: ast.AST) -> Chain | None:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pass
            case _:
                return None
        for product_node, shift in ((left, right), (right, left)):
            product = self.product(product_node)
            if product is not None and not isinstance(shift, ast.Constant):
                operands = {**product.operands, "shift": Operand(shift)}
                return Chain(node, "modulate", operands, product.links, reason=product.reason)
        return None

    # `x *= 1 + scale` and then `x += shift`
    def in_place(self, node: ast.AST) -> Chain | None:
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
        reason = (
            f"line {node.lineno}: it writes in place, and a kernel returns a new tensor; write `{name} = {name} * …`"
        )
        return Chain(root, "modulate", operands, reason=reason)

    # `norm(x) * (1 + scale)`
    def scale(self, node: ast.AST) -> Chain | None:
        if not isinstance(node, ast.BinOp):
            return None
        product = self.product(node)
        # Without a norm in front it could be anything: a gate, a gain, a weight.
        if product is None or self.norm_call(product.operands["x"].expression) is None:
            return None
        reason = "a scale without a shift: there is no kernel for it"
        return Chain(node, "scale", product.operands, product.links, reason=reason)

    # `residual + update * gate`
    def gated_residual(self, node: ast.AST) -> Chain | None:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pass
            case _:
                return None
        for residual, product in ((left, right), (right, left)):
            match product:
                case ast.BinOp(left=one, op=ast.Mult(), right=other):
                    # Which product is a gate's, only its name can tell.
                    gates = [factor for factor in (one, other) if "gate" in ast.unparse(factor).lower()]
                    if len(gates) == 1 and isinstance(residual, ast.Name):
                        update = other if gates[0] is one else one
                        named = {"residual": residual, "update": update, "gate": gates[0]}
                        return Chain(node, "gated_residual", {role: Operand(e) for role, e in named.items()})
        return None

    def product(self, node: ast.expr) -> _Part | None:
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                for factor, sum_node in ((left, right), (right, left)):
                    found = self.one_plus(sum_node)
                    if found is not None and not isinstance(factor, ast.Constant):
                        return replace(found, operands={"x": Operand(factor), **found.operands})
            case ast.Name():
                return self.behind(node, self.product)
        return None

    def one_plus(self, node: ast.expr) -> _Part | None:
        match node:
            case (
                ast.BinOp(left=ast.Constant(value=one), op=ast.Add(), right=operand)
                | ast.BinOp(left=operand, op=ast.Add(), right=ast.Constant(value=one))
            ) if one == 1 and not isinstance(one, bool) and not isinstance(operand, ast.Constant):
                return _Part({"scale": Operand(operand)})
            case ast.Subscript(value=inner, slice=index) if _takes_whole_dimensions(index):
                movable = True
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _VIEWS:
                movable = method in _MOVABLE
            case ast.Name():
                return self.behind(node, self.one_plus)
            case _:
                return None
        found = self.one_plus(inner)
        if found is None or found.links:
            return None
        scale = found.operands["scale"]
        reason = found.reason
        if not movable:
            reason = f"line {node.lineno}: the sum is viewed by another shape; view the scale instead of the sum"
        return _Part({"scale": replace(scale, views=(*scale.views, node))}, reason=reason)

    def norm_call(self, node: ast.expr) -> tuple[ast.Call, Definition | None] | None:
        """The norm that gives an expression's value, and the assignment that it stands in."""
        if _is_norm(node):
            return node, None
        definition = self.uses.definition(node) if isinstance(node, ast.Name) else None
        return (definition.value, definition) if definition is not None and _is_norm(definition.value) else None

    def behind(self, name: ast.Name, pattern: Callable[[ast.expr], _Part | None]) -> _Part | None:
        """What a pattern finds in the assignment behind a name."""
        definition = self.uses.definition(name)
        found = pattern(definition.value) if definition is not None else None
        if definition is None or found is None:
            return None
        return replace(found, links={**found.links, name: definition})


PATTERNS: tuple[Callable[[_Patterns, ast.AST], Chain | None], ...] = (
    *(_Patterns.modulate_fp32, _Patterns.modulate, _Patterns.in_place, _Patterns.scale, _Patterns.gated_residual),
)
"""Every pattern, the wider ones first: what one has found is not looked at by the next."""


def find_chains(function: FunctionNode, owner: str | None, modules: frozenset[str]) -> tuple[Chain, ...]:
    """Find every chain of a function, those where no gate can stand with the reason.

    Parameters
    ----------
    function
        The function.
    owner
        The parameter that is its instance.
    modules
        The global names of the modules whose functions are listed.
    """
    uses = Uses(function)
    if any(isinstance(n, ast.Name) and n.id == owner and not isinstance(n.ctx, ast.Load) for n in ast.walk(function)):
        owner = None
    patterns, prover = _Patterns(uses), _Prover(uses, Scope(uses.local, owner, modules))
    taken: set[ast.AST] = set()
    chains: list[Chain] = []
    for pattern in PATTERNS:
        for node in ast.walk(function):
            chain = pattern(patterns, node) if node not in taken else None
            if chain is not None:
                taken.update(_covered(chain))
                x = chain.operands.get("x")
                chains.append(prover.proven(chain, patterns.norm_call(x.expression) if x is not None else None))
    inside = {node: chain for chain in chains for leaf in chain.leaves[1:] for node in ast.walk(leaf)}
    for number, chain in enumerate(chains):
        if chain.reason is None and chain.root in inside:
            chains[number] = replace(
                chain, reason=f"it stands in an operand of the site in line {inside[chain.root].line}"
            )
    return tuple(sorted(chains, key=lambda chain: (chain.root.lineno, chain.root.col_offset)))


class _Prover:
    """Proves that the arithmetic of a chain may move to its root."""

    def __init__(self, uses: Uses, scope: Scope) -> None:
        self.uses = uses
        self.scope = scope
        self.read: set[str] = set()

    def proven(self, chain: Chain, norm: tuple[ast.Call, Definition | None] | None) -> Chain:
        """The chain with what has to be looked at when it runs, or with the reason why no gate can stand there."""
        found = None if norm is None else NormCall(norm[0])
        self.reads()
        if chain.reason is None:
            try:
                chain = self.placed(chain)
            except Obstacle as obstacle:
                chain = replace(chain, reason=str(obstacle))
        self.reads()
        if norm is not None and chain.reason is None:
            try:
                found = self.folded(chain, *norm)
            except Obstacle as obstacle:
                found = NormCall(norm[0], reason=str(obstacle))
        return replace(chain, norm=found)

    def placed(self, chain: Chain) -> Chain:
        for holder in self.uses.holders(chain.root):
            if isinstance(holder, ast.Lambda | FunctionNode | ast.ClassDef) and holder is not self.uses.function:
                raise Obstacle(holder, "the chain stands in a function inside the function; make that a method")
        leaves = tuple(leaves_of(chain.root, chain))
        if chain.links and any(operand.views for operand in chain.operands.values()):
            raise Obstacle(chain.root, "the sum that is viewed has a name; write the chain as one expression")
        if chain.links:
            definitions = sorted({*chain.links.values()}, key=lambda definition: definition.statement.lineno)
            deferral = self.deferral(chain, definitions, leaves, {d: [name] for name, d in chain.links.items()})
            return replace(chain, leaves=leaves, deferral=deferral, reads=self.reads())
        held = not isinstance(leaves[0], ast.Name) or any(operand.views for operand in chain.operands.values())
        guards: list[Value] = []
        for leaf in leaves[held:]:
            guards += self.values(leaf, f"bind it to a name before line {chain.line}")
        ends = self.uses.exceptions_end(chain.root)
        for leaf in leaves[1:]:
            # Which of two operations raises shows where the exception is caught.
            if ends is not None and not isinstance(leaf, ast.Name):
                what = f"`{text(leaf)}` may raise in the `{_keyword(ends)}` of line {ends.lineno}"
                raise Obstacle(leaf, f"{what}; bind it to a name before line {chain.line}")
        if any(isinstance(holder, ast.comprehension) for holder in self.uses.holders(chain.root)):
            raise Obstacle(chain.root, "a comprehension goes over the chain; bind it to a name before")
        return replace(chain, leaves=leaves, held=held, guards=tuple(guards), reads=self.reads())

    def folded(self, chain: Chain, call: ast.Call, definition: Definition | None) -> NormCall:
        """The norm as a part of the chain."""
        if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
            raise Obstacle(call, "the norm is called with more than one argument")
        if path_of(call.func, self.scope.owner) is None:
            raise Obstacle(call, f"`{text(call.func)}` may be anything; call a norm of the instance, as `self.norm(x)`")
        if chain.deferral is not None:
            raise Obstacle(chain.root, "the product behind the norm has a name; write the chain as one expression")
        x = chain.operands["x"].expression
        first = chain.leaves[0] is x
        others = [leaf for leaf in chain.leaves if leaf is not x]
        if definition is not None:
            deferral = self.deferral(chain, [definition], others, {definition: [x, chain.like or x]})
            return NormCall(call, deferral, reads=self.reads())
        advice = f"bind it to a name before line {chain.line}"
        found = [self.values(leaf, advice) for leaf in others[chain.held and not first :]]
        if not first:
            found += [self.values(call.func, advice, used=False), self.values(call.args[0], advice)]
        return NormCall(call, guards=tuple(value for values in found for value in values), reads=self.reads())

    def deferral(
        self,
        chain: Chain,
        definitions: Sequence[Definition],
        leaves: Sequence[ast.expr],
        readers: Mapping[Definition, Sequence[ast.AST]],
    ) -> Deferral:
        """Prove that definitions may wait for the chain's root, which evaluates ``leaves``."""
        for definition in definitions:
            other = self.uses.other_reader(definition, readers[definition])
            if other is not None:
                who = (
                    "locals(), or a function inside, may read"
                    if other is self.uses.function
                    else "something else reads"
                )
                told = f"{who} `{definition.name}` of line {definition.statement.lineno} too"
                raise Obstacle(other, f"{told}; write the chain as one expression")
        region = self.uses.region(definitions, self.uses.statement_of(chain.root))
        if region is None:
            raise Obstacle(chain.root, "the chain stands in more than one block; write it as one expression")
        first = definitions[0].statement
        ends = self.uses.exceptions_end(first)
        if ends is not None:
            what = f"the chain begins in the `{_keyword(ends)}` of line {ends.lineno}"
            raise Obstacle(first, f"{what}; write it as one expression")
        advice = f"move it out of lines {first.lineno} to {chain.line}"
        inside = {definition.statement: definition.value for definition in definitions}
        guards: dict[ast.stmt, list[Value]] = {}
        for statement in region.statements:
            if statement in inside:
                own = list(leaves_of(inside[statement], chain))
                # What the chain begins with is evaluated before any of its operations.
                values = [self.values(leaf, advice) for leaf in (own[1:] if statement is first else own)]
                guards[statement] = [value for found in values for value in found]
            else:
                guards[statement] = self.values_of_statement(statement, advice)
        if region.branch is not None:
            guards[region.branch] = self.values(region.branch.test, advice)
        before = [self.values(part, advice, used=False) for part in self.before_root(chain)]
        last = [*before, *(self.values(leaf, advice) for leaf in leaves)]
        guards[region.reader] = [value for found in last for value in found]
        return Deferral(tuple(definitions), region, guards)

    def before_root(self, chain: Chain) -> Iterator[ast.expr]:
        """What the chain's statement evaluates before its root, which it has to reach once."""
        node: ast.AST = chain.root
        while not isinstance(node, ast.stmt):
            holder = self.uses.parents[node]
            match holder:
                case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Expr():
                    return
                case ast.BinOp() | ast.UnaryOp() | ast.Call() | ast.Tuple() | ast.List() | ast.Dict() | ast.keyword():
                    pass
                case ast.Attribute() | ast.Subscript() | ast.Starred():
                    pass
                case _:
                    raise Obstacle(chain.root, "the chain may not be reached once; give its value a name first")
            for sibling in ast.iter_child_nodes(holder):
                if sibling is node:
                    break
                for part in ast.walk(sibling) if isinstance(sibling, ast.keyword) else [sibling]:
                    if isinstance(part, ast.expr):
                        yield part
                        break
            node = holder

    def values(self, node: ast.expr, advice: str, *, used: bool = True) -> list[Value]:
        self.read |= {path[0] for inner in ast.walk(node) if (path := path_of(inner, self.scope.owner)) is not None}
        try:
            return values_of(node, self.scope, used=used)
        except Obstacle as obstacle:
            raise Obstacle(obstacle.node, f"{obstacle.what}; {advice}") from None

    def reads(self) -> frozenset[str]:
        """The attributes of the instance that were read in what was looked at since the last time."""
        read, self.read = frozenset(self.read), set()
        return read

    def values_of_statement(self, statement: ast.stmt, advice: str) -> list[Value]:
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return []
            case ast.Assign(targets=targets, value=value) if all(map(binds_names, targets)):
                return self.values(value, advice, used=not all(isinstance(target, ast.Name) for target in targets))
            case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
                return self.values(value, advice, used=False)
        raise Obstacle(statement, f"`{text(statement)}` stands in between; {advice}")


def leaves_of(node: ast.AST, chain: Chain) -> Iterator[ast.expr]:
    """What a part of a chain evaluates, in order: operands, and what their views are taken by."""
    ends = {operand.expression for operand in chain.operands.values()} | {chain.like}
    views = {view for operand in chain.operands.values() for view in operand.views}

    def walk(node: ast.AST) -> Iterator[ast.expr]:
        if node in ends:
            assert isinstance(node, ast.expr)
            yield node
        elif node in views and isinstance(node, ast.Call):
            yield from walk(node.func)
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield from (argument for argument in given if not isinstance(argument, ast.Constant))
        elif node not in chain.links:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    yield from walk(node)


def _covered(chain: Chain) -> Iterator[ast.AST]:
    """The nodes that belong to a chain itself: from its root down to its operands."""
    ends = {operand.expression for operand in chain.operands.values()}
    heads: list[ast.AST] = [chain.root, *(definition.value for definition in chain.links.values())]
    while heads:
        node = heads.pop()
        if node not in ends:
            yield node
            heads += ast.iter_child_nodes(node)


def path_of(node: ast.AST, owner: str | None) -> tuple[str, ...] | None:
    """The attributes that lead from the instance to a value; ``None`` where it is none of the instance's."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            return (attribute,)
        case ast.Attribute(value=inner, attr=attribute) if (path := path_of(inner, owner)) is not None:
            return (*path, attribute)
    return None


def _keyword(node: ast.AST) -> str:
    return "try" if isinstance(node, ast.Try | ast.TryStar) else "with"


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
