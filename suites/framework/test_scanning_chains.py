"""Chains in the syntax tree of one function: what is found, as which kind, and what stands in the way."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fusiongate.scanning.chains import Chain, find_chains
from fusiongate.scanning.sources import FunctionNode

CHAIN = "x * (1 + scale) + shift"


def chains_of(body: str) -> tuple[Chain, ...]:
    """The chains of a function with a body."""
    (function,) = ast.parse("def forward(self, x, scale, shift):\n" + textwrap.indent(body, "    ")).body
    assert isinstance(function, FunctionNode)
    return find_chains(function, "self", frozenset({"torch", "F"}))


def chain_of(body: str) -> Chain:
    """The only chain of a function with a body."""
    (chain,) = chains_of(body)
    return chain


def obstacle_to(body: str) -> str:
    """Why no gate can stand at the only chain of a body."""
    reason = chain_of(body).reason
    assert reason is not None
    return reason


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (CHAIN, ("modulate", "x", "scale", "shift")),
        ("shift + (scale + 1.0) * x", ("modulate", "x", "scale", "shift")),
        ("(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)", ("modulate_fp32", "x", "scale", "shift")),
        (
            "(x.to(torch.float32) * (1 + scale) + shift.to(dtype=torch.float32)).type_as(x)",
            ("modulate_fp32", "x", "scale", "shift"),
        ),
        # Cast to something else's dtype, the whole is no kernel's: what stands inside is.
        ("(x.float() * (1 + scale) + shift).type_as(y)", ("modulate", "x.float()", "scale", "shift")),
        ("(x * (1 + scale) + shift).to(x.dtype)", ("modulate", "x", "scale", "shift")),
        ("(x.to(device) * (1 + scale) + shift).to(x.dtype)", ("modulate", "x.to(device)", "scale", "shift")),
        ("x * (1 + scale[:, None]) + shift", ("modulate", "x", "scale[:, None]", "shift")),
    ],
)
def test_the_kind_and_the_operands(expression: str, expected: tuple[str, str, str, str]) -> None:
    chain = chain_of(f"return {expression}")
    assert chain.reason is None
    assert ("x", "scale", "shift") == tuple(chain.operands)
    assert expected == (chain.kind, *(ast.unparse(operand.expression) for operand in chain.operands.values()))


@pytest.mark.parametrize(
    "body",
    [
        "return x * (2 + scale) + shift",
        "return x * (True + scale) + shift",
        "return x * (1 + scale) + 1",
        "return x * (1 + 2) + shift",
        "return 2 * (1 + scale)",
        "return x * (1 + scale)[0] + shift",
        "return x * (1 + scale)[1:] + shift",
        "return x * (1 + scale).mean(1) + shift",
        "x += shift\nreturn x",
        "x -= 1 + scale\nx += shift\nreturn x",
        "x *= scale\nx += shift\nreturn x",
        "x *= 1 + scale\nx -= shift\nreturn x",
    ],
)
def test_what_is_no_chain(body: str) -> None:
    assert () == chains_of(body)


def test_a_cast_to_a_dtype_that_another_value_had_is_none() -> None:
    """`x` was another tensor when its name was read for the chain."""
    body = "y = x.float() * (1 + scale) + shift\nx = other(x)\nreturn y.to(x.dtype)"
    assert "modulate" == chain_of(body).kind


def test_in_place_there_is_no_gate() -> None:
    reason = obstacle_to("x *= 1 + scale\nx += shift\nreturn x")
    assert "line 3: it writes in place, and a kernel returns a new tensor" in reason


def test_a_gated_residual_is_told_by_its_gates_name() -> None:
    for product in ("y * gate_msa", "gate_msa.unsqueeze(1) * y"):
        chain = chain_of(f"return x + {product}")
        assert ("gated_residual", ["residual", "update", "gate"]) == (chain.kind, list(chain.operands))
    assert () == chains_of("return x + y * scale")


@pytest.mark.parametrize("call", ["self.norm(x)", "self.first.norm(x)", "self.ln_1(x)"])
def test_a_norm_of_the_instance_is_taken_in(call: str) -> None:
    for body in (f"return {call} * (1 + scale) + shift", f"y = {call}\nreturn y * (1 + scale) + shift"):
        norm = chain_of(body).norm
        assert norm is not None
        assert norm.reason is None
        assert call.partition("(")[0] == norm.text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("F.rms_norm(x)", "`F.rms_norm` may be anything"),
        ("rms_norm(x)", "`rms_norm` may be anything"),
        ("self.norm(x, scale)", "the norm is called with more than one argument"),
        ("self.norm(x, eps=1e-6)", "the norm is called with more than one argument"),
        ("self.norm(*x)", "the norm is called with more than one argument"),
    ],
)
def test_another_norm_is_not(call: str, reason: str) -> None:
    for body in (f"return {call} * (1 + scale) + shift", f"y = {call}\nreturn y * (1 + scale) + shift"):
        chain = chain_of(body)
        assert chain.reason is None
        assert chain.norm is not None
        assert reason in str(chain.norm.reason)


@pytest.mark.parametrize(
    "call", ["norm(x)", "self.norms[0].of(x)", "self.norm()", "self.blocks[0](x)", "self.linear(x)"]
)
def test_what_is_called_nothing_like_a_norm_is_none(call: str) -> None:
    """A plain function by the name of `norm` may be a vector's length."""
    assert chain_of(f"return {call} * (1 + scale) + shift").norm is None


def test_a_scale_without_a_shift_is_listed_behind_a_norm_only() -> None:
    for product in ("self.norm(x) * (1 + scale)", "(1 + scale) * self.norm(x)"):
        chain = chain_of(f"return {product}")
        assert ("scale", ["x", "scale"], None) == (chain.kind, list(chain.operands), chain.reason)
    assert () == chains_of("return self.linear(x) * (1 + scale)")


