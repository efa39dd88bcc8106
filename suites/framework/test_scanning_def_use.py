"""Definitions and uses: which assignment a reading goes back to, and who else may read it."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fusiongate.scanning.def_use import Uses
from fusiongate.scanning.sources import FunctionNode


def uses_of(body: str) -> tuple[Uses, ast.Name]:
    """The uses of a function with a body, and the name in its `use(x)`."""
    text = "def function(x, *others, **named):\n" + textwrap.indent(body, "    ")
    (function,) = ast.parse(text).body
    assert isinstance(function, FunctionNode)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    (reader,) = (call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "use")
    assert isinstance(reader, ast.Name)
    return Uses(function), reader


DEFINED = {
    "the last assignment": "x = b\nx = a\nuse(x)",
    "an annotated assignment": "x: Tensor = a\nuse(x)",
    "before the if around": "x = a\nif c:\n    use(x)",
    "in the if around": "x = b\nif c:\n    x = a\n    use(x)",
    "in a loop with it": "for i in n:\n    x = a\n    use(x)",
    "an element is no name": "x = a\nx[0] = b\nuse(x)",
    "an annotation assigns nothing": "x = a\ny: Tensor\nuse(x)",
}

UNDEFINED = {
    "a parameter": "use(x)",
    "an assignment in place": "x += a\nuse(x)",
    "one of several targets": "x, y = a\nuse(x)",
    "two targets": "x = y = a\nuse(x)",
    "an import": "import x.y\nuse(x)",
    "an import under another name": "from y import z as x\nuse(x)",
    "a branch that may be left out": "x = b\nif c:\n    x = a\nuse(x)",
    "a loop that may not run": "x = b\nfor i in n:\n    x = a\nuse(x)",
    "outside of the loop": "x = a\nfor i in n:\n    use(x)\n    x = b",
    "outside of the else": "x = a\nif c:\n    pass\nelse:\n    use(x)",
    "outside of two ifs": "x = a\nif c:\n    if d:\n        use(x)",
    "a with's name": "with c as x:\n    use(x)",
    "an error's name": "try:\n    pass\nexcept E as x:\n    use(x)",
    "a condition": "x = a\nif c and (x := b):\n    pass\nuse(x)",
    "a condition inside": "x = (x := b)\nuse(x)",
    "a case": "x = a\nmatch c:\n    case [x]:\n        use(x)",
    "a case before": "x = a\nmatch c:\n    case [*x]:\n        pass\nuse(x)",
    "a case's rest": "x = a\nmatch c:\n    case {'k': 1, **x}:\n        pass\nuse(x)",
    "a deletion": "x = a\ndel x\nuse(x)",
    "a function": "def x():\n    pass\nuse(x)",
    "a comprehension's own": "x = a\ny = [x for x in n]\nuse(x)",
}


@pytest.mark.parametrize("body", DEFINED.values(), ids=DEFINED)
def test_a_reading_goes_back_to_one_assignment(body: str) -> None:
    uses, reader = uses_of(body)
    definition = uses.definition(reader)
    assert definition is not None
    assert "a" == ast.unparse(definition.value)


@pytest.mark.parametrize("body", UNDEFINED.values(), ids=UNDEFINED)
def test_where_it_may_go_back_to_something_else_there_is_none(body: str) -> None:
    uses, reader = uses_of(body)
    assert uses.definition(reader) is None


NO_OTHER = {
    "nothing behind it": "x = a\nuse(x)",
    "a return": "x = a\nreturn use(x)",
    "it is replaced": "x = a\nx = use(x)\nreturn x",
    "it is replaced later": "x = a\nuse(x)\nx = b\nreturn x",
    "behind the function's end": "x = a\nuse(x)\nreturn b\nx",
    "replaced in the next turn": "for i in n:\n    x = a\n    use(x)",
    "replaced behind the if": "x = a\nif c:\n    use(x)\nx = b\nreturn x",
    "the other branch": "x = a\nif c:\n    return use(x)\nelse:\n    return x",
}

OTHER = {
    "behind it": "x = a\nuse(x)\nreturn x",
    "in its own statement": "x = a\ny = use(x) + x",
    "in between": "x = a\ny = x\nuse(x)",
    "in the test in between": "x = a\nif x:\n    x = use(x)",
    "one of two ways": "x = a\nuse(x)\nif c:\n    x = b\nreturn x",
    "in place": "x = a\nuse(x)\nx += b",
    "a deletion": "x = a\nuse(x)\ndel x",
    "the next turn": "for i in n:\n    y = x\n    x = a\n    use(x)",
    "the loop's test": "while x:\n    x = a\n    use(x)",
    "the loop's else": "for i in n:\n    x = a\n    use(x)\nelse:\n    y = x",
    "behind the loop": "for i in n:\n    x = a\n    use(x)\nreturn x",
    "past a break": "for i in n:\n    x = a\n    use(x)\n    if c:\n        break\n    x = b\nreturn x",
    "past a continue": "for i in n:\n    y = x\n    x = a\n    use(x)\n    if c:\n        continue\n    x = b",
    "an outer loop's next turn": "for i in n:\n    y = x\n    if c:\n        x = a\n        use(x)",
    "a case": "match c:\n    case 1:\n        x = a\n        use(x)\nreturn x",
    "a function inside": "x = a\ndef inner():\n    return x\nuse(x)",
    "a class inside": "x = a\nclass Inner:\n    y = x\nuse(x)",
    "a lambda": "x = a\ny = lambda: x\nuse(x)",
    "a generator": "y = (x + i for i in n)\nx = a\nuse(x)",
    "a global name": "global x\nx = a\nuse(x)",
    "a look at all names": "x = a\nuse(x)\ny = locals()",
}


@pytest.mark.parametrize("body", NO_OTHER.values(), ids=NO_OTHER)
def test_nobody_else_reads(body: str) -> None:
    uses, reader = uses_of(body)
    definition = uses.definition(reader)
    assert definition is not None
    assert uses.other_reader(definition, [reader]) is None


@pytest.mark.parametrize("body", OTHER.values(), ids=OTHER)
def test_somebody_else_may_read(body: str) -> None:
    uses, reader = uses_of(body)
    definition = uses.definition(reader)
    assert definition is not None
    assert uses.other_reader(definition, [reader]) is not None
