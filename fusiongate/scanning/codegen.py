"""A function with calls of gates in the place of its chains, compiled in the surroundings of the original.

Every statement and every expression of the original stays in it, and runs whenever something is not what the proof goes
by: a chain becomes ``gate if as_proven else chain``, and a definition that waits for the chain's root
``if not as_proven: definition``. Operands are evaluated once, where and in the order in which the source does it.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

from .chains import Chain, Deferral, Operand, leaves_of
from .def_use import Definition
from .norms import FAMILIES, FoldableNorm
from .purity import Value
from .sources import FunctionSource

__all__ = ["SITES", "code_of", "reference_of"]

SITES = "_fusiongate"
"""The name by which a rewritten function reaches its gates."""

_ENTER = ast.parse("from fusiongate.scanning.rewire import enter as _fusiongate_enter").body[0]


def code_of(
    source: FunctionSource, chains: Mapping[int, Chain], helpers: frozenset[str], number: int | None
) -> CodeType:
    """Put gates in the place of chains.

    Parameters
    ----------
    source
        The function.
    chains
        Its chains where a gate can stand, by their numbers.
    helpers
        The global names of the functions that may have gates in them too.
    number
        The function's own number, by which a method looks for the gates of its instance; ``None`` for a helper, which
        is given them as an argument.

    Raises
    ------
    SyntaxError
        If it cannot be compiled, or would close over other names than before.
    """
    original = source.function.__code__
    node: Any = source.node
    body = _Writer(chains, helpers).block(node.body)
    arguments = _bare(node.args)
    if number is None:
        arguments.kwonlyargs.append(ast.arg(SITES))
        arguments.kw_defaults.append(None)
    else:
        docstring = ast.get_docstring(node, clean=False) is not None
        first = [*arguments.posonlyargs, *arguments.args][0].arg
        enter = _call(ast.Name(f"{SITES}_enter", ast.Load()), [ast.Constant(number), _name(first)])
        body[docstring:docstring] = [_ENTER, _assign(SITES, enter)]
    decorators = [ast.copy_location(ast.Constant(None), decorator) for decorator in node.decorator_list]
    function = type(node)(name=node.name, args=arguments, body=body, decorator_list=decorators, returns=None)
    made: Any = ast.copy_location(_without_type_params(function), node)
    if source.class_name is not None and source.class_name.strip("_"):
        # In a class whose name differs by underscores in front, private names are spelled as they were.
        name = f"________{source.class_name.lstrip('_')}"
        made = ast.ClassDef(name=name, bases=[], keywords=[], body=[made], decorator_list=[])
        made = ast.copy_location(_without_type_params(made), node)
    if original.co_freevars:
        factory = ast.FunctionDef(name=SITES, args=parameters(original.co_freevars), body=[made], decorator_list=[])
        made = ast.copy_location(_without_type_params(factory), node)
    module = ast.fix_missing_locations(ast.Module(body=[made], type_ignores=[]))
    compiled = compile(module, original.co_filename, "exec", flags=original.co_flags & _FUTURE, dont_inherit=True)
    code = next(code for code in _inside(compiled) if code.co_name == original.co_name)
    if code.co_freevars != original.co_freevars:
        raise SyntaxError(f"it would close over {code.co_freevars} and not over {original.co_freevars}")
    return code.replace(co_qualname=original.co_qualname)


_FUTURE = __future__.annotations.compiler_flag


def _inside(code: CodeType) -> Iterable[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


class _Waiting:
    """Definitions that wait, while a function is written."""

    def __init__(self, number: int, chain: Chain, deferral: Deferral, norm: ast.Call | None) -> None:
        self.chain = chain
        self.deferral = deferral
        self.norm = norm
        self.number = number
        self.flag = f"{SITES}_{'n' if norm is not None else 'c'}{number}"
        leaves = [norm.func, *norm.args] if norm is not None else self.leaves(*deferral.definitions)
        self.held: dict[ast.AST, str] = {leaf: f"{self.flag}_{place}" for place, leaf in enumerate(leaves)}

    def leaves(self, *definitions: Definition) -> list[ast.expr]:
        return [leaf for definition in definitions for leaf in leaves_of(definition.value, self.chain)]


class _Writer:
    """Writes a function's statements again."""

    def __init__(self, chains: Mapping[int, Chain], helpers: frozenset[str]) -> None:
        self.roots = {chain.root: (number, chain) for number, chain in chains.items()}
        self.helpers = helpers
        self.table: dict[ast.AST, str] = {}
        self.temporary: list[str] = []
        self.waiting: list[_Waiting] = []
        self.deferred: dict[ast.AST, str] = {}
        for number, chain in chains.items():
            norm = chain.norm
            if chain.deferral is not None:
                self.waiting.append(_Waiting(number, chain, chain.deferral, None))
                self.deferred.update(dict.fromkeys(chain.links, self.waiting[-1].flag))
            elif norm is not None and norm.reason is None and norm.deferral is not None:
                self.waiting.append(_Waiting(number, chain, norm.deferral, norm.call))
                self.deferred[chain.operands["x"].expression] = self.waiting[-1].flag

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in statements for made in self.statement(statement)]

    def statement(self, statement: ast.stmt) -> list[ast.stmt]:
        outer, self.temporary = self.temporary, []
        made: list[ast.stmt] = []
        copied: list[ast.stmt] | None = None
        for waiting in self.waiting:
            region = waiting.deferral.region
            if statement in waiting.deferral.guards and statement is not region.statements[0]:
                made += self.guarded(waiting, statement)
            if any(definition.statement is statement for definition in waiting.deferral.definitions):
                copied = self.defined(waiting, statement)
        copied = [self.fields(statement)] if copied is None else copied
        for waiting in self.waiting:
            if waiting.deferral.region.branch is statement:
                assert isinstance(copied[0], ast.If)
                copied[0].orelse[:0] = [_if(_name(waiting.flag), self.caught_up(waiting, statement))]
            if waiting.deferral.region.reader is statement:
                self.temporary += waiting.held.values()
        made += copied
        if self.temporary and not isinstance(statement, ast.Return | ast.Raise):
            # What was kept for a while is not to live until the function ends.
            made.append(ast.Assign([ast.Name(name, ast.Store()) for name in self.temporary], ast.Constant(None)))
        self.temporary = outer
        return [ast.copy_location(each, statement) if not hasattr(each, "lineno") else each for each in made]

    def guarded(self, waiting: _Waiting, statement: ast.stmt) -> list[ast.stmt]:
        """Look at what a statement goes by before it runs; where that will not do, catch up with what waits."""
        values = waiting.deferral.guards[statement]
        if not values:
            return []
        refused = ast.UnaryOp(ast.Not(), self.asked("proven", waiting.number, values))
        test = ast.BoolOp(ast.And(), [_name(waiting.flag), refused])
        return [_if(test, [*self.caught_up(waiting, statement), _assign(waiting.flag, ast.Constant(False))])]

    def caught_up(self, waiting: _Waiting, until: ast.stmt) -> list[ast.stmt]:
        """The definitions before a statement, as they were written, on the operands that were kept."""
        made: list[ast.stmt] = []
        region = waiting.deferral.region
        before = region.statements
        if until in before:
            before = before[: before.index(until)]
        elif until is region.branch:
            before = tuple(statement for statement in before if statement not in region.branch.body)
        for definition in waiting.deferral.definitions:
            if definition.statement in before:
                value = self.with_names(definition.value, waiting.held)
                made.append(ast.copy_location(_assign(definition.name, value), definition.statement))
        return made

    def defined(self, waiting: _Waiting, statement: ast.stmt) -> list[ast.stmt]:
        """A definition that waits: its operands are evaluated here, and its arithmetic is not."""
        (definition,) = (d for d in waiting.deferral.definitions if d.statement is statement)
        if waiting.norm is not None:
            made = [_assign(name, self.copy(leaf)) for leaf, name in waiting.held.items()]
            folds = self.site("folds", waiting.number, [_name(name) for name in waiting.held.values()])
            undo = _assign(definition.name, self.with_names(definition.value, waiting.held))
            return [*made, _assign(waiting.flag, folds), _if(ast.UnaryOp(ast.Not(), _name(waiting.flag)), [undo])]
        leaves = waiting.leaves(definition)
        made = []
        kept: Mapping[ast.AST, str] = {}
        if statement is waiting.deferral.region.statements[0]:
            first = leaves.pop(0)
            made.append(_assign(waiting.held[first], self.copy(first)))
            values = waiting.deferral.guards[statement]
            kept = {first: waiting.held[first]}
            made.append(_assign(waiting.flag, self.takes(waiting.number, values, [_name(waiting.held[first])])))
        held: list[ast.stmt] = [_assign(waiting.held[leaf], self.copy(leaf)) for leaf in leaves]
        original = _assign(definition.name, self.with_names(definition.value, kept))
        return [*made, _if(_name(waiting.flag), held or [ast.Pass()], [original])]

    # -- expressions ---------------------------------------------------------------------------------------------------

    def fields(self, node: Any) -> Any:
        """A node with its children copied, and itself not replaced."""
        values = {}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                statements = bool(value) and isinstance(value[0], ast.stmt)
                values[name] = self.block(value) if statements else [self.copy(child) for child in value]
            else:
                values[name] = self.copy(value)
        copied = type(node)(**values)
        return ast.copy_location(copied, node) if hasattr(node, "lineno") else copied

    def copy(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if node in self.table:
            return ast.copy_location(_name(self.table[node]), node)
        if isinstance(node, ast.expr) and node in self.roots:
            return ast.copy_location(self.root(*self.roots[node]), node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.helpers:
            called = _call(_attribute("helper"), [ast.Constant(node.id), _name(node.id)])
            return ast.copy_location(called, node)
        return self.fields(node)

    def with_names(self, node: ast.expr, names: Mapping[ast.AST, str]) -> Any:
        """A chain's own expression as it was written, with names in the place of what was evaluated before."""
        before, self.table = self.table, {**self.table, **names}
        copied = self.fields(node)
        self.table = before
        return copied

    def root(self, number: int, chain: Chain) -> ast.expr:
        norm = chain.norm
        if chain.deferral is not None:
            (waiting,) = (w for w in self.waiting if w.chain is chain)
            return ast.IfExp(
                _name(waiting.flag), self.gate("plain", number, chain, waiting.held), self.fields(chain.root)
            )
        if norm is None or norm.reason is not None:
            return self.expression(number, chain)
        if norm.deferral is not None:
            (waiting,) = (w for w in self.waiting if w.chain is chain)
            kept = [_name(name) for name in waiting.held.values()]
            folded = self.gate("folded", number, chain, {}, kept)
            return ast.IfExp(_name(waiting.flag), folded, self.expression(number, chain))
        x, first = chain.operands["x"].expression, chain.leaves[0]
        names = [self.temporary_name() for _ in range(2)]
        parts = [_walrus(name, self.copy(e)) for name, e in zip(names, (norm.call.func, *norm.call.args), strict=True)]
        folds = self.site("folds", number, parts)
        arguments = [_name(name) for name in names]
        if first is x:
            test = ast.BoolOp(ast.And(), [folds, self.asked("folding", number, norm.guards)])
            otherwise = self.expression(number, chain, ast.Call(arguments[0], arguments[1:], []), norm.guards)
            return ast.IfExp(test, self.gate("folded", number, chain, {}, arguments), otherwise)
        table: dict[ast.AST, str] = {}
        begun: list[ast.expr] = []
        if chain.held:
            table[first] = self.temporary_name()
            begun.append(_walrus(table[first], self.copy(first)))
        stands = self.site("stands", number, begun)
        kept_first = [_name(name) for name in table.values()]
        test = ast.BoolOp(ast.And(), [stands, self.asked("folding", number, norm.guards, kept_first), folds])
        otherwise = self.expression(number, chain, _name(table[first]) if chain.held else None, chain.guards)
        return ast.IfExp(test, self.gate("folded", number, chain, table, arguments), otherwise)

    def expression(
        self, number: int, chain: Chain, first: ast.expr | None = None, guards: Sequence[Value] | None = None
    ) -> ast.expr:
        """A chain in one expression; ``first`` is what it begins with, where that is not what the source has."""
        table: dict[ast.AST, str] = {}
        begun: list[ast.expr] = []
        if chain.held or first is not None:
            leaf = chain.leaves[0]
            if isinstance(first, ast.Name):
                table[leaf] = first.id
                begun.append(first)
            else:
                table[leaf] = self.temporary_name()
                begun.append(_walrus(table[leaf], self.copy(leaf) if first is None else first))
        scale = chain.operands.get("scale", Operand(chain.root))
        summed: ast.expr | None = None
        if scale.views and scale.expression in table:
            summed = _name(table[scale.expression])
        elif scale.views:
            table[scale.expression] = self.temporary_name()
            summed = _walrus(table[scale.expression], self.copy(scale.expression))
        test = self.takes(number, chain.guards if guards is None else guards, begun, summed)
        return ast.IfExp(test, self.gate("plain", number, chain, table), self.with_names(chain.root, table))

    def gate(
        self, method: str, number: int, chain: Chain, names: Mapping[ast.AST, str], norm: Sequence[ast.expr] = ()
    ) -> ast.expr:
        """The call of a gate, with its operands by their names and in the order in which they are evaluated."""
        roles = {operand.expression: role for role, operand in chain.operands.items()}
        held = [*chain.links.values()]
        order = [leaf for definition in held for leaf in leaves_of(definition.value, chain)]
        order = [leaf for leaf in (*order, *chain.leaves) if leaf in roles]
        keywords = [
            ast.keyword(roles[leaf], self.operand(chain.operands[roles[leaf]], names))
            for leaf in order
            if not (norm and roles[leaf] == "x")
        ]
        made = self.site(method, number, norm)
        made.keywords = keywords
        return made

    def operand(self, operand: Operand, names: Mapping[ast.AST, str]) -> ast.expr:
        before, self.table = self.table, {**self.table, **names}
        made: ast.expr = self.copy(operand.expression)
        for view in operand.views:
            match view:
                case ast.Subscript(slice=index):
                    made = ast.Subscript(made, self.copy(index), ast.Load())
                case ast.Call(func=ast.Attribute(attr=method), args=args, keywords=keywords):
                    called = ast.Attribute(made, method, ast.Load())
                    made = ast.Call(called, [self.copy(a) for a in args], [self.copy(k) for k in keywords])
            made = ast.copy_location(made, view)
        self.table = before
        return made

    def takes(
        self, number: int, values: Sequence[Value], begun: Sequence[ast.expr], summed: ast.expr | None = None
    ) -> ast.expr:
        """Whether a gate takes a chain; only where one stands may values be asked for before their time."""
        evaluated = [*begun, *([summed] if summed is not None else [])]
        names = [_name(e.target.id if isinstance(e, ast.NamedExpr) else e.id) for e in evaluated]  # type: ignore[attr-defined]
        asked = self.asked("takes", number, values, names[: len(begun)], *names[len(begun) :])
        return ast.BoolOp(ast.And(), [self.site("stands", number, evaluated), asked])

    def asked(
        self,
        method: str,
        number: int,
        values: Sequence[Value],
        begun: Sequence[ast.expr] = (),
        summed: ast.expr | None = None,
    ) -> ast.expr:
        """Whether the values that a proof goes by are plain or proven."""
        plain, called = dict[str, ast.expr](), dict[str, ast.expr]()
        for value in values:
            (called if value.called else plain).setdefault(ast.dump(value.node), self.value(value.node))
        made = self.site(method, number, [ast.Tuple([*begun, *plain.values()], ast.Load())])
        made.args += [ast.Tuple([*called.values()], ast.Load()), *([summed] if summed is not None else [])]
        return made

    def value(self, node: ast.expr) -> ast.expr:
        copied: ast.expr = self.fields(node)
        if node in self.deferred:
            # It is not there where it waits, and what waits is plain.
            return ast.IfExp(_name(self.deferred[node]), ast.Constant(None), copied)
        return copied

    def site(self, method: str, number: int, arguments: Sequence[ast.expr]) -> ast.Call:
        return _call(_attribute(method), [ast.Constant(number), *arguments])

    def temporary_name(self) -> str:
        name = f"{SITES}_t{len(self.temporary)}"
        self.temporary.append(name)
        return name


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _attribute(name: str) -> ast.expr:
    return ast.Attribute(_name(SITES), name, ast.Load())


def _call(function: ast.expr, arguments: Sequence[ast.expr]) -> ast.Call:
    return ast.Call(function, list(arguments), [])


def _walrus(name: str, value: ast.expr) -> ast.expr:
    return ast.NamedExpr(ast.Name(name, ast.Store()), value)


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _if(test: ast.expr, body: list[ast.stmt], orelse: Sequence[ast.stmt] = ()) -> ast.stmt:
    return ast.If(test, body, list(orelse))


def _without_type_params(node: Any) -> Any:
    # Python 3.12 gave definitions type parameters; older ones have no such field.
    if "type_params" in node._fields:
        node.type_params = []
    return node


def parameters(names: Sequence[str]) -> ast.arguments:
    """Plain parameters with these names."""
    return ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )


def _bare(arguments: ast.arguments) -> ast.arguments:
    """The parameters without annotations and defaults, which the original function has evaluated already."""

    def bare(argument: ast.arg | None) -> ast.arg | None:
        return None if argument is None else ast.arg(arg=argument.arg)

    return ast.arguments(
        posonlyargs=[ast.arg(arg=a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(arg=a.arg) for a in arguments.args],
        vararg=bare(arguments.vararg),
        kwonlyargs=[ast.arg(arg=a.arg) for a in arguments.kwonlyargs],
        kw_defaults=[None] * len(arguments.kwonlyargs),
        kwarg=bare(arguments.kwarg),
        defaults=[],
    )


def reference_of(chain: Chain, source: FunctionSource, norm: FoldableNorm | None) -> Callable[..., Any]:
    """A chain as a function of its operands, built from its own source.

    Parameters
    ----------
    chain
        The chain.
    source
        The function that it stands in.
    norm
        The norm that is folded in: then ``x`` is its argument, and its eps and the rest of what it is given come last.
    """
    names = [*chain.operands, *(["eps", *FAMILIES[norm.family]] if norm is not None else [])]
    made = ast.Lambda(parameters(names), _Inliner(chain, norm).visit(chain.root))
    made.args.defaults = [ast.Constant(None) for _ in FAMILIES[norm.family]] if norm is not None else []
    tree = ast.fix_missing_locations(ast.Expression(ast.copy_location(made, chain.root)))
    namespace = {**source.function.__globals__, f"{SITES}_norm": norm}
    function: Callable[..., Any] = eval(compile(tree, str(source.file), "eval"), namespace)
    return function


def _receiver(node: ast.AST) -> ast.expr:
    """What a view's method is called on."""
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    return node.func.value


class _Inliner:
    """The chain's own expression, with its operands named and the definitions it goes through put in place."""

    def __init__(self, chain: Chain, norm: FoldableNorm | None) -> None:
        self.chain = chain
        self.norm = norm
        self.names: dict[ast.AST, str] = {operand.expression: role for role, operand in chain.operands.items()}
        self.links: dict[ast.AST, Definition] = {name: link for name, link in chain.links.items()}  # noqa: C416  # wider keys
        self.views: set[ast.AST] = {view for operand in chain.operands.values() for view in operand.views}

    def visit(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if self.norm is not None and self.names.get(node) == "x":
            given = ("x", "eps", *FAMILIES[self.norm.family])
            return _call(_name(f"{SITES}_norm"), [_name(name) for name in given])
        if node in self.names or node is self.chain.like:
            return _name(self.names.get(node, "x"))
        if node in self.links:
            return self.visit(self.links[node].value)
        if node in self.views:
            # The operand comes in its final shape: the view has been taken of it already.
            return self.visit(node.value if isinstance(node, ast.Subscript) else _receiver(node))
        values = {
            name: [self.visit(child) for child in value] if isinstance(value, list) else self.visit(value)
            for name, value in ast.iter_fields(node)
        }
        copied = type(node)(**values)
        return ast.copy_location(copied, node) if hasattr(node, "lineno") else copied