PURE = {
    "an alias": "y = x",
    "an alias of an attribute": "y = self.anything",
    "rows": "a, (b, c) = y.chunk(3, dim=-1)",
    "rows of a table": "a, b = (self.table[None] + y[:, None].to(self.table.device)).unbind(2)",
    "an annotated assignment": "a: Tensor = y.unsqueeze(1)",
    "a listed function": "a = torch.cat((y, y), dim=-1)",
    "an own method, which may be proven": "a = self.rows(y)",
    "a function, which may be proven": "a = rows(y)",
    "a comparison": "a = y is None",
    "nothing": "pass",
    "a remark": "'now the shift'",
}

OBSTACLES = {
    "an assignment in place": "x += 1",
    "an element": "x[0] = 1",
    "an attribute": "self.x = x",
    "a method with an underscore": "a = x.zero_()",
    "a method that is not listed": "a = x.numpy()",
    "a call for nothing": "helper(x)",
    "out=": "a = torch.add(x, x, out=x)",
    "inplace=": "a = F.silu(x, inplace=True)",
    "starred arguments": "a = helper(*y)",
    "keyword arguments": "a = helper(**y)",
    "a loop": "for a in y:\n    pass",
    "a with": "with y:\n    pass",
    "a try": "try:\n    pass\nfinally:\n    pass",
    "an assert": "assert y",
    "a deletion": "del y",
    "a walrus": "a = (b := y)",
    "a comprehension": "a = [b for b in y]",
    "a generator": "a = max(b for b in y)",
    "a condition": "a = y if y else x",
    "either": "a = y or x",
    "a lambda": "a = lambda: x",
    "a function": "def a():\n    pass",
    "an import": "import a",
    "the instance itself": "a = helper(self)",
    "another object's attribute": "a = y.anything",
    "yield": "a = yield y",
    "await": "a = await y",
    "a branch": "if y:\n    pass",
}


@pytest.mark.parametrize("between", PURE.values(), ids=PURE)
def test_what_may_stand_in_between(between: str) -> None:
    assert chain_of(f"product = x * (1 + scale)\n{between}\nreturn product + shift").reason is None


@pytest.mark.parametrize("between", OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way_is_named_with_its_line(between: str) -> None:
    reason = obstacle_to(f"product = x * (1 + scale)\n{between}\nreturn product + shift")
    assert reason.startswith("line 3: ")
    assert f"move it out of lines 2 to {4 + between.count(chr(10))}" in reason


@pytest.mark.parametrize("shift", ["helper(*x)", "x.zero_()", "(x := shift)", "shift if x else x", "shift.anything"])
def test_an_operand_that_is_not_listed_is_an_obstacle_unless_it_comes_first(shift: str) -> None:
    assert "bind it to a name before line 2" in obstacle_to(f"return x * (1 + scale) + ({shift})")
    assert chain_of(f"return ({shift}) + x * (1 + scale)").reason is None


ELSEWHERE = {
    "a lambda": (f"return lambda: {CHAIN}", "in a function inside the function"),
    "a function inside": (f"def inner():\n    return {CHAIN}\nreturn inner", "in a function inside the function"),
    "a comprehension's iterable": (f"return [y for y in {CHAIN}]", "a comprehension goes over the chain"),
    "another chain's shift": (f"return y * (1 + a) + ({CHAIN})", "it stands in an operand of the site in line 2"),
    "a layer on another chain": (
        f"return x + gate * self.ff({CHAIN})",
        "the site in line 2 stands in an operand; bind that to a name before line 2",
    ),
    "a condition": ("h = x * (1 + scale)\nreturn h + shift if x else x", "may not be reached once"),
    "a test": ("h = x * (1 + scale)\nif h + shift:\n    return x", "may not be reached once"),
    "a try": (
        "try:\n    h = x * (1 + scale)\n    return h + shift\nfinally:\n    pass",
        "begins in the `try` of line 2",
    ),
    "a with": ("with x:\n    h = x * (1 + scale)\n    return h + shift", "begins in the `with` of line 2"),
    "an operand in a try": (
        "try:\n    return x * (1 + scale) + shift[0]\nfinally:\n    pass",
        "in the `try` of line 2",
    ),
    "another reader": ("h = x * (1 + scale)\nreturn h + shift, h", "line 3: something else reads `h` of line 2 too"),
    "a closure": (
        "h = x * (1 + scale)\ny = lambda: h\nreturn h + shift",
        "a function inside, may read `h` of line 2 too",
    ),
    "a viewed sum": ("return x * (1 + scale).view(2, 3) + shift", "view the scale instead of the sum"),
}


@pytest.mark.parametrize(("body", "reason"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_where_no_gate_can_stand(body: str, reason: str) -> None:
    assert [reason] == [reason for chain in chains_of(body) if chain.reason is not None and reason in chain.reason]


def test_a_norm_stays_where_something_stands_between_it_and_the_chain() -> None:
    chain = chain_of("y = self.norm(x)\nwrite(x)\nreturn y * (1 + scale) + shift")
    assert chain.reason is None
    assert chain.norm is not None
    assert "line 3: `write(x)` stands in between; move it out of lines 2 to 4" == chain.norm.reason


def test_a_norm_may_stand_before_the_if_around_the_chain() -> None:
    chain = chain_of("y = self.norm(x)\nif self.modulated:\n    y = y * (1 + scale) + shift\nreturn y")
    assert chain.norm is not None
    assert chain.norm.form is not None
    assert chain.norm.form.region is not None
    assert chain.norm.form.region.branch is not None
    assert {"modulated"} == chain.norm.form.reads
