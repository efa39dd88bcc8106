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
from typing import Any, cast

from .chains import Chain, Form, leaves_of
from .def_use import Definition
from .norms import FAMILIES, FoldableNorm
from .sources import FunctionSource
from .templates import copied, expression, filled, name_of, parameters, without_type_params

__all__ = ["SITES", "code_of", "reference_of"]

SITES = "_fusiongate"
"""The name by which a rewritten function reaches its gates."""

_ENTER = f"""
from fusiongate.scanning.rewire import enter as {SITES}_enter
{SITES} = {SITES}_enter(NUMBER, OWNER)
"""


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
        body[docstring:docstring] = filled(_ENTER, NUMBER=ast.Constant(number), OWNER=first)
    decorators = [ast.copy_location(ast.Constant(None), decorator) for decorator in node.decorator_list]
    function = type(node)(name=node.name, args=arguments, body=body, decorator_list=decorators, returns=None)
    made: Any = ast.copy_location(without_type_params(function), node)
    if source.class_name is not None and source.class_name.strip("_"):
        # In a class whose name differs by underscores in front, private names are spelled as they were.
        name = f"________{source.class_name.lstrip('_')}"
        made = ast.ClassDef(name=name, bases=[], keywords=[], body=[made], decorator_list=[])
        made = ast.copy_location(without_type_params(made), node)
    if original.co_freevars:
        factory = ast.FunctionDef(name=SITES, args=parameters(original.co_freevars), body=[made], decorator_list=[])
        made = ast.copy_location(without_type_params(factory), node)
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


class _Moved:
    """A chain whose definitions wait for its root, while a function is written."""

    def __init__(self, number: int, chain: Chain, form: Form, norm: ast.Call | None) -> None:
        assert form.region is not None
        self.number, self.chain, self.form, self.norm, self.region = number, chain, form, norm, form.region
        self.flag = f"{SITES}_{'n' if norm is not None else 'c'}{number}"
        leaves = [leaf for definition in form.definitions for leaf in self.leaves(definition)]
        self.held: dict[ast.AST, str] = {leaf: f"{self.flag}_{place}" for place, leaf in enumerate(leaves)}

    def leaves(self, definition: Definition) -> list[ast.expr]:
        if self.norm is not None:
            return _parts(self.norm)
        return list(leaves_of(definition.value, self.chain.pattern))


