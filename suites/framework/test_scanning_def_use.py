"""Reaching definitions: what a name may stand for where a function reads it."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fusiongate.scanning.def_use import Flow, FunctionNode, analyse


def flow_of(body: str) -> tuple[Flow, FunctionNode]:
    """The flow of a function with a body, which has parameters `x` and `others`."""
    text = "def function(x, *others, **named):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (function,) = ast.parse(text).body
    assert isinstance(function, FunctionNode)
    return analyse(function), function


def at_use(body: str) -> set[str]:
    """What `x` may be where the function says `use(x)`: values as they are written, else the line of the assignment."""
    flow, function = flow_of(body)
    (reader,) = (
        node.args[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "use"
    )
    assert isinstance(reader, ast.Name)
    found = set()
    for definition in flow.reaching[reader]:
        if definition.value is not None:
            found.add(ast.unparse(definition.value))
        else:
            found.add("?" if definition.statement is None else type(definition.statement).__name__)
    return found


STRAIGHT = {
    "a parameter": ("use(x)", {"?"}),
    "the last assignment": ("x = a\nx = b\nuse(x)", {"b"}),
    "an annotated assignment": ("x: Tensor = a\nuse(x)", {"a"}),
    "an annotation assigns nothing": ("x: Tensor\nuse(x)", {"?"}),
    "an assignment in place": ("x += a\nuse(x)", {"AugAssign"}),
    "one of several targets": ("x, y = a\nuse(x)", {"Assign"}),
    "an import": ("import x.y\nuse(x)", {"Import"}),
    "an import under another name": ("from y import z as x\nuse(x)", {"ImportFrom"}),
    "an element is no name": ("x[0] = a\nuse(x)", {"?"}),
}

BRANCHES = {
    "either branch": ("if c:\n    x = a\nelse:\n    x = b\nuse(x)", {"a", "b"}),
    "a branch that may be left out": ("if c:\n    x = a\nuse(x)", {"?", "a"}),
    "a branch that returns": ("if c:\n    x = a\n    return x\nuse(x)", {"?"}),
    "a branch that raises": ("if c:\n    x = a\n    raise E\nuse(x)", {"?"}),
    "nothing arrives behind a return": ("return\nx = a\nuse(x)", None),
    "both branches return": ("x = a\nif c:\n    return 1\nelse:\n    return 2\nuse(x)", None),
}

LOOPS = {
    "a loop may not run": ("for i in n:\n    x = a\nuse(x)", {"?", "a"}),
    "the turn before": ("for i in n:\n    use(x)\n    x = a", {"?", "a"}),
    "the loop's own name": ("for x in n:\n    use(x)", {"For"}),
    "a while loop": ("while c:\n    x = a\nuse(x)", {"?", "a"}),
    "a break": ("for i in n:\n    x = a\n    if c:\n        break\n    x = b\nuse(x)", {"?", "a", "b"}),
    "else comes without a break": ("for i in n:\n    x = a\n    break\nelse:\n    use(x)", {"?"}),
    "a continue": ("for i in n:\n    use(x)\n    x = a\n    if c:\n        continue\n    x = b", {"?", "a", "b"}),
}

FAILURES = {
    "with may swallow what is raised": ("with c:\n    x = a\n    x = b\nuse(x)", {"?", "a", "b"}),
    "with gives a name": ("with c as x:\n    use(x)", {"With"}),
    "a handler sees every place": ("try:\n    x = a\n    x = b\nexcept E:\n    use(x)", {"?", "a", "b"}),
    "else sees the end": ("try:\n    x = a\nexcept E:\n    pass\nelse:\n    use(x)", {"a"}),
    "behind a handler that returns": ("try:\n    x = a\nexcept E:\n    return\nuse(x)", {"a"}),
    "a handler names the error": ("try:\n    pass\nexcept E as x:\n    use(x)", {"Try"}),
    "finally sees every place": (
        "try:\n    x = a\nexcept E:\n    x = b\nelse:\n    x = c\nfinally:\n    use(x)",
        {"?", "a", "b", "c"},
    ),
    "behind finally": ("try:\n    x = a\nfinally:\n    x = b\nuse(x)", {"b"}),
    "nothing behind a finally whose blocks return": ("try:\n    return x\nfinally:\n    x = b\nuse(x)", None),
}


# What is assigned on the way to somewhere else.
ON_THE_WAY = {
    "a condition": ("if c and (x := a):\n    pass\nuse(x)", {"?"}),
    "a condition's value": ("x = a\nif c and (x := b):\n    pass\nuse(x)", {"a", "?"}),
    "the condition of a loop whose body returns": ("x = a\nwhile (x := b):\n    return\nuse(x)", {"a", "?"}),
    "a case": ("x = a\nmatch c:\n    case [x]:\n        use(x)", {"Match"}),
    "a case's rest": ("x = a\nmatch c:\n    case {'k': 1, **x}:\n        use(x)", {"Match"}),
    "behind the cases": (
        "x = a\nmatch c:\n    case 1:\n        x = b\n    case 2:\n        x = d\nuse(x)",
        {"a", "b", "d"},
    ),
    "a case whose guard has failed": (
        "x = a\nmatch c:\n    case [x] if x > 0:\n        pass\n    case _:\n        use(x)",
        {"a", "Match"},
    ),
    "the finally of a break": (
        "x = a\nfor i in n:\n    try:\n        break\n    finally:\n        x = b\nuse(x)",
        {"a", "b"},
    ),
    "the finally of a continue": (
        "x = a\nfor i in n:\n    try:\n        continue\n    finally:\n        x = b\nuse(x)",
        {"a", "b"},
    ),
}

UNSTABLE = {
    "a function inside": "def inner():\n    return x",
    "a class inside": "class Inner:\n    y = x",
    "a lambda": "y = lambda: x",
    "a generator": "y = (x + i for i in n)",
    "a global name": "global x",
    "a look at all names": "y = locals()",
    "a comprehension's assignment": "y = [x := i for i in n]",
}


def test_a_name_that_something_else_may_read_or_assign_has_no_definition() -> None:
    found = {}
    for name, statement in UNSTABLE.items():
        flow, function = flow_of(f"x = a\n{statement}\nuse(x)")
        last = function.body[-1]
        assert isinstance(last, ast.Expr)
        assert isinstance(last.value, ast.Call)
        reader = last.value.args[0]
        assert isinstance(reader, ast.Name)
        found[name] = flow.definition(reader)
    assert dict.fromkeys(UNSTABLE) == found


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("y = [x for x in n]", set()),
        ("y = [i for i in n if x]", {2}),
        ("y = {x: i for i in n}", {2}),
        ("y = {i for i in x}", {2}),
        ("x[i] = b", {2}),
        ("x[i] += b", {2}),
        ("del x", {2}),
        ("y[x:] = b", {2}),
        ("assert x, b", {2}),
    ],
)
def test_who_reads_an_assignment(statement: str, expected: set[int]) -> None:
    """By lines behind the assignment: a comprehension's own names are not the function's."""
    flow, _ = flow_of(f"x = a\n{statement}")
    found = {
        getattr(node, "lineno", 0) - 1
        for definition, nodes in flow.readers.items()
        if definition.value is not None and definition.name == "x"
        for node in nodes
    }
    assert expected == found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(body, expected, id=name)
        for cases in (STRAIGHT, BRANCHES, LOOPS, FAILURES, ON_THE_WAY)
        for name, (body, expected) in cases.items()
    ],
)
def test_the_definitions_that_may_arrive(body: str, expected: set[str] | None) -> None:
    """`None` where the reading is never reached."""
    if expected is None:
        with pytest.raises(KeyError):
            at_use(body)
    else:
        assert expected == at_use(body)
