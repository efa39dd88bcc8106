"""Chains of a function, each with the proof that a gate may take its arithmetic, or with what stands in the way.

A chain is one expression, or definitions in one block that end in one. Between its first operand and its root stands
nothing but what is on the list of pure expressions, so that what the proof goes by can be looked at once, when the
first operand is there: nothing changes it until the root is reached.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .def_use import Definition, Region, Uses
from .patterns import PATTERNS, Operand, Pattern, Patterns
from .purity import Obstacle, Scope, Value, binds_names, text, values_of
from .sources import FunctionNode

__all__ = ["Chain", "Form", "NormCall", "find_chains", "leaves_of", "path_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One way in which a gate takes a chain: by itself, or with the norm in front."""

    values: tuple[Value, ...]
    """What has to be plain or proven, when what it begins with has been evaluated."""
    reads: frozenset[str]
    """Attributes of the instance that are read between its operations."""
    definitions: tuple[Definition, ...] = ()
    """The definitions whose arithmetic waits for the root, in order; none where it is one expression."""
    region: Region | None = None
    """What runs from the first of them to the root."""


@dataclass(frozen=True, slots=True, eq=False)
class NormCall:
    """The norm whose result a chain modulates."""

    call: ast.Call
    """The call."""
    form: Form | None
    """The chain with the norm in it; ``None`` where it cannot be folded."""
    reason: str | None = None
    """Why it cannot."""

    @property
    def text(self) -> str:
        """The norm as the source calls it, without its argument: ``self.norm1``."""
        return ast.unparse(self.call.func)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One chain of a function."""

    pattern: Pattern
    """What it is."""
    reason: str | None
    """Why no gate can stand here; ``None`` where one can."""
    form: Form | None = None
    """How a gate takes it without a norm; ``None`` where none can."""
    norm: NormCall | None = None
    """The norm that gives ``x``, if one does."""

    @property
    def root(self) -> ast.expr:
        """The expression that it is the value of."""
        return self.pattern.root

    @property
    def kind(self) -> str:
        """The kind of site, without a norm."""
        return self.pattern.kind

    @property
    def operands(self) -> Mapping[str, Operand]:
        """Its operands by their names, in the kernel's order."""
        return self.pattern.operands

    @property
    def leaves(self) -> tuple[ast.expr, ...]:
        """What its root evaluates, in order."""
        return tuple(leaves_of(self.root, self.pattern))

    @property
    def held(self) -> bool:
        """Whether the first of these is kept, because evaluating it twice would not do."""
        viewed = any(operand.views for operand in self.operands.values())
        return viewed or not isinstance(self.leaves[0], ast.Name)


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
    patterns, prover = Patterns(uses), _Prover(uses, Scope(uses.local, owner, modules))
    taken: set[ast.AST] = set()
    chains: list[Chain] = []
    for pattern in PATTERNS:
        for node in ast.walk(function):
            found = pattern(patterns, node) if node not in taken else None
            if found is not None:
                taken.update(_covered(found))
                x = found.operands.get("x")
                chains.append(prover.chain(found, patterns.norm_call(x.expression) if x is not None else None))
    return tuple(sorted(_apart(chains), key=lambda chain: (chain.root.lineno, chain.root.col_offset)))


def _apart(chains: Sequence[Chain]) -> Iterator[Chain]:
    """The chains; where one stands in an operand of another, one of the two has a reason."""
    inside: dict[Chain, Chain] = {}
    around: dict[Chain, Chain] = {}
    roots = {chain.root: chain for chain in chains if chain.reason is None}
    for outer in roots.values():
        for leaf in outer.leaves[1:]:
            called = {n for call in ast.walk(leaf) if isinstance(call, ast.Call) for n in ast.walk(call)}
            for inner in (roots[node] for node in ast.walk(leaf) if isinstance(node, ast.expr) and node in roots):
                # What computes with a site's result is a layer, which no proof covers: the site inside is worth more.
                if inner.root in called:
                    around[outer] = inner
                else:
                    inside[inner] = outer
    for chain in chains:
        if chain in inside:
            yield replace(chain, reason=f"it stands in an operand of the site in line {inside[chain].root.lineno}")
        elif chain in around:
            what = f"the site in line {around[chain].root.lineno} stands in an operand"
            yield replace(chain, reason=f"{what}; bind that to a name before line {chain.root.lineno}")
        else:
            yield chain