class _Writer:
    """Writes a function's statements again."""

    def __init__(self, chains: Mapping[int, Chain], helpers: frozenset[str]) -> None:
        self.roots = {chain.root: (number, chain) for number, chain in chains.items()}
        self.helpers = helpers
        self.table: Mapping[ast.AST, str] = {}
        self.temporary: list[str] = []
        self.moved: list[_Moved] = []
        for number, chain in chains.items():
            for form, norm in ((chain.form, None), *([(n.form, n.call)] if (n := chain.norm) is not None else [])):
                if form is not None and form.region is not None:
                    self.moved.append(_Moved(number, chain, form, norm))

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in statements for made in self.statement(statement)]

    def statement(self, statement: ast.stmt) -> list[ast.stmt]:
        outer, self.temporary = self.temporary, []
        waiting = [(m, d) for m in self.moved for d in m.form.definitions if d.statement is statement]
        made: list[ast.stmt] = self.definition(*waiting[0]) if waiting else [self.fields(statement)]
        for moved in self.moved:
            if moved.region.branch is statement:
                assert isinstance(made[0], ast.If)
                made[0].orelse[:0] = self.caught_up(moved)
            if moved.region.reader is statement:
                self.temporary += moved.held.values()
        if not isinstance(statement, ast.Return | ast.Raise):
            made += self.forgotten(self.temporary)
        self.temporary = outer
        return [ast.copy_location(each, statement) if not hasattr(each, "lineno") else each for each in made]

    def forgotten(self, names: Sequence[str]) -> list[ast.stmt]:
        """What was kept for a while is not to live until the function ends."""
        return [ast.Assign([ast.Name(name, ast.Store()) for name in names], ast.Constant(None))] if names else []

    def definition(self, moved: _Moved, definition: Definition) -> list[ast.stmt]:
        """A definition that waits: its operands are evaluated here, and its arithmetic is not."""
        leaves = moved.leaves(definition)
        made: list[ast.stmt] = []
        kept: dict[ast.AST, str] = {}
        if definition is moved.form.definitions[0]:
            begun = leaves if moved.norm is not None else leaves[:1]
            leaves = leaves[len(begun) :]
            kept = {leaf: moved.held[leaf] for leaf in begun}
            for leaf, name in kept.items():
                made += filled("HELD = LEAF", HELD=name, LEAF=self.copy(leaf))
            names = [name_of(name) for name in kept.values()]
            asked = self.asked(moved.form, *([], names) if moved.norm is not None else (names, []))
            made += filled(_ASKED, FLAG=moved.flag, NUMBER=ast.Constant(moved.number), ASKED=asked)
        held = [each for leaf in leaves for each in filled("HELD = LEAF", HELD=moved.held[leaf], LEAF=self.copy(leaf))]
        original = self.with_names(definition.value, kept)
        return [
            *made,
            *filled(
                "if FLAG: HELD\nelse: NAME = VALUE",
                FLAG=moved.flag,
                HELD=held or [ast.Pass()],
                NAME=definition.name,
                VALUE=original,
            ),
        ]

    def caught_up(self, moved: _Moved) -> list[ast.stmt]:
        """Where the root is not reached: the definitions as they were written, on the operands that were kept."""
        assert moved.region.branch is not None
        made: list[ast.stmt] = []
        for definition in moved.form.definitions:
            if definition.statement not in moved.region.branch.body:
                value = self.with_names(definition.value, moved.held)
                (assigned,) = filled("NAME = VALUE", NAME=definition.name, VALUE=value)
                made.append(ast.copy_location(assigned, definition.statement))
        return filled("if FLAG: MADE", FLAG=moved.flag, MADE=[*made, *self.forgotten([*moved.held.values()])])

    # -- expressions ---------------------------------------------------------------------------------------------------

    def fields(self, node: Any) -> Any:
        """A node with its children copied, and itself not replaced."""
        return copied(node, self.block, self.copy)

    def copy(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if node in self.table:
            return ast.copy_location(name_of(self.table[node]), node)
        if isinstance(node, ast.expr) and node in self.roots:
            return ast.copy_location(self.root(*self.roots[node]), node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.helpers:
            return ast.copy_location(
                expression(f"{SITES}.helper(NAME, VALUE)", NAME=ast.Constant(node.id), VALUE=node.id), node
            )
        return self.fields(node)

    def named(self, node: ast.expr, names: Mapping[ast.AST, str]) -> Any:
        """A part of a chain as it was written, with names in the place of what was evaluated before."""
        before, self.table = self.table, {**self.table, **names}
        made = self.copy(node)
        self.table = before
        return made

    def with_names(self, node: ast.expr, names: Mapping[ast.AST, str]) -> Any:
        """The same for a chain's root itself, without its gate."""
        before, self.table = self.table, {**self.table, **names}
        made = self.fields(node)
        self.table = before
        return made

    def root(self, number: int, chain: Chain) -> Any:
        moved = next((moved for moved in self.moved if moved.chain is chain), None)
        if moved is None:
            norm = chain.norm.call if chain.norm is not None and chain.norm.form is not None else None
            return self.inline(number, chain, norm)
        gate = self.gate(number, chain, moved.held, moved.norm)
        otherwise = self.inline(number, chain) if moved.norm is not None else self.fields(chain.root)
        return expression("GATE if FLAG else OTHERWISE", GATE=gate, FLAG=moved.flag, OTHERWISE=otherwise)

    def inline(self, number: int, chain: Chain, norm: ast.Call | None = None, first: ast.expr | None = None) -> Any:
        """A chain in one expression; ``first`` is what it begins with, where that has been evaluated already."""
        form = chain.form if norm is None or chain.norm is None else chain.norm.form
        assert form is not None
        opened = norm is not None and chain.leaves[0] is chain.operands["x"].expression
        # What comes first may be anything, and is evaluated once; so is all before a sum that is viewed, which has the
        # layout of its operand.
        viewed = [each.expression for each in chain.operands.values() if each.views and norm is None]
        count = max([int(chain.held or first is not None), *(1 + chain.leaves.index(leaf) for leaf in viewed)])
        begun = _parts(norm) if norm is not None and opened else chain.leaves[:count]
        table: dict[ast.AST, str] = {leaf: self.temporary_name() for leaf in begun}
        held = [
            expression(
                "(HELD := LEAF)", HELD=name, LEAF=first if first is not None and leaf is begun[0] else self.copy(leaf)
            )
            for leaf, name in table.items()
        ]
        names = [name_of(name) for name in table.values()]
        parts = [] if norm is None else [self.named(part, table) for part in _parts(norm)]
        if norm is None:
            otherwise = self.with_names(chain.root, table)
        elif opened:
            otherwise = self.inline(number, chain, first=ast.Call(names[0], names[1:], []))
        else:
            otherwise = self.inline(number, chain, first=names[0] if names else None)
        return expression(
            f"GATE if {SITES}.stands(NUMBER, HELD) and {SITES}.takes(NUMBER, ASKED) else OTHERWISE",
            GATE=self.gate(number, chain, table, norm),
            NUMBER=ast.Constant(number),
            HELD=held,
            ASKED=self.asked(form, [] if opened else names, parts, [name_of(table[e]) for e in viewed]),
            OTHERWISE=otherwise,
        )

    def asked(
        self, form: Form, plain: Sequence[ast.expr], norm: Sequence[ast.expr], summed: Sequence[ast.expr] = ()
    ) -> list[ast.expr]:
        """What a proof goes by: values that have to be plain, what is called, a norm and its argument, viewed sums."""
        asked: tuple[dict[str, ast.expr], dict[str, ast.expr]] = ({}, {})
        for value in form.values:
            asked[value.called].setdefault(ast.dump(value.node), self.fields(value.node))
        several = ([*plain, *asked[False].values()], asked[True].values(), norm, summed)
        return [ast.Tuple(list(each), ast.Load()) for each in several]

    def gate(self, number: int, chain: Chain, names: Mapping[ast.AST, str], norm: ast.Call | None = None) -> ast.expr:
        """The call of a gate, with its operands by their names and in the order in which they are evaluated."""
        before, self.table = self.table, {**self.table, **names}
        roles = {operand.expression: role for role, operand in chain.operands.items()}
        definitions = chain.form.definitions if chain.form is not None else ()
        order = [leaf for d in definitions for leaf in leaves_of(d.value, chain.pattern)]
        made: Any = expression(
            f"{SITES}.call(NUMBER, NORM)",
            NUMBER=ast.Constant(number),
            NORM=[] if norm is None else [self.copy(part) for part in _parts(norm)],
        )
        for leaf in (*order, *chain.leaves):
            if leaf in roles and not (norm is not None and roles[leaf] == "x"):
                value = self.copy(leaf)
                for view in chain.operands[roles[leaf]].views:
                    match view:
                        case ast.Subscript(slice=index):
                            value = ast.Subscript(value, self.copy(index), ast.Load())
                        case ast.Call(func=ast.Attribute(attr=method), args=args, keywords=keywords):
                            called = ast.Attribute(value, method, ast.Load())
                            value = ast.Call(called, [self.copy(a) for a in args], [self.copy(k) for k in keywords])
                made.keywords.append(ast.keyword(roles[leaf], value))
        self.table = before
        return cast(ast.expr, made)

    def temporary_name(self) -> str:
        name = f"{SITES}_t{len(self.temporary)}"
        self.temporary.append(name)
        return name


_ASKED = f"""
FLAG = {SITES}.stands(NUMBER)
if FLAG:
    try:
        FLAG = (ASKED,)
    except {SITES}.MISSING:
        FLAG = False
    else:
        FLAG = {SITES}.takes(NUMBER, *FLAG)
"""
"""Looks at what a proof goes by before its time: where the chain's root will not be reached, some may be missing."""


def _parts(norm: ast.Call) -> list[ast.expr]:
    return [norm.func, *norm.args]


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


class _Inliner:
    """The chain's own expression, with its operands named and the definitions it goes through put in place."""

    def __init__(self, chain: Chain, norm: FoldableNorm | None) -> None:
        self.like = chain.pattern.like
        self.norm = norm
        self.names: dict[ast.AST, str] = {operand.expression: role for role, operand in chain.operands.items()}
        self.links: dict[Any, Definition] = {**chain.pattern.links}
        self.views: set[Any] = {view for operand in chain.operands.values() for view in operand.views}

    def visit(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return node
        if self.norm is not None and self.names.get(node) == "x":
            given = ("x", "eps", *FAMILIES[self.norm.family])
            return expression("NORM(GIVEN)", NORM=f"{SITES}_norm", GIVEN=[name_of(name) for name in given])
        if node in self.names or node is self.like:
            return name_of(self.names.get(node, "x"))
        if node in self.links:
            return self.visit(self.links[node].value)
        if node in self.views:
            # The operand comes in its final shape: the view has been taken of it already.
            view: Any = node
            return self.visit(view.value if isinstance(view, ast.Subscript) else view.func.value)
        return copied(node, lambda several: [self.visit(each) for each in several], self.visit)