class _Prover:
    """Proves that the arithmetic of a chain may move to its root."""

    def __init__(self, uses: Uses, scope: Scope) -> None:
        self.uses = uses
        self.scope = scope

    def chain(self, pattern: Pattern, norm: tuple[ast.Call, Definition | None] | None) -> Chain:
        """The chain with what has to be looked at when it runs, or with the reason why no gate can stand there."""
        chain = Chain(pattern, pattern.reason)
        if norm is not None:
            chain = replace(chain, norm=NormCall(norm[0], None))
        if chain.reason is None:
            try:
                chain = replace(chain, form=self.plain(chain))
            except Obstacle as obstacle:
                return replace(chain, reason=str(obstacle))
            if norm is not None:
                try:
                    chain = replace(chain, norm=NormCall(norm[0], self.folded(chain, *norm)))
                except Obstacle as obstacle:
                    chain = replace(chain, norm=NormCall(norm[0], None, str(obstacle)))
        return chain

    def plain(self, chain: Chain) -> Form:
        """The chain by itself."""
        root, line = chain.root, chain.root.lineno
        for holder in self.uses.holders(root):
            if isinstance(holder, ast.Lambda | FunctionNode | ast.ClassDef) and holder is not self.uses.function:
                raise Obstacle(holder, "the chain stands in a function inside the function; make that a method")
        leaves, links = chain.leaves, chain.pattern.links
        if links:
            if any(operand.views for operand in chain.operands.values()):
                raise Obstacle(root, "the sum that is viewed has a name; write the chain as one expression")
            definitions = sorted({*links.values()}, key=lambda definition: definition.statement.lineno)
            return self.moved(chain, definitions, leaves, {d: [name] for name, d in links.items()})
        ends = self.uses.exceptions_end(root)
        for leaf in leaves[1:]:
            # Which of two operations raises shows where the exception is caught.
            if ends is not None and not isinstance(leaf, ast.Name):
                what = f"`{text(leaf)}` may raise in the `{_keyword(ends)}` of line {ends.lineno}"
                raise Obstacle(leaf, f"{what}; bind it to a name before line {line}")
        if any(isinstance(holder, ast.comprehension) for holder in self.uses.holders(root)):
            raise Obstacle(root, "a comprehension goes over the chain; bind it to a name before")
        return self.form(leaves[chain.held :], f"bind it to a name before line {line}")

    def folded(self, chain: Chain, call: ast.Call, definition: Definition | None) -> Form:
        """The norm as a part of the chain."""
        if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
            raise Obstacle(call, "the norm is called with more than one argument")
        if path_of(call.func, self.scope.owner) is None:
            raise Obstacle(call, f"`{text(call.func)}` may be anything; call a norm of the instance, as `self.norm(x)`")
        if chain.pattern.links:
            raise Obstacle(chain.root, "the product behind the norm has a name; write the chain as one expression")
        x = chain.operands["x"].expression
        first = chain.leaves[0] is x
        others = [leaf for leaf in chain.leaves if leaf is not x]
        if definition is not None:
            return self.moved(chain, [definition], others, {definition: [x, chain.pattern.like or x]})
        advice = f"bind it to a name before line {chain.root.lineno}"
        handed = [] if first else [call.func]
        return self.form([*others[chain.held and not first :], *([] if first else call.args)], advice, handed)

    def form(self, used: Sequence[ast.expr], advice: str, handed: Sequence[ast.expr] = ()) -> Form:
        """What is evaluated in one expression; with ``handed`` nothing is done between the operations."""
        values = [value for leaf in used for value in self.values(leaf, advice)]
        values += [value for leaf in handed for value in self.values(leaf, advice, used=False)]
        return Form(tuple(values), self.reads(*used, *handed))

    def moved(
        self,
        chain: Chain,
        definitions: Sequence[Definition],
        leaves: Sequence[ast.expr],
        readers: Mapping[Definition, Sequence[ast.AST]],
    ) -> Form:
        """Prove that definitions may wait for the chain's root, which evaluates ``leaves``."""
        for definition in definitions:
            other = self.uses.other_reader(definition, readers[definition])
            if other is not None:
                inside = other is self.uses.function
                who = "locals(), or a function inside, may read" if inside else "something else reads"
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
        advice = f"move it out of lines {first.lineno} to {chain.root.lineno}"
        inside_of = {definition.statement: definition.value for definition in definitions}
        bound: set[str] = set()
        values: list[Value] = []
        read: list[ast.expr] = []

        def look(parts: Sequence[ast.expr], *, used: bool = True) -> None:
            # What is bound on the way is made of plain values by what is listed, and so is plain.
            for value in (value for part in parts for value in self.values(part, advice, used=used)):
                if not (isinstance(value.node, ast.Name) and value.node.id in bound):
                    values.append(value)
                elif value.called:
                    raise Obstacle(value.node, f"`{text(value.node)}` is bound on the way and called; {advice}")
            read.extend(parts)

        for statement in region.statements:
            if region.branch is not None and statement is region.branch.body[0]:
                look([region.branch.test])
            if statement in inside_of:
                own = list(leaves_of(inside_of[statement], chain.pattern))
                # What the chain begins with is evaluated before any of its operations.
                look(own[1:] if statement is first else own)
            else:
                look(self.evaluated(statement, advice))
            bound |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if region.branch is not None and region.reader is region.branch.body[0]:
            look([region.branch.test])
        look(list(self.before_root(chain)), used=False)
        look(leaves)
        return Form(tuple(values), self.reads(*read), tuple(definitions), region)

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
        try:
            return values_of(node, self.scope, used=used)
        except Obstacle as obstacle:
            raise Obstacle(obstacle.node, f"{obstacle.what}; {advice}") from None

    def reads(self, *nodes: ast.expr) -> frozenset[str]:
        """The attributes of the instance that are read in expressions."""
        paths = (path_of(inner, self.scope.owner) for node in nodes for inner in ast.walk(node))
        return frozenset(path[0] for path in paths if path is not None)

    def evaluated(self, statement: ast.stmt, advice: str) -> list[ast.expr]:
        """What a statement evaluates that may stand in between."""
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return []
            case ast.Assign(targets=targets, value=value) if all(map(binds_names, targets)):
                return [value]
            case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
                return [value]
        raise Obstacle(statement, f"`{text(statement)}` stands in between; {advice}")


def leaves_of(node: ast.AST, chain: Pattern) -> Iterator[ast.expr]:
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


def _covered(chain: Pattern) -> Iterator[ast.AST]:
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
